"""Backend `native` on one layer of a stack: the bits of a slice, and other layers left alone. On the CPU, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import RouterConfig
from moejax.ops.moe import moe_ffn, prepare_experts
from moejax.ops.schedule import schedule
from moejax.ops.spec import MoESpec
from tests.native_support import needs_native

N, E, D, F, K, T = 4, 6, 64, 32, 2, 70
ON_GPU = jax.default_backend() != "cpu"
RECIPES = ("bf16",) if ON_GPU else ("fp32", "bf16", "mxfp8")


def problem(recipe):
    rng = np.random.default_rng(0)
    dtype = jnp.float32 if recipe == "fp32" else jnp.bfloat16
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    scores = rng.random((T, E))
    scores[:, 2] = 9  # nobody chooses expert 2, and the first sits at the end of no group of its neighbours
    expert = jnp.asarray(np.argsort(scores, axis=1)[:, :K], jnp.int32)
    return {
        "x": normal(T, D).astype(dtype),
        "dy": normal(T, D).astype(dtype),
        "weight": jnp.asarray(rng.random((T, K)), jnp.float32),
        "expert": expert,
        "gate_up": normal(N, E, 2, F, D) / D**0.5,
        "down": normal(N, E, D, F) / F**0.5,
        "start": (normal(N, E, 2, F, D), normal(N, E, D, F)),
    }


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(spec, stacked, x, dy, weight, expert, gate_up, down, start, layer):
    plan = schedule(expert, spec)
    if not stacked:
        gate_up, down, start = gate_up[layer], down[layer], jax.tree.map(lambda leaf: leaf[layer], start)
    experts = prepare_experts(gate_up, down, spec)
    buffer = type(experts)(*start)
    if stacked:
        experts = experts.of_layer(layer)
    forward = lambda x, weight, buffer: moe_ffn(x, weight, plan, experts, spec, accumulator=buffer)  # noqa: E731
    (y, _), pullback = jax.vjp(forward, x, weight, buffer)
    return y, pullback((dy, buffer))


@needs_native
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("save", ["recompute", "gate_up"])
def test_a_layer_of_a_stack_has_the_bits_of_its_slice(recipe, save):
    values = problem(recipe)
    spec = MoESpec(E, D, F, router=RouterConfig(top_k=K), recipe=recipe, backend="native", save=save)
    for layer in (0, N - 2, N - 1):
        y, (dx, d_weight, buffer) = run(spec, True, *values.values(), layer)
        want_y, (want_dx, want_d_weight, want) = run(spec, False, *values.values(), layer)
        for got, expected in ((y, want_y), (dx, want_dx), (d_weight, want_d_weight)):
            assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()
        for got, expected, start in zip(jax.tree.leaves(buffer), jax.tree.leaves(want), values["start"], strict=True):
            np.testing.assert_array_equal(got[layer], expected)
            assert np.linalg.norm(got[layer] - start[layer]) > 0.1 * np.linalg.norm(start[layer])
            others = np.arange(N) != layer
            np.testing.assert_array_equal(np.asarray(got)[others], np.asarray(start)[others])
            np.testing.assert_array_equal(got[layer, 2], start[layer, 2])  # the expert without rows
