"""The single kernels: grouped products, the MX format, the schedule, dispatch and combine, each against its definition."""

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import RouterConfig
from moejax.native import calls
from moejax.ops.mxfp8 import dequantize, quantize
from moejax.ops.schedule import rows_bound, schedule
from moejax.ops.spec import MoESpec
from tests.native_support import assert_same_bits, needs_native, relative_norm

pytestmark = needs_native
rng = np.random.default_rng(0)


def padded(sizes, slack=128):
    """Starts at multiples of 128, and the row count with some slack behind the last group."""
    ends = np.cumsum(-(-np.array(sizes) // 128) * 128)
    starts = np.concatenate([[0], ends[:-1]])
    return jnp.asarray(sizes, jnp.int32), jnp.asarray(starts, jnp.int32), int(ends[-1]) + slack


@pytest.mark.parametrize("sizes", [[162, 0, 2577, 446, 0, 83], [1, 31, 32, 33, 0], [130]], ids=str)
def test_grouped_products_of_unaligned_groups_with_nan_slack(sizes):
    count, start, rows = padded(sizes)
    K, N = 19, 45
    used = np.zeros(rows, bool)
    for c, s in zip(count.tolist(), start.tolist()):
        used[s : s + c] = True
    x, dy = (np.where(used[:, None], rng.normal(size=(rows, width)), np.nan).astype(np.float32) for width in (K, N))
    w = rng.normal(size=(len(sizes), N, K)).astype(np.float32)

    y = np.asarray(calls.grouped_product(x, w, count, start, transposed=True))
    dx = np.asarray(calls.grouped_product(dy, w, count, start, transposed=False))
    dw = np.asarray(calls.grouped_wgrad(dy, x, count, start))
    assert not y[~used].any() and not dx[~used].any()
    for e, (c, s) in enumerate(zip(count.tolist(), start.tolist())):
        x_e, dy_e, w_e = (a.astype(np.float64) for a in (x[s : s + c], dy[s : s + c], w[e]))
        assert relative_norm(y[s : s + c], x_e @ w_e.T) < 1e-6
        assert relative_norm(dx[s : s + c], dy_e @ w_e) < 1e-6
        assert relative_norm(dw[e], dy_e.T @ x_e) < 1e-6  # exactly zero without rows


def test_wgrad_of_ones_counts_rows_exactly_and_continues_from_its_accumulator():
    sizes = [162, 0, 2577, 446, 0, 83]
    count, start, rows = padded(sizes)
    ones = jnp.ones((rows, 8), jnp.bfloat16)
    dw = calls.grouped_wgrad(ones, ones, count, start)
    assert dw.dtype == jnp.float32
    np.testing.assert_array_equal(dw, np.broadcast_to(np.array(sizes, np.float32)[:, None, None], dw.shape))
    buffer = jnp.full(dw.shape, 0.5, jnp.float32)
    again = calls.grouped_wgrad(ones, ones, count, start, buffer)
    np.testing.assert_array_equal(again, dw + 0.5)
    np.testing.assert_array_equal(buffer, 0.5)  # not donated, so the caller's array is intact


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("axis", [-1, -2])
def test_mx_bits_are_those_of_the_definition(dtype, axis):
    bits = rng.integers(0, 2**32, size=(3, 70, 96), dtype=np.uint32)
    wild = bits.view(np.float32)
    scaled = np.ldexp(rng.uniform(-1, 1, size=(3, 70, 96)), rng.integers(-149, 128, size=(3, 70, 1))).astype(np.float32)
    edges = np.zeros((3, 70, 96), np.float32)
    edges[:, 0, :8] = np.array(
        [0x04600001, 0x04600000, 1, 0x80000000, 0x7F7FFFFF, 0x43E00000, 0x43E00001, 0x007FFFFF], np.uint32
    ).view(np.float32)
    edges[1, 1, 5], edges[2, 40, 7] = np.inf, np.nan
    for source in (wild, scaled, edges):
        x = jnp.asarray(source).astype(dtype)
        expected = quantize(x, axis)
        elements, codes = calls.mx_quantize(x, axis)
        assert_same_bits((elements, codes), (expected.elements, expected.scales))
        for out in (jnp.float32, jnp.bfloat16):
            assert_same_bits(calls.mx_dequantize(elements, codes, axis, out), dequantize(expected, out))


def test_mx_takes_vectors_and_ragged_last_blocks():
    x = jnp.asarray(rng.normal(size=45), jnp.float32)
    expected = quantize(x, -1)
    assert_same_bits(calls.mx_quantize(x, -1), (expected.elements, expected.scales))
    with pytest.raises(ValueError, match="axis -2 of an array of shape"):
        calls.mx_quantize(x, -2)


@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (3, 0, 40), (0, 0, 4), (2, 3, 0)], ids=str)
@pytest.mark.parametrize("axis", [-1, -2])
def test_mx_takes_empty_arrays(shape, axis):
    expected = quantize(jnp.zeros(shape), axis)
    elements, codes = calls.mx_quantize(jnp.zeros(shape), axis)
    assert (elements.shape, codes.shape) == (expected.elements.shape, expected.scales.shape)
    assert calls.mx_dequantize(elements, codes, axis).shape == shape


@pytest.mark.parametrize("capacity_factor", [None, "0.5"])
def test_schedule_equals_the_jax_one(capacity_factor):
    E, K, T = 7, 3, 200
    spec = MoESpec(E, 32, 32, router=RouterConfig(top_k=K), capacity_factor=capacity_factor)
    expert = np.stack([rng.permutation(E - 1)[:K] for _ in range(T)]).astype(np.int32)
    expert[rng.random((T, K)) < 0.1] = -1
    plan = schedule(jnp.asarray(expert), spec)
    from moejax.ops.schedule import capacity

    native = calls.schedule(jnp.asarray(expert), 0, rows_bound(T, spec), E, E, capacity(T, spec))
    assert_same_bits(native, (plan.count_E, plan.start_E, plan.row_TxK, plan.slot_M, plan.routed_E))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dispatch_and_combine_gather_and_sum_in_slot_order(dtype):
    E, K, T, D = 4, 3, 50, 21
    spec = MoESpec(E, D, 8, router=RouterConfig(top_k=K))
    expert = np.stack([rng.permutation(E)[:K] for _ in range(T)]).astype(np.int32)
    expert[3] = -1
    plan = schedule(jnp.asarray(expert), spec)
    x = jnp.asarray(rng.normal(size=(T, D)), dtype)
    rows = calls.dispatch(x, plan.slot_M, K, dtype)
    slot = np.asarray(plan.slot_M)
    np.testing.assert_array_equal(
        np.asarray(rows, np.float32), np.where(slot[:, None] >= 0, np.asarray(x, np.float32)[slot // K], 0)
    )

    weight = rng.uniform(size=(T, K)).astype(np.float32)
    values = jnp.asarray(rng.normal(size=rows.shape), dtype)
    expected = np.zeros((T, D), np.float32)
    for k in range(K):
        row = np.asarray(plan.row_TxK)[:, k]
        expected += np.where(row[:, None] >= 0, weight[:, k, None] * np.asarray(values, np.float32)[row], 0)
    assert_same_bits(calls.combine(values, weight, plan.row_TxK, dtype), jnp.asarray(expected).astype(dtype))
