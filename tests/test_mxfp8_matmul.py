"""Products of MXArrays: three forms against float64 products of independently decoded operands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.ops.mxfp8 import MXArray, dequantize, quantize
from moejax.ops.mxfp8_layout import deinterleave_scales, interleave_scales, scale_offset
from moejax.ops.mxfp8_matmul import FORMS, align, dot_general, grouped_matmul, grouped_wgrad
from tests import mxfp8_oracle as oracle

GAUSSIAN, HEAVY, OUTLIERS = "gaussian", "student_t3", "outlier channels over 12 binades"
CONTRACT_LAST = (((1,), (1,)), ((), ()))


def draw(kind, shape, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3, shape) if kind == HEAVY else rng.standard_normal(shape)
    if kind == OUTLIERS:
        x = x * 2.0 ** rng.integers(-6, 7, shape[-1])
    return x.astype(np.float32)


def relative(got, expected):
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(("kind", "aligned_bound"), [(GAUSSIAN, 1e-6), (HEAVY, 4e-6), (OUTLIERS, 3e-5)])
def test_forms_agree_with_float64_products_of_decoded_operands(kind, aligned_bound):
    a, b = draw(kind, (160, 352), 0), draw(kind, (96, 352), 1)
    exact = oracle.round_trip(a) @ oracle.round_trip(b).T
    left, right = quantize(jnp.asarray(a)), quantize(jnp.asarray(b))
    for form, bound in (("dequantized", 1e-6), ("blocks", 1e-6), ("aligned", aligned_bound)):
        out = dot_general(left, right, CONTRACT_LAST, form=form)
        assert out.dtype == jnp.float32
        assert relative(out, exact) < bound, form
    # Far below: the operands were not quantised. Far above: they were quantised twice or along the wrong axis.
    assert 0.03 < relative(exact, a.astype(np.float64) @ b.T.astype(np.float64)) < 0.045


@pytest.mark.parametrize("form", FORMS)
def test_dimension_numbers_batch_axes_and_storage_orders(form):
    x, y = draw(GAUSSIAN, (3, 64, 7, 2), 2), draw(GAUSSIAN, (5, 2, 64, 3), 3)
    left, right = quantize(jnp.asarray(x), 1), quantize(jnp.asarray(y), 2, transposed=True)
    out = dot_general(left, right, (((1,), (2,)), ((0, 3), (3, 1))), form=form)
    expected = np.einsum("bkms,nskb->bsmn", oracle.round_trip(x, 1), oracle.round_trip(y, 2))
    assert out.shape == (3, 2, 7, 5)
    assert relative(out, expected) < (1e-6 if form != "aligned" else 1e-5)


def test_scales_outside_the_fp32_range_meet_in_the_product():
    """2^-127 * 2^100: one factor is subnormal, and would be flushed if it were applied alone."""
    a, b = np.full((1, 32), 2.0**-119, np.float32), np.full((1, 32), 2.0**108, np.float32)
    left, right = quantize(jnp.asarray(a)), quantize(jnp.asarray(b))
    assert int(left.scales[0, 0]) == 0
    for form in FORMS:
        assert float(dot_general(left, right, CONTRACT_LAST, form=form)[0, 0]) == 32 * 2.0**-11


def align_oracle(x, rows):
    """q' = E4M3(q * 2^(e - e*)) with e* the largest of each rows x 128 group, written out group by group."""
    data, codes = oracle.quantize(x)
    values, codes = oracle.dequantize(data, np.full_like(codes, 127)), codes.astype(int)
    out = np.zeros_like(values)
    for r in range(0, x.shape[0], rows):
        for c in range(0, codes.shape[1], 4):
            top = codes[r : r + rows, c : c + 4].max()
            for k in range(c, min(c + 4, codes.shape[1])):
                cols = slice(32 * k, 32 * (k + 1))
                shift = 2.0 ** (codes[r : r + rows, k : k + 1] - top)
                moved = oracle.element_bytes(values[r : r + rows, cols] * shift)
                out[r : r + rows, cols] = oracle.dequantize(moved, np.full((len(moved), 1), top, np.uint8))
    return out


@pytest.mark.parametrize("rows", [1, 128])
def test_aligned_bytes_follow_the_rebasing_rule(rows):
    x = draw(OUTLIERS, (200, 224), 4) * np.float32(2.0) ** np.random.default_rng(5).integers(-9, 9, (200, 1))
    x = x.astype(np.float32)
    expected = align_oracle(x, rows)
    for source, axis in ((x, 1), (x.T.copy(), 0)):
        aligned = align(quantize(jnp.asarray(source), axis), rows)
        got = np.asarray(dequantize(aligned))
        np.testing.assert_array_equal(got if axis == 1 else got.T, expected)
    codes = np.asarray(align(quantize(jnp.asarray(x)), rows).scales)
    assert (codes[:, :4] == codes[:, :1]).all() and (codes[:, 4:] == codes[:, 4:5]).all()
    if rows == 128:
        assert (codes[:128] == codes[0]).all() and (codes[128:] == codes[128]).all()
    assert not np.array_equal(expected, oracle.round_trip(x)), "the draw must make some elements subnormal"


@pytest.mark.parametrize("rows", [1, 128])
def test_alignment_spreads_poison_no_further(rows):
    x = np.ones((130, 256), np.float32)
    x[3, 40] = np.nan
    got = np.asarray(dequantize(align(quantize(jnp.asarray(x)), rows)))
    expected = np.ones_like(x)
    expected[3, 32:64] = np.nan
    np.testing.assert_array_equal(got, expected)


# Groups of unequal size, one empty, one single row, one above a tile; slack tiles at the end.
COUNT, START = [40, 0, 131, 1], [0, 128, 128, 384]
ROWS = 640


def grouped_rows(width, seed):
    """Rows with zero padding inside each group's tiles and NaN in the slack behind the last."""
    x = np.full((ROWS, width), np.nan, np.float32)
    x[:512] = 0
    for start, count in zip(START, COUNT):
        x[start : start + count] = draw(HEAVY, (count, width), seed + start)
    return x


def per_expert(got, expected, bound):
    for e, (one, other) in enumerate(zip(got, expected)):
        if COUNT[e]:
            assert relative(one, other) < bound, e
        else:
            assert not np.any(np.asarray(one)), e


@pytest.mark.parametrize("form", FORMS)
def test_grouped_products_match_each_expert_and_never_read_slack(form):
    x, dy = grouped_rows(96, 10), grouped_rows(64, 20)
    w = draw(GAUSSIAN, (4, 64, 96), 30)
    start, count = jnp.array(START), jnp.array(COUNT)
    groups = [slice(s, s + c) for s, c in zip(START, COUNT)]
    bound = 1e-6 if form != "aligned" else 2e-5

    outside = np.ones(ROWS, bool)
    for g in groups:
        outside[g] = False
    poisoned = np.where(outside[:, None], np.float32(np.nan), x)  # padding inside a tile does not reach its rows either
    product = jax.jit(functools.partial(grouped_matmul, form=form))
    y = np.asarray(product(quantize(jnp.asarray(poisoned)), quantize(jnp.asarray(w)), start, count))
    assert y.shape == (ROWS, 64)
    expected = [oracle.round_trip(x[g]) @ oracle.round_trip(w[e]).T for e, g in enumerate(groups)]
    per_expert([y[g] for g in groups], expected, bound)
    assert not y[outside].any()

    operands = quantize(jnp.asarray(dy), 0, transposed=True), quantize(jnp.asarray(x), 0)
    wgrad = jax.jit(functools.partial(grouped_wgrad, form=form))
    dw = wgrad(*operands, start, count)
    tile = [slice(s, s + -(-c // 128) * 128) for s, c in zip(START, COUNT)]
    expected = [
        oracle.round_trip(dy[t], 0).T @ oracle.round_trip(x[t], 0) if COUNT[e] else 0 for e, t in enumerate(tile)
    ]
    per_expert(dw, expected, bound)
    again = wgrad(*operands, start, count, accumulator_ExNxK=jnp.ones_like(dw))
    assert np.all(np.asarray(again[1]) == 1.0)
    per_expert(np.where(np.array(COUNT)[:, None, None] > 0, again - 1, 0), expected, 1e-4)


@pytest.mark.parametrize(("rows", "columns"), [(256, 512), (130, 96), (1, 32), (384, 1056)])
def test_scale_layout_is_a_bijection_and_interleaving_follows_it(rows, columns):
    blocks = columns // 32
    padded_rows, padded_blocks = -(-rows // 128) * 128, -(-blocks // 4) * 4
    m, kb = np.meshgrid(np.arange(padded_rows), np.arange(padded_blocks), indexing="ij")
    offset = scale_offset(m, kb, columns)
    np.testing.assert_array_equal(np.sort(offset.ravel()), np.arange(padded_rows * padded_blocks))
    scales = np.random.default_rng(0).integers(1, 255, (2, rows, blocks), dtype=np.uint8)
    packed = np.asarray(interleave_scales(jnp.asarray(scales)))
    assert packed.shape == (2, padded_rows * padded_blocks)
    for e in range(2):
        np.testing.assert_array_equal(packed[e][offset[:rows, :blocks]], scales[e])
        assert packed[e].astype(int).sum() == scales[e].astype(int).sum(), "padding holds code 0"
    np.testing.assert_array_equal(deinterleave_scales(jnp.asarray(packed), rows, blocks), scales)


def test_scale_offset_passes_two_to_the_31():
    assert scale_offset(2**27, 3, 7168) == (2**27 // 128) * 56 * 512 + 3
    assert scale_offset(np.array([2**27]), np.array([3]), 7168)[0] == (2**27 // 128) * 56 * 512 + 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, b: dot_general(a, b, (((0,), (0,)), ((), ()))), "blocks along axis 1 and is contracted over"),
        (lambda a, b: dot_general(a, b, CONTRACT_LAST, form="exact"), "form is 'exact'"),
        (lambda a, b: grouped_matmul(a, b, jnp.zeros(1), jnp.zeros(1)), "multiple of 128 rows"),
        (lambda a, b: align(MXArray(jnp.zeros((2, 64, 3)), jnp.zeros((2, 2, 3)), -3)), "last two axes"),
        (lambda a, b: scale_offset(0, 4, 128), r"blocks 0\.\.3"),
        (lambda a, b: scale_offset(-1, 0, 128), "rows start at 0"),
        (lambda a, b: deinterleave_scales(jnp.zeros(512, jnp.uint8), 129, 4), "1024"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    a = b = quantize(jnp.ones((4, 64)))
    with pytest.raises(ValueError, match=message):
        call(a, b)


@pytest.mark.parametrize("form", FORMS)
def test_sizes_that_differ_are_refused_by_every_form(form):
    """40 and 50 elements are two blocks each, and one block of 128: no later shape would show the mistake."""
    mx = lambda *shape: quantize(jnp.ones(shape))  # noqa: E731
    for a, b in ((mx(4, 40), mx(4, 50)), (mx(4, 64), mx(4, 96))):
        with pytest.raises(ValueError, match=r"along the contraction and the batch axes: expected the same"):
            dot_general(a, b, CONTRACT_LAST, form=form)
    with pytest.raises(ValueError, match=r"sizes \(64, 2\) and \(64, 3\)"):
        dot_general(mx(2, 4, 64), mx(3, 4, 64), (((2,), (2,)), ((0,), (0,))), form=form)


def test_grouped_operands_that_do_not_fit_are_refused_by_name():
    rows, weights = quantize(jnp.ones((128, 64))), quantize(jnp.ones((2, 32, 64)))
    down = lambda *shape: quantize(jnp.ones(shape), 0)  # noqa: E731
    two, one = jnp.zeros(2, jnp.int32), jnp.zeros(1, jnp.int32)
    none = quantize(jnp.ones((0, 64)))
    refused = [
        (TypeError, "count_E is float32, expected int32", lambda: grouped_matmul(rows, weights, two, jnp.ones(2))),
        (ValueError, r"count_E has shape \(1,\), expected \(2,\)", lambda: grouped_matmul(rows, weights, two, one)),
        (ValueError, r"has shape \(0, 64\), expected .* multiple of 128", lambda: grouped_matmul(none, weights, two, two)),
        (ValueError, "lhs_MxN has 256 rows and rhs_MxK 128", lambda: grouped_wgrad(down(256, 64), down(128, 32), two, two)),
        (TypeError, r"accumulator is bfloat16\[2, 64, 32\], expected float32", lambda: grouped_wgrad(
            down(128, 64), down(128, 32), two, two, accumulator_ExNxK=jnp.zeros((2, 64, 32), jnp.bfloat16))),
        (ValueError, "rows = 0, expected a positive number", lambda: align(rows, 0)),
    ]  # fmt: skip
    for error, message, attempt in refused:
        with pytest.raises(error, match=message):
            attempt()
