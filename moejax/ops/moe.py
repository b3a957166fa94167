"""The expert layer: dispatch, expert products, combine, as one differentiable function.

`moe_layer` is the global view a model calls; `moe_ffn` the local one, inside `shard_map`: one `custom_vjp` around
gathering rows, a backend that computes them, and the weighted sum of each token's slots. Nothing is ever scattered:
`Plan` holds both directions of the permutation, so forward and backward only gather, in a fixed order. Read
`backends.py` for what a backend is, `schedule.py` for the plan, `experts_xla.py` for the products and the rounding
points between them.

Letters: B batch, L sequence, T tokens of this rank, N tokens of its expert group (= R T), K experts per token, D model
width, F expert width, E experts, M rows after dispatch.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax.ops import backends
from moejax.ops.backends import resolve_backend
from moejax.ops.experts import ExpertWeights, add_copies, check_experts, prepare_experts
from moejax.ops.schedule import Plan
from moejax.ops.spec import GATE_UP_NAME, MoESpec
from moejax.ops.transport import gather_tokens, return_slots
from moejax.ops.varying import vary_alike

__all__ = ["ExpertWeights", "moe_ffn", "prepare_experts", "resolve_backend"]


def moe_ffn(
    x_TxD: jax.Array,
    weight_TxK: jax.Array,
    plan: Plan,
    experts: ExpertWeights,
    spec: MoESpec,
    accumulator: ExpertWeights | None = None,
):
    """y_t = sum over slots k of weight_tk * expert_{e(t,k)}(x_t). Local view: inside `shard_map` if `spec.ranks > 1`.

    Differentiable in x, weight and the FP32 masters of `experts`, whose gradients are FP32 and were never rounded to
    BF16. Weights are used as they are, neither normalised nor scaled. A slot without a row (masked, dropped) adds
    nothing.

    Args:
      x_TxD: FP32 or BF16 tokens of this rank.
      weight_TxK: FP32 combine weights.
      plan: from `schedule`, for the same tokens.
      experts: from `prepare_experts`; experts of this rank. Plain masters work too: their copies are then made on every
      call.
      spec: static description of the layer.
      accumulator: FP32 buffers shaped like the masters. They come back unchanged beside y, and it is the cotangent that
        accumulates: give the buffer as cotangent of the second output, and the cotangent of `accumulator` is buffer +
        dW (the masters then get none). Inside a step this keeps weight gradients in one place, with no addition of that
        size.
    Returns:
      y_TxD in the dtype of x; with `accumulator`, (y_TxD, accumulator).
    Raises:
      TypeError, ValueError: an argument does not fit the spec; the message names it.
    """
    _check_arguments(x_TxD, weight_TxK, plan, experts, spec, accumulator)
    if experts.copies is None:
        experts = add_copies(experts, spec)
    operands = vary_alike((x_TxD, weight_TxK, plan, experts, accumulator))
    y_TxD, accumulator = _ffn(spec, *operands)
    return y_TxD if accumulator is None else (y_TxD, accumulator)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ffn(spec, x_TxD, weight_TxK, plan, experts, accumulator):
    return _ffn_forward(spec, x_TxD, weight_TxK, plan, experts, accumulator)[0]


def _ffn_forward(spec, x_TxD, weight_TxK, plan, experts, accumulator):
    backend = backends.load(spec)
    if _fused(backend, spec):
        y_TxD, saved = backend.ffn_forward(x_TxD, weight_TxK, plan, experts, spec)
    else:
        with jax.named_scope("moe_dispatch"):
            x_MxD = _rows(x_TxD, plan, spec)
        with jax.named_scope("moe_experts"):
            y_MxD, saved = backend.forward(x_MxD, plan, experts, spec)
        with jax.named_scope("moe_combine"):
            y_TxD = _sum_slots(_slots(y_MxD, plan, spec), weight_TxK).astype(x_TxD.dtype)
    saved = jax.tree.map(lambda leaf: checkpoint_name(leaf, GATE_UP_NAME), saved)
    return (y_TxD, accumulator), (x_TxD, weight_TxK, plan, experts, saved)


def _ffn_backward(spec, residuals, cotangents):
    x_TxD, weight_TxK, plan, experts, saved = residuals
    dy_TxD, buffer = cotangents
    backend = backends.load(spec)
    if _fused(backend, spec):
        dx_TxD, d_weight_TxK, d_experts = backend.ffn_backward(
            x_TxD, weight_TxK, dy_TxD, saved, plan, experts, spec, accumulator=buffer
        )
    else:
        with jax.named_scope("moe_dispatch"):
            x_MxD, dy_MxD = _rows(x_TxD, plan, spec), _rows(dy_TxD, plan, spec)
            weight_N = gather_tokens(weight_TxK, spec).astype(jnp.float32).reshape(-1)
            weight_M = jnp.where(plan.slot_M >= 0, weight_N[plan.slot_M], 0.0)
        with jax.named_scope("moe_experts_grad"):
            dx_MxD, d_weight_M, d_experts = backend.backward(
                x_MxD, dy_MxD, weight_M, saved, plan, experts, spec, accumulator=buffer
            )
        with jax.named_scope("moe_combine"):
            dx_TxD = _sum_slots(_slots(dx_MxD, plan, spec)).astype(x_TxD.dtype)
            d_weight_TxK = _slots(d_weight_M, plan, spec).astype(weight_TxK.dtype)
    # None is "no cotangent": for the plan, the copies, and whichever of masters and accumulator did not get the
    # gradient.
    if buffer is None:
        return dx_TxD, d_weight_TxK, None, d_experts, None
    return dx_TxD, d_weight_TxK, None, None, d_experts


_ffn.defvjp(_ffn_forward, _ffn_backward)


def _fused(backend, spec: MoESpec) -> bool:
    return spec.ranks == 1 and hasattr(backend, "ffn_forward")


def _rows(value_TxD: jax.Array, plan: Plan, spec: MoESpec) -> jax.Array:
    """Token values, rounded to the compute dtype, in row order; padding is zero: (T, D) -> (M, D)."""
    value_NxD = gather_tokens(value_TxD.astype(backends.compute_dtype(spec)), spec)
    used_Mx1 = (plan.slot_M >= 0)[:, None]
    return jnp.where(used_Mx1, value_NxD[plan.slot_M // spec.top_k], jnp.zeros((), value_NxD.dtype))


def _slots(value_Mxany: jax.Array, plan: Plan, spec: MoESpec) -> jax.Array:
    """Row values at the slots of this rank's tokens, zero where a slot has no row: (M, …) -> (T, K, …)."""
    return return_slots(value_Mxany[jnp.maximum(plan.row_TxK, 0)], plan.row_TxK, spec)


def _sum_slots(value_TxKxD: jax.Array, weight_TxK: jax.Array | None = None) -> jax.Array:
    """Sum over k in slot order in FP32, optionally weighted. The caller rounds once."""
    total_TxD = jnp.zeros((), jnp.float32)
    for slot in range(value_TxKxD.shape[1]):
        term_TxD = value_TxKxD[:, slot].astype(jnp.float32)
        if weight_TxK is not None:
            term_TxD = weight_TxK[:, slot, None].astype(jnp.float32) * term_TxD
        total_TxD = total_TxD + term_TxD
    return total_TxD


def _check_arguments(x_TxD, weight_TxK, plan, experts, spec, accumulator):
    tokens = plan.row_TxK.shape[0] // spec.ranks
    if x_TxD.shape != (tokens, spec.d_model):
        raise ValueError(
            f"x has shape {x_TxD.shape}; expected (T, D) = ({tokens}, {spec.d_model}): T as in the plan, D = d_model of the spec"
        )
    if x_TxD.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"x is {x_TxD.dtype}; expected float32 or bfloat16")
    if weight_TxK.shape != (tokens, spec.top_k) or weight_TxK.dtype != jnp.float32:
        raise ValueError(
            f"weight is {weight_TxK.dtype}{weight_TxK.shape}; expected float32 (T, K) = ({tokens}, {spec.top_k})"
        )
    check_experts(experts, spec)
    rows_E = plan.count_E.shape[0]
    if experts.w_down_ExDxF.ndim != 3 or experts.w_down_ExDxF.shape[0] != rows_E:
        raise ValueError(
            f"experts hold w_down of shape {experts.w_down_ExDxF.shape}, the plan is for {rows_E} local experts: "
            f"pass the slice of this rank, (E / R, D, F) with R = {spec.ranks}"
        )
    if accumulator is not None:
        expected, given = (
            [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(tree)]
            for tree in (experts.masters(), accumulator)
        )
        if expected != given:
            raise ValueError(f"accumulator holds {given}; expected FP32 buffers shaped like the masters, {expected}")
