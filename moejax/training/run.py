"""The folder of a run: who may use it, which config it belongs to, and what is in it.

config.yaml     the whole config, checked when the run continues
checkpoints/    see moejax/checkpoint.py
metrics.jsonl, tensorboard/, summary.json, sample.txt, report.html
"""

import dataclasses
import fcntl
import json
import os
import pathlib
from typing import Any

import yaml

from moejax.config import Config

# What may change between a run and its continuation: none of it moves a number. (Another mesh gives the same values restored,
# and then sums in another order, which is what a user who asks for it expects.)
_FREE = ("preset", "run_dir", "data.cache_dir", "checkpoint.", "mesh.", "log.")


class RunError(RuntimeError):
    """The run folder can't be used as asked. The message is one line for the user."""


class RunFolder:
    """The locked folder of one run; use it in a `with` statement.

    Args:
      path: the folder; created if absent.
      config: the config of this run, compared with the stored one if the folder has checkpoints.
    Raises:
      RunError: not writable, in use by another process, or its run has another config (the keys are listed).
    """

    def __init__(self, path: str | pathlib.Path, config: Config):
        self.path = pathlib.Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
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

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_) -> None:
        self._lock.close()

    def summary(self) -> dict[str, Any] | None:
        """`summary.json` if the run has finished, else None."""
        try:
            return json.loads((self.path / "summary.json").read_text())
        except FileNotFoundError:
            return None

    def write(self, name: str, text: str) -> pathlib.Path:
        """Writes a file of the run so that it is whole or absent; returns its path."""
        path = self.path / name
        temporary = path.with_name(name + ".tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
        return path

    def _check_or_store(self, config: Config) -> None:
        stored_path = self.path / "config.yaml"
        current = dataclasses.asdict(config)
        started = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        if started and stored_path.exists():
            stored = yaml.safe_load(stored_path.read_text())
            changed = config_differences(stored, current)
            if changed:
                raise RunError(
                    f"{self.path} holds a run with another config: {'; '.join(changed)}. "
                    f"Undo the change, choose another folder with run_dir=…, or delete {self.path}"
                )
        try:
            self.write("config.yaml", yaml.safe_dump(_plain(current), sort_keys=False))
        except OSError as error:
            raise RunError(f"can't write to the run folder {self.path}: {error.strerror}") from error


def run_path(config: Config, config_file: str | pathlib.Path) -> pathlib.Path:
    """`run_dir` if it is set, else runs/<name of the config file>."""
    return pathlib.Path(config.run_dir) if config.run_dir else pathlib.Path("runs") / pathlib.Path(config_file).stem


def config_differences(stored: dict, current: dict) -> list[str]:
    """The keys that change numbers and differ, as `key: stored -> current`. A key the stored config lacks has its default."""
    old, new = _flat(_plain(stored)), _flat(_plain(current))
    defaults = _flat(_plain(dataclasses.asdict(Config())))
    free = _FREE
    if new.get("optimizer.schedule") == "constant" == old.get("optimizer.schedule"):
        free = (*free, "training.steps")  # without a schedule, more steps only continue the run
    changed = []
    for key in [*new, *(key for key in old if key not in new)]:
        before, after = old.get(key, defaults.get(key)), new.get(key)
        if before != after and not any(key == name or (name.endswith(".") and key.startswith(name)) for name in free):
            changed.append(f"{key}: {before} -> {after}")
    return changed


def _flat(tree: dict, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _plain(value: Any) -> Any:
    """Tuples as lists, as YAML gives them back."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
