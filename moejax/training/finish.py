"""After the last step: held-out loss, a sample, the summary and the report."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from moejax.config import Config
from moejax.data import Dataset, heldout_batches
from moejax.data.placement import local_rows, place_batch
from moejax.generate import generate_text
from moejax.training.evaluate import evaluate
from moejax.training.metrics import read_records
from moejax.training.report import report_html, summary, summary_text
from moejax.training.run import RunFolder
from moejax.training.state import Skeleton, TrainState, parameter_counts
from moejax.training.watchdog import Watchdog


def finish(
    run: RunFolder,
    config: Config,
    dataset: Dataset,
    skeleton: Skeleton,
    state: TrainState,
    mesh: jax.sharding.Mesh | None,
    watchdog: Watchdog,
) -> dict[str, Any]:
    """Scores the held-out text, writes a sample, `summary.json` and `report.html`, and prints what matters of them.

    `summary.json` is written last: it says that the run has finished. In a job of several processes all score and sample
    together, and the first one writes.
    """
    print(f"scoring {dataset.heldout.num_bytes:,} held-out bytes")
    held_out = evaluate(skeleton, state, _batches(dataset, config, mesh, watchdog), dataset.heldout.num_bytes, config)
    watchdog.doing("generating a sample", compiles=True)
    records = list(read_records(run.metrics))
    values = summary(records, held_out, *parameter_counts(state.params, config))
    sample = ""
    if config.log.sample_tokens:
        model = skeleton.merge(state.params, state.router_bias)
        sample = generate_text(model, dataset.tokenizer, config.log.sample_prompt, config.log.sample_tokens)
        run.write("sample.txt", sample)
        print(f"sample:\n{sample}\n")
    watchdog.doing("writing the report")
    config_text = (run.path / "config.yaml").read_text(encoding="utf-8")
    report = run.write("report.html", report_html(records, values, sample, config_text, run.path.name))
    run.write_summary(values)
    print(f"{summary_text(values)}\nreport: {report}")
    return values


def _batches(dataset: Dataset, config: Config, mesh, watchdog: Watchdog) -> Iterator[Any]:
    """Held-out batches on the mesh; every process loads its rows of each."""
    whole = dataclasses.replace(config, training=dataclasses.replace(config.training, micro_batches=1))
    for number, batch in enumerate(heldout_batches(dataset, config, local_rows(whole, mesh))):
        watchdog.doing("scoring held-out text", compiles=number == 0)
        yield place_batch(batch, mesh, config.training.global_batch)
