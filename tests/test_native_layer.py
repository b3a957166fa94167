"""The native expert layer against NumPy in double precision and against the xla backend, which rounds at the same points."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import ActivationConfig
from moejax.native import calls
from moejax.ops.activation import gated, gated_grad
from moejax.ops.backends import choose_backend
from moejax.ops.moe import resolve_backend
from tests.native_support import assert_close, assert_same_bits, make_problem, needs_native, oracle, relative_norm, run

pytestmark = needs_native

ACTIVATIONS = [
    ActivationConfig("swiglu"),
    ActivationConfig("swiglu_clamped", limit=0.8),
    ActivationConfig("swiglu_oai", limit=0.8),
    ActivationConfig("geglu"),
]


@pytest.mark.parametrize("sizes", [[162, 0, 2577, 446, 0, 83], [1, 31, 32, 33, 0], [300]], ids=str)
def test_unaligned_groups_match_double_precision(sizes):
    problem = make_problem(sizes, 33, 50, save="gate_up")
    got = run(problem)
    assert_close(got, oracle(problem), 3e-6)
    empty = [e for e, size in enumerate(sizes) if size == 0]
    for leaf in jax.tree.leaves(got[3]):
        assert not leaf[empty].any()


@pytest.mark.parametrize("act", ACTIVATIONS, ids=lambda act: act.name)
def test_every_activation_with_biases_masked_slots_and_two_experts(act):
    problem = make_problem([40, 0, 130, 7], 24, 40, top_k=2, bias=True, act=act)
    assert_close(run(problem), oracle(problem), 3e-6)


@pytest.mark.parametrize("act", ACTIVATIONS, ids=lambda act: act.name)
def test_gates_of_any_finite_size(act):
    """One token whose gates are the list, ups are 0.5, and outputs are h itself. Far below zero nothing may be left of a gate."""
    gates = np.array([-3e38, -1e30, -1e4, -100.0, -88.1, -80.0, 0.3, 80.0, 1e30], np.float32)
    size = len(gates)
    problem = make_problem([1], size, size, act=act)
    problem.x_TxD[:], problem.dy_TxD[:], problem.weight_TxK[:] = np.eye(1, size), 1.0, 1.0
    problem.w_gate_up[:], problem.w_down[:] = 0.0, np.eye(size)
    problem.w_gate_up[0, 0, :, 0], problem.w_gate_up[0, 1, :, 0] = gates, 0.5
    y, _, _, d_experts = run(problem)
    up = jnp.full(size, 0.5)
    np.testing.assert_allclose(np.asarray(y)[0], gated(gates, up, act), rtol=2e-6, atol=1e-30)
    d_gate, d_up = gated_grad(gates, up, jnp.ones(size), act)
    np.testing.assert_allclose(d_experts.w_gate_up_Ex2xFxD[0, 0, :, 0], d_gate, rtol=2e-6, atol=1e-30)
    np.testing.assert_allclose(d_experts.w_gate_up_Ex2xFxD[0, 1, :, 0], d_up, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_low_precision_matches_the_xla_backend(recipe):
    problem = make_problem([1, 131, 64, 0, 40], 64, 96, top_k=2, bias=True, recipe=recipe, save="gate_up")
    got, peer = run(problem), run(problem, "xla")
    # Operands are the same bits; sums differ in their last ones, and now and then one falls the other way when rounded.
    assert_close(got, peer, 1e-3)
    # And the recipe is really applied: far from FP32, by as much as its format costs.
    low, high = {"bf16": (1e-3, 1e-2), "mxfp8": (2e-2, 1.2e-1)}[recipe]
    exact = oracle(problem)
    for a, b in zip(jax.tree.leaves(got)[:5], jax.tree.leaves(exact)[:5]):
        assert low < relative_norm(a, b) < high


def test_wgrad_in_bf16_changes_weight_gradients_alone():
    problem = make_problem([70, 30], 32, 64, recipe="mxfp8")
    quantised, bf16 = run(problem), run(problem, wgrad="bf16")
    assert_same_bits(quantised[:3], bf16[:3])
    assert_close(bf16, run(problem, "xla", wgrad="bf16"), 1e-3)
    assert relative_norm(bf16[3].w_down_ExDxF, quantised[3].w_down_ExDxF) > 1e-2


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "mxfp8"])
def test_saving_recomputing_and_repeating_give_equal_bits(recipe):
    problem = make_problem([5, 150, 0, 40], 32, 64, top_k=2, recipe=recipe, save="gate_up")
    first = run(problem)
    assert_same_bits(first, run(problem))
    assert_same_bits(first, run(problem, save="recompute"))


def test_rows_give_the_bits_of_tokens():
    """The row-level form, which runs between the collectives of expert parallelism."""
    from moejax.ops import experts_native as backend
    from moejax.ops.moe import prepare_experts
    from moejax.ops.schedule import schedule

    problem = make_problem([40, 0, 130, 7], 32, 64, top_k=2, recipe="mxfp8", save="gate_up")
    spec, plan = problem.spec, schedule(jnp.asarray(problem.expert_TxK), problem.spec)
    experts = prepare_experts(jnp.asarray(problem.w_gate_up), jnp.asarray(problem.w_down), spec)
    x, dy = (jnp.asarray(a, jnp.bfloat16) for a in (problem.x_TxD, problem.dy_TxD))
    weight = jnp.asarray(problem.weight_TxK)
    y, saved = backend.ffn_forward(x, weight, plan, experts, spec)
    dx, d_weight, gradients = backend.ffn_backward(x, weight, dy, saved, plan, experts, spec)

    rows = lambda a: jnp.where((plan.slot_M >= 0)[:, None], a[plan.slot_M // 2], jnp.nan)  # noqa: E731  slack is NaN
    weight_M = jnp.where(plan.slot_M >= 0, weight.reshape(-1)[plan.slot_M], jnp.nan)
    y_rows, saved_rows = backend.forward(rows(x), plan, experts, spec)
    dx_rows, d_weight_rows, gradients_rows = backend.backward(
        rows(x), rows(dy), weight_M, saved_rows, plan, experts, spec
    )
    padding = np.asarray(plan.slot_M) < 0
    assert not np.asarray(y_rows, np.float32)[padding].any() and not np.asarray(dx_rows, np.float32)[padding].any()
    assert_same_bits(calls.combine(y_rows, weight, plan.row_TxK, jnp.bfloat16), y)
    assert_same_bits(calls.combine(dx_rows, None, plan.row_TxK, jnp.bfloat16), dx)
    has_row = np.asarray(plan.row_TxK) >= 0
    assert_same_bits(np.asarray(d_weight_rows)[np.asarray(plan.row_TxK)[has_row]], np.asarray(d_weight)[has_row])
    assert not np.asarray(d_weight)[~has_row].any()
    assert_same_bits(gradients_rows, gradients)


def test_capacity_drops_the_last_rows_and_their_gradients():
    problem = make_problem([100, 20], 16, 24, capacity_factor="1.0")
    y, dx, d_weight, _ = run(problem)
    expert = problem.expert_TxK[:, 0]
    late = np.flatnonzero(expert == 0)[60:]  # ceil(120 / 2) = 60 rows fit
    assert not y[late].any() and not dx[late].any() and not d_weight[late].any()
    kept = np.setdiff1d(np.arange(len(expert)), late)
    expected = oracle(problem)
    assert relative_norm(y[kept], expected[0][kept]) < 3e-6


def test_fp32_tokens_under_a_bf16_recipe_keep_their_dtype():
    problem = make_problem([40, 12], 16, 24, recipe="bf16")
    from moejax.ops.moe import moe_ffn, prepare_experts
    from moejax.ops.schedule import schedule

    spec = problem.spec
    plan = schedule(jnp.asarray(problem.expert_TxK), spec)
    experts = prepare_experts(jnp.asarray(problem.w_gate_up), jnp.asarray(problem.w_down), spec)
    x = jnp.asarray(problem.x_TxD, jnp.bfloat16)
    low = moe_ffn(x, problem.weight_TxK, plan, experts, spec)
    wide = moe_ffn(x.astype(jnp.float32), problem.weight_TxK, plan, experts, spec)
    assert wide.dtype == jnp.float32
    assert_same_bits(wide.astype(jnp.bfloat16), low)


def test_native_is_the_default_on_the_cpu():
    spec = make_problem([4, 4], 32, 32).spec
    for recipe in ("fp32", "bf16", "mxfp8"):
        assert resolve_backend(spec.replace(backend=None, recipe=recipe), platform="cpu") == "native"
    aligned = spec.replace(backend=None, recipe="mxfp8", mx_mode="aligned")
    name, refused = choose_backend(aligned, platform="cpu")  # resolve_backend would warn, once a process
    assert name == "xla" and "mx_mode is aligned" in refused["native"]
