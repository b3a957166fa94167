"""Schedules, the choice of decayed parameters, and AdamW against the formula in NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import OptimizerConfig
from moejax.training.optimizer import decay_mask, is_decayed, learning_rate, make_optimizer


def rates(config, total):
    steps = jnp.arange(total + 5, dtype=jnp.int32)
    return np.asarray(jax.vmap(lambda step: learning_rate(step, config, total))(steps), np.float64)


def test_warmup_is_linear_and_reaches_the_peak():
    got = rates(OptimizerConfig(learning_rate=0.5, warmup_steps=4, schedule="constant"), 10)
    np.testing.assert_allclose(got[:6], [0.125, 0.25, 0.375, 0.5, 0.5, 0.5], rtol=1e-6)


def test_cosine_ends_at_the_final_fraction():
    got = rates(OptimizerConfig(learning_rate=2.0, warmup_steps=3, schedule="cosine", final_fraction=0.1), 13)
    expected = [2.0 * (0.1 + 0.45 * (1 + math.cos(math.pi * i / 10))) for i in range(11)]
    np.testing.assert_allclose(got[2:13], expected, rtol=1e-6)
    np.testing.assert_allclose(got[12:], 0.2, rtol=1e-6)  # and stays there


def test_wsd_stays_then_decays_over_the_last_fraction():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=2, schedule="wsd", decay_fraction=0.25, final_fraction=0.2)
    got = rates(config, 16)
    np.testing.assert_allclose(got[:16], [0.5] + [1.0] * 11 + [0.8, 0.6, 0.4, 0.2], rtol=1e-6)


def test_no_warmup_starts_at_the_peak():
    assert rates(OptimizerConfig(learning_rate=0.3, warmup_steps=0, schedule="constant"), 3)[0] == pytest.approx(0.3)


def test_decay_is_chosen_by_name_and_not_by_ndim():
    params = {
        "embedding": {"table": jnp.ones((9, 4))},
        "moe_layers": {
            "attention_norm": {"scale": jnp.ones((3, 4))},  # a stack of scales has two dimensions
            "moe": {
                "w_router": jnp.ones((3, 5, 4)),
                "experts": {"w_down": jnp.ones((3, 5, 4, 6)), "b_down": jnp.ones((3, 5, 4))},
            },
        },
        "dense": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)},
    }
    mask = decay_mask(params)
    assert mask == {
        "embedding": {"table": False},
        "moe_layers": {
            "attention_norm": {"scale": False},
            "moe": {"w_router": True, "experts": {"w_down": True, "b_down": False}},
        },
        "dense": {"kernel": True, "bias": False},
    }
    assert is_decayed("head.w_OxI") and not is_decayed("w_stack.scale")


def test_adamw_follows_its_formula_and_decays_only_matrices():
    config = OptimizerConfig(b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.5)
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=(2, 3)) for name in ("w_a", "scale")}
    state = make_optimizer(config).init(jax.tree.map(jnp.float32, params))
    m = v = {name: np.zeros((2, 3)) for name in params}
    for step in range(1, 4):
        grads = {name: rng.normal(size=(2, 3)) for name in params}
        direction, state = make_optimizer(config).update(
            jax.tree.map(jnp.float32, grads), state, jax.tree.map(jnp.float32, params)
        )
        m = {n: 0.8 * m[n] + 0.2 * grads[n] for n in params}
        v = {n: 0.9 * v[n] + 0.1 * grads[n] ** 2 for n in params}
        for name in params:
            expected = (m[name] / (1 - 0.8**step)) / (np.sqrt(v[name] / (1 - 0.9**step)) + 1e-3)
            expected = expected + (0.5 * params[name] if name == "w_a" else 0.0)
            error = np.linalg.norm(direction[name] - expected) / np.linalg.norm(expected)
            assert error < 1e-6, (name, step, error)
            params[name] = params[name] - 0.1 * expected
