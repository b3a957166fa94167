"""Tables of docs/benchmarks.md from result lines: the last line counts, gaps stay gaps, bad input is named."""

import json
import re

import pytest

from benchmarks import tables


def line(shape, impl, kind, tflops, **more):
    return {
        "shape": shape,
        "recipe": "bf16",
        "impl": impl,
        "pass": kind,
        "tflops": tflops,
        "commit": "abc",
        "date": "2026-01-02T03",
    } | more


def test_the_last_line_about_a_thing_counts_and_what_is_missing_is_a_dash():
    lines = [line("s", "ours", "forward", 400.4), line("s", "ours", "backward", 300), line("t", "peer", "forward", 2.6)]
    lines += [line("s", "ours", "forward", 512.5, commit="def"), line("s", "ours", "weights", 9e9)]
    text = tables.table(lines, "m/f.jsonl")
    assert "| s | bf16 | 512 / 300 | – |" in text and "| t | bf16 | – | 3 / – |" in text
    assert text.splitlines()[0] == "| TFLOP/s, forward / backward | recipe | ours | peer |"
    assert "From `benchmarks/results/m/f.jsonl`: 2026-01-02, commit abc, def." in text


def test_a_step_of_both_passes_is_shown_where_there_is_one():
    lines = [line("s", "ours", "forward", 400), line("s", "ours", "step", 350), line("s", "peer", "backward", 300)]
    text = tables.table(lines, "m/f.jsonl")
    assert text.splitlines()[0] == "| TFLOP/s, forward / backward / step | recipe | ours | peer |"
    assert "| s | bf16 | 400 / – / 350 | – / 300 / – |" in text


def test_slow_machines_are_shown_in_gflops():
    assert "| s | bf16 | 70 / – |" in tables.table([line("s", "ours", "forward", 0.0704)], "m/f.jsonl")


def test_only_what_stands_between_the_markers_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m/f.jsonl").write_text(json.dumps(line("s", "ours", "forward", 5)) + "\n")
    page = "before\n<!-- results: m/f.jsonl -->\nold\n<!-- end -->\nafter\n"
    once = tables.rewritten(page)
    assert once.startswith("before\n<!-- results: m/f.jsonl -->\n| TFLOP/s") and once.endswith("<!-- end -->\nafter\n")
    assert "old" not in once and tables.rewritten(once) == once


def test_bad_pages_and_files_are_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    with pytest.raises(tables.ResultError, match="no such result file"):
        tables.rewritten("<!-- results: m/none.jsonl -->\n<!-- end -->\n")
    with pytest.raises(tables.ResultError, match="a table needs two lines"):
        tables.rewritten("<!-- results: m/f.jsonl -->\nno end")
    (tmp_path / "bad.jsonl").write_text('{"shape": 1}\n')
    with pytest.raises(tables.ResultError, match=r"bad.jsonl:1: lacks commit, date"):
        tables.read_lines(tmp_path / "bad.jsonl")


def test_the_page_asks_for_files_that_exist():
    asked = re.findall(r"<!-- results: (\S+) -->", tables.PAGE.read_text())
    assert asked and all((tables.RESULTS / name).exists() for name in asked)
    tables.rewritten(tables.PAGE.read_text())


def test_steps_have_a_table_of_their_own():
    ours = line(
        "s", "ours", "step", 9, tokens_per_second=12345, ms=67.89, peak_bytes=3 * 2**29, split_ms={"experts": 1.25}
    )
    peer = line("s", "peer", "step", 9, tokens_per_second=678, ms=100, peak_bytes=2**30, commit="def")
    text = tables.table([ours, peer], "m/f.jsonl")
    assert text.splitlines()[0] == "| step | recipe | experts run by | tokens/s | ms | peak GiB | experts |"
    assert (
        "| s | bf16 | ours | 12,345 | 67.9 | 1.5 | 1.2 |" in text
        and "| s | bf16 | peer | 678 | 100.0 | 1.0 | – |" in text
    )
    assert "2026-01-02, commit abc, def." in text
