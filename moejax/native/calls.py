"""FFI calls of the CPU kernels, one typed function per handler. Read `ops/experts_native.py` next, the backend made of them.

Every call is pure: no side effect, workspaces are results nobody reads, so remat, common-subexpression and dead-code
elimination are free to repeat, merge or drop it. Under `vmap` a call runs once per element, in sequence
(`vmap_method="sequential"`). Inside `shard_map` results vary over the axes any operand varies over. Not differentiable by
themselves: `ops/moe.py` holds the one custom_vjp. The C++ side checks every shape, dtype and index before it works, and a
violation raises with `INVALID_ARGUMENT: …` (a JaxRuntimeError or a ValueError, as JAX chooses).

Letters: T tokens, K experts per token, E experts, D model width, F expert width, G = 2F, M rows after dispatch.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax import native
from moejax.config import ActivationConfig

TILE = 128
_MAX_TILE = 192  # rows of a tile with the remainder that joined it (ffi/cpu/types.h); the handler checks it
_RECIPES = {"fp32": 0, "bf16": 1, "mxfp8": 2}
_ACTIVATIONS = {"swiglu": 0, "swiglu_clamped": 1, "swiglu_oai": 2, "geglu": 3}

# Tiles between the dgrad and the wgrad products of the backward: bounds the workspace (a tile holds 192 (2D + 3F) values)
# and is enough work for many cores. It changes no bits.
_WINDOW_TILES = 64


@dataclasses.dataclass(frozen=True)
class Rows:
    """Which rows belong to whom: arrays of a `Plan`. Without slot and row indices, the arrays of a call hold rows, not tokens."""

    count_E: jax.Array
    start_E: jax.Array
    slot_M: jax.Array | None = None
    row_TxK: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Operands:
    """Weight operands of one orientation: FP32 or BF16 arrays, or E4M3 elements with uint8 E8M0 codes beside them.

    For the forward blocks run along the last axis, for dgrad along the one before it; without codes the two are the same arrays.
    """

    gate_up_Ex2xFxD: jax.Array
    down_ExDxF: jax.Array
    gate_up_codes: jax.Array | None = None
    down_codes: jax.Array | None = None


def schedule(expert_TxK, first_expert, rows: int, num_experts: int, local_experts: int, capacity: int | None):
    """(count_E, start_E, row_TxK, slot_M, routed_E) as `ops/schedule.py` defines them, in one pass over the slots.

    Args:
      expert_TxK: int32 ids over all ranks, -1 for a masked slot; out of range raises when it runs.
      first_expert: int32 scalar, the first expert of this rank.
      rows: M.
      num_experts: experts over all ranks.
      local_experts: experts of this rank, E.
      capacity: most rows of an expert, or None.
    """
    E = (local_experts,)
    return _call(
        "moejax_schedule",
        [(E, jnp.int32), (E, jnp.int32), (expert_TxK.shape, jnp.int32), ((rows,), jnp.int32), (E, jnp.int32)],
        [expert_TxK, jnp.asarray(first_expert, jnp.int32)],
        num_experts=np.int64(num_experts),
        capacity=np.int64(-1 if capacity is None else capacity),
    )


def dispatch(x_TxD, slot_M, top_k: int, dtype) -> jax.Array:
    """Rows (M, D) of the tokens that slot_M names, in `dtype`; zero where it is -1."""
    shape = (*slot_M.shape, *x_TxD.shape[1:])
    return _call("moejax_dispatch", [(shape, dtype)], [x_TxD, slot_M], top_k=np.int64(top_k))[0]


def combine(rows_MxD, weight_TxK, row_TxK, dtype) -> jax.Array:
    """Sum over each token's slots, in slot order in FP32, of weight * row, rounded once to `dtype`; weight None: 1."""
    shape = (*row_TxK.shape[:1], *rows_MxD.shape[1:])
    return _call("moejax_combine", [(shape, dtype)], [rows_MxD, _or_absent(weight_TxK, jnp.float32), row_TxK])[0]


def grouped_product(x_MxK, w, count_E, start_E, *, transposed: bool, dtype=None) -> jax.Array:
    """Rows of each expert times its matrix, accumulated in FP32; zero in padding: (M, N) in `dtype` (x's if None).

    Args:
      x_MxK: FP32 or BF16 rows.
      w: FP32 or BF16 (E, N, K) with `transposed`, else (E, K, N).
      count_E, start_E: int32; starts are multiples of 128.
    """
    shape = (x_MxK.shape[0], w.shape[1 if transposed else 2])
    results = [(shape, dtype or x_MxK.dtype)]
    return _call("moejax_grouped_product", results, [x_MxK, w, count_E, start_E], transposed=bool(transposed))[0]


def grouped_wgrad(dy_MxN, x_MxK, count_E, start_E, accumulator_ExNxK=None) -> jax.Array:
    """FP32 (E, N, K): per expert the sum over its rows, in row order, of dy^T x, continuing from the accumulator if there is one.

    The accumulator is aliased: inside `jit` its memory becomes the result's, and it is copied first only if it is still needed.
    """
    shape = (count_E.shape[0], dy_MxN.shape[1], x_MxK.shape[1])
    accumulate = accumulator_ExNxK is not None
    operands = [dy_MxN, x_MxK, count_E, start_E, _or_absent(accumulator_ExNxK, jnp.float32)]
    aliases = {4: 0} if accumulate else {}
    return _call("moejax_grouped_wgrad", [(shape, jnp.float32)], operands, aliases, accumulate=accumulate)[0]


def mx_quantize(x, axis: int) -> tuple[jax.Array, jax.Array]:
    """(E4M3 elements of x's shape, uint8 codes), bit for bit those of `ops/mxfp8.quantize(x, axis)`; axis is -1 or -2.

    Args:
      x: FP32 or BF16.
    """
    if axis not in (-1, -2) or x.ndim < -axis:
        raise ValueError(
            f"mx_quantize got axis {axis} of an array of shape {x.shape}; blocks run along axis -1, or -2 of a matrix"
        )
    matrices = _matrices(x)
    B, R, C = matrices.shape
    codes_shape = (B, R, -(-C // 32)) if axis == -1 else (B, -(-R // 32), C)
    results = [((B, R, C), jnp.float8_e4m3fn), (codes_shape, jnp.uint8)]
    elements, codes = _call("moejax_mx_quantize", results, [matrices], down=axis == -2)
    final = list(x.shape)
    final[axis] = -(-final[axis] // 32)
    return elements.reshape(x.shape), codes.reshape(final)


def mx_dequantize(elements, codes, axis: int, dtype=jnp.float32) -> jax.Array:
    """Values of what `mx_quantize` made, bit for bit those of `ops/mxfp8.dequantize`."""
    matrices = _matrices(elements)
    results = [(matrices.shape, dtype)]
    values = _call("moejax_mx_dequantize", results, [matrices, _matrices(codes)], down=axis == -2)[0]
    return values.reshape(elements.shape)


def _matrices(x) -> jax.Array:
    """All leading axes as one; a vector as a matrix of one row. Spelled out, because -1 stands for no size in an empty array."""
    shape = (1, 1, *x.shape)[-max(x.ndim, 2) :]
    return x.reshape(math.prod(shape[:-2]), *shape[-2:])


def moe_forward(
    x, weight_TxK, rows: Rows, operands: Operands, biases, *, recipe: str, act: ActivationConfig, top_k: int, save: bool
) -> tuple[jax.Array, jax.Array | None]:
    """The layer on tokens, or with `rows` alone on rows.

    Args:
      x: FP32 or BF16 (T, D), or (M, D) rows.
      weight_TxK: FP32 combine weights, or None on rows.
      rows: indices of the plan.
      operands: forward orientation.
      biases: (b_gate_up_Ex2xF, b_down_ExD) FP32, or (None, None).
      save: whether gate and up are returned too.
    Returns:
      y like x (on rows: in the compute dtype, zero in padding), and gate_up (T K, 2F), on rows (M, 2F), in the compute
      dtype or None: the rows of the groups one after another, without padding.
    """
    on_rows = rows.slot_M is None or rows.row_TxK is None
    packed, (_, D, F) = x.shape[0] if rows.row_TxK is None else rows.row_TxK.size, operands.down_ExDxF.shape
    dtype = _compute_dtype(recipe)
    results = [
        ((0,) if on_rows else x.shape, x.dtype),
        ((packed, D), dtype),
        ((packed, 2 * F) if save else (0,), dtype),
    ]
    arguments = [x, _or_absent(weight_TxK, jnp.float32), *_indices(rows), *_biases(biases)]
    arguments += [operands.gate_up_Ex2xFxD, _or_absent(operands.gate_up_codes, jnp.uint8)]
    arguments += [operands.down_ExDxF, _or_absent(operands.down_codes, jnp.uint8)]
    y, y_rows, saved = _call(
        "moejax_moe_forward", results, arguments, **_attributes(recipe, act, 0 if on_rows else top_k)
    )
    return (y_rows if on_rows else y), (saved if save else None)


def moe_backward(
    x, dy, weight, saved, rows: Rows, fprop: Operands, dgrad: Operands, biases, accumulators, *,
    recipe: str, act: ActivationConfig, top_k: int, wgrad_bf16: bool,
):  # fmt: skip
    """Gradients of `moe_forward`.

    Args:
      x, dy: FP32 or BF16 (T, D), or (M, D) rows; one dtype.
      weight: FP32 (T, K), or (M,) on rows.
      saved: what the forward saved, or None: gate and up are computed again.
      fprop, dgrad: both orientations of the operands.
      accumulators: (dw_gate_up, dw_down, db_gate_up or None, db_down or None) FP32 to continue from, aliased to the
        results; or None.
    Returns:
      dx like x (on rows: in the compute dtype), d_weight like weight, and the four gradients (biases None where there
      are none).
    """
    on_rows = rows.slot_M is None or rows.row_TxK is None
    M, (E, D, F) = x.shape[0] if rows.slot_M is None else rows.slot_M.shape[0], dgrad.down_ExDxF.shape
    window_tiles = max(1, min(_WINDOW_TILES, M // TILE))
    has_bias = biases[0] is not None
    results = [
        ((0,) if on_rows else x.shape, x.dtype),
        ((M if rows.row_TxK is None else rows.row_TxK.size, D), _compute_dtype(recipe)),
        (weight.shape, jnp.float32),
        ((E, 2, F, D), jnp.float32),
        ((E, D, F), jnp.float32),
        ((E, 2, F) if has_bias else (0,), jnp.float32),
        ((E, D) if has_bias else (0,), jnp.float32),
        ((window_tiles, _MAX_TILE * (2 * D + 3 * F) + 2 * F + D), jnp.float32),
    ]
    arguments = [x, dy, weight, _or_absent(saved, _compute_dtype(recipe)), *_indices(rows), *_biases(biases)]
    arguments += [fprop.gate_up_Ex2xFxD, _or_absent(fprop.gate_up_codes, jnp.uint8)]
    arguments += [dgrad.gate_up_Ex2xFxD, _or_absent(dgrad.gate_up_codes, jnp.uint8)]
    arguments += [dgrad.down_ExDxF, _or_absent(dgrad.down_codes, jnp.uint8)]
    first = len(arguments)
    accumulators = accumulators or (None,) * 4
    arguments += [_or_absent(accumulator, jnp.float32) for accumulator in accumulators]
    aliases = {first + i: 3 + i for i, accumulator in enumerate(accumulators) if accumulator is not None}
    dx, dx_rows, d_weight, dw_gate_up, dw_down, db_gate_up, db_down, _ = _call(
        "moejax_moe_backward", results, arguments, aliases,
        wgrad_bf16=bool(wgrad_bf16), accumulate=bool(aliases), **_attributes(recipe, act, 0 if on_rows else top_k),
    )  # fmt: skip
    gradients = (dw_gate_up, dw_down, db_gate_up if has_bias else None, db_down if has_bias else None)
    return (dx_rows if on_rows else dx), d_weight, gradients


def ffi_call(
    module: str, target: str, results: list, operands: list, aliases: dict[int, int] | None = None, **attributes
):
    """Calls a handler of a compiled module.

    Args:
      module: "_cpu" or "_cuda"; registered on first use.
      results: (shape, dtype) of each result.
      operands: arrays; inside `shard_map` they are cast to vary over the same axes.
      aliases: operand index to the index of the result that takes over its memory.
      attributes: NumPy scalars or booleans; handlers check their types strictly.
    """
    native.register(module)
    operands = _vary_alike(operands)
    # The type of a result is an operand's with another shape and dtype: a plain ShapeDtypeStruct would be typed as equal
    # on all devices, and shard_map would then return one device's values for all of them without a word.
    like = jax.typeof(operands[0])
    types = [like.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False) for shape, dtype in results]
    call = jax.ffi.ffi_call(target, types, vmap_method="sequential", input_output_aliases=aliases or None)
    return call(*operands, **attributes)


def absent(dtype) -> jax.Array:
    """What stands for an optional operand that is not given."""
    return jnp.zeros((0,), dtype)


def _call(target: str, results: list, operands: list, aliases: dict[int, int] | None = None, **attributes: Any):
    return ffi_call("_cpu", target, results, operands, aliases, **attributes)


def _vary_alike(operands):
    # late: ops is above native in the import order, and this one function is about types only
    from moejax.ops.varying import vary_alike

    return vary_alike(operands)


def _attributes(recipe: str, act: ActivationConfig, top_k: int) -> dict[str, Any]:
    return {
        "recipe": np.int32(_RECIPES[recipe]),
        "activation": np.int32(_ACTIVATIONS[act.name]),
        "limit": np.float32(act.limit or 0.0),
        "alpha": np.float32(act.alpha),
        "top_k": np.int64(top_k),
    }


def _indices(rows: Rows) -> list[jax.Array]:
    slot_M, row_TxK = (_or_absent(index, jnp.int32) for index in (rows.slot_M, rows.row_TxK))
    return [slot_M, row_TxK, rows.count_E, rows.start_E]


def _biases(biases) -> list[jax.Array]:
    return [_or_absent(bias, jnp.float32) for bias in biases]


def _or_absent(array, dtype) -> jax.Array:
    return absent(dtype) if array is None else array


def _compute_dtype(recipe: str):
    return jnp.float32 if recipe == "fp32" else jnp.bfloat16
