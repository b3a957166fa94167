"""Balance losses, metrics and the bias rule: exactness, and independence of how a step is split."""

import fractions
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from moejax.config import BalanceConfig, RouterConfig
from moejax.ops.balance import RouterStats, balance_loss, balance_metrics, frequency, update_select_bias
from moejax.ops.routing import route
from moejax.ops.spec import MoESpec
from tests import routing_oracle as oracle

pytestmark = pytest.mark.quick_compile

EXPERTS, TOP_K = 6, 2


def spec_of(**balance):
    return MoESpec(
        EXPERTS, 8, 8, router=RouterConfig(top_k=TOP_K, score_fn="sigmoid"), balance=BalanceConfig(**balance)
    )


SPECS = [spec_of(aux_coef=1.0, aux_scope="global"), spec_of(aux_coef=1.0), spec_of(z_coef=1.0)]


@jax.jit
def losses_and_gradients(logits, mask, tokens, count_E):
    """Global, sequence and z-loss of one part of a step, with their gradients."""

    def three(logits):
        _, _, stats = route(logits, None, SPECS[0], mask)
        counts = [count_E, None, None]
        return [balance_loss(stats, s, tokens=tokens, count_E=c) for s, c in zip(SPECS, counts, strict=True)], stats

    values, vjp, stats = jax.vjp(three, logits, has_aux=True)
    gradients = [vjp([jnp.float32(i == n) for i in range(3)])[0] for n in range(3)]
    return jnp.stack(values), jnp.stack(gradients), stats


@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
@hypothesis.given(seed=st.integers(0, 10**6), rows=st.sampled_from([1, 2, 3, 6]))
def test_gradients_do_not_depend_on_the_split_even_with_unequal_padding(seed, rows):
    """Six sequences in micro-batches of `rows`, each padded differently (some parts may hold no real token at all)."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.standard_normal((6, 7, EXPERTS)).astype(np.float32)
    mask = np.arange(7) < rng.integers(0, 8, (6, 1))
    tokens = int(mask.sum())
    whole = losses_and_gradients(logits, mask, tokens, route_counts(logits, mask))
    parts = [
        losses_and_gradients(logits[i : i + rows], mask[i : i + rows], tokens, whole[2].count_E)
        for i in range(0, 6, rows)
    ]
    np.testing.assert_allclose(sum(p[0] for p in parts), whole[0], rtol=1e-6)
    gradient = np.concatenate([p[1] for p in parts], axis=1)
    for n in range(3):
        assert oracle.relative_norm(gradient[n], whole[1][n]) < 1e-6 or not mask.any()
    assert np.all(gradient[:, ~mask] == 0.0) and np.all(np.isfinite(gradient))
    total = functools.reduce(RouterStats.__add__, [p[2] for p in parts])
    np.testing.assert_array_equal(total.count_E, whole[2].count_E)
    assert int(total.tokens) == tokens and total.count_E.dtype == jnp.int32
    np.testing.assert_allclose(total.prob_sum_E, whole[2].prob_sum_E, rtol=1e-5)


def route_counts(logits, mask):
    _, expert = oracle.route(logits, None, SPECS[0].router, mask)
    return np.bincount(expert[mask].ravel(), minlength=EXPERTS).astype(np.int32)


def test_micro_batch_scope_depends_on_the_split_and_global_does_not():
    rng = np.random.default_rng(0)
    logits = 2 * rng.standard_normal((4, 5, EXPERTS)).astype(np.float32)
    spec = spec_of(aux_coef=1.0, aux_scope="micro_batch")

    @jax.jit
    def loss(logits):
        return balance_loss(route(logits, None, spec)[2], spec, tokens=20)

    whole, parts = float(loss(logits)), float(sum(loss(logits[i : i + 1]) for i in range(4)))
    assert abs(whole - parts) > 1e-2  # it says so in its documentation; `global` and `sequence` are tested to agree
    expert = oracle.route(logits, None, spec.router)[1]
    np.testing.assert_allclose(
        whole, oracle.balance(logits.reshape(20, -1), expert.reshape(20, -1), spec.router), rtol=1e-6
    )


def test_gradient_at_exact_balance_is_finite():
    """vmoe #218: a loss built on a coefficient of variation has no gradient at balance; sum f P does."""
    spec = MoESpec(4, 8, 8, router=RouterConfig(top_k=2), balance=BalanceConfig(aux_coef=1.0))
    logits = np.float32([[np.roll([2.0, 1.0, 0.0, -1.0], i) for i in range(4)]])

    def loss(x):
        return balance_loss(route(x, None, spec)[2], spec, tokens=4)

    value, gradient = jax.jit(jax.value_and_grad(loss))(logits)
    np.testing.assert_allclose(value, 1.0, rtol=1e-6)
    assert np.all(np.isfinite(gradient)) and np.max(np.abs(gradient)) < 1e-6  # f is 1 everywhere: P cannot improve


def test_losses_of_stacked_layers_add_and_metrics_stay_per_layer():
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((3, 2, 5, EXPERTS)).astype(np.float32)
    stack = jax.jit(jax.vmap(lambda x: route(x, None, SPECS[0])[2]))(logits)
    one = [jax.tree.map(lambda leaf, n=n: leaf[n], stack) for n in range(3)]
    for spec in [*SPECS, spec_of(aux_coef=0.5, aux_scope="micro_batch", z_coef=0.25)]:
        counts = (lambda s: s.count_E) if spec.balance.aux_scope == "global" else (lambda s: None)
        together = balance_loss(stack, spec, tokens=10, count_E=counts(stack))
        apart = sum(balance_loss(s, spec, tokens=10, count_E=counts(s)) for s in one)
        np.testing.assert_allclose(together, apart, rtol=1e-6)
    metrics = balance_metrics(stack, SPECS[0])
    for n in range(3):
        for name, value in balance_metrics(one[n], SPECS[0]).items():
            np.testing.assert_allclose(metrics[name][n], value, rtol=1e-6)
        router, flat = SPECS[0].router, logits[n].reshape(10, -1)
        expert = oracle.route(logits[n], None, router)[1].reshape(10, -1)
        prob = np.array([oracle.probability(row, router) for row in flat])
        entropy = -(prob * np.log(prob)).sum() / 10 / np.log(EXPERTS)
        np.testing.assert_allclose(metrics["load_balance"][n], oracle.balance(flat, expert, router), rtol=1e-6)
        np.testing.assert_allclose(metrics["max_load"][n], np.bincount(expert.ravel()).max() * EXPERTS / 20, rtol=1e-6)
        np.testing.assert_allclose(metrics["router_entropy"][n], entropy, rtol=1e-5)
        np.testing.assert_allclose(metrics["router_z"][n], oracle.z_loss(flat), rtol=1e-6)


def test_metrics_of_a_batch_without_real_tokens_are_finite():
    stats = jax.jit(lambda x: route(x, None, SPECS[0], jnp.zeros((1, 3)))[2])(jnp.full((1, 3, EXPERTS), jnp.nan))
    assert int(stats.tokens) == 0 and not np.any(stats.count_E)
    assert all(np.isfinite(value) for value in balance_metrics(stats, SPECS[0]).values())
    assert float(balance_loss(stats, SPECS[0], tokens=0, count_E=stats.count_E)) == 0.0


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 3), min_size=6, max_size=6), st.booleans())
def test_bias_moves_by_the_exact_sign_of_the_difference_from_the_mean(counts, recentre):
    hypothesis.assume(sum(counts) < 2**31)
    balance = BalanceConfig(bias_rate=0.5, bias_recentre=recentre)
    mean = fractions.Fraction(sum(counts), 6)
    sign = np.array([(mean > c) - (mean < c) for c in counts], np.float64)
    expected = 0.25 + 0.5 * (sign - sign.mean() if recentre else sign)
    updated = update_select_bias(jnp.full(6, 0.25), jnp.array(counts, jnp.int32), balance)
    np.testing.assert_allclose(updated, expected, rtol=1e-6, atol=1e-7)


def test_no_rows_no_update():
    bias = jnp.array([0.5, -0.25, 0.125])
    for recentre in (False, True):
        balance = BalanceConfig(bias_rate=0.001, bias_recentre=recentre)
        np.testing.assert_array_equal(update_select_bias(bias, jnp.zeros(3, jnp.int32), balance), bias)
        np.testing.assert_array_equal(update_select_bias(bias, jnp.full(3, 7), balance), bias)


def test_frequency_is_one_at_balance_and_e_on_collapse():
    np.testing.assert_array_equal(frequency(jnp.full((2, 5), 3)), np.ones((2, 5)))
    np.testing.assert_array_equal(frequency(jnp.array([9, 0, 0])), [3.0, 0.0, 0.0])


def test_wrong_use_is_refused_by_name():
    stats = jax.tree.map(jnp.asarray, RouterStats(jnp.zeros(6, jnp.int32), jnp.zeros(6), 0.0, 0.0, 0.0, 1, 0, 0.0))
    with pytest.raises(ValueError, match="aux_scope is 'global' and count_E was not given"):
        balance_loss(stats, SPECS[0], tokens=1)
    with pytest.raises(ValueError, match="aux_scope is 'sequence' and count_E was given"):
        balance_loss(stats, SPECS[1], tokens=1, count_E=stats.count_E)
    with pytest.raises(TypeError, match="expert counts are float32; expected int32"):
        update_select_bias(jnp.zeros(6), jnp.zeros(6), BalanceConfig())
    with pytest.raises(ValueError, match=r"select_bias has shape \(5,\); expected \(6,\)"):
        update_select_bias(jnp.zeros(5), stats.count_E, BalanceConfig())
