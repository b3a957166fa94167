"""Which rows of every batch a process loads, and how they become arrays of the whole mesh.

The mesh says it: a process loads the rows whose tokens its devices hold, so processes that share rows (their devices differ
along `tensor` or `context`) load the same ones. Row order in the global array is that of the batch, whatever the
processes; how many there are changes no number.

Letters: B batch, L sequence, m micro-batches, r rows of a micro-batch that this process loads.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from moejax.config import Config
from moejax.mesh import named_sharding

_WHAT = "a micro-batch (training.global_batch / training.micro_batches rows)"


def local_rows(config: Config, mesh: jax.sharding.Mesh | None) -> np.ndarray:
    """Numbers of the rows of a global batch that this process loads, int64, ascending: r of each micro-batch.

    Args:
      config: reads training.global_batch, micro_batches and sequence_length.
      mesh: None: one device, all rows.
    Raises:
      ValueError: the rows of a micro-batch do not divide over the devices that split them.
    """
    training = config.training
    size = training.global_batch // training.micro_batches
    mine = _rows_here(size, training.sequence_length, mesh)
    return (np.arange(training.micro_batches)[:, None] * size + mine).reshape(-1)


def place_batch(
    batch: Mapping[str, np.ndarray], mesh: jax.sharding.Mesh | None, rows: int | None = None
) -> Mapping[str, Any]:
    """This process's rows of a batch, as global arrays: rows over the axes that split the batch, L over `context`.

    Args:
      batch: int32 arrays (m, r, L), or (r, L): the rows of `local_rows`, in its order.
      mesh: None: one device; the arrays stay as they are.
      rows: rows of all processes (B / m, or B); None: this process has them all.
    """
    if mesh is None:
        return batch
    return {name: _place(x, mesh, x.shape[-2] if rows is None else rows) for name, x in batch.items()}


def _place(x: np.ndarray, mesh: jax.sharding.Mesh, rows: int) -> jax.Array:
    shape = (*x.shape[:-2], rows, x.shape[-1])
    names = (*(None,) * (x.ndim - 2), "batch", "sequence")
    mine = _rows_here(rows, x.shape[-1], mesh)
    if len(mine) != x.shape[-2]:
        raise ValueError(
            f"{x.shape[-2]} rows of a batch of {rows} given, but the devices of this process hold {len(mine)}"
        )

    def shard(index):
        *leading, row_slice, columns = index
        first = int(np.searchsorted(mine, row_slice.indices(rows)[0]))
        count = len(range(*row_slice.indices(rows)))
        return x[(*leading, slice(first, first + count), columns)]

    return jax.make_array_from_callback(shape, named_sharding(mesh, names, _WHAT, shape), shard)


def _rows_here(rows: int, length: int, mesh: jax.sharding.Mesh | None) -> np.ndarray:
    """Rows, of `rows`, that devices of this process hold, ascending. A shard's rows are neighbours in it."""
    if mesh is None:
        return np.arange(rows)
    sharding = named_sharding(mesh, ("batch", "sequence"), _WHAT, (rows, length))
    held = np.zeros(rows, bool)
    for index in sharding.addressable_devices_indices_map((rows, length)).values():
        assert index is not None  # of a device of this process
        held[index[0]] = True
    return np.flatnonzero(held)
