"""The loss comparison: a run that has a line in the result file is not run again, wherever its text lay."""

import json

import pytest

from benchmarks import loss_parity
from benchmarks.loss_parity import BESIDE, Run, collect, table
from moejax.config_load import load


def runs(tmp_path, *extra):
    make = lambda recipe, seed: Run("c.yaml", recipe, seed, 40, extra, tmp_path / "runs")  # noqa: E731
    return [make(recipe, seed) for seed in (0, 1) for recipe in ("bf16", "mxfp8", "exact", "bf16-again")]


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
    finish(there[4], 1.5)
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
    for run, loss in zip(here, (2.0, 2.1, 2.05, 2.0, 1.9), strict=False):
        finish(run, loss)
    found = collect(here, tmp_path / "loss_parity.jsonl")
    text = table(found, "page", ["mxfp8-1", "exact-1"])
    assert "| 0 | 2.0000 | 2.1000 |" in text and "+0.1000 (+5.00%)" in text and "gap +0.1000 (one seed)" in text
    assert "**Not finished yet:** mxfp8-1, exact-1" in text and "Finished without its pair: bf16, seed 1" in text
    assert "| exact-0 | mxfp8; mode exact | 2.0500 | +0.0500 | -0.0500 |" in text
    assert "bf16-again-0 and bf16-0: the same loss in every step." in text
    assert "| bf16-1 - bf16-0 | -0.1000 |" in text
    found["bf16-again", 0]["loss"][6] += 1e-5
    assert "first differs at step 7." in table(found, "page", [])


def test_the_gap_of_several_pairs_comes_with_its_interval(tmp_path):
    here = [
        Run("c.yaml", recipe, seed, 40, (), tmp_path / "runs") for seed in (0, 1, 2) for recipe in ("bf16", "mxfp8")
    ]
    for run, loss in zip(here, (2.0, 2.1, 2.2, 2.1, 1.9, 2.2), strict=True):  # gaps 0.1, -0.1, 0.3
        finish(run, loss)
    text = table(collect(here, tmp_path / "loss_parity.jsonl"), "page", [])
    # Student's t of two degrees of freedom: 4.3027 standard errors
    assert "gap +0.1000 ± 0.2000 (standard error 0.1155, 95 % interval -0.3968 to +0.5968)" in text


def test_what_was_written_by_hand_stays_on_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(loss_parity, "ROOT", tmp_path)
    monkeypatch.setattr(loss_parity, "plot", lambda *_: None)  # matplotlib is not among the tests' requirements
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("# old\n\n## Reading\n\nBy hand.\n")
    here = runs(tmp_path)
    for run in here[:2]:
        finish(run, 1.0)
    for _ in range(2):
        loss_parity.report(here, "machine", "page")
        assert page.read_text().count("## Reading\n\nBy hand.\n") == 1 and "# old" not in page.read_text()


def test_every_run_trains_what_its_name_says(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    given = lambda recipe: Run("configs/quickstart.yaml", recipe, 3, 40, (), tmp_path).overrides()  # noqa: E731
    plain, expected = (
        given("bf16"),
        {
            "mxfp8": {"moe.mx_mode=aligned"},
            "exact": {"moe.mx_mode=aligned", "moe.mx_mode=exact"},  # the last one counts
            "wgrad-bf16": {"moe.mx_mode=aligned", "moe.wgrad=bf16"},
            "bf16-again": set(),
            "bf16-reordered": {"training.loss_chunk=512"},
            "mxfp8-reordered": {"moe.mx_mode=aligned", "training.loss_chunk=512"},
        },
    )
    assert expected.keys() == {"mxfp8", *BESIDE}
    for recipe, changes in expected.items():
        if not recipe.startswith("bf16"):
            changes.add("recipe=mxfp8")
        assert {o for o in given(recipe) if not o.startswith("run_dir=")} - set(plain) == changes
    assert "training.seed=3" in plain and "recipe=bf16" in plain


def test_an_override_for_all_runs_does_not_undo_what_one_of_them_changes(tmp_path):
    chunks = []
    for recipe in ("bf16", "bf16-reordered"):
        run = Run("configs/quickstart.yaml", recipe, 3, 40, ("training.loss_chunk=64",), tmp_path)
        chunks.append(load(run.config, run.overrides()).training.loss_chunk)
    assert chunks == [64, 32]


def test_jobs_are_spread_over_the_gpus(monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    monkeypatch.setattr("jax.local_devices", lambda: [0, 1])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    seats = loss_parity._seats(3)
    assert [seats.get()["CUDA_VISIBLE_DEVICES"] for _ in range(3)] == ["4", "6", "4"]
    monkeypatch.setattr("jax.local_devices", lambda: [0])
    assert loss_parity._seats(1).get() == {}
