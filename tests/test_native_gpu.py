"""The native expert layer on one GPU, through JAX: against double precision, repeated bits, donated accumulators."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from moejax.config import ActivationConfig
from moejax.ops.moe import moe_ffn, prepare_experts, resolve_backend
from moejax.ops.schedule import schedule
from tests.native_support import assert_close, assert_same_bits, make_problem, oracle, relative_norm, run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sizes", [[162, 0, 2577, 446, 0, 83], [1, 31, 32, 33, 0], [300]], ids=str)
@pytest.mark.parametrize("save", ["gate_up", "recompute"])
def test_unaligned_groups_match_double_precision(sizes, save):
    problem = make_problem(sizes, 72, 104, recipe="bf16", save=save)
    got = run(problem)
    assert_close(got, oracle(problem), 1.2e-2)
    for e, size in enumerate(sizes):
        for leaf in jax.tree.leaves(got[3]):
            assert size or not leaf[e].any()
    assert_same_bits(got, run(problem))


@pytest.mark.parametrize("name", ["swiglu", "swiglu_clamped", "swiglu_oai", "geglu"])
def test_agrees_with_the_xla_backend(name):
    act = ActivationConfig(name, limit=0.8 if name in ("swiglu_clamped", "swiglu_oai") else None)
    problem = make_problem([40, 0, 130, 7], 128, 64, top_k=2, act=act, recipe="bf16", save="gate_up")
    assert_close(run(problem), run(problem, "xla"), 3e-3)


@pytest.mark.parametrize("save", ["gate_up", "recompute"])
def test_biases_match_double_precision(save):
    act = ActivationConfig("swiglu_oai", limit=7.0)  # as gpt-oss has it
    problem = make_problem([40, 0, 130, 7], 72, 104, top_k=2, bias=True, act=act, recipe="bf16", save=save)
    got = run(problem)
    assert_close(got, oracle(problem), 1.2e-2)
    assert len(jax.tree.leaves(got[3])) == 4
    assert_same_bits(got, run(problem))


def test_bf16_on_a_hopper_gpu_is_native_by_default():
    spec = make_problem([4, 4], 64, 64, recipe="bf16").spec
    assert resolve_backend(spec.replace(backend=None)) == "native"
    assert resolve_backend(spec.replace(backend=None, recipe="fp32")) == "xla"


def test_scan_with_a_donated_accumulator_adds_up():
    """Micro-batches in a scan, under CUDA graphs where XLA uses them: each adds to one buffer, twice the same bits."""
    problem = make_problem([40, 0, 130, 7], 64, 96, top_k=2, recipe="bf16")
    spec, plan = problem.spec, schedule(jnp.asarray(problem.expert_TxK), problem.spec)
    masters = problem.masters()
    experts = prepare_experts(masters.w_gate_up_Ex2xFxD, masters.w_down_ExDxF, spec)
    x, dy = (jnp.asarray(a, jnp.bfloat16) for a in (problem.x_TxD, problem.dy_TxD))
    weight = jnp.asarray(problem.weight_TxK)

    def accumulate(buffer, length):
        def body(buffer, _):
            layer = lambda acc: moe_ffn(x, weight, plan, experts, spec, accumulator=acc)  # noqa: E731
            _, pullback = jax.vjp(layer, masters.zeros())
            return pullback((dy, buffer))[0], None

        return jax.lax.scan(body, buffer, None, length=length)[0]

    step = jax.jit(accumulate, donate_argnums=0, static_argnums=1)
    one, four = step(masters.zeros(), 1), step(masters.zeros(), 4)
    for a, b in zip(jax.tree.leaves(four), jax.tree.leaves(one)):
        assert a.dtype == jnp.float32
        assert relative_norm(a, 4.0 * jax.device_get(b)) < 1e-5
    assert_same_bits(jax.device_get(four), jax.device_get(step(masters.zeros(), 4)))


def test_what_the_gpu_kernels_cannot_run_is_refused_by_rule():
    spec = make_problem([4, 4], 64, 64, recipe="bf16").spec
    with pytest.raises(ValueError, match="for bf16 and mxfp8"):
        resolve_backend(dataclasses.replace(spec, recipe="fp32"))
