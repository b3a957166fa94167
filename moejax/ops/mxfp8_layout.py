"""Where a scale lives in memory on Blackwell: the interleaved layout that tcgen05 block-scaled products read.

One 512-byte atom holds the scales of 128 rows by 4 blocks of 32 columns; atoms follow each other along K, then along M.
cuBLAS calls it the 128x4 layout of 1D block scaling factors, CUTLASS `Sm1xxBlockScaledConfig<32>`. Scales run along K
whichever way the elements are stored.
Letters: M rows, K columns (the contraction), C scale columns, ceil(K / 32).
"""

import jax
import jax.numpy as jnp
import numpy as np

ATOM_ROWS = 128
ATOM_COLUMNS = 4  # blocks of 32, so 128 columns
ATOM_BYTES = ATOM_ROWS * ATOM_COLUMNS


def scale_offset(row, block, columns: int):
    """Byte offset of the scale of `row` and K-block `block`.

    Args:
      row, block: non-negative integers, or integer arrays that broadcast.
      columns: K; rounded up to 128.
    Returns:
      int, or int64 array (numpy: JAX has no int64 by default, and a large operand passes 2^31).
    """
    atoms_along_k = -(-columns // ATOM_ROWS)
    if np.ndim(row) or np.ndim(block):
        row, block = np.asarray(row, np.int64), np.asarray(block, np.int64)
    blocks = atoms_along_k * ATOM_COLUMNS
    if np.any(np.asarray(row) < 0) or np.any(np.asarray(block) < 0) or np.any(np.asarray(block) >= blocks):
        raise ValueError(
            f"scale_offset got row {row}, block {block}: rows start at 0, and K = {columns} has blocks 0..{blocks - 1}"
        )
    atom = (row // 128) * atoms_along_k + block // ATOM_COLUMNS
    return atom * ATOM_BYTES + (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4


def interleave_scales(scales: jax.Array) -> jax.Array:
    """Scales of a K-major operand in tensor-core order; padding holds code 0.

    Args:
      scales: uint8 […, M, C]; leading axes are operands of their own (experts), each padded to whole atoms.
    Returns:
      uint8 […, ceil(M/128) * ceil(C/4) * 512].
    """
    *lead, rows, blocks = scales.shape
    padding = [(0, 0)] * len(lead) + [(0, -rows % ATOM_ROWS), (0, -blocks % ATOM_COLUMNS)]
    padded = jnp.pad(scales, padding)
    atom_rows, atom_blocks = padded.shape[-2] // ATOM_ROWS, padded.shape[-1] // ATOM_COLUMNS
    atoms = padded.reshape(*lead, atom_rows, 4, 32, atom_blocks, 4)  # row = (atom, quarter, lane), block = (atom, byte)
    return _permuted(atoms, (0, 3, 2, 1, 4)).reshape(*lead, -1)


def deinterleave_scales(packed: jax.Array, rows: int, blocks: int) -> jax.Array:
    """The inverse of `interleave_scales`, without the padding.

    Args:
      packed: uint8 […, bytes].
      rows, blocks: M and C of the operand.
    Returns:
      uint8 […, M, C].
    Raises:
      ValueError: the number of bytes does not belong to M and C.
    """
    *lead, size = packed.shape
    atom_rows, atom_blocks = -(-rows // ATOM_ROWS), -(-blocks // ATOM_COLUMNS)
    if size != atom_rows * atom_blocks * ATOM_BYTES:
        raise ValueError(
            f"deinterleave_scales got {size} bytes for {rows} rows of {blocks} blocks, which take "
            f"{atom_rows * atom_blocks * ATOM_BYTES} (whole atoms of 128 rows by 4 blocks)"
        )
    atoms = packed.reshape(*lead, atom_rows, atom_blocks, 32, 4, 4)
    padded = _permuted(atoms, (0, 3, 2, 1, 4)).reshape(*lead, atom_rows * ATOM_ROWS, atom_blocks * ATOM_COLUMNS)
    return padded[..., :rows, :blocks]


def _permuted(atoms: jax.Array, order: tuple[int, ...]) -> jax.Array:
    """Transposes the last five axes. The order used here exchanges atom-along-K with quarter: its own inverse."""
    lead = atoms.ndim - len(order)
    return jnp.transpose(atoms, (*range(lead), *(lead + i for i in order)))
