"""Checkpoints: the training state and the position in the data, together, through Orbax.

A checkpoint is `FOLDER/<step>/`, where `step` counts finished optimizer steps. This file adds to Orbax what it leaves out:
leaves are compared by name, shape and dtype before anything is read (Orbax casts a wrong dtype in silence), non-finite
values are never written, and what a killed process left behind is neither listed nor kept. `training/state.py` says what a
state is; `training/loop.py` says when it is saved.
"""

import json
import pathlib
import re
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

_TEMPORARY = ".orbax-checkpoint-tmp"  # Orbax writes here, and renames when the checkpoint is whole
_SHOWN = 8  # leaves listed in an error


class CheckpointError(RuntimeError):
    """A checkpoint that can't be written, read, or does not fit the state. The message is one line for the user."""


class NonFiniteError(CheckpointError):
    """The state holds NaN or infinity, and was not written."""


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves of a pytree under their dotted path, such as `params.layers.moe.w_down`, in tree order."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


@jax.jit
def _finite_flags(leaves: list) -> jax.Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves])


def first_non_finite(tree: Any) -> str | None:
    """Name of the first floating-point leaf (in tree order) that holds NaN or infinity, or None."""
    floats = {name: leaf for name, leaf in named_leaves(tree).items() if jnp.issubdtype(leaf.dtype, jnp.inexact)}
    if not floats:
        return None
    finite = np.asarray(_finite_flags(list(floats.values())))
    return None if finite.all() else list(floats)[int(np.argmin(finite))]


class Checkpoints:
    """The checkpoints of one run.

    Args:
      folder: where they live; created if absent. Left-overs of killed writes are removed.
      keep: newest checkpoints that stay.
      asynchronous: write in the background; `wait` or the next `save` raises what failed.
    Raises:
      CheckpointError: the folder can't be created or written.
    """

    def __init__(self, folder: str | pathlib.Path, *, keep: int = 2, asynchronous: bool = True):
        if keep < 1:
            raise CheckpointError(f"checkpoint.keep is {keep}: at least 1 checkpoint must stay")
        self.folder = pathlib.Path(folder).absolute()
        self._asynchronous = asynchronous
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                _remove_unfinished(self.folder)
        except OSError as error:
            raise CheckpointError(f"can't use the checkpoint folder {self.folder}: {error.strerror}") from error
        if jax.process_count() > 1:  # nobody lists the folder before it is clean
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices("moejax checkpoint folder")
        self._orbax = ocp.training.Checkpointer(
            self.folder,
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),  # the loop decides
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),
        )

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, ascending."""
        return sorted(int(entry.name) for entry in self.folder.iterdir() if entry.name.isdecimal() and _is_whole(entry))

    def latest(self) -> int | None:
        """The newest step with a whole checkpoint, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, dataset: dict) -> None:
        """Writes `state` (any pytree of arrays) and `dataset` (the iterator's state, a dict of ints) as checkpoint `step`.

        Returns once the arrays have been copied; donating them afterwards is safe. Saving a step again replaces it.

        Raises:
          NonFiniteError: names the step and the first leaf with NaN or infinity. Nothing is written.
          CheckpointError: this write, or an earlier one in the background, failed.
        """
        bad = first_non_finite(state)
        if bad is not None:
            raise NonFiniteError(f"step {step}: {bad} holds NaN or infinity, so checkpoint {step} was not written")
        content = {"state": _nested(named_leaves(state)), "dataset": dataset}
        try:
            response = self._orbax.save_checkpointables_async(step, content, overwrite=True)
        except Exception as error:
            raise self._write_error(step, error) from error
        if response is None:
            raise CheckpointError(f"Orbax declined to write checkpoint {step} to {self.folder}")
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Blocks until everything is on disk.

        Raises:
          CheckpointError: a write failed, a full disk for instance.
        """
        try:
            self._orbax.wait()
        except Exception as error:
            raise self._write_error(None, error) from error

    def restore(self, abstract: Any, step: int | None = None) -> tuple[Any, dict]:
        """Reads checkpoint `step` (None: the newest) into the structure and shardings of `abstract`.

        Args:
          abstract: pytree of `jax.ShapeDtypeStruct` (or arrays) of any mesh; a leaf without sharding goes to the
            default device.
        Returns:
          The state, and the data iterator's state.
        Raises:
          CheckpointError: no such checkpoint; or a leaf is missing, unexpected, misshapen or of another dtype, each named.
        """
        found = self.steps()
        if step is None and found:
            step = found[-1]
        if step not in found:
            raise CheckpointError(
                f"no checkpoint {step if step is not None else ''} in {self.folder}; found {found or 'none'}"
            )
        try:
            saved = self._orbax.checkpointables_metadata(step).metadata
        except Exception as error:
            raise CheckpointError(f"checkpoint {step} in {self.folder} is damaged: {_first_line(error)}") from error
        for part in ("state", "dataset"):
            if part not in saved:
                raise CheckpointError(f"checkpoint {step} in {self.folder} has no '{part}': it has {sorted(saved)}")
        if not named_leaves(saved["state"]):  # Orbax gives an empty tree where it can't read one
            raise CheckpointError(
                f"checkpoint {step} in {self.folder} is damaged: its list of arrays can't be read. "
                f"Delete {self.folder / str(step)} to go on from the one before it"
            )

        expected = named_leaves(abstract)
        _compare(expected, named_leaves(saved["state"]), f"checkpoint {step} in {self.folder}")
        default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        target = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or default)
            for name, leaf in expected.items()
        }
        try:
            loaded = self._orbax.load_checkpointables(step, {"state": _nested(target), "dataset": saved["dataset"]})
        except Exception as error:
            raise CheckpointError(f"checkpoint {step} in {self.folder} can't be read: {_first_line(error)}") from error
        leaves = named_leaves(loaded["state"])  # the nested dict sorts its keys: put them back by name
        state = jax.tree.unflatten(jax.tree.structure(abstract), [leaves[name] for name in expected])
        return state, loaded["dataset"]

    def close(self) -> None:
        """Waits, and releases Orbax's threads."""
        self.wait()
        self._orbax.close()

    def _write_error(self, step: int | None, error: Exception) -> CheckpointError:
        which = "a checkpoint" if step is None else f"checkpoint {step}"
        return CheckpointError(f"could not write {which} to {self.folder}: {_first_line(error)}")


def _compare(expected: dict[str, Any], saved: dict[str, Any], where: str) -> None:
    """Raises one CheckpointError that lists every kind of difference between two {name: shaped leaf} dicts."""
    missing = [name for name in expected if name not in saved]
    unexpected = [name for name in saved if name not in expected]
    shared = [name for name in expected if name in saved]
    shapes = [
        f"{name} is {tuple(saved[name].shape)} but must be {tuple(expected[name].shape)}"
        for name in shared
        if tuple(saved[name].shape) != tuple(expected[name].shape)
    ]
    dtypes = [
        f"{name} is {saved[name].dtype} but must be {expected[name].dtype}"
        for name in shared
        if jnp.dtype(saved[name].dtype) != jnp.dtype(expected[name].dtype)
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "wrong shape": shapes, "wrong dtype": dtypes}
    found = [
        f"{kind}: {', '.join(names[:_SHOWN])}" + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        for kind, names in kinds.items()
        if names
    ]
    if found:
        raise CheckpointError(f"{where} does not fit the model; {'; '.join(found)}")


def _nested(leaves: dict[str, Any]) -> dict:
    """{'a.b': x} as {'a': {'b': x}}: plain dicts with string keys, which do not depend on library versions."""
    root: dict = {}
    for name, leaf in leaves.items():
        *folders, last = name.split(".")
        node = root
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = leaf
    return root


def _is_whole(folder: pathlib.Path) -> bool:
    """Whether Orbax finished this checkpoint: it lists any folder with a number as its name, even an empty one."""
    if (folder / "commit_success.txt").exists():
        return True
    try:
        return bool(json.loads((folder / "_CHECKPOINT_METADATA").read_text()).get("commit_timestamp_nsecs"))
    except (OSError, ValueError):
        return False


def _remove_unfinished(folder: pathlib.Path) -> None:
    for entry in folder.iterdir():
        if _TEMPORARY in entry.name or (entry.name.isdecimal() and not _is_whole(entry)):
            shutil.rmtree(entry)


def _first_line(error: BaseException) -> str:
    """The innermost cause in one line: Orbax wraps what matters (`No space left on device`) in its own exceptions."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    text = str(error).strip().splitlines()
    if not text:
        return type(error).__name__
    system = re.search(r"([^:]*) \[os_error_code='\d+'\]", text[0])  # TensorStore's form of an errno
    return system[1].strip() if system else f"{type(error).__name__}: {text[0][:300]}"
