"""Checkpoints: the training state and the position in the data, together, through Orbax.

A checkpoint is `FOLDER/<step>/`, where `step` counts finished optimizer steps. This file adds to Orbax what it leaves out:
leaves are compared by name, shape and dtype before anything is read (Orbax casts a wrong dtype in silence), non-finite
values are never written, a checksum per leaf finds what changed on disk, and what a killed process left behind is neither
listed nor kept. `training/state.py` says what a state is; `training/loop.py` says when it is saved.

In a job of several processes each writes and reads its own shards, and all must call the methods together.
"""

import functools
import json
import logging
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from moejax.distributed import agree, barrier

logger = logging.getLogger(__name__)

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


def first_non_finite(tree: Any) -> str | None:
    """Name of the first floating-point leaf (in tree order) that holds NaN or infinity, or None."""
    leaves = named_leaves(tree)
    finite, _ = _inspect(leaves)
    return None if finite.all() else list(leaves)[int(np.argmin(finite))]


def checksums(tree: Any) -> dict[str, int]:
    """A 32-bit checksum of the bits of every leaf, by name; it does not depend on how the leaf is sharded.

    Each element's bits are mixed with its row-major index by a bijection of 32-bit words (the finaliser of MurmurHash3),
    and the results are summed modulo 2^32. Any change of one element is found, and any other with a probability of 1 - 2^-32.
    """
    leaves = named_leaves(tree)
    return dict(zip(leaves, _inspect(leaves)[1].tolist()))


def _inspect(leaves: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Whether each leaf is finite (bool), and its checksum (uint32): one pass over the state, where it lies."""
    if not leaves:
        return np.ones(0, bool), np.zeros(0, np.uint32)
    arrays = [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in leaves.values()]
    meshes = [leaf.sharding.mesh for leaf in arrays if isinstance(leaf.sharding, jax.NamedSharding)]
    everywhere = jax.NamedSharding(meshes[0], jax.P()) if meshes else None  # every process can read it
    finite, sums = _inspection(everywhere)(arrays)
    return np.asarray(finite), np.asarray(sums)


@functools.cache
def _inspection(out_sharding: jax.sharding.Sharding | None) -> Callable:
    def inspect(leaves: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        finite = [jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.bool_(True) for x in leaves]
        return jnp.stack(finite), jnp.stack([_checksum(x) for x in leaves])

    return jax.jit(inspect, out_shardings=out_sharding)


def _checksum(x: jax.Array) -> jax.Array:
    """uint32 checksum of `checksums`."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    if x.dtype.itemsize == 8:
        word = jax.lax.bitcast_convert_type(x, jnp.uint32)  # two words, on a new last axis
    else:
        unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
        word = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    index, stride = jnp.zeros(word.shape, jnp.uint32), 1
    for axis in reversed(range(word.ndim)):  # modulo 2^32: arrays may have more elements
        index += jax.lax.broadcasted_iota(jnp.uint32, word.shape, axis) * np.uint32(stride % 2**32)
        stride *= word.shape[axis]
    word = word ^ (index * np.uint32(0x9E3779B9))
    word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * np.uint32(0xC2B2AE35)
    word = word ^ (word >> 16)
    return jnp.sum(word, dtype=jnp.uint32)


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
        barrier("moejax checkpoint folder")  # nobody lists the folder before it is clean
        self._orbax = ocp.training.Checkpointer(
            self.folder,
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),  # the loop decides
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),
        )

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, ascending."""
        return sorted(int(entry.name) for entry in self.folder.iterdir() if entry.name.isdecimal() and _is_whole(entry))

    def latest(self) -> int | None:
        """The newest step with a whole checkpoint, or None; what process 0 finds, in every process."""
        newest = agree(max(self.steps(), default=-1))
        return None if newest < 0 else newest

    def save(self, step: int, state: Any, dataset: dict) -> None:
        """Writes `state` (any pytree of arrays) and `dataset` (the iterator's state, a dict of ints) as checkpoint `step`.

        Returns once the arrays have been copied; donating them afterwards is safe. Saving a step again replaces it.

        Raises:
          NonFiniteError: names the step and the first leaf with NaN or infinity. Nothing is written.
          CheckpointError: this write, or an earlier one in the background, failed.
        """
        leaves = named_leaves(state)
        finite, sums = _inspect(leaves)
        if not finite.all():
            bad = list(leaves)[int(np.argmin(finite))]
            raise NonFiniteError(f"step {step}: {bad} holds NaN or infinity, so checkpoint {step} was not written")
        content = {
            "state": _nested(leaves),
            "dataset": dataset,
            "checksum": _nested(dict(zip(leaves, sums.tolist()))),
        }
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
          CheckpointError: no such checkpoint; a leaf is missing, unexpected, misshapen or of another dtype, or its values are not
            the ones that were saved, each named.
        """
        if step is None:
            step = self.latest()
        found = self.steps()
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
            others = {part: saved[part] for part in ("dataset", "checksum") if part in saved}
            loaded = self._orbax.load_checkpointables(step, {"state": _nested(target), **others})
        except Exception as error:
            raise CheckpointError(f"checkpoint {step} in {self.folder} can't be read: {_first_line(error)}") from error
        leaves = named_leaves(loaded["state"])  # the nested dict sorts its keys: put them back by name
        self._check_sums(step, leaves, loaded.get("checksum"))
        state = jax.tree.unflatten(jax.tree.structure(abstract), [leaves[name] for name in expected])
        return state, loaded["dataset"]

    def close(self) -> None:
        """Waits, and releases Orbax's threads."""
        self.wait()
        self._orbax.close()

    def _check_sums(self, step: int, leaves: dict[str, Any], stored: Any) -> None:
        """Compares what was read with the checksums that were written; a checkpoint of an older version has none."""
        if stored is None:
            logger.warning("checkpoint %d in %s has no checksums: its values were not checked", step, self.folder)
            return
        expected = named_leaves(stored)
        changed = [name for name, value in checksums(leaves).items() if value != expected.get(name)]
        if changed:
            more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
            raise CheckpointError(
                f"checkpoint {step} in {self.folder} is damaged: the values of {', '.join(changed[:_SHOWN])}{more} are not "
                f"the ones that were saved. Delete {self.folder / str(step)} to go on from the one before it"
            )

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
