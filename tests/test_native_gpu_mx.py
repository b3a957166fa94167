"""The native expert layer in MXFP8 on one GPU, through JAX: against the xla backend in the same mode, repeated bits,
scans, remat.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.ops.backends import resolve_backend
from moejax.ops.gemms import list_gemms
from moejax.ops.moe import moe_ffn, prepare_experts
from moejax.ops.schedule import schedule
from tests.native_support import assert_close, assert_same_bits, make_problem, oracle, relative_norm, run

pytestmark = pytest.mark.gpu

# BF16 rounding of the same values on both sides, a few of which fall across a tie and are then quantised differently,
# and in mode aligned the tensor core's short sums.
TOLERANCE = 1.2e-2


@pytest.mark.parametrize("mode", ["exact", "aligned"])
@pytest.mark.parametrize("wgrad", ["recipe", "bf16"])
@pytest.mark.parametrize("save", ["gate_up", "recompute"])
def test_agrees_with_the_xla_backend(mode, wgrad, save):
    problem = make_problem([162, 0, 300, 7], 160, 96, top_k=2, recipe="mxfp8", mx_mode=mode, wgrad=wgrad, save=save)
    got = run(problem)
    assert_close(got, run(problem, "xla"), TOLERANCE)
    assert_same_bits(got, run(problem))


@pytest.mark.parametrize("mode", ["exact", "aligned"])
def test_error_against_double_precision_is_that_of_the_format(mode):
    problem = make_problem([200, 100, 212], 512, 256, recipe="mxfp8", mx_mode=mode, save="gate_up_mx")
    got, expected = run(problem), oracle(problem)
    assert_close(got, expected, 0.12)
    assert relative_norm(got[0], expected[0]) > 4e-2  # something ran unquantised


def test_scan_with_remat_and_a_donated_accumulator_adds_up():
    problem = make_problem([40, 0, 130, 7], 64, 96, top_k=2, recipe="mxfp8", mx_mode="aligned")
    spec, plan = problem.spec, schedule(jnp.asarray(problem.expert_TxK), problem.spec)
    masters = problem.masters()
    experts = prepare_experts(masters.w_gate_up_Ex2xFxD, masters.w_down_ExDxF, spec)
    x, dy = (jnp.asarray(a, jnp.bfloat16) for a in (problem.x_TxD, problem.dy_TxD))
    weight = jnp.asarray(problem.weight_TxK)

    def accumulate(buffer, length):
        def body(buffer, _):
            layer = jax.checkpoint(lambda acc: moe_ffn(x, weight, plan, experts, spec, accumulator=acc))
            _, pullback = jax.vjp(layer, masters.zeros())
            return pullback((dy, buffer))[0], None

        return jax.lax.scan(body, buffer, None, length=length)[0]

    step = jax.jit(accumulate, donate_argnums=0, static_argnums=1)
    one, four = step(masters.zeros(), 1), step(masters.zeros(), 4)
    for a, b in zip(jax.tree.leaves(four), jax.tree.leaves(one)):
        assert a.dtype == jnp.float32
        assert relative_norm(a, 4.0 * np.asarray(b)) < 1e-5


def test_the_step_says_that_its_products_are_mxfp8():
    problem = make_problem([40, 0, 130, 7], 64, 96, recipe="mxfp8", mx_mode="exact", wgrad="bf16", save="gate_up")
    spec = problem.spec

    def loss(x, masters):
        plan = schedule(jnp.asarray(problem.expert_TxK), spec)
        return moe_ffn(x, jnp.asarray(problem.weight_TxK), plan, masters, spec).astype(jnp.float32).sum()

    x = jnp.asarray(problem.x_TxD, jnp.bfloat16)
    found = list_gemms(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, problem.masters()))
    kinds = {(gemm.kind, gemm.precision) for gemm in found}
    assert kinds == {("fprop", "mxfp8"), ("dgrad", "mxfp8"), ("wgrad", "bf16")}, kinds


def test_what_the_gpu_kernels_cannot_run_is_refused_by_rule():
    spec = make_problem([4, 4], 64, 64, recipe="mxfp8").spec
    for changes, rule in (
        ({"expert_bias": True}, "biases in bf16, not in mxfp8"),
        ({"recipe": "bf16", "save": "gate_up_mx"}, "belongs to mxfp8: use save gate_up"),
    ):
        with pytest.raises(ValueError, match=rule):
            resolve_backend(spec.replace(**changes))
