"""Plans against a NumPy enumeration, bit for bit: dropless and with capacity, masked, and for every number of ranks."""

import fractions
import functools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from moejax.config import RouterConfig
from moejax.ops.schedule import capacity, dropped_rows, minibatches, rows_bound, schedule, stable_sort
from moejax.ops.spec import MoESpec

pytestmark = pytest.mark.quick_compile


def spec_of(experts, top_k, **more):
    return MoESpec(experts, 8, 8, router=RouterConfig(top_k=top_k, norm_topk=top_k > 1), **more)


def random_ids(rng, tokens, top_k, experts, masked=0.1, skew=1.0):
    """Distinct ids per token, popular experts first if skew > 1; some slots masked."""
    noise = rng.random((tokens, experts)) ** (1 / skew ** np.arange(experts))
    ids = np.argsort(-noise, axis=1)[:, :top_k].astype(np.int32)
    ids[rng.random(ids.shape) < masked] = -1
    return ids


def expected_rows(ids_TxK, experts, limit=None):
    """Per expert its kept (token, slot) pairs, in order, and how many asked."""
    pairs = [[(t, k) for t, k in np.ndindex(ids_TxK.shape) if ids_TxK[t, k] == e] for e in experts]
    return [p if limit is None else p[:limit] for p in pairs], [len(p) for p in pairs]


def check_plan(plan, ids_TxK, experts, limit=None):
    plan = jax.tree.map(np.asarray, plan)
    pairs, routed = expected_rows(ids_TxK, experts, limit)
    top_k, start = ids_TxK.shape[1], 0
    row_TxK = np.full(ids_TxK.shape, -1)
    slot_M = np.full(plan.slot_M.shape, -1)
    assert all(leaf.dtype == np.int32 for leaf in jax.tree.leaves(plan))
    for e, kept in enumerate(pairs):
        assert (plan.routed_E[e], plan.count_E[e], plan.start_E[e]) == (routed[e], len(kept), start)
        for rank, (t, k) in enumerate(kept):
            row_TxK[t, k] = start + rank
            slot_M[start + rank] = t * top_k + k
        start += -(-len(kept) // 128) * 128
    assert start <= plan.slot_M.shape[0] and plan.slot_M.shape[0] % 128 == 0
    np.testing.assert_array_equal(plan.row_TxK, row_TxK)
    np.testing.assert_array_equal(plan.slot_M, slot_M)


@functools.partial(jax.jit, static_argnums=1)
def planned(ids, spec):
    return schedule(ids, spec)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "factor"),
    [
        (37, 3, 5, None),
        (300, 2, 7, None),
        (300, 2, 7, "0.75"),
        (129, 1, 3, "1.1"),
        (5, 8, 8, None),
        (1, 4, 64, None),
        (6, 2, 3, "9"),
    ],  # fmt: skip
)
def test_rows_follow_expert_then_token_then_slot_order(tokens, top_k, experts, factor):
    spec = spec_of(experts, top_k, capacity_factor=factor)
    rng = np.random.default_rng(tokens)
    for masked, skew in [(0.1, 1.0), (0.0, 3.0), (1.0, 1.0)]:
        ids = random_ids(rng, tokens, top_k, experts, masked, skew)
        plan = planned(ids, spec)
        check_plan(plan, ids, range(experts), capacity(tokens, spec))
        assert dropped_rows(plan) == np.sum(plan.routed_E) - np.sum(np.asarray(plan.row_TxK) >= 0)


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_any_ids_of_a_small_batch_give_the_enumerated_plan(data):
    """Repeated experts within a token too: a plan does not rely on distinct ids."""
    factor = data.draw(st.sampled_from([None, "0.5"]))
    ids = data.draw(st.lists(st.lists(st.integers(-1, 3), min_size=2, max_size=2), min_size=9, max_size=9))
    ids = np.array(ids, np.int32)
    hypothesis.assume(factor is not None or all(a != b or a == -1 for a, b in ids))
    spec = spec_of(4, 2, capacity_factor=factor)
    check_plan(planned(ids, spec), ids, range(4), capacity(9, spec))


def test_all_tokens_on_one_expert_fit_the_bound():
    for tokens, top_k, experts in [(257, 1, 6), (129, 4, 4), (1, 1, 9)]:
        spec = spec_of(experts, top_k)
        ids = np.broadcast_to(np.arange(top_k, dtype=np.int32), (tokens, top_k)).copy()
        check_plan(planned(ids, spec), ids, range(experts))


def test_the_bound_counts_padding_only_for_experts_that_can_have_rows():
    assert rows_bound(1, spec_of(128, 8)) == 1024  # one decoded token: eight tiles, not 128
    for tokens, spec in [(1000, spec_of(7, 3)), (64, spec_of(4, 2, capacity_factor="1"))]:
        worst = tokens * 3 if spec.top_k == 3 else capacity(tokens, spec) * 4
        assert worst + 127 * spec.num_experts <= rows_bound(tokens, spec) < worst + 127 * spec.num_experts + 128


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("factor", [None, "0.9"])
def test_every_way_of_sharding_tokens_gives_the_same_rows(ranks, factor):
    """Each rank's plan is the part of the one-device plan that belongs to its experts, over the tokens of the group."""
    tokens, top_k, experts = 64, 3, 16
    ids = random_ids(np.random.default_rng(7), tokens, top_k, experts, skew=1.2)
    whole = spec_of(experts, top_k, capacity_factor=factor)
    spec = whole.replace(axis="expert", ranks=ranks)
    mesh = jax.make_mesh((ranks,), ("expert",), devices=jax.devices()[:ranks])
    with jax.set_mesh(mesh):
        stack = jax.jit(
            jax.shard_map(
                lambda ids: jax.tree.map(lambda leaf: leaf[None], schedule(ids, spec)),
                in_specs=jax.P("expert"),
                out_specs=jax.P("expert"),
            )
        )(jax.device_put(ids, jax.P("expert")))
    stack, limit = jax.device_get(stack), capacity(tokens, whole)
    assert limit == (None if factor is None else 11) and capacity(tokens, spec) == limit
    for rank in range(ranks):
        plan = jax.tree.map(lambda leaf, rank=rank: leaf[rank], stack)
        check_plan(plan, ids, range(rank * experts // ranks, (rank + 1) * experts // ranks), limit)


def test_the_schedule_is_integer_work_only():
    text = str(
        jax.make_jaxpr(lambda ids: schedule(ids, spec_of(6, 2, capacity_factor="1.25")))(jnp.zeros((9, 2), jnp.int32))
    )
    assert "i32[" in text
    for name in ("f16", "bf16", "f32", "f64", "random"):
        assert name not in text


def test_large_keys_neither_overflow_nor_lose_their_order():
    """2^31 is near for expert x slot, and the form for still larger problems agrees."""
    slots, experts = 1_000_001, 2146
    assert 0.999 < slots * (experts + 1) / 2**31 < 1
    local = np.random.default_rng(0).integers(0, experts + 1, slots).astype(np.int32)
    order = np.argsort(local, kind="stable")
    sorted_local, sorted_slot = jax.jit(stable_sort, static_argnums=1)(local, experts)
    np.testing.assert_array_equal(sorted_slot, order)
    np.testing.assert_array_equal(sorted_local, local[order])
    two_keys = stable_sort(local[:5001], experts, largest_key=10**6)
    np.testing.assert_array_equal(two_keys[1], np.argsort(local[:5001], kind="stable"))
    np.testing.assert_array_equal(two_keys[0], np.sort(local[:5001]))


def test_minibatch_borders_fall_on_tiles_of_the_experts_own_rows():
    spec = spec_of(5, 2)
    ids = random_ids(np.random.default_rng(1), 700, 2, 5, skew=1.3)
    plan = planned(ids, spec)
    for rows in (128, 384, 4096):
        first, count = (np.asarray(x) for x in minibatches(plan, rows))
        assert first.shape == (-(-plan.slot_M.shape[0] // rows), 5) and first.dtype == count.dtype == np.int32
        seen = []
        for w, e in np.ndindex(first.shape):
            if count[w, e]:
                assert (first[w, e] - plan.start_E[e]) % 128 == 0 and w * rows <= first[w, e]
                assert first[w, e] + count[w, e] <= (w + 1) * rows
                seen += range(first[w, e], first[w, e] + count[w, e])
        assert seen == np.flatnonzero(np.asarray(plan.slot_M) >= 0).tolist()
    with pytest.raises(ValueError, match="rows_per_minibatch is 100"):
        minibatches(plan, 100)


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(
    st.integers(1, 5000), st.integers(1, 600), st.integers(1, 16), st.integers(1, 9999), st.integers(0, 4)
)
def test_capacity_is_the_exact_ceiling_within_its_bounds(tokens, experts, top_k, digits, places):
    top_k = min(top_k, experts)
    text = f"{digits // 10**places}.{digits % 10**places:0{places}d}" if places else str(digits)
    rows = capacity(tokens, spec_of(experts, top_k, capacity_factor=text))
    wanted = fractions.Fraction(tokens * top_k * digits, experts * 10**places)
    assert 1 <= rows <= tokens
    assert rows == tokens or rows >= wanted
    assert rows == 1 or rows - 1 < wanted
    assert rows == min(tokens, math.ceil(wanted))


@pytest.mark.parametrize("text", ["0", "0.0", "-1", "1e3", "1.25x", "nan", "", 1.25, "5/4"])
def test_a_capacity_factor_that_is_not_a_positive_decimal_is_refused(text):
    with pytest.raises(ValueError, match="expected a positive decimal number in quotes"):
        capacity(10, spec_of(4, 2, capacity_factor=text))


def test_ids_that_do_not_fit_are_refused_by_name():
    spec = spec_of(4, 2)
    for error, message, ids in [
        (ValueError, r"lie in 0..4; expected 0..3", [[0, 4]]),
        (ValueError, r"lie in -2..1; expected 0..3", [[-2, 1]]),
        (ValueError, r"shape \(1, 3\); expected \(T, 2\)", [[0, 1, 2]]),
    ]:
        with pytest.raises(error, match=message):
            schedule(jnp.array(ids, jnp.int32), spec)
    with pytest.raises(TypeError, match="expert ids are int16"):
        schedule(jnp.zeros((1, 2), jnp.int16), spec)
    with pytest.raises(ValueError, match="do not fit an int32 schedule"):
        jax.eval_shape(lambda ids: schedule(ids, spec), jax.ShapeDtypeStruct((2**29, 2), jnp.int32))
