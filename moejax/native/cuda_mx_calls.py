"""FFI calls of the CUDA kernels in MXFP8: weights to both orientations, and the single-GPU expert layer on them. Rules
of a call: `calls.py`.

Two modes (`kernels_cuda/mx_moe.h`): `aligned` keeps E4M3 bytes re-based to one scale per 128 x 128 of a weight,
`exact` the values of canonical MXFP8 in BF16.

Letters: T tokens, K experts per token, E experts, D model width, F expert width, M rows after dispatch.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from moejax import native
from moejax.config import ActivationConfig
from moejax.native.calls import Rows, absent, ffi_call
from moejax.native.cuda_calls import _activation, _indices

E4M3 = jnp.float8_e4m3fn


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MXWeight:
    """Both orientations of a weight, made from its FP32 master. Codes are None in mode exact.

    Attributes:
      fprop: blocks along the last axis, in the master's layout. E4M3, or BF16 values.
      fprop_codes: uint8, one per 128 x 128.
      dgrad: blocks along the axis before. E4M3 with the last two axes exchanged, or BF16 values in the master's layout.
      dgrad_codes: uint8, one per 128 x 128 of `dgrad`.
    """

    fprop: jax.Array
    fprop_codes: jax.Array | None
    dgrad: jax.Array
    dgrad_codes: jax.Array | None


def prepare(master: jax.Array, aligned: bool) -> MXWeight:
    """Both orientations from one read of an FP32 master of at least two axes, multiples of 32."""
    *lead, R, C = master.shape
    B = 1
    for size in lead:
        B *= size
    tiles = (-(-R // 128), -(-C // 128))
    results: list[tuple[tuple[int, ...], Any]]
    if aligned:
        results = [((B, R, C), E4M3), ((B, *tiles), jnp.uint8), ((B, C, R), E4M3), ((B, *tiles[::-1]), jnp.uint8)]
    else:
        results = [((B, R, C), jnp.bfloat16), ((0,), jnp.uint8), ((B, R, C), jnp.bfloat16), ((0,), jnp.uint8)]
    fprop, fprop_codes, dgrad, dgrad_codes = ffi_call(
        "_cuda", "moejax_cuda_mx_prepare", results, [master.reshape(B, R, C)], aligned=aligned
    )

    def shaped(x):
        return x.reshape(*lead, *x.shape[1:])

    if not aligned:
        return MXWeight(shaped(fprop), None, shaped(dgrad), None)
    return MXWeight(shaped(fprop), shaped(fprop_codes), shaped(dgrad), shaped(dgrad_codes))


def moe_forward(x_TxD, weight_TxK, rows: Rows, gate_up: MXWeight, down: MXWeight, *, act: ActivationConfig, save: str):
    """y (T, D) in BF16, and what is saved.

    Args:
      x_TxD: BF16 tokens.
      weight_TxK: FP32 combine weights.
      rows: indices of the plan, with slot and row indices.
      gate_up, down: from `prepare`.
      save: "gate_up": (2, M, F) in BF16; "gate_up_mx": (elements, codes) in MXFP8; "recompute": None.
    """
    aligned = gate_up.fprop_codes is not None
    sizes = _sizes(x_TxD, rows, down)
    _, _, _, M, _, F = sizes
    kept: dict[str, list[tuple[tuple[int, ...], Any]]] = {
        "gate_up": [((2, M, F), jnp.bfloat16), ((0,), jnp.uint8)],
        "gate_up_mx": [((2, M, F), E4M3), ((2, -(-F // 128), M), jnp.uint8)],
        "recompute": [((0,), jnp.bfloat16), ((0,), jnp.uint8)],
    }
    workspace = native.module("_cuda").mx_forward_workspace_bytes(*sizes, aligned)
    results = [(x_TxD.shape, jnp.bfloat16), *kept[save], ((workspace,), jnp.uint8)]
    arguments = [x_TxD, weight_TxK, *_indices(rows), gate_up.fprop, _codes(gate_up.fprop_codes)]
    arguments += [down.fprop, _codes(down.fprop_codes)]
    y, elements, codes, _ = ffi_call(
        "_cuda", "moejax_cuda_mx_forward", results, arguments, aligned=aligned, **_activation(act)
    )
    return y, {"gate_up": elements, "gate_up_mx": (elements, codes), "recompute": None}[save]


def moe_backward(
    x_TxD,
    dy_TxD,
    weight_TxK,
    saved,
    rows: Rows,
    gate_up: MXWeight,
    down: MXWeight,
    accumulators,
    *,
    act: ActivationConfig,
    wgrad_bf16: bool,
):
    """Gradients of `moe_forward`: dx (BF16), d_weight (FP32), dw_gate_up and dw_down (FP32).

    Args:
      saved: what the forward saved.
      accumulators: (dw_gate_up, dw_down) FP32 to continue from, aliased to the results; or None.
      wgrad_bf16: weight gradients from BF16 operands.
    """
    aligned = gate_up.fprop_codes is not None
    sizes = _sizes(x_TxD, rows, down)
    _, _, E, _, D, F = sizes
    elements, codes = saved if isinstance(saved, tuple) else (saved, None)
    workspace = native.module("_cuda").mx_backward_workspace_bytes(*sizes, aligned, wgrad_bf16)
    results = [
        (x_TxD.shape, jnp.bfloat16),
        (weight_TxK.shape, jnp.float32),
        ((E, 2, F, D), jnp.float32),
        ((E, D, F), jnp.float32),
        ((workspace,), jnp.uint8),
    ]
    arguments = [x_TxD, dy_TxD, weight_TxK, absent(jnp.bfloat16) if elements is None else elements, _codes(codes)]
    arguments += _indices(rows)
    for weight in (gate_up, down):
        arguments += [weight.fprop, _codes(weight.fprop_codes), weight.dgrad, _codes(weight.dgrad_codes)]
    first = len(arguments)
    arguments += list(accumulators) if accumulators else [absent(jnp.float32)] * 2
    aliases = {first: 2, first + 1: 3} if accumulators else {}
    dx, d_weight, dw_gate_up, dw_down, _ = ffi_call(
        "_cuda",
        "moejax_cuda_mx_backward",
        results,
        arguments,
        aliases,
        aligned=aligned,
        wgrad_bf16=wgrad_bf16,
        accumulate=bool(accumulators),
        **_activation(act),
    )
    return dx, d_weight, dw_gate_up, dw_down


def loss_counts(x_TxD: jax.Array, real_T: jax.Array) -> jax.Array:
    """FP32 (3,): nonzero, underflowed and saturated elements of BF16 rows quantised along D; real_T is negative for rows that do
    not count. The definition is that of `ops/mxfp8.quantization_stats`.
    """
    (words,) = ffi_call("_cuda", "moejax_cuda_mx_loss_counts", [((6, 2), jnp.uint32)], [x_TxD, real_T])
    low, high = words[1:4, 0].astype(jnp.float32), words[1:4, 1].astype(jnp.float32)  # of 64-bit counts
    return low + high * 2.0**32


def _codes(codes) -> jax.Array:
    return absent(jnp.uint8) if codes is None else codes


def _sizes(x_TxD: jax.Array, rows: Rows, down: MXWeight) -> tuple[int, ...]:
    """T, K, E, M, D, F."""
    slot_M, row_TxK, _, _ = _indices(rows)
    E, D, F = down.fprop.shape
    return x_TxD.shape[0], row_TxK.shape[1], E, slot_M.shape[0], D, F
