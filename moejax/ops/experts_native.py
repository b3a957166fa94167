"""Backend `native`: the whole expert layer in one compiled call, forward and backward.

On the CPU the call gathers, multiplies, activates and combines tile by tile (`ffi/cpu/moe.h`); this file turns a
plan, weights and a spec into its operands. Rounding points are those of `experts_xla.py`, and so are the bits of the
weight copies. With a transport around it (R > 1) the row-level forms run. On one GPU the calls are those of
`kernels_cuda/moe.h` (BF16) and `kernels_cuda/mx_moe.h` (MXFP8) for Hopper, and of `kernels_cuda/sm100_moe.h` for Blackwell,
where a self-test comes before the first use (`moejax/selftest.py`).

Letters: T tokens, K experts per token, M rows after dispatch, E experts, D model width, F expert width.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from moejax import native
from moejax.native import calls, cuda_calls, cuda_mx_calls, cuda_sm100_calls
from moejax.ops.experts import ExpertWeights, flat_counts
from moejax.ops.mxfp8 import MXArray
from moejax.ops.schedule import Plan
from moejax.ops.spec import MoESpec

STACKED = True  # one layer of a stack of N is N E experts, of which only that layer's have rows: the kernels never touch the others

_MAX_GPU_EXPERTS = 4096


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NativeCopies:
    """MX weight operands: for the forward with blocks along the last axis, for dgrad along the one before it."""

    gate_up_fprop_Ex2xFxD: MXArray
    down_fprop_ExDxF: MXArray
    gate_up_dgrad_Ex2xFxD: MXArray
    down_dgrad_ExDxF: MXArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GpuMXCopies:
    """MX weight operands of the GPU kernels, both orientations each, as the architecture wants them."""

    gate_up: cuda_mx_calls.MXWeight
    down: cuda_mx_calls.MXWeight


def refuses(spec: MoESpec, platform: str) -> str | None:
    """Where the compiled module is: every recipe on the CPU, BF16 and MXFP8 on one Hopper or Blackwell GPU."""
    if platform != "cpu":
        return _refuses_gpu(spec)
    if spec.save == "gate_up_mx":
        return "save is gate_up_mx, a residual of the Hopper kernels: use gate_up"
    if spec.recipe == "mxfp8" and spec.mx_mode != "exact":
        return f"mx_mode is {spec.mx_mode}, a way to run on Hopper; here MX products are exact: use mx_mode exact"
    return unavailable(platform)


def unavailable(platform: str) -> str | None:
    """What keeps every spec from running on this platform: a device without kernels, a compiled module that is not there."""
    if platform == "cpu":
        return native.missing("_cpu")
    if not _capability().startswith(("9.", "10.")):
        return f"the device has compute capability {_capability()}; its GPU kernels are for 9.0 (Hopper) and 10.x (Blackwell)"
    missing = native.missing("_cuda")
    if missing is None and _capability().startswith("10."):
        missing = cuda_sm100_calls.library_problem()
    return missing


def aligned_is_faster() -> bool:
    """Whether mode `aligned` has tensor cores of its own here: those for FP8 of Hopper, where `exact` has BF16's rate."""
    return _on_gpu() and _capability().startswith("9.")


def _refuses_gpu(spec: MoESpec) -> str | None:
    if spec.recipe == "fp32":
        return "recipe is fp32; its GPU kernels are for bf16 and mxfp8: use one of these"
    if spec.recipe == "mxfp8" and spec.expert_bias:
        return "expert_bias is set; its GPU kernels have biases in bf16, not in mxfp8"
    if spec.ranks > 1:
        return (
            f"ranks is {spec.ranks}; its GPU kernels do the whole layer on one GPU: use mesh.expert=1 where a GPU can hold all "
            "experts"
        )
    if spec.num_experts > _MAX_GPU_EXPERTS:
        return f"num_experts is {spec.num_experts}; its GPU kernels take up to {_MAX_GPU_EXPERTS}"
    return _refuses_blackwell(spec) if _capability().startswith("10.") else unavailable("gpu")


def _refuses_blackwell(spec: MoESpec) -> str | None:
    """Raises SelfTestError where the kernels give wrong results: nobody should train on another backend without knowing why."""
    if spec.expert_bias:
        return "expert_bias is set; its Blackwell kernels have no biases"
    if spec.recipe == "mxfp8" and spec.mx_mode != "exact":
        return (
            f"mx_mode is {spec.mx_mode}, a way to run on Hopper; on Blackwell MX products are exact: use mx_mode exact"
        )
    if spec.recipe == "mxfp8" and spec.wgrad == "bf16":
        return "wgrad is bf16; its Blackwell kernels have weight gradients of mxfp8 in mxfp8"
    if spec.save == "gate_up_mx":
        return "save is gate_up_mx, a residual of the Hopper kernels: use gate_up"
    missing = unavailable("gpu")
    if missing is None:
        from moejax import selftest  # late: it stands above this layer, which it runs

        selftest.first_use()
    return missing


def _capability() -> str:
    return str(getattr(jax.devices()[0], "compute_capability", "unknown"))


def _on_gpu() -> bool:
    # The platform programs are traced for, as `resolve_backend` sees it.
    return jax.default_backend() != "cpu"


def _on_blackwell() -> bool:
    return _on_gpu() and _capability().startswith("10.")


def prepare(masters: ExpertWeights, spec: MoESpec) -> Any:
    """None (fp32), (gate_up, down) in BF16, or `NativeCopies`, from the FP32 masters."""
    gate_up, down = masters.w_gate_up_Ex2xFxD, masters.w_down_ExDxF
    if spec.recipe == "fp32":
        return None
    if spec.recipe == "bf16":
        return gate_up.astype(jnp.bfloat16), down.astype(jnp.bfloat16)
    if _on_blackwell():
        return GpuMXCopies(cuda_sm100_calls.prepare(gate_up), cuda_sm100_calls.prepare(down))
    if _on_gpu():
        aligned = spec.mx_mode == "aligned"
        return GpuMXCopies(cuda_mx_calls.prepare(gate_up, aligned), cuda_mx_calls.prepare(down, aligned))
    return NativeCopies(_quantize(gate_up, -1), _quantize(down, -1), _quantize(gate_up, -2), _quantize(down, -2))


def forward(x_MxD: jax.Array, plan: Plan, experts: ExpertWeights, spec: MoESpec):
    """Slot rows y before the combine weight, zero in padding, and gate_up (M, 2F), packed, if `spec.save` keeps it."""
    plan, experts = _flat(plan, experts)
    fprop, _ = _operands(experts, spec)
    rows = calls.Rows(plan.count_E, plan.start_E)
    return calls.moe_forward(x_MxD, None, rows, fprop, _biases(experts), save=_saves(spec), **_static(spec))


def backward(x_MxD, dy_MxD, weight_M, saved, plan: Plan, experts: ExpertWeights, spec: MoESpec, accumulator=None):
    """dx rows, d(weight) per row, and FP32 weight gradients that continue from `accumulator` if there is one."""
    if experts.layer is not None:
        dx, d_weight, gradients = backward(
            x_MxD, dy_MxD, weight_M, saved, *_flat(plan, experts), spec, accumulator=_flat_buffers(accumulator)
        )
        return dx, d_weight, _like(gradients, accumulator)
    rows = calls.Rows(plan.count_E, plan.start_E)
    return _backward(x_MxD, dy_MxD, weight_M, saved, rows, experts, spec, accumulator)


def combine(y_TxKxD: jax.Array, weight_TxK: jax.Array, used_TxK: jax.Array, dtype) -> jax.Array:
    """The weighted sum of each token's slots, as `ffn_forward` rounds it. CPU only, as are the row-level forms."""
    tokens, top_k, width = y_TxKxD.shape
    slot_TxK = jnp.arange(tokens * top_k, dtype=jnp.int32).reshape(tokens, top_k)
    rows_MxD = y_TxKxD.reshape(tokens * top_k, width)
    return calls.combine(rows_MxD, weight_TxK.astype(jnp.float32), jnp.where(used_TxK, slot_TxK, -1), dtype)


def ffn_forward(x_TxD, weight_TxK, plan: Plan, experts: ExpertWeights, spec: MoESpec):
    """y of the tokens, dispatch and combine included, and gate_up ((T K, 2F); (2, M, F) on a GPU) if `spec.save` keeps it."""
    plan, experts = _flat(plan, experts)
    rows = calls.Rows(plan.count_E, plan.start_E, plan.slot_M, plan.row_TxK)
    if _on_blackwell():
        x, weights = x_TxD.astype(jnp.bfloat16), _blackwell_weights(experts, spec)
        y, saved = cuda_sm100_calls.moe_forward(x, weight_TxK, rows, *weights, act=spec.act, save=_saves(spec))
        return y.astype(x_TxD.dtype), saved
    if _on_gpu() and spec.recipe == "mxfp8":
        x, mx = x_TxD.astype(jnp.bfloat16), experts.copies
        y, saved = cuda_mx_calls.moe_forward(x, weight_TxK, rows, mx.gate_up, mx.down, act=spec.act, save=spec.save)
        return y.astype(x_TxD.dtype), saved
    fprop, _ = _operands(experts, spec)
    if _on_gpu():
        x = x_TxD.astype(jnp.bfloat16)
        y, saved = cuda_calls.moe_forward(x, weight_TxK, rows, fprop, _biases(experts), act=spec.act, save=_saves(spec))
        return y.astype(x_TxD.dtype), saved
    return calls.moe_forward(x_TxD, weight_TxK, rows, fprop, _biases(experts), save=_saves(spec), **_static(spec))


def ffn_backward(x_TxD, weight_TxK, dy_TxD, saved, plan: Plan, experts: ExpertWeights, spec: MoESpec, accumulator=None):
    """dx, d(weight) and FP32 weight gradients of the tokens."""
    if experts.layer is not None:
        dx, d_weight, gradients = ffn_backward(
            x_TxD, weight_TxK, dy_TxD, saved, *_flat(plan, experts), spec, accumulator=_flat_buffers(accumulator)
        )
        return dx, d_weight, _like(gradients, accumulator)
    rows = calls.Rows(plan.count_E, plan.start_E, plan.slot_M, plan.row_TxK)
    if _on_blackwell():
        x, dy, weights = x_TxD.astype(jnp.bfloat16), dy_TxD.astype(jnp.bfloat16), _blackwell_weights(experts, spec)
        starts = None if accumulator is None else (accumulator.w_gate_up_Ex2xFxD, accumulator.w_down_ExDxF)
        dx, d_weight, *gradients = cuda_sm100_calls.moe_backward(
            x, dy, weight_TxK, saved, rows, *weights, starts, act=spec.act
        )
        return dx.astype(x_TxD.dtype), d_weight, ExpertWeights(*gradients)
    if _on_gpu() and spec.recipe == "mxfp8":
        x, dy, mx = x_TxD.astype(jnp.bfloat16), dy_TxD.astype(jnp.bfloat16), experts.copies
        starts = None if accumulator is None else (accumulator.w_gate_up_Ex2xFxD, accumulator.w_down_ExDxF)
        dx, d_weight, *gradients = cuda_mx_calls.moe_backward(
            x, dy, weight_TxK, saved, rows, mx.gate_up, mx.down, starts, act=spec.act, wgrad_bf16=spec.wgrad == "bf16"
        )
        return dx.astype(x_TxD.dtype), d_weight, ExpertWeights(*gradients)
    if _on_gpu():
        operands, _ = _operands(experts, spec)
        if accumulator is not None:
            accumulator = _leaves(accumulator)
        x, dy = x_TxD.astype(jnp.bfloat16), dy_TxD.astype(jnp.bfloat16)
        dx, d_weight, *gradients = cuda_calls.moe_backward(
            x, dy, weight_TxK, saved, rows, operands, _biases(experts), accumulator, act=spec.act
        )
        return dx.astype(x_TxD.dtype), d_weight, ExpertWeights(*gradients)
    return _backward(x_TxD, dy_TxD.astype(x_TxD.dtype), weight_TxK, saved, rows, experts, spec, accumulator)


def _flat(plan: Plan, experts: ExpertWeights) -> tuple[Plan, ExpertWeights]:
    return (plan, experts) if experts.layer is None else (flat_counts(plan, experts), experts.flat())


def _flat_buffers(accumulator: ExpertWeights) -> ExpertWeights:
    """XLA's CPU compiler fuses the reshape of an aliased operand with a copy for the call, and then keeps that copy of the whole
    stack, for every layer; behind a barrier it sees the copy alone and drops it (`tests/test_step_compiled.py`)."""
    flat = accumulator.flat()
    return flat if _on_gpu() else jax.lax.optimization_barrier(flat)


def _like(gradients: ExpertWeights, stack: ExpertWeights) -> ExpertWeights:
    return jax.tree.map(lambda leaf, like: leaf.reshape(like.shape), gradients, stack)


def _backward(x, dy, weight, saved, rows: calls.Rows, experts: ExpertWeights, spec: MoESpec, accumulator):
    fprop, dgrad = _operands(experts, spec)
    if accumulator is not None:
        accumulator = _leaves(accumulator)
    dx, d_weight, gradients = calls.moe_backward(
        x, dy, weight, saved, rows, fprop, dgrad, _biases(experts), accumulator,
        wgrad_bf16=spec.wgrad == "bf16", **_static(spec),
    )  # fmt: skip
    return dx, d_weight, ExpertWeights(*gradients)


def _operands(experts: ExpertWeights, spec: MoESpec) -> tuple[calls.Operands, calls.Operands]:
    """The weight operands of the forward and of dgrad."""
    if spec.recipe == "mxfp8":
        copies = experts.copies
        return (
            _mx_operands(copies.gate_up_fprop_Ex2xFxD, copies.down_fprop_ExDxF),
            _mx_operands(copies.gate_up_dgrad_Ex2xFxD, copies.down_dgrad_ExDxF),
        )
    gate_up, down = (experts.w_gate_up_Ex2xFxD, experts.w_down_ExDxF) if spec.recipe == "fp32" else experts.copies
    operands = calls.Operands(gate_up, down)
    return operands, operands


def _blackwell_weights(experts: ExpertWeights, spec: MoESpec) -> tuple[cuda_mx_calls.MXWeight, cuda_mx_calls.MXWeight]:
    """Gate and up, and down, as the Blackwell calls take them."""
    if spec.recipe == "mxfp8":
        return experts.copies.gate_up, experts.copies.down
    gate_up, down = experts.copies
    return cuda_sm100_calls.bf16_weight(gate_up), cuda_sm100_calls.bf16_weight(down)


def _mx_operands(gate_up: MXArray, down: MXArray) -> calls.Operands:
    return calls.Operands(gate_up.elements, down.elements, gate_up.scales, down.scales)


def _quantize(master: jax.Array, axis: int) -> MXArray:
    elements, codes = calls.mx_quantize(master, axis)
    return MXArray(elements, codes, axis)


def _leaves(weights: ExpertWeights):
    return weights.w_gate_up_Ex2xFxD, weights.w_down_ExDxF, weights.b_gate_up_Ex2xF, weights.b_down_ExD


def _biases(experts: ExpertWeights):
    return experts.b_gate_up_Ex2xF, experts.b_down_ExD


def _saves(spec: MoESpec) -> bool:
    return spec.save == "gate_up"


def _static(spec: MoESpec) -> dict[str, Any]:
    return {"recipe": spec.recipe, "act": spec.act, "top_k": spec.top_k}
