"""Backend `xla`: the expert products in plain JAX, on every platform, with static shapes.

Rows are cut into blocks of 64 that never cross a group; a loop runs over the experts that have rows, reads their
weights once, and inside it a loop over their blocks. Work follows the rows that exist, not the bound M, and each block
is the same small product whatever surrounds it, so a row's bits depend only on the rows before it in its block's sums:
on its expert's rows for weight gradients, on nothing else for outputs and dx. Nothing here is differentiated by JAX.

Rounding points (bf16 and mxfp8; fp32 has none): gate and up before the activation; h after it; slot rows y and dx;
d_gate and d_up; weight * h. Everything between is FP32. Read `products.py` for what a recipe does to operands.

Letters: M rows after dispatch, P rows of a block, D model width, F expert width, G = 2F, E experts.
"""

import jax
import jax.numpy as jnp

from moejax.ops.activation import gated, gated_grad
from moejax.ops.backends import compute_dtype
from moejax.ops.experts import ExpertWeights
from moejax.ops.products import load_weights, product, put_expert, rounded, row_operand, take_expert, weight_copies
from moejax.ops.row_blocks import block_size, each_block, each_used_group, put_block, take_block
from moejax.ops.schedule import Plan
from moejax.ops.spec import MoESpec
from moejax.ops.varying import zeros_like_varying

STACKED = True  # reads one layer of a stack of experts where it lies

_D_WEIGHT_COLUMNS = 128  # d(weight) sums partials of this many columns in order (docs/design.md: a fixed order)


def refuses(spec: MoESpec, platform: str) -> str | None:
    """Runs every shape on every platform."""
    return "save is gate_up_mx, a residual of the Hopper kernels: use gate_up" if spec.save == "gate_up_mx" else None


def prepare(masters: ExpertWeights, spec: MoESpec):
    """The recipe's weight copies."""
    return weight_copies(masters, spec)


def forward(x_MxD: jax.Array, plan: Plan, experts: ExpertWeights, spec: MoESpec):
    """Slot rows y before the combine weight, and gate_up (M, 2F) if `spec.save` keeps it."""
    rows, size = x_MxD.shape[0], block_size(spec.recipe, spec.mx_mode)
    y_MxD = zeros_like_varying((rows, spec.d_model), compute_dtype(spec), x_MxD)
    saved_MxG = None
    if spec.save == "gate_up":
        saved_MxG = zeros_like_varying((rows, 2 * spec.expert_width), compute_dtype(spec), x_MxD)

    def run_expert(expert, state):
        weights = load_weights(experts, expert, spec)
        b_gate_up_G, b_down_D = _biases(experts, expert)

        def run_block(row, state):
            y_MxD, saved_MxG = state
            gate_up_PxG = _gate_up(take_block(x_MxD, row, size), weights, b_gate_up_G, spec)
            h_PxF = _hidden(gate_up_PxG, spec)
            y_PxD = product(row_operand(h_PxF, "fprop", 1, spec), weights.down_fprop_DxF, 1, 1, "fprop.down")
            y_PxD = rounded(y_PxD if b_down_D is None else y_PxD + b_down_D, spec)
            if saved_MxG is not None:
                saved_MxG = put_block(saved_MxG, gate_up_PxG, row)
            return put_block(y_MxD, y_PxD, row), saved_MxG

        return each_block(plan.count_E[expert], plan.start_E[expert], size, run_block, state)

    return each_used_group(plan.count_E, run_expert, (y_MxD, saved_MxG))


def backward(x_MxD, dy_MxD, weight_M, saved_MxG, plan: Plan, experts: ExpertWeights, spec: MoESpec, accumulator=None):
    """dx rows, d(weight) per row, and FP32 weight gradients that continue from `accumulator` if there is one."""
    size = block_size(spec.recipe, spec.mx_mode)
    dx_MxD = zeros_like_varying(x_MxD.shape, compute_dtype(spec), x_MxD)
    d_weight_M = zeros_like_varying(weight_M.shape, jnp.float32, x_MxD)
    if accumulator is None:
        accumulator = jax.tree.map(lambda leaf: zeros_like_varying(leaf.shape, jnp.float32, leaf), experts.masters())

    def run_expert(expert, state):
        dx_MxD, d_weight_M, d_experts = state
        weights = load_weights(experts, expert, spec)
        b_gate_up_G, b_down_D = _biases(experts, expert)

        def run_block(row, state):
            dx_MxD, d_weight_M, d_expert = state
            x_PxD, dy_PxD, weight_P = (take_block(value, row, size) for value in (x_MxD, dy_MxD, weight_M))
            if saved_MxG is None:
                gate_up_PxG = _gate_up(x_PxD, weights, b_gate_up_G, spec, "recompute.gate_up")
            else:
                gate_up_PxG = take_block(saved_MxG, row, size)
            h_PxF = _hidden(gate_up_PxG, spec)

            dh0_PxF = product(row_operand(dy_PxD, "dgrad", 1, spec), weights.down_dgrad_DxF, 1, 0, "dgrad.down")
            d_weight_P = _row_dot(h_PxF, dh0_PxF)
            if b_down_D is not None:
                d_weight_P = d_weight_P + _row_dot(dy_PxD, jnp.broadcast_to(b_down_D, dy_PxD.shape))
            dh_PxF = weight_P[:, None] * dh0_PxF
            gate_PxF, up_PxF = jnp.split(gate_up_PxG, 2, axis=1)
            d_gate_PxF, d_up_PxF = gated_grad(gate_PxF, up_PxF, dh_PxF, spec.act)
            da_PxG = rounded(jnp.concatenate([d_gate_PxF, d_up_PxF], axis=1), spec)
            dx_PxD = product(row_operand(da_PxG, "dgrad", 1, spec), weights.gate_up_dgrad_GxD, 1, 0, "dgrad.gate_up")
            dx_PxD = rounded(dx_PxD, spec)

            weighted_h_PxF = rounded(weight_P[:, None] * h_PxF, spec)
            d_expert = _add_wgrad(d_expert, x_PxD, dy_PxD, weighted_h_PxF, da_PxG, weight_P, spec)
            return put_block(dx_MxD, dx_PxD, row), put_block(d_weight_M, d_weight_P, row), d_expert

        d_expert = take_expert(d_experts, expert, experts.layer)
        dx_MxD, d_weight_M, d_expert = each_block(
            plan.count_E[expert], plan.start_E[expert], size, run_block, (dx_MxD, d_weight_M, d_expert)
        )
        d_experts = put_expert(d_experts, d_expert, expert, experts.layer)
        return dx_MxD, d_weight_M, d_experts

    return each_used_group(plan.count_E, run_expert, (dx_MxD, d_weight_M, accumulator))


def _gate_up(x_PxD, weights, b_gate_up_G, spec, name="fprop.gate_up"):
    gate_up_PxG = product(row_operand(x_PxD, "fprop", 1, spec), weights.gate_up_fprop_GxD, 1, 1, name)
    return rounded(gate_up_PxG if b_gate_up_G is None else gate_up_PxG + b_gate_up_G, spec)


def _hidden(gate_up_PxG, spec):
    gate_PxF, up_PxF = jnp.split(gate_up_PxG, 2, axis=1)
    return rounded(gated(gate_PxF, up_PxF, spec.act), spec)


def _add_wgrad(d_expert, x_PxD, dy_PxD, weighted_h_PxF, da_PxG, weight_P, spec):
    """Adds one block's products over its rows: the sum runs over accumulator, block 0, block 1, … in this order."""
    x_op, dy_op, weighted_h_op, da_op = (
        row_operand(value, "wgrad", 0, spec) for value in (x_PxD, dy_PxD, weighted_h_PxF, da_PxG)
    )
    d_gate_up = product(da_op, x_op, 0, 0, "wgrad.gate_up").reshape(d_expert.w_gate_up_Ex2xFxD.shape)
    biases = {}
    if d_expert.b_gate_up_Ex2xF is not None:
        biases["b_gate_up_Ex2xF"] = d_expert.b_gate_up_Ex2xF + da_PxG.sum(0).reshape(d_expert.b_gate_up_Ex2xF.shape)
        biases["b_down_ExD"] = d_expert.b_down_ExD + (weight_P[:, None] * dy_PxD).sum(0)
    return ExpertWeights(
        w_gate_up_Ex2xFxD=d_expert.w_gate_up_Ex2xFxD + d_gate_up,
        w_down_ExDxF=d_expert.w_down_ExDxF + product(dy_op, weighted_h_op, 0, 0, "wgrad.down"),
        **biases,
    )


def _row_dot(a_PxF, b_PxF):
    """Sum over the columns of a * b in FP32: partial sums of 128 columns, added in order."""
    width = a_PxF.shape[1]
    padding = ((0, 0), (0, -width % _D_WEIGHT_COLUMNS))
    partial_PxC = jnp.pad(a_PxF * b_PxF, padding).reshape(a_PxF.shape[0], -1, _D_WEIGHT_COLUMNS).sum(2)
    total_P = partial_PxC[:, 0]
    for column in range(1, partial_PxC.shape[1]):
        total_P = total_P + partial_PxC[:, column]
    return total_P


def _biases(experts, expert):
    if experts.b_down_ExD is None:
        return None, None
    biases = take_expert((experts.b_gate_up_Ex2xF, experts.b_down_ExD), expert, experts.layer)
    return biases[0].reshape(-1), biases[1]
