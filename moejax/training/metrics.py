"""What a run writes down while it trains: one JSON record per step, TensorBoard scalars, and a progress line.

`metrics.jsonl` holds each step exactly once, whatever interrupted the run: records are on disk before the checkpoint of their
step is written, and a resumed run first drops the records after the checkpoint it starts from.
"""

import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

import numpy as np


class MetricsError(RuntimeError):
    """The metrics of a run can't be read. The message is one line for the user."""


def read_records(path: str | pathlib.Path) -> Iterator[dict[str, Any]]:
    """The whole records of a metrics file, in order; a last line cut off by a crash is left out.

    Raises:
      MetricsError: a line is no record; names file and line.
    """
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.endswith("\n"):
                    yield _record(line, f"{path} line {number}")
    except FileNotFoundError:
        return
    except UnicodeDecodeError as error:
        raise MetricsError(f"{path} is damaged: {error}; remove what is no record") from error


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not {"step", "loss", "tokens", "seconds"} <= record.keys():
        raise MetricsError(f"{where} is damaged: expected the record of a step, found {line.strip()[:60]!r}; remove it")
    return record


class MetricLog:
    """Appends records to `metrics.jsonl` and TensorBoard.

    Args:
      folder: the run folder.
      finished: steps already in the checkpoint that the run continues from; later records are dropped.
      tensorboard: also write event files to `folder/tensorboard`.
      writes: False: writes nothing, as in all processes of a job but the first.
    """

    def __init__(self, folder: pathlib.Path, *, finished: int, tensorboard: bool, writes: bool = True):
        self.path = folder / "metrics.jsonl"
        self.missing, self.seconds = 0, 0.0
        self._file: TextIO | None = None
        self._board = None
        if not writes:
            return
        kept = [record for record in read_records(self.path) if record["step"] <= finished]
        temporary = self.path.with_suffix(".jsonl.tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        os.replace(temporary, self.path)
        self.missing = finished - len(kept)  # more than 0 only if someone removed records
        self.seconds = sum(record["seconds"] for record in kept)
        self._file = open(self.path, "a", encoding="utf-8")
        if tensorboard:
            from tensorboardX import SummaryWriter  # its import costs 0.3 s: only runs that want it pay

            # purge_step: a resumed run hides what an interrupted one wrote after the checkpoint
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=finished + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Adds the record of one step; `record['step']` counts from 1."""
        if self._file is None:
            return
        self._file.write(json.dumps(record) + "\n")
        self.seconds += record["seconds"]
        if self._board is None:
            return
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                self._board.add_scalar(name, value, record["step"])
            elif isinstance(value, list) and value and isinstance(value[0], int | float):
                for layer, item in enumerate(value):
                    self._board.add_scalar(f"{name}/layer_{layer:02d}", item, record["step"])

    def flush(self) -> None:
        """Puts all records on disk; called before each checkpoint."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def step_record(step: int, metrics: dict[str, np.ndarray], seconds: float, *, with_load: bool) -> dict[str, Any]:
    """The JSON record of one step from the step's (fetched) metrics.

    A load is a multiple of the layer's mean: `expert_load_max` is that of the busiest expert of each layer, 1 at balance. The mean
    itself, in rows per expert, is `expert_rows_mean`. In recipe mxfp8, per layer: `mx_underflow_x` and `mx_underflow_dy` are the
    shares of an expert layer's inputs, and of its output's gradients, that quantising makes zero; `mx_saturation_x` and
    `mx_saturation_dy` those at the top of their block's range (`ops/mxfp8_rates.py`).

    Args:
      step: its number, from 1.
      seconds: wall time of the step.
      with_load: also the load of every expert in every layer, as a multiple of the mean (`expert_load`, layers x experts).
    """
    tokens = int(metrics["tokens"])
    record: dict[str, Any] = {
        "step": step,
        "loss": float(metrics["loss"]),
        "balance_loss": float(metrics["balance_loss"]),
        "grad_norm": float(metrics["grad_norm"]),
        "learning_rate": float(metrics["learning_rate"]),
        "tokens": tokens,
        "seconds": round(seconds, 6),
        "tokens_per_second": round(tokens / max(seconds, 1e-9), 1),
    }
    if "count_NxE" in metrics:
        count_NxE = np.asarray(metrics["count_NxE"], np.float64)
        load_NxE = count_NxE / np.maximum(count_NxE.mean(axis=1, keepdims=True), 1e-9)
        record |= {
            "expert_load_max": [round(float(x), 4) for x in load_NxE.max(axis=1)],
            "expert_rows_mean": [round(float(x), 4) for x in count_NxE.mean(axis=1)],
            "router_entropy": [round(float(x), 5) for x in metrics["entropy_N"]],
            "dropped_fraction": [round(float(x), 6) for x in metrics["dropped_N"]],
            "moved_bytes": float(np.sum(metrics["moved_bytes_N"], dtype=np.float64)),
        }
        for name in sorted(name for name in metrics if name.startswith("mx_")):
            record[name] = [float(f"{x:.4g}") for x in metrics[name]]
        if with_load:
            record["expert_load"] = [[round(float(x), 3) for x in row] for row in load_NxE]
    return record


class Progress:
    """A live line on a terminal, else one plain line every `every` steps. As a `with` block it ends the live line.

    Args:
      total: steps of the whole run.
      finished: steps done before this process.
      every: steps between lines; on a terminal these stay, and the live line below them is rewritten.
      stream: where to print; standard output by default.
    """

    def __init__(self, total: int, finished: int, every: int, stream: TextIO | None = None):
        self._total, self._every = total, max(every, 1)
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()
        self._first, self._started = finished, time.monotonic()
        self._shown = 0.0
        self._tokens, self._seconds = 0, 0.0
        self._open = False  # whether the cursor stands behind a live line

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            self._stream.write("\n")
            self._stream.flush()

    def update(self, record: dict[str, Any]) -> None:
        """Shows the record of one more step."""
        step = record["step"]
        self._tokens += record["tokens"]
        self._seconds += record["seconds"]
        due = step % self._every == 0 or step in (self._first + 1, self._total)
        now = time.monotonic()
        if not due and not (self._live and now - self._shown > 0.2):
            return
        self._shown = now
        left = (now - self._started) / max(step - self._first, 1) * (self._total - step)
        line = (
            f"step {step:>{len(str(self._total))}}/{self._total}  loss {record['loss']:.4f}"
            f"  {self._tokens / max(self._seconds, 1e-9):,.0f} tokens/s  ETA {duration(left)}"
        )
        if "expert_load_max" in record:
            line += f"  busiest expert {max(record['expert_load_max']):.2f}x"
        if self._live:
            # erase the live line; a due line ends with a newline and stays
            self._stream.write("\r\x1b[K" + line + ("\n" if due else ""))
            self._open = not due
        else:
            self._stream.write(line + "\n")
        self._stream.flush()
        if due:
            self._tokens, self._seconds = 0, 0.0

    def say(self, text: str) -> None:
        """Prints a message without tearing the live line."""
        self._stream.write(("\r\x1b[K" if self._live else "") + text + "\n")
        self._open = False
        self._stream.flush()


def duration(seconds: float) -> str:
    """Seconds as 0:42, 12:05 or 3:12:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
