"""Backend `dense`: the oracle. Every expert runs on every token in FP32, and autodiff makes the backward.

It shares no dispatch, no row order and no hand-written derivative with the other backends, and ignores the precision
recipe: it is what they are all compared with. Cost: E / K times the useful FLOPs.

Letters: T tokens, K experts per token, D model width, F expert width, E experts.
"""

import jax
import jax.numpy as jnp

from moejax.ops.activation import gated
from moejax.ops.experts import ExpertWeights
from moejax.ops.schedule import Plan
from moejax.ops.spec import MoESpec
from moejax.ops.varying import zeros_like_varying

_EXACT = jax.lax.Precision.HIGHEST


def refuses(spec: MoESpec, platform: str) -> str | None:
    """The oracle needs all experts in one place."""
    if spec.save == "gate_up_mx":
        return "save is gate_up_mx, a residual of the Hopper kernels: use gate_up"
    return f"it has no transport, and ranks is {spec.ranks}: use xla" if spec.ranks > 1 else None


def prepare(masters: ExpertWeights, spec: MoESpec) -> None:
    """Products read the FP32 masters in every recipe."""
    return None


def ffn_forward(x_TxD, weight_TxK, plan: Plan, experts: ExpertWeights, spec: MoESpec):
    """The whole layer; saves nothing."""
    y_TxD = _layer(x_TxD.astype(jnp.float32), weight_TxK, experts.masters(), plan, spec)
    return y_TxD.astype(x_TxD.dtype), None


def ffn_backward(x_TxD, weight_TxK, dy_TxD, saved, plan: Plan, experts: ExpertWeights, spec: MoESpec, accumulator=None):
    """Autodiff of the forward, recomputed."""
    _, pullback = jax.vjp(
        lambda x, weight, masters: _layer(x, weight, masters, plan, spec),
        x_TxD.astype(jnp.float32), weight_TxK, experts.masters(),
    )  # fmt: skip
    dx_TxD, d_weight_TxK, d_experts = pullback(dy_TxD.astype(jnp.float32))
    if accumulator is not None:
        d_experts = jax.tree.map(jnp.add, accumulator, d_experts)
    return dx_TxD.astype(x_TxD.dtype), d_weight_TxK, d_experts


def _layer(x_TxD, weight_TxK, masters: ExpertWeights, plan: Plan, spec: MoESpec):
    # The row of a slot tells its expert: the last one that starts at or before it. Empty experts share their start with
    # the next one, hence "last".
    expert_TxK = jnp.where(plan.row_TxK >= 0, jnp.searchsorted(plan.start_E, plan.row_TxK, side="right") - 1, -1)

    def add_expert(y_TxD, expert_and_index):
        expert, index = expert_and_index
        weight_T = jnp.sum(jnp.where(expert_TxK == index, weight_TxK, 0.0), axis=1)
        term_TxD = weight_T[:, None] * _expert(x_TxD, expert, spec)
        # selected, not multiplied away: an expert's overflow must not reach tokens that did not choose it
        chosen_Tx1 = jnp.any(expert_TxK == index, axis=1, keepdims=True)
        return y_TxD + jnp.where(chosen_Tx1, term_TxD, 0.0), None

    index_E = jnp.arange(masters.w_down_ExDxF.shape[0])
    return jax.lax.scan(add_expert, zeros_like_varying(x_TxD.shape, jnp.float32, x_TxD), (masters, index_E))[0]


def _expert(x_TxD, expert: ExpertWeights, spec: MoESpec):
    """One expert on all tokens; `expert` is a slice of the weights, without the leading E."""
    gate_up_Tx2xF = jnp.einsum("td,cfd->tcf", x_TxD, expert.w_gate_up_Ex2xFxD, precision=_EXACT)
    if expert.b_gate_up_Ex2xF is not None:
        gate_up_Tx2xF = gate_up_Tx2xF + expert.b_gate_up_Ex2xF
    h_TxF = gated(gate_up_Tx2xF[:, 0], gate_up_Tx2xF[:, 1], spec.act)
    y_TxD = jnp.einsum("tf,df->td", h_TxF, expert.w_down_ExDxF, precision=_EXACT)
    return y_TxD if expert.b_down_ExD is None else y_TxD + expert.b_down_ExD
