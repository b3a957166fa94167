"""Routing against an FP64 oracle, and the properties that public bug reports show to be fragile."""

import functools

import hypothesis
import hypothesis.extra.numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from moejax.config import BalanceConfig, RouterConfig
from moejax.mesh import AXES
from moejax.ops.balance import balance_loss
from moejax.ops.routing import make_hash_table, route, router_logits
from moejax.ops.spec import MoESpec
from tests import routing_oracle as oracle

pytestmark = pytest.mark.quick_compile

ROUTERS = {
    "softmax_norm": RouterConfig(top_k=2),
    "softmax_scaled": RouterConfig(top_k=3, norm_topk=False, route_scale=2.5),
    "sigmoid_groups": RouterConfig(
        top_k=3, score_fn="sigmoid", select_bias=True, n_group=4, topk_group=2, group_top=2, route_scale=2.5
    ),
    "sigmoid_plain": RouterConfig(top_k=1, score_fn="sigmoid", norm_topk=False),
    "sqrtsoftplus": RouterConfig(top_k=4, score_fn="sqrtsoftplus", select_bias=True, route_scale=1.5),
    "softmax_after": RouterConfig(top_k=4, score_before_topk=False),
    "softmax_after_groups": RouterConfig(top_k=2, score_before_topk=False, n_group=3, topk_group=1, group_top=3),
    "identity": RouterConfig(top_k=2, score_fn="identity", norm_topk=False),
}
EXPERTS = 12


def spec_of(router, experts=EXPERTS, **balance):
    return MoESpec(experts, 8, 8, router=router, balance=BalanceConfig(**balance))


def inputs(seed, shape=(2, 5), experts=EXPERTS):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((*shape, experts)).astype(np.float32) * 2
    return logits, (0.3 * rng.standard_normal(experts)).astype(np.float32), rng


@functools.partial(jax.jit, static_argnames="spec")
def routed(logits, bias, spec, mask=None, token=None, table=None):
    return route(logits, bias, spec, mask, token, table)


def bias_of(router, bias):
    return bias if router.select_bias else None


@pytest.mark.parametrize("name", ROUTERS)
def test_choice_weights_and_gradients_match_the_fp64_oracle(name):
    router = ROUTERS[name]
    logits, bias, rng = inputs(seed=3)
    bias = bias_of(router, bias)
    mask = np.array([[1, 1, 0, 1, 1], [1, 1, 1, 1, 0]])
    spec = spec_of(router, aux_coef=0.7, z_coef=0.3)
    d_weight = rng.standard_normal((2, 5, router.top_k))

    @jax.jit
    def value_and_grad(logits):
        def loss(logits):
            weight, expert, stats = route(logits, bias, spec, mask)
            return jnp.sum(weight * d_weight) + balance_loss(stats, spec, tokens=8), (weight, expert)

        return jax.value_and_grad(loss, has_aux=True)(logits)

    (value, (weight, expert)), d_logits = value_and_grad(logits)
    expected_weight, expected_expert = oracle.route(logits, bias, router, mask)
    np.testing.assert_array_equal(expert, expected_expert)
    assert oracle.relative_norm(weight, expected_weight) < 1e-6

    def loss(x):  # selection is fixed: it has no gradient
        total = 0.0
        for b, t in zip(*np.nonzero(mask), strict=True):
            total += np.dot(oracle.combine_weights(x[b, t], expected_expert[b, t], router), d_weight[b, t])
        for b in range(2):
            real = mask[b] == 1
            total += 0.7 * real.sum() / 8 * oracle.balance(x[b][real], expected_expert[b][real], router)
        return total + 0.3 * oracle.z_loss(x[mask == 1])

    np.testing.assert_allclose(value, loss(logits.astype(np.float64)), rtol=1e-6)
    expected = oracle.gradient(loss, logits)
    assert oracle.relative_norm(d_logits, expected) < 1e-5
    for e in range(EXPERTS):
        assert oracle.relative_norm(d_logits[..., e], expected[..., e]) < 1e-5
    assert np.all(np.asarray(d_logits)[mask == 0] == 0.0)


# Multiples of 1/2, so that sums are exact and ties are common; -0.0 among them.
GRID = (st.integers(-3, 3).map(lambda n: n / 2) | st.just(-0.0)).map(np.float32)
TIES = [
    RouterConfig(top_k=2, score_fn="identity", norm_topk=False),
    RouterConfig(top_k=5, score_fn="identity", norm_topk=False, select_bias=True, n_group=4, topk_group=2, group_top=2),
    RouterConfig(top_k=2, score_before_topk=False, n_group=3, topk_group=1, group_top=3),
]


@hypothesis.settings(max_examples=50, deadline=None, derandomize=True)
@hypothesis.given(
    router=st.sampled_from(TIES), logits=hypothesis.extra.numpy.arrays(np.float32, (1, 3, EXPERTS), elements=GRID)
)
def test_ties_go_to_the_lower_index(router, logits):
    bias = np.full(EXPERTS, -4.0, np.float32) if router.select_bias else None
    _, expert, _ = routed(logits, bias, spec_of(router))
    for t in range(3):
        assert np.asarray(expert)[0, t].tolist() == oracle.choose(logits[0, t], bias, router)


def test_experts_that_tie_exactly_are_chosen_in_index_order():
    for name, router in ROUTERS.items():
        bias = np.full(EXPERTS, -1.0, np.float32) if router.select_bias else None
        _, expert, _ = routed(np.full((2, 5, EXPERTS), -0.0, np.float32), bias, spec_of(router))
        assert np.all(np.asarray(expert) == np.arange(router.top_k)), name


def test_selection_bias_never_reaches_weights_or_gradients():
    router = ROUTERS["sigmoid_groups"]
    logits, _, _ = inputs(seed=5)
    spec = spec_of(router, aux_coef=1.0)

    @jax.jit
    def weight_and_grads(bias, logits):
        def loss(bias, logits):
            weight, expert, stats = route(logits, bias, spec)
            return jnp.sum(weight[..., 0]) + balance_loss(stats, spec, tokens=10), (weight, expert)

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(bias, logits)

    (d_bias, _), (weight, expert) = weight_and_grads(np.zeros(EXPERTS, np.float32), logits)
    assert np.all(np.asarray(d_bias) == 0.0)
    # The same shift for all experts moves no choice: then nothing at all may change.
    _, (weight_shifted, expert_shifted) = weight_and_grads(np.full(EXPERTS, -8.0, np.float32), logits)
    np.testing.assert_array_equal(expert_shifted, expert)
    np.testing.assert_array_equal(weight_shifted, weight)
    always = np.zeros(EXPERTS, np.float32)
    always[7] = 100.0
    _, (weight, expert) = weight_and_grads(always, logits)
    assert np.all(np.asarray(expert)[..., 0] == 7)
    expected = [[oracle.combine_weights(logits[b, t], expert[b, t], router) for t in range(5)] for b in range(2)]
    assert oracle.relative_norm(weight, expected) < 1e-6


@pytest.mark.parametrize("score_fn", ["softmax", "sigmoid", "sqrtsoftplus", "identity"])
def test_extreme_logits_keep_finite_weights_and_gradients(score_fn):
    logits = np.array([[[-200.0, 80.0, -95.0, 0.0], [-60.0, -70.0, -80.0, -90.0]]], np.float32)
    spec = spec_of(RouterConfig(top_k=2, score_fn=score_fn, norm_topk=False), experts=4)

    @jax.jit
    def weight_and_slope(logits):
        weight, vjp = jax.vjp(lambda x: route(x, None, spec)[0], logits)
        return weight, vjp(jnp.ones_like(weight))[0]

    weight, d_logits = weight_and_slope(logits)
    expected, expert = oracle.route(logits, None, spec.router)
    assert np.all(np.isfinite(d_logits))
    # 1e-30 and less may be flushed to zero; what is left is right.
    np.testing.assert_allclose(weight, expected, rtol=2e-6, atol=1e-30)

    def total(x):
        return sum(oracle.combine_weights(x[0, t], expert[0, t], spec.router).sum() for t in (0, 1))

    slope = oracle.gradient(total, logits, step=1e-3)
    np.testing.assert_allclose(d_logits, slope, rtol=1e-4, atol=1e-8)
    if score_fn == "sqrtsoftplus":  # far below zero the score is e^(x/2); sqrt(log(1 + e^x)) as written has no gradient
        np.testing.assert_allclose(np.asarray(d_logits)[0, 1, :2], 0.5 * np.exp([-30.0, -35.0]), rtol=1e-5)


def test_sqrtsoftplus_has_a_gradient_at_every_finite_logit():
    """178 is where e^(x/2) of the form for small logits overflows; -17 is where the two forms meet."""
    logits = jnp.asarray([[[1000.0, 178.0, 90.0, -16.9, -17.0, -17.1]]], jnp.float32)
    spec = spec_of(RouterConfig(top_k=6, score_fn="sqrtsoftplus", norm_topk=False), experts=6)
    slope = jax.grad(lambda x: route(x, None, spec)[0].sum())(logits)[0, 0]
    x = np.asarray(logits, np.float64)[0, 0]
    expected = 1 / (1 + np.exp(-x)) / (2 * np.sqrt(np.logaddexp(0.0, x)))
    np.testing.assert_allclose(slope, expected, rtol=1e-6)


@pytest.mark.parametrize("score_fn", ["sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("logit", [-40.0, -50.0, -80.0, -200.0])
def test_normalised_weights_have_a_gradient_where_all_scores_nearly_vanish(score_fn, logit):
    """The sum of the scores is below the square root of the smallest FP32 number, or 0."""
    logits = (logit + np.array([[[0.0, 0.5, -0.3, 0.2]]])).astype(np.float32)
    router = RouterConfig(top_k=4, score_fn=score_fn)
    spec = spec_of(router, experts=4)
    slot = np.array([1.0, -2.0, 3.0, 0.5])

    def value(x):
        weight, expert, stats = route(x, None, spec)
        return jnp.sum(weight * jnp.asarray(slot, jnp.float32)[expert]), stats.prob_sum_E

    (got, share), pullback = jax.vjp(value, jnp.asarray(logits))
    d_weight, d_share = (
        pullback((jnp.float32(a), b))[0][0, 0] for a, b in ((1, jnp.zeros(4)), (0, jnp.asarray(slot, jnp.float32)))
    )
    x = logits[0, 0].astype(np.float64)
    score, slope = (np.exp(x), np.exp(x)) if score_fn == "sigmoid" else (np.exp(x / 2), np.exp(x / 2) / 2)
    total = score.sum() + 1e-20
    expected = slope / total * (slot - score @ slot / total)
    np.testing.assert_allclose(got, score @ slot / total, rtol=1e-5, atol=1e-17)
    np.testing.assert_allclose(share, score / total, rtol=1e-5, atol=1e-17)
    for d_logits in (d_weight, d_share):
        np.testing.assert_allclose(d_logits, expected, rtol=1e-4, atol=1e-17)


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7F800000, 0xFF800000], ids=["nan", "-nan", "inf", "-inf"])
@pytest.mark.parametrize("name", ["softmax_norm", "sigmoid_groups", "softmax_after", "identity"])
def test_a_logit_that_is_not_finite_poisons_its_token_only(name, bits):
    router = ROUTERS[name]
    logits, bias, _ = inputs(seed=9)
    clean_weight, clean_expert, clean = routed(logits, bias_of(router, bias), spec_of(router))
    logits = logits.copy()  # JAX may still be reading the first one, without a copy of its own
    logits[1, 2, 4] = np.array(bits, np.uint32).view(np.float32)
    weight, expert, stats = (
        jax.tree.map(np.asarray, t) for t in routed(logits, bias_of(router, bias), spec_of(router))
    )
    assert np.all(np.isnan(weight[1, 2])) and np.isnan(stats.z_sum) and np.all(np.isnan(stats.prob_sum_E))
    assert len(set(expert[1, 2])) == router.top_k and expert.min() >= 0 and expert.max() < EXPERTS
    others = np.ones((2, 5), bool)
    others[1, 2] = False
    np.testing.assert_array_equal(weight[others], np.asarray(clean_weight)[others])
    np.testing.assert_array_equal(expert[others], np.asarray(clean_expert)[others])
    assert np.isfinite(clean.z_sum)
    # The same logit in padding is not read.
    weight, expert, stats = routed(logits, bias_of(router, bias), spec_of(router), mask=others)
    assert np.all(np.isfinite(weight)) and np.isfinite(stats.z_sum) and np.all(np.isfinite(stats.prob_sum_E))
    assert np.all(np.asarray(expert)[1, 2] == -1) and np.all(np.asarray(weight)[1, 2] == 0.0)


def test_a_nan_in_the_bias_poisons_every_real_token():
    router = ROUTERS["sqrtsoftplus"]
    logits, bias, _ = inputs(seed=1)
    bias[3] = np.nan
    mask = np.array([[1] * 5, [1, 0, 1, 1, 1]])
    weight, expert, _ = (np.asarray(x) for x in routed(logits, bias, spec_of(router), mask)[:2] + (0,))
    assert np.all(np.isnan(weight[mask == 1])) and np.all(weight[mask == 0] == 0)
    assert all(len(set(row)) == router.top_k for row in expert[mask == 1])


def test_gradients_of_masked_tokens_are_zero_even_if_they_hold_nan():
    logits, _, _ = inputs(seed=2)
    logits[0, 1] = np.nan
    mask = np.ones((2, 5), bool)
    mask[0, 1] = False
    spec = spec_of(RouterConfig(top_k=2), aux_coef=1.0, z_coef=1.0)

    @jax.jit
    @jax.grad
    def gradient(logits):
        weight, _, stats = route(logits, None, spec, mask)
        return jnp.sum(weight[..., 0]) + balance_loss(stats, spec, tokens=9)

    d_logits = np.asarray(gradient(logits))
    assert np.all(d_logits[0, 1] == 0.0) and np.all(np.isfinite(d_logits))


@pytest.mark.parametrize("policy", ["nothing", "schedule"])
def test_remat_repeats_the_choice_and_the_gradient_exactly(policy):
    router = ROUTERS["sigmoid_groups"]
    logits, bias, rng = inputs(seed=4)
    spec = spec_of(router, aux_coef=0.1, z_coef=0.1)
    d_weight = rng.standard_normal((2, 5, 3)).astype(np.float32)

    def loss(logits):
        weight, expert, stats = route(logits, bias, spec)
        # Each slot counts differently for each expert, so a different choice in the recompute would show.
        return jnp.sum(weight * d_weight * (1 + expert)) + balance_loss(stats, spec, tokens=10), expert

    keep = jax.checkpoint_policies.save_only_these_names("moe_schedule") if policy == "schedule" else None
    plain = jax.jit(jax.grad(loss, has_aux=True))(logits)
    remat = jax.jit(jax.grad(jax.checkpoint(loss, policy=keep), has_aux=True))(logits)
    np.testing.assert_array_equal(remat[1], plain[1])
    assert oracle.relative_norm(remat[0], plain[0]) < 1e-6


def test_the_chosen_experts_are_saved_under_the_schedule_name():
    spec = spec_of(ROUTERS["softmax_norm"])
    policy = jax.checkpoint_policies.save_only_these_names("moe_schedule")
    jaxpr = jax.make_jaxpr(jax.grad(jax.checkpoint(lambda x: jnp.sum(route(x, None, spec)[0][..., 0]), policy=policy)))(
        jnp.zeros((2, 5, EXPERTS))
    )
    assert str(jaxpr).count("top_k[") == 1  # in the forward; the recompute reads the saved ids


def test_hash_layers_choose_by_the_table_and_weigh_by_the_gate():
    router = RouterConfig(top_k=3, score_fn="sqrtsoftplus", hash_layers=1, route_scale=1.5)
    spec, vocab = spec_of(router), 50
    logits, _, rng = inputs(seed=6)
    token = rng.integers(0, vocab, (2, 5)).astype(np.int32)
    table = make_hash_table(vocab, spec, seed=1)
    assert table.dtype == np.int32 and all(len(set(row)) == 3 for row in table)
    counts = np.bincount(table.ravel(), minlength=EXPERTS)
    assert counts.max() - counts.min() <= 1
    weight, expert, stats = routed(logits, None, spec, None, token, table)
    np.testing.assert_array_equal(expert, table[token])
    expected = [[oracle.combine_weights(logits[b, t], table[token[b, t]], router) for t in range(5)] for b in range(2)]
    assert oracle.relative_norm(weight, expected) < 1e-6
    np.testing.assert_array_equal(stats.count_E, np.bincount(table[token].ravel(), minlength=EXPERTS))


@pytest.mark.parametrize("fault", ["token_too_large", "token_negative", "row_of_zeros", "expert_out_of_range"])
def test_a_hash_entry_that_cannot_be_used_poisons_its_token(fault):
    spec = spec_of(RouterConfig(top_k=2, hash_layers=1))
    logits, _, rng = inputs(seed=6)
    token = rng.integers(0, 20, (2, 5)).astype(np.int32)
    table = make_hash_table(20, spec)
    token[token == 7] = 8
    token[0, 3] = {"token_too_large": 20, "token_negative": -1}.get(fault, 7)
    table[7] = {"row_of_zeros": [0, 0], "expert_out_of_range": [1, EXPERTS]}.get(fault, table[7])
    weight, expert, _ = (np.asarray(x) for x in routed(logits, None, spec, None, token, table)[:2] + (0,))
    bad = np.isnan(weight).all(-1)
    assert bad.sum() == 1 and bad[0, 3] and np.all(np.isfinite(weight[~bad]))
    assert expert[0, 3].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("experts", "top_k", "shape"), [(12, 5, (3, 7)), (8, 2, (1, 4)), (7, 7, (2, 3)), (96, 6, (4, 9))]
)
def test_forced_balance_spreads_slots_evenly_with_the_gates_weights(experts, top_k, shape):
    router = RouterConfig(top_k=top_k, forced_balance=True)
    logits, _, _ = inputs(seed=8, shape=shape, experts=experts)
    weight, expert, stats = routed(logits, None, spec_of(router, experts))
    assert np.max(stats.count_E) - np.min(stats.count_E) <= 1
    assert all(len(set(row)) == top_k for row in np.asarray(expert).reshape(-1, top_k))
    expected = [oracle.combine_weights(logits[b, t], expert[b, t], router) for b, t in np.ndindex(shape)]
    assert oracle.relative_norm(np.reshape(weight, (-1, top_k)), expected) < 1e-6


def test_forced_balance_is_that_of_the_whole_batch_where_a_mesh_splits_it():
    """Rows over data and expert, sequences over context: every device goes on where the one before it ended."""
    router, experts = RouterConfig(top_k=2, forced_balance=True), 6
    logits, _, _ = inputs(seed=8, shape=(12, 7 * 2), experts=experts)
    spec = spec_of(router, experts)
    mesh = jax.make_mesh((2, 1, 2, 2, 1), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 5)
    rows = jax.P(("data", "fsdp", "expert"), "context")
    with jax.set_mesh(mesh):
        split = jax.jit(jax.shard_map(lambda piece: route(piece, None, spec)[1], in_specs=rows, out_specs=rows))(logits)
    np.testing.assert_array_equal(split, route(logits, None, spec)[1])
    counts = np.bincount(np.ravel(split), minlength=experts)
    assert counts.tolist() == [12 * 14 * 2 // experts] * experts


def test_router_logits_are_products_of_fp32_operands():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 3, 200)), jnp.bfloat16)
    w, b = rng.standard_normal((5, 200)).astype(np.float32), rng.standard_normal(5).astype(np.float32)
    logits, vjp = jax.vjp(router_logits, x, w, b)
    assert logits.dtype == jnp.float32
    exact = np.asarray(x, np.float64) @ w.T.astype(np.float64) + b
    assert oracle.relative_norm(logits, exact) < 1e-6
    d_logits = rng.standard_normal((2, 3, 5)).astype(np.float32)
    dx, dw, db = vjp(d_logits)
    assert dx.dtype == jnp.bfloat16 and dw.dtype == jnp.float32
    assert (
        oracle.relative_norm(dw, np.einsum("ble,bld->ed", d_logits.astype(np.float64), np.asarray(x, np.float64)))
        < 1e-6
    )
    assert oracle.relative_norm(db, d_logits.sum((0, 1))) < 1e-6
    with pytest.raises(TypeError, match="w_router_ExD is bfloat16"):
        router_logits(x, w.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"w_router_ExD has shape .* the width of x"):
        router_logits(x, w[:, 1:])
    with pytest.raises(ValueError, match=r"router_bias_E has shape \(1,\)"):  # it would broadcast
        router_logits(x, w, jnp.ones(1))


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (RouterConfig(top_k=1), "norm_topk with k = 1"),
        (RouterConfig(top_k=1, score_fn="sigmoid"), "norm_topk with k = 1"),
        (RouterConfig(top_k=1, norm_topk=False, score_before_topk=False), "softmax over the chosen logits with k = 1"),
        (RouterConfig(top_k=13), "top_k is 13 but there are 12 experts"),
        (RouterConfig(top_k=0), "top_k is 0"),
        (RouterConfig(top_k=4, n_group=4, topk_group=1), "top_k is 4 but the 1 kept groups hold 3 experts"),
        (RouterConfig(n_group=5), "n_group is 5 but must divide num_experts = 12"),
        (RouterConfig(n_group=3, topk_group=4), "topk_group is 4"),
        (RouterConfig(n_group=12, topk_group=2), "group_top is 2 but a group has 1 experts"),
        (
            RouterConfig(score_fn="sigmoid", score_before_topk=False),
            "score_fn is 'sigmoid' with score_before_topk false",
        ),
        (RouterConfig(route_scale=float("nan")), "route_scale is nan"),
    ],
)
def test_routers_that_cannot_work_are_refused_by_name(router, message):
    with pytest.raises(ValueError, match=message):
        route(jnp.zeros((1, 2, EXPERTS)), None, spec_of(router))


def test_inputs_that_do_not_fit_are_refused_by_name():
    spec, biased = spec_of(RouterConfig()), spec_of(RouterConfig(select_bias=True))
    logits, bias = jnp.zeros((1, 2, EXPERTS)), jnp.zeros(EXPERTS)
    table, token = jnp.zeros((4, 2), jnp.int32), jnp.zeros((1, 2), jnp.int32)
    for error, message, call in [
        (TypeError, "router logits are bfloat16", lambda: route(logits.astype(jnp.bfloat16), None, spec)),
        (ValueError, r"expected \(batch, sequence, 12\)", lambda: route(logits[..., :5], None, spec)),
        (ValueError, "select_bias is True but none was given", lambda: route(logits, None, biased)),
        (ValueError, "select_bias is False but one was given", lambda: route(logits, bias, spec)),
        (TypeError, "select_bias is bfloat16", lambda: route(logits, bias.astype(jnp.bfloat16), biased)),
        (ValueError, r"select_bias has shape \(5,\)", lambda: route(logits, bias[:5], biased)),
        (ValueError, r"mask_BxL has shape \(2,\)", lambda: route(logits, None, spec, jnp.ones(2))),
        (ValueError, "without token ids", lambda: route(logits, None, spec, hash_table_VxK=table)),
        (ValueError, r"expected int32 \(vocabulary, 2\)", lambda: route(logits, None, spec, None, token, table[:, :1])),
        (
            ValueError,
            r"int32 \(0, 2\); expected int32 \(vocabulary, 2\)",
            lambda: route(logits, None, spec, None, token, table[:0]),
        ),
        (TypeError, "token_BxL is int8", lambda: route(logits, None, spec, None, token.astype(jnp.int8), table)),
        (ValueError, "vocab_size is 0", lambda: make_hash_table(0, spec)),
    ]:
        with pytest.raises(error, match=message):
            call()
