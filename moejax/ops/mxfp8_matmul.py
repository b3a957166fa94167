"""Products of MXArrays in three exact forms, and the re-basing of scales that Hopper's FP8 tensor cores need.

All forms have the same operands and an FP32 result; they differ in where the scales are applied, and so in FP32
rounding:

* `dequantized`: FP32 dot of the dequantised operands. What the `xla` backend runs.
* `blocks`: the dot of each block of 32 elements, times its two scales, summed over blocks in order. What Blackwell's
tensor
  core computes.
* `aligned`: scales re-based to one per 128 (`align`), then the same with blocks of 128. What Hopper's `aligned` mode
computes.

Letters: M rows, N columns, K contraction, E experts; blocks of both operands run along the contraction.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from moejax.ops import mxfp8
from moejax.ops.mxfp8 import BLOCK, NAN_BYTE, NAN_CODE, MXArray, dequantize
from moejax.ops.spec import TILE

Form = Literal["dequantized", "blocks", "aligned"]
FORMS = ("dequantized", "blocks", "aligned")
ALIGNED = 128  # elements along the contraction that share a scale after `align`

type _DotNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def dot_general(
    lhs: MXArray,
    rhs: MXArray,
    dimension_numbers: _DotNumbers,
    *,
    form: Form = "dequantized",
    aligned_rows: tuple[int, int] = (1, ALIGNED),
) -> jax.Array:
    """`jax.lax.dot_general` of two MXArrays.

    Args:
      lhs, rhs: operands whose blocks run along the one contracted axis.
      dimension_numbers: as for `jax.lax.dot_general`, one contracting axis a side, any batch axes.
      form: where the scales are applied; see the top of this file.
      aligned_rows: with `aligned`, how many rows of each side share a scale: (1, 128) with weights on the right, (1, 1)
        for weight gradients.
    Returns:
      FP32, axes in the order batch, free axes of lhs, free axes of rhs. NaN wherever a poisoned block is read.
    Raises:
      ValueError: an unknown form, several contractions, an operand quantised along another axis, sizes that differ.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    if form not in FORMS:
        raise ValueError(f"form is {form!r}, expected one of {', '.join(FORMS)}")
    _check_contraction("lhs", lhs, lhs_contract)
    _check_contraction("rhs", rhs, rhs_contract)
    # Here and not in the product: two contractions of different sizes may still have equally many blocks.
    lhs_sizes, rhs_sizes = (
        tuple(mx.shape[axis] for axis in (*contract, *batch))
        for mx, contract, batch in ((lhs, lhs_contract, lhs_batch), (rhs, rhs_contract, rhs_batch))
    )
    if lhs_sizes != rhs_sizes:
        raise ValueError(
            f"lhs of shape {lhs.shape} and rhs of shape {rhs.shape} have sizes {lhs_sizes} and {rhs_sizes} along the contraction "
            "and the batch axes: expected the same"
        )
    if min(aligned_rows) < 1:
        raise ValueError(f"aligned_rows is {aligned_rows}; expected positive numbers of rows")
    if form == "dequantized":
        return jax.lax.dot_general(
            dequantize(lhs),
            dequantize(rhs),
            dimension_numbers,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
    return _blocked_dot(lhs, rhs, tuple(lhs_batch), tuple(rhs_batch), form, aligned_rows)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _blocked_dot(lhs: MXArray, rhs: MXArray, lhs_batch, rhs_batch, form: Form, aligned_rows) -> jax.Array:
    lhs_BxMxK, batch_shape, lhs_free = _as_matrices(lhs, lhs_batch)
    rhs_BxNxK, _, rhs_free = _as_matrices(rhs, rhs_batch)
    block = BLOCK
    if form == "aligned":
        lhs_BxMxK, rhs_BxNxK, block = align(lhs_BxMxK, aligned_rows[0]), align(rhs_BxNxK, aligned_rows[1]), ALIGNED
    return _scaled_product(lhs_BxMxK, rhs_BxNxK, block).reshape(*batch_shape, *lhs_free, *rhs_free)


def grouped_matmul(
    lhs_MxK: MXArray,
    rhs_ExNxK: MXArray,
    start_E: jax.Array,
    count_E: jax.Array,
    *,
    form: Form = "dequantized",
    aligned_rows: tuple[int, int] = (1, ALIGNED),
) -> jax.Array:
    """Rows of each group times the group's matrix: out[m] = rhs[e] · lhs[m], for the e whose rows hold m.

    Args:
      lhs_MxK: rows, blocks along K, M a multiple of 128.
      rhs_ExNxK: matrices, blocks along K.
      start_E: int32, first row of each group, ascending multiples of 128.
      count_E: int32, rows of each group.
      form, aligned_rows: as in `dot_general`.
    Returns:
      FP32 out_MxN; zero in rows outside every group, whatever they hold.
    Raises:
      TypeError, ValueError: an operand or the groups do not fit; the message names it.
    """
    tiles = _tiles(lhs_MxK, "lhs_MxK")
    if rhs_ExNxK.ndim != 3:
        raise ValueError(f"rhs_ExNxK has shape {rhs_ExNxK.shape}, expected three axes")
    _check_groups(start_E, count_E, rhs_ExNxK.shape[0])

    def tile_product(tile):
        expert, real_rows = _tile_owner(tile, start_E, count_E)
        rows = _rows(lhs_MxK, tile)
        out = dot_general(
            rows, _expert(rhs_ExNxK, expert), (((1,), (1,)), ((), ())), form=form, aligned_rows=aligned_rows
        )
        return jnp.where(jnp.arange(TILE)[:, None] < real_rows, out, 0.0)

    out = jax.lax.map(tile_product, jnp.arange(tiles))
    return out.reshape(tiles * TILE, out.shape[-1])


def grouped_wgrad(
    lhs_MxN: MXArray,
    rhs_MxK: MXArray,
    start_E: jax.Array,
    count_E: jax.Array,
    *,
    form: Form = "dequantized",
    accumulator_ExNxK: jax.Array | None = None,
) -> jax.Array:
    """Weight gradients: for each group, the sum over its rows of outer products lhs[m] ⊗ rhs[m].

    Args:
      lhs_MxN, rhs_MxK: rows with blocks along M. Padding inside a group's last tile must have been zero when it was
        quantised: it shares blocks with real rows.
      start_E, count_E: as in `grouped_matmul`.
      form: `aligned` re-bases 1x128 on both sides.
      accumulator_ExNxK: FP32 to start from; None: zeros.
    Returns:
      FP32 (E, N, K), summed in row order. A group without rows keeps the accumulator's value, or is exactly zero.
    Raises:
      TypeError, ValueError: an operand, the groups or the accumulator do not fit; the message names it.
    """
    tiles = _tiles(lhs_MxN, "lhs_MxN")
    if _tiles(rhs_MxK, "rhs_MxK") != tiles:
        raise ValueError(f"lhs_MxN has {lhs_MxN.shape[0]} rows and rhs_MxK {rhs_MxK.shape[0]}: expected the same")
    _check_groups(start_E, count_E, start_E.size)
    shape = (start_E.shape[0], lhs_MxN.shape[1], rhs_MxK.shape[1])
    if accumulator_ExNxK is None:
        accumulator_ExNxK = jnp.zeros(shape, jnp.float32)
    if accumulator_ExNxK.shape != shape or accumulator_ExNxK.dtype != jnp.float32:
        raise TypeError(
            f"the accumulator is {accumulator_ExNxK.dtype}{list(accumulator_ExNxK.shape)}, expected float32{list(shape)}"
        )

    def add_tile(total_ExNxK, tile):
        expert, real_rows = _tile_owner(tile, start_E, count_E)
        lhs, rhs = _rows(lhs_MxN, tile), _rows(rhs_MxK, tile)
        product = dot_general(lhs, rhs, (((0,), (0,)), ((), ())), form=form, aligned_rows=(1, 1))
        return total_ExNxK.at[expert].add(jnp.where(real_rows > 0, product, 0.0)), None

    return jax.lax.scan(add_tile, accumulator_ExNxK, jnp.arange(tiles))[0]


def align(mx: MXArray, rows: int = 1) -> MXArray:
    """Re-bases scales to one per 128 elements along the blocks, and per `rows` along the other of the last two axes.

    The common scale e* is the largest of the group; an element becomes E4M3(q · 2^(e - e*)), nearest even, which loses
    bits only where it turns subnormal. Blocks that were poisoned do not count towards e* and keep NaN elements, so
    poison spreads no further than before.

    Args:
      mx: blocks along one of the last two axes (or a vector).
      rows: 1 for activations and gradients, 128 for weights in fprop and dgrad.
    Returns:
      MXArray of the same shape, whose scales are equal within a group.
    Source: `docs/mxfp8.md`; prior art DeepGEMM pull request 411.
    """
    axis = mx.storage_axis
    if axis not in (-1, -2) or (rows > 1 and mx.ndim < 2):
        raise ValueError(f"align needs blocks along one of the last two axes, got {mx}")
    if rows < 1:
        raise ValueError(f"align got rows = {rows}, expected a positive number")
    return _align(mx, rows)


@functools.partial(jax.jit, static_argnums=1)
def _align(mx: MXArray, rows: int) -> MXArray:
    axis = mx.storage_axis
    codes = mx.scales.astype(jnp.int32)
    codes = jnp.where(codes == NAN_CODE, 0, codes)
    common = _group_max(codes, axis, ALIGNED // BLOCK)
    if rows > 1:
        common = _group_max(common, -3 - axis, rows)
    byte = mxfp8.split_blocks(mxfp8.element_bytes(mx), axis)
    shift = jax.lax.expand_dims(codes - common, [axis + byte.ndim])
    poisoned = jax.lax.expand_dims(mx.scales == NAN_CODE, [axis + byte.ndim]) | (byte & 0x7F == NAN_BYTE)
    moved = mxfp8.round_to_e4m3(mxfp8.decode_bits(byte & 0x7F, jnp.maximum(127 + shift, 0))) | (byte & 0x80)
    merged = mxfp8.merge_blocks(jnp.where(poisoned, NAN_BYTE, moved), axis)
    elements = jax.lax.slice_in_dim(merged, 0, mx.elements.shape[axis], axis=axis)
    return dataclasses.replace(mx, elements=mxfp8.as_e4m3(elements), scales=common.astype(jnp.uint8))


def _scaled_product(lhs_BxMxK: MXArray, rhs_BxNxK: MXArray, block: int) -> jax.Array:
    """Sum over blocks, in order, of the block's dot times both scales. Scales are equal within a block."""

    def by_block(mx):
        values = jax.lax.bitcast_convert_type(mxfp8.decode_bits(mxfp8.element_bytes(mx), jnp.int32(127)), jnp.float32)
        codes = mx.scales[..., :: block // BLOCK].astype(jnp.int32)
        return jnp.moveaxis(mxfp8.split_blocks(values, -1, block), -2, 0), jnp.moveaxis(codes, -1, 0)

    def add_block(total_BxMxN, operands):
        (lhs, lhs_code), (rhs, rhs_code) = operands
        dot = jnp.einsum("bmk,bnk->bmn", lhs, rhs, precision=jax.lax.Precision.HIGHEST)
        # Both exponents together, in two factors: one scale alone may be subnormal where the product is not.
        exponent = jnp.maximum(lhs_code[..., :, None] + rhs_code[..., None, :] - 254, -252)
        half = exponent // 2
        poisoned = (lhs_code == NAN_CODE)[..., :, None] | (rhs_code == NAN_CODE)[..., None, :]
        return total_BxMxN + jnp.where(
            poisoned, jnp.nan, dot * _power_of_two(half) * _power_of_two(exponent - half)
        ), None

    shape = (*lhs_BxMxK.shape[:2], rhs_BxNxK.shape[1])
    return jax.lax.scan(add_block, jnp.zeros(shape, jnp.float32), (by_block(lhs_BxMxK), by_block(rhs_BxNxK)))[0]


def _power_of_two(exponent: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)  # exp2 is not exact at integers


def _group_max(codes: jax.Array, axis: int, size: int) -> jax.Array:
    largest = jnp.max(mxfp8.split_blocks(codes, axis, size), axis=axis)
    spread = jnp.repeat(largest, size, axis=axis)
    return jax.lax.slice_in_dim(spread, 0, codes.shape[axis], axis=axis)


def _as_matrices(mx: MXArray, batch: Sequence[int]) -> tuple[MXArray, tuple[int, ...], tuple[int, ...]]:
    """(batch, free, contraction) in C order with blocks along the last axis; also the batch and free shapes."""
    shape, contract = mx.shape, mx.axis + mx.ndim
    batch = [axis % mx.ndim for axis in batch]
    free = [axis for axis in range(mx.ndim) if axis != contract and axis not in batch]
    batch_shape, free_shape = tuple(shape[a] for a in batch), tuple(shape[a] for a in free)

    def reorder(leaf):
        leaf = jnp.swapaxes(leaf, -1, -2) if mx.transposed else leaf
        leaf = jnp.transpose(leaf, (*batch, *free, contract))
        return leaf.reshape(math.prod(batch_shape), math.prod(free_shape), leaf.shape[-1])

    return MXArray(reorder(mx.elements), reorder(mx.scales)), batch_shape, free_shape


def _check_contraction(name: str, mx: MXArray, contract: Sequence[int]) -> None:
    if len(contract) != 1 or (contract[0] % mx.ndim) != mx.axis % mx.ndim:
        raise ValueError(
            f"{name} of shape {mx.shape} has blocks along axis {mx.axis % mx.ndim} and is contracted over "
            f"{tuple(contract)}: quantise the source along the contraction, one axis"
        )


def _tiles(mx: MXArray, name: str) -> int:
    rows = mx.shape[0]
    if mx.ndim != 2 or rows % TILE or rows == 0:
        raise ValueError(
            f"{name} has shape {mx.shape}, expected two axes and a multiple of {TILE} rows: pad the last group"
        )
    return rows // TILE


def _check_groups(start_E, count_E, groups: int) -> None:
    for name, leaf in (("start_E", start_E), ("count_E", count_E)):
        if leaf.dtype != jnp.int32:
            raise TypeError(f"{name} is {leaf.dtype}, expected int32")
        if leaf.shape != (groups,) or groups == 0:
            raise ValueError(f"{name} has shape {leaf.shape}, expected ({max(groups, 1)},), one entry for each group")


def _tile_owner(tile: jax.Array, start_E: jax.Array, count_E: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Expert of a tile, and how many of its rows, from the first, are real (0 outside every group)."""
    row = tile * TILE
    holds_E = (start_E <= row) & (row < start_E + count_E)
    expert = jnp.argmax(holds_E)
    real = jnp.clip(start_E[expert] + count_E[expert] - row, 0, TILE)
    return expert, jnp.where(jnp.any(holds_E), real, 0)


def _rows(mx: MXArray, tile: jax.Array) -> MXArray:
    """The 128 rows of a tile, whichever way they are stored and blocked."""
    row_axis = 1 if mx.transposed else 0

    def cut(leaf, size):
        return jax.lax.dynamic_slice_in_dim(leaf, tile * size, size, axis=row_axis)

    blocked_rows = mx.axis == -2
    return dataclasses.replace(
        mx, elements=cut(mx.elements, TILE), scales=cut(mx.scales, TILE // BLOCK if blocked_rows else TILE)
    )


def _expert(mx: MXArray, expert: jax.Array) -> MXArray:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, expert, keepdims=False), mx)
