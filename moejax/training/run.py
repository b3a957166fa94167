"""The folder of a run: who may use it, which config it belongs to, and what is in it.

config.yaml     the whole config, checked when the run continues
tokenizer.json  what the model's tokens mean
data.json       which corpus it learns from, checked when the run continues
checkpoints/    see moejax/checkpoint.py
metrics.jsonl, tensorboard/, summary.json, sample.txt, report.html
"""

import dataclasses
import fcntl
import json
import os
import pathlib
from typing import Any, TextIO

import jax
import yaml

from moejax.config import Config, DistributedConfig
from moejax.config_load import config_diff, config_to_dict, numerics_diff
from moejax.data import Dataset
from moejax.distributed import barrier, of_first

SUMMARY_KEYS = {
    *("heldout_nats_per_byte", "heldout_bits_per_byte", "heldout_bytes", "steps", "tokens", "tokens_per_second"),
    *("seconds", "parameters", "active_parameters"),
}


class RunError(RuntimeError):
    """The run folder can't be used as asked. The message is one line for the user."""


class RunFolder:
    """The locked folder of one run; use it in a `with` statement.

    In a job of several processes all see the same folder, and only the first one locks it and writes to it.

    Args:
      config: the config of this run: `run_dir` is the folder (created if absent), and the rest is compared with the config
        stored there if it has checkpoints.
    Raises:
      RunError: not writable, in use by another process, or its run has another config (the keys are listed).
    """

    def __init__(self, config: Config):
        self.path = pathlib.Path(config.run_dir or "runs/default")
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.writes = jax.process_index() == 0
        self._lock: TextIO | None = None
        _check_command(config)
        if not self.writes:
            self._check(config)
            barrier("moejax run folder")
            if not (self.path / "config.yaml").exists():
                raise RunError(
                    f"process {jax.process_index()} does not see the run folder {self.path.absolute()} that process 0 made: "
                    "put it, with run_dir=…, on a file system that all machines share"
                )
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "w")
        except OSError as error:
            raise RunError(
                f"can't write to the run folder {self.path}: {error.strerror}; choose another with run_dir=…"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system drops it however the process ends
        except BlockingIOError:
            self._lock.close()
            raise RunError(f"the run folder {self.path} is in use by another process") from None
        try:
            self._check_or_store(config)
        except BaseException:
            self._lock.close()
            raise
        barrier("moejax run folder")  # the others have looked at it before anything in it changes

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_) -> None:
        if self._lock is not None:
            self._lock.close()

    def summary(self) -> dict[str, Any] | None:
        """`summary.json` if the run has finished, else None."""
        found = read_stored(self.path / "summary.json")
        if found is not None and (missing := SUMMARY_KEYS - found.keys()):
            raise RunError(
                f"{self.path / 'summary.json'} is damaged: it has no {min(missing)}; delete it to score again"
            )
        return found

    def write(self, name: str, text: str) -> pathlib.Path:
        """Writes a file of the run so that it is whole or absent; returns its path. Only the first process writes."""
        path = self.path / name
        if not self.writes:
            return path
        temporary = path.with_name(name + ".tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
        return path

    def keep_data(self, dataset: Dataset) -> None:
        """Stores the tokenizer and the corpus's key; a run that continues must find the corpus it began with.

        Raises:
          RunError: the corpus is another one. Its position in the data would point at other text.
        """
        now = {"corpus": dataset.folder.name, "train_tokens": len(dataset.train.tokens)}
        if json.loads(of_first("corpus", json.dumps(now))) != now:
            raise RunError(
                f"process {jax.process_index()} finds other text at data.source than process 0 "
                f"({len(dataset.train.tokens):,} tokens to train on): all processes of a job must see the same files"
            )
        if self.started and read_stored(self.path / "data.json") not in (None, now):
            raise RunError(
                f"the text changed since {self.path} began: bring it back, choose another folder with run_dir=…, "
                f"or delete {self.path}"
            )
        self.write("data.json", json.dumps(now) + "\n")
        self.write("tokenizer.json", dataset.tokenizer.to_json())

    def write_summary(self, values: dict[str, Any]) -> None:
        """Marks the run as finished."""
        self.write("summary.json", json.dumps(values, indent=2) + "\n")

    def _check_or_store(self, config: Config) -> None:
        self._check(config)
        try:
            self.write("config.yaml", yaml.safe_dump(config_to_dict(config), sort_keys=False))
        except OSError as error:
            raise RunError(f"can't write to the run folder {self.path}: {error.strerror}") from error

    def _check(self, config: Config) -> None:
        self.started = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        if self.started and (stored := read_stored(self.path / "config.yaml")) is not None:
            changed = numerics_diff(stored, config)
            if changed:
                raise RunError(
                    f"{self.path} holds a run with another config: {'; '.join(changed)}. "
                    f"Undo the change, choose another folder with run_dir=…, or delete {self.path}"
                )


def _check_command(config: Config) -> None:
    """Raises RunError in a process whose config is not that of process 0: they would wait for each other, or train apart."""
    first = json.loads(of_first("config", json.dumps(config_to_dict(config))))
    here = {f"distributed.{field.name}" for field in dataclasses.fields(DistributedConfig)} | {"data.cache_dir"}
    if changed := config_diff(first, config, here):
        raise RunError(
            f"process {jax.process_index()} was given another config than process 0: {'; '.join(changed)}. Start all with "
            "the same command (distributed.* and data.cache_dir may differ)"
        )


def read_stored(path: pathlib.Path) -> dict[str, Any] | None:
    """The keys and values of a JSON or YAML file of a run folder, or None if it isn't there.

    Raises:
      RunError: it can't be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise RunError(f"{path} can't be read: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(values, dict):
        raise RunError(f"{path} is damaged: expected keys with values, found {str(values)[:60]!r}")
    return values
