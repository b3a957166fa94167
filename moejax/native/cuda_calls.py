"""FFI calls of the CUDA kernels: the single-GPU expert layer in BF16, tokens in, tokens out. Rules of a call: `calls.py`.

The workspace is a result nobody reads; the compiled module says how large it is, from sizes alone.

Letters: T tokens, K experts per token, E experts, D model width, F expert width, M rows after dispatch.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax import native
from moejax.config import ActivationConfig
from moejax.native import ways
from moejax.native.calls import Operands, Rows, absent, ffi_call


def moe_forward(
    x_TxD, weight_TxK, rows: Rows, operands: Operands, biases=(None, None), *, act: ActivationConfig, save: bool
):
    """y (T, D) in BF16, and gate_up (2, M, F) in BF16 if `save`, else None.

    Args:
      x_TxD: BF16 tokens.
      weight_TxK: FP32 combine weights.
      rows: indices of the plan, with slot and row indices.
      operands: BF16 weights.
      biases: FP32 (b_gate_up (E, 2, F), b_down (E, D)), or (None, None).
    """
    sizes = _sizes(x_TxD, rows, operands)
    _, _, _, M, _, F = sizes
    results = [
        (x_TxD.shape, jnp.bfloat16),
        ((2, M, F) if save else (0,), jnp.bfloat16),
        ((native.module("_cuda").forward_workspace_bytes(*sizes),), jnp.uint8),
    ]
    arguments = [x_TxD, weight_TxK, *_indices(rows), *_weights(operands, biases)]
    y, saved, _ = ffi_call("_cuda", "moejax_cuda_moe_forward", results, arguments, **_activation(act))
    return y, saved if save else None


def moe_backward(
    x_TxD, dy_TxD, weight_TxK, saved, rows: Rows, operands: Operands, biases, accumulators, *, act: ActivationConfig
):
    """Gradients of `moe_forward`: dx (BF16), d_weight, dw_gate_up, dw_down, and db_gate_up, db_down or None (FP32).

    Args:
      saved: what the forward saved, or None: gate and up are computed again.
      accumulators: (dw_gate_up, dw_down, db_gate_up, db_down) FP32 to continue from, aliased to the results; or None.
    """
    sizes = _sizes(x_TxD, rows, operands)
    results = [
        (x_TxD.shape, jnp.bfloat16),
        (weight_TxK.shape, jnp.float32),
        (operands.gate_up_Ex2xFxD.shape, jnp.float32),
        (operands.down_ExDxF.shape, jnp.float32),
        *(((0,) if bias is None else bias.shape, jnp.float32) for bias in biases),
        ((native.module("_cuda").backward_workspace_bytes(*sizes, saved is None),), jnp.uint8),
    ]
    arguments = [x_TxD, dy_TxD, weight_TxK, absent(jnp.bfloat16) if saved is None else saved, *_indices(rows)]
    arguments += _weights(operands, biases)
    first = len(arguments)
    starts = list(accumulators) if accumulators else [None] * 4
    arguments += [absent(jnp.float32) if start is None else start for start in starts]
    aliases = {first + i: 2 + i for i, start in enumerate(starts) if start is not None}
    dx, d_weight, dw_gate_up, dw_down, *db, _ = ffi_call(
        "_cuda",
        "moejax_cuda_moe_backward",
        results,
        arguments,
        aliases,
        accumulate=bool(accumulators),
        **_activation(act),
    )
    return dx, d_weight, dw_gate_up, dw_down, *(None if bias is None else d for bias, d in zip(biases, db, strict=True))


def _weights(operands: Operands, biases) -> list[jax.Array]:
    return [
        operands.gate_up_Ex2xFxD,
        operands.down_ExDxF,
        *(absent(jnp.float32) if bias is None else bias for bias in biases),
    ]


def _sizes(x_TxD: jax.Array, rows: Rows, operands: Operands) -> tuple[int, ...]:
    """T, K, E, M, D, F, of a layer whose products run as was measured for this GPU."""
    ways.apply()
    slot_M, row_TxK, _, _ = _indices(rows)
    E, D, F = operands.down_ExDxF.shape
    return x_TxD.shape[0], row_TxK.shape[1], E, slot_M.shape[0], D, F


def _indices(rows: Rows) -> list[jax.Array]:
    if rows.slot_M is None or rows.row_TxK is None:
        raise ValueError("the CUDA layer works on tokens: rows must hold slot_M and row_TxK of the plan")
    return [rows.slot_M, rows.row_TxK, rows.count_E, rows.start_E]


def _activation(act: ActivationConfig) -> dict[str, Any]:
    """The kernels know one formula, g sigmoid(alpha g (1 + gamma g^2)) (u + beta) after the clamp (`kernels_cuda/activation.h`)."""
    alpha, beta, gamma = {
        "swiglu": (1.0, 0.0, 0.0),
        "swiglu_clamped": (1.0, 0.0, 0.0),
        "swiglu_oai": (act.alpha, 1.0, 0.0),
        "geglu": (2.0 * math.sqrt(2.0 / math.pi), 0.0, 0.044715),  # (1 + tanh z) / 2 is sigmoid(2 z)
    }[act.name]
    limit = math.inf if act.limit is None else act.limit
    return {name: np.float32(v) for name, v in (("alpha", alpha), ("beta", beta), ("gamma", gamma), ("limit", limit))}
