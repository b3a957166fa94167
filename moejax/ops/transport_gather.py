"""Rows by all-gather: every rank takes all tokens of its expert group and computes the rows of its own experts.

The value of each slot then goes back to the token's rank from the one rank that has it, by all-to-all and a selection,
not by a sum: nothing is rounded or reordered on the way, so the layer's bits do not depend on R. With R = 1 nothing
travels. Simple, and one pass over all rows; its buffers hold any routing of the whole group, so it is for few ranks.

Letters: T tokens of this rank, N tokens of the whole expert group (= R T), K experts per token, D model width, M rows.
"""

import jax
import jax.numpy as jnp

from moejax.ops import backends
from moejax.ops.experts import ExpertWeights
from moejax.ops.schedule import Plan
from moejax.ops.spec import MoESpec


def forward(x_TxD: jax.Array, plan: Plan, run, spec: MoESpec):
    """Results of this rank's slots before the combine weight; `run` as in `transport_exchange.forward`.

    Returns:
      y_TxKxD in the compute dtype, zero for slots without a row; and what `run` saves.
    """
    with jax.named_scope("moe_dispatch"):
        x_MxD = _rows(x_TxD, plan, spec)
    with jax.named_scope("moe_experts"):
        y_MxD, saved = run(x_MxD, plan)
    with jax.named_scope("moe_combine"):
        return _slots(y_MxD, plan, spec), saved


def backward(x_TxD, dy_TxD, weight_TxK, saved, plan: Plan, run, buffer: ExpertWeights | None, spec: MoESpec):
    """dx_TxKxD, d_weight_TxK and weight gradients; `run` as in `transport_exchange.backward`."""
    with jax.named_scope("moe_dispatch"):
        x_MxD, dy_MxD = _rows(x_TxD, plan, spec), _rows(dy_TxD, plan, spec)
        weight_N = _gather(weight_TxK, spec).astype(jnp.float32).reshape(-1)
        weight_M = jnp.where(plan.slot_M >= 0, weight_N[plan.slot_M], 0.0)
    with jax.named_scope("moe_experts_grad"):
        dx_MxD, d_weight_M, buffer = run(x_MxD, dy_MxD, weight_M, saved, plan, buffer)
    with jax.named_scope("moe_combine"):
        return _slots(dx_MxD, plan, spec), _slots(d_weight_M, plan, spec), buffer


def used_slots(plan: Plan, spec: MoESpec) -> jax.Array:
    """bool (T, K): slots of this rank's tokens that have a row somewhere."""
    return _return(plan.row_TxK >= 0, plan.row_TxK, spec)


def moved_bytes(plan: Plan, spec: MoESpec) -> jax.Array:
    """FP32 bytes that this rank sends to others for one forward and one backward."""
    tokens = plan.row_TxK.shape[0] // spec.ranks
    width = spec.d_model * backends.compute_dtype(spec).itemsize
    per_token = 3 * width + 4 * spec.top_k + spec.top_k * (2 * width + 4)  # x, x and dy, weights; y, dx, d_weight
    return jnp.float32((spec.ranks - 1) * tokens * per_token)


def _rows(value_TxD: jax.Array, plan: Plan, spec: MoESpec) -> jax.Array:
    """Token values, rounded to the compute dtype, in row order; padding is zero: (T, D) -> (M, D)."""
    value_NxD = _gather(value_TxD.astype(backends.compute_dtype(spec)), spec)
    used_Mx1 = (plan.slot_M >= 0)[:, None]
    return jnp.where(used_Mx1, value_NxD[plan.slot_M // spec.top_k], jnp.zeros((), value_NxD.dtype))


def _slots(value_Mxany: jax.Array, plan: Plan, spec: MoESpec) -> jax.Array:
    """Row values at the slots of this rank's tokens, zero where a slot has no row: (M, …) -> (T, K, …)."""
    return _return(value_Mxany[jnp.maximum(plan.row_TxK, 0)], plan.row_TxK, spec)


def _gather(value_Txany: jax.Array, spec: MoESpec) -> jax.Array:
    """Rows of all ranks of the expert group, in rank order: (T, …) -> (N, …)."""
    if spec.ranks == 1:
        return value_Txany
    return jax.lax.all_gather(value_Txany, spec.axis, axis=0, tiled=True)


def _return(value_NxKxany: jax.Array, row_NxK: jax.Array, spec: MoESpec) -> jax.Array:
    """Brings each slot's value home from the rank that computed it: (N, K, …) on every rank -> (T, K, …).

    Args:
      value_NxKxany: this rank's values; read only where row_NxK >= 0.
      row_NxK: rows of the plan; at most one rank of the group has a row for a slot.
    Returns:
      The values, zero for slots that no rank computed.
    """
    mine_NxK = row_NxK >= 0
    if spec.ranks > 1:
        # (N, …) -> (R, T, …): block r is for the tokens of rank r; afterwards block r is what rank r sends us.
        mine_RxTxK, value_RxTxKxany = (_exchange(array, spec) for array in (mine_NxK, value_NxKxany))
        owner_1xTxK = jnp.argmax(mine_RxTxK, axis=0)[None]
        index = owner_1xTxK.reshape(owner_1xTxK.shape + (1,) * (value_RxTxKxany.ndim - 3))
        value_NxKxany = jnp.take_along_axis(value_RxTxKxany, index, axis=0)[0]
        mine_NxK = jnp.any(mine_RxTxK, axis=0)
    mask = mine_NxK.reshape(mine_NxK.shape + (1,) * (value_NxKxany.ndim - 2))
    return jnp.where(mask, value_NxKxany, jnp.zeros((), value_NxKxany.dtype))


def _exchange(value_Nxany: jax.Array, spec: MoESpec) -> jax.Array:
    blocks_RxTxany = value_Nxany.reshape(spec.ranks, -1, *value_Nxany.shape[1:])
    return jax.lax.all_to_all(blocks_RxTxany, spec.axis, split_axis=0, concat_axis=0)
