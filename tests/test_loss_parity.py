"""The loss comparison: a run that has a line in the result file is not run again, wherever its text lay."""

import json

import pytest

from benchmarks import loss_parity
from benchmarks.loss_parity import EXACT, Run, collect, table


def runs(tmp_path, *extra):
    make = lambda recipe, seed: Run("c.yaml", recipe, seed, 40, extra, tmp_path / "runs")  # noqa: E731
    return [make(recipe, seed) for seed in (0, 1) for recipe in ("bf16", "mxfp8", EXACT)]


def finish(run, loss, corpus="abc"):
    """What train.py and loss_parity.py leave behind."""
    run.folder.mkdir(parents=True)
    keys = {"balance_loss": 0, "tokens": 10, "seconds": 1.0}
    records = [{"step": step + 1, "loss": loss + 1 / (step + 1), **keys} for step in range(run.steps)]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    summary = {
        "steps": run.steps,
        "tokens": 400,
        "heldout_nats_per_byte": loss,
        "seconds": 40.0,
        "tokens_per_second": 10,
    }
    (run.folder / "summary.json").write_text(json.dumps(summary))
    (run.folder / "data.json").write_text(json.dumps({"corpus": corpus}))
    conditions = {"date": "2026-01-01", "commit": "1234567", "machine": "m", "gpu": None, "backend": "xla"}
    (run.folder / "conditions.json").write_text(json.dumps(conditions))


def test_finished_runs_are_known_again_from_the_file_alone(tmp_path):
    path = tmp_path / "results" / "loss_parity.jsonl"
    bf16, mxfp8, *_ = here = runs(tmp_path / "one", "data.source=/one/text", "moe.backend=xla")
    finish(bf16, 1.0)
    finish(mxfp8, 1.25)
    assert collect(here, path).keys() == {("bf16", 0), ("mxfp8", 0)}
    there = runs(tmp_path / "two", "data.source=/two/text", "moe.backend=xla")  # another machine, which has the file
    found = collect(there, path)
    assert found.keys() == {("bf16", 0), ("mxfp8", 0)}
    assert found["mxfp8", 0]["last_loss"] == pytest.approx(1.25 + sum(1 / step for step in (37, 38, 39, 40)) / 4)
    assert len(found["bf16", 0]["loss"]) == 40
    finish(there[3], 1.5)
    assert collect(there, path).keys() == {("bf16", 0), ("mxfp8", 0), ("bf16", 1)}
    assert len(path.read_text().splitlines()) == 3
    assert not collect(runs(tmp_path / "three", "moe.backend=native"), path)  # another comparison


def test_runs_on_different_texts_are_not_compared(tmp_path):
    path = tmp_path / "loss_parity.jsonl"
    here = runs(tmp_path)
    finish(here[0], 1.0)
    finish(here[1], 1.0, corpus="def")
    with pytest.raises(SystemExit, match="2 different texts"):
        collect(here, path)


def test_an_unfinished_run_is_no_result(tmp_path):
    here = runs(tmp_path)
    finish(here[0], 1.0)
    lines = (here[0].folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (here[0].folder / "metrics.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(SystemExit, match="holds 39 steps, expected 40"):
        collect(here, tmp_path / "loss_parity.jsonl")


def test_the_page_says_what_is_missing_and_reports_the_gap_as_it_is(tmp_path):
    here = runs(tmp_path)
    for run, loss in zip(here, (2.0, 2.1, 2.05, 1.9), strict=False):
        finish(run, loss)
    found = collect(here, tmp_path / "loss_parity.jsonl")
    pair = {0: {recipe: found[recipe, 0] for recipe in loss_parity.RECIPES}}
    text = table(pair, {0: found[EXACT, 0]}, {("bf16", 1): found["bf16", 1]}, "page", ["mxfp8-1", "exact-1"])
    assert "| 0 | 2.0000 | 2.1000 |" in text and "+0.1000 (+5.00%)" in text
    assert "**Not finished yet:** mxfp8-1, exact-1" in text and "Finished without its pair: bf16, seed 1" in text
    assert "mode exact, seed 0: held-out, nats per byte 2.0500, +0.0500 from bf16 and +0.0500 from there" in text
