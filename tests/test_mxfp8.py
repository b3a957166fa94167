"""The MXFP8 format, bit for bit, against the exact rational rule (`tests/mxfp8_oracle.py`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.ops import mxfp8
from moejax.ops.mxfp8 import MXArray, dequantize, quantize, scale_code, to_e4m3
from tests import mxfp8_oracle as oracle

TIE_CODE = 0x04600001  # the one FP32 magnitude where the hardware's product rule differs from the rational rule


def as_bytes(array):
    return np.asarray(array).view(np.uint8)


def assert_same_bits(mx: MXArray, x, axis):
    data, codes = oracle.quantize(x, axis)
    np.testing.assert_array_equal(np.asarray(mx.scales), codes)
    np.testing.assert_array_equal(as_bytes(mx.elements), data)


def wild_floats(rng, shape):
    """Random FP32 bits: every exponent, subnormals, now and then NaN and Inf; rows of 30 binades each."""
    bits = rng.integers(0, 2**32, shape, dtype=np.uint32)
    centre = rng.integers(0, 250, (shape[0], *[1] * (len(shape) - 1)), dtype=np.uint32)
    exponent = np.clip(centre.astype(np.int64) - rng.integers(0, 30, shape), 0, 254).astype(np.uint32)
    near = (bits & 0x807FFFFF) | (exponent << 23)
    special = rng.choice(np.array([0x7FC00000, 0xFFC00001, 0x7F800000, 0xFF800000, 0, 0x80000000], np.uint32), shape)
    return np.where(rng.random(shape) < 0.002, special, near).astype(np.uint32).view(np.float32)


def test_every_bf16_value_as_block_maximum_matches_the_integer_rule():
    every = np.arange(2**16, dtype=np.uint16)
    rng = np.random.default_rng(0)
    # 31 companions below the maximum: the maximum's own bits with a smaller magnitude
    smaller = (rng.random((2**16, 31)) * ((every & 0x7FFF) + 1)[:, None]).astype(np.uint16)
    signs = rng.integers(0, 2, smaller.shape, dtype=np.uint16) << 15
    block = np.concatenate([every[:, None], smaller | signs], axis=1)
    x = jnp.asarray(block.view(jnp.bfloat16))
    mx = quantize(x, 1)
    assert_same_bits(mx, (block.astype(np.uint32) << 16).view(np.float32), 1)
    finite = (every & 0x7FFF) < 0x7F80
    assert set(np.asarray(mx.scales)[finite, 0]) == set(range(248)), "every code of a finite block occurs"


def test_every_fp32_exponent_with_edge_mantissas_matches_the_integer_rule():
    edges = [
        0,
        1,
        2,
        0x0FFFFF,
        0x100000,
        0x1FFFFF,
        0x3FFFFF,
        0x400000,
        0x400001,
        0x5FFFFF,
        0x600000,
        0x600001,
        0x600002,
        0x700000,
        0x7FFFFE,
        0x7FFFFF,
    ]
    bits = np.array([(e << 23) | m for e in range(256) for m in edges], np.uint32)
    with np.errstate(invalid="ignore"):
        amax = bits.view(np.float32).astype(np.float64)
    expected = oracle.scale_codes(amax)
    expected[bits == TIE_CODE] = 0
    np.testing.assert_array_equal(np.asarray(scale_code(jnp.asarray(bits.view(np.int32)))), expected)
    x = np.zeros((len(bits), 32), np.float32)
    x[:, 3] = (bits | 0x80000000).view(np.float32)
    mx = quantize(jnp.asarray(x))
    data, _ = oracle.quantize(x)
    keep = bits != TIE_CODE
    np.testing.assert_array_equal(np.asarray(mx.scales)[:, 0], expected)
    np.testing.assert_array_equal(as_bytes(mx.elements)[keep], data[keep])


def test_scale_equals_the_fp32_product_rule_of_hardware():
    """s from fl32(amax * fl32(1/448)) rounded up, the form cuBLAS documents: NumPy keeps subnormals, so it can be run
    as written.
    """
    rng = np.random.default_rng(1)
    bits = np.concatenate(
        [rng.integers(0, 0x7F800000, 200_000), np.arange(0x045FFFF0, 0x04600010), np.arange(64)]
    ).astype(np.uint32)
    product = (bits.view(np.float32) * np.uint32(0x3B124925).view(np.float32)).view(np.uint32)
    exponent, mantissa = product >> 23, product & 0x7FFFFF
    code = np.where(exponent == 0, mantissa > 0x400000, np.minimum(254, exponent + (mantissa != 0)))
    np.testing.assert_array_equal(np.asarray(scale_code(jnp.asarray(bits.view(np.int32)))), code)


def test_element_cast_at_every_e4m3_value_and_midpoint():
    exact = np.concatenate([oracle.E4M3, oracle.MIDPOINT, [456.0, 464.0, 480.0, 1e30, np.inf]]).astype(np.float32)
    with np.errstate(over="ignore"):
        x = np.concatenate([exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(np.inf))])
    x = np.concatenate([x, -x, np.float32([np.nan, 2.0**-149, -(2.0**-130)])])
    np.testing.assert_array_equal(as_bytes(to_e4m3(jnp.asarray(x))), oracle.element_bytes(x))


def test_every_byte_under_every_code_decodes_exactly():
    data = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    codes = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    mx = MXArray(jnp.asarray(data.view(jnp.float8_e4m3fn)), jnp.asarray(codes))
    with np.errstate(over="ignore"):
        expected = oracle.dequantize(data, codes).astype(np.float32)
    got = np.asarray(dequantize(mx))
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])
    as_bf16 = np.asarray(dequantize(mx, jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(as_bf16[3:247][~nan[3:247]], expected[3:247][~nan[3:247]])  # codes 3..246 fit BF16


def test_gaussian_blocks_lose_2_65_percent():
    x = jax.random.normal(jax.random.key(3), (4096, 32))
    assert abs(100 * float(mxfp8.relative_rmse(x, quantize(x))) - 2.65) < 0.05
    rounded = x.astype(jnp.bfloat16)
    through_bf16 = dequantize(quantize(rounded)) - x
    assert abs(100 * float(jnp.linalg.norm(through_bf16) / jnp.linalg.norm(x)) - 2.67) < 0.05


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("transposed", [False, True])
def test_any_axis_and_storage_order_gives_the_same_numbers_as_the_oracle(axis, transposed):
    x = wild_floats(np.random.default_rng(5), (35, 67, 45))
    x = x if axis != 1 else np.swapaxes(x, 0, 1)
    mx = quantize(jnp.asarray(x), axis, transposed=transposed)
    data, codes = oracle.quantize(x, axis)
    assert mx.shape == x.shape
    elements, scales = as_bytes(mx.elements), np.asarray(mx.scales)
    if transposed:
        assert elements.shape == (*x.shape[:-2], x.shape[-1], x.shape[-2])
        elements, scales = np.swapaxes(elements, -1, -2), np.swapaxes(scales, -1, -2)
    np.testing.assert_array_equal(scales, codes)
    np.testing.assert_array_equal(elements, data)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(
            np.asarray(dequantize(mx)), oracle.dequantize(data, codes, axis).astype(np.float32)
        )


def test_jit_eager_and_fused_round_trip_give_equal_bits():
    x = jnp.asarray(wild_floats(np.random.default_rng(6), (64, 96)))
    with jax.disable_jit():
        eager = quantize(x, 0)
        eager_values = dequantize(eager)
    compiled = jax.jit(lambda x: quantize(x, 0))(x)
    fused = jax.jit(lambda x: dequantize(quantize(x, 0)))(x)
    np.testing.assert_array_equal(as_bytes(eager.elements), as_bytes(compiled.elements))
    np.testing.assert_array_equal(np.asarray(eager.scales), np.asarray(compiled.scales))
    np.testing.assert_array_equal(np.asarray(eager_values), np.asarray(fused))


def test_bf16_source_equals_its_fp32_widening():
    bits = np.random.default_rng(7).integers(0, 2**16, (40, 64), dtype=np.uint16)
    x = jnp.asarray(bits.view(jnp.bfloat16))
    narrow, wide = quantize(x), quantize(jnp.asarray((bits.astype(np.uint32) << 16).view(np.float32)))
    np.testing.assert_array_equal(as_bytes(narrow.elements), as_bytes(wide.elements))
    np.testing.assert_array_equal(np.asarray(narrow.scales), np.asarray(wide.scales))


# One compiled shape for all examples: hypothesis varies the bits.
BITS = st.lists(st.integers(0, 2**32 - 1), min_size=45, max_size=45)


@settings(max_examples=150, deadline=None)
@given(BITS, st.integers(0, 255))
def test_any_bits_quantise_by_the_rule(bits, exponent):
    """Scale is the smallest that reaches amax, NaN and Inf poison their block alone, a ragged tail equals its
    zero-filled block.
    """
    pattern = np.array(bits, np.uint32)
    pattern[:40] = (pattern[:40] & 0x81FFFFFF) | np.uint32(exponent << 23 & 0x7E000000)  # mostly of one magnitude
    x = pattern.view(np.float32)
    mx = quantize(jnp.asarray(x))
    codes, data = np.asarray(mx.scales).astype(int), as_bytes(mx.elements)
    assert codes.shape == (2,)
    for i, block in enumerate((x[:32], x[32:])):
        block_data = data[32 * i : 32 * (i + 1)]
        with np.errstate(invalid="ignore"):
            amax = np.max(np.abs(block.astype(np.float64)))
        if not np.isfinite(amax):
            assert codes[i] == 255 and (block_data == 0x7F).all()
            continue
        assert codes[i] <= 247
        assert 448 * 2.0 ** (codes[i] - 127) >= amax or amax == np.uint32(TIE_CODE).view(np.float32)
        assert codes[i] == 0 or 448 * 2.0 ** (codes[i] - 128) < amax
        np.testing.assert_array_equal(
            block_data, oracle.element_bytes(block.astype(np.float64) / oracle.SCALE[codes[i]])
        )
    filled = quantize(jnp.asarray(np.concatenate([x, np.zeros(19, np.float32)])))
    np.testing.assert_array_equal(as_bytes(filled.elements)[:45], data)
    np.testing.assert_array_equal(np.asarray(filled.scales), codes)


def test_statistics_count_underflow_saturation_and_poison():
    x = np.ones((3, 64), np.float32)
    x[0, :3] = [448.0, 448.0 * 2.0**-20, -448.0 * 2.0**-20]  # block maximum 448: two elements vanish, one saturates
    x[1, 40] = np.inf
    x[2, :] = 0.0
    x = jnp.asarray(x)
    for transposed in (False, True):
        stats = mxfp8.quantization_stats(x, quantize(x, 1, transposed=transposed))
        assert [int(v) for v in (stats.elements, stats.nonzero, stats.blocks, stats.poisoned)] == [192, 127, 6, 1]
        assert int(stats.underflowed) == 2
        assert int(stats.saturated) == 1
        rates = {name: float(rate) for name, rate in stats.rates().items()}
        assert rates == pytest.approx({"underflow": 2 / 127, "saturation": 1 / 127, "poison": 1 / 6})


def test_array_prints_what_it_is_and_survives_tree_operations():
    mx = quantize(jnp.ones((4, 40)), 0, transposed=True)
    assert repr(mx) == (
        "MXArray(shape=(4, 40), blocks of 32 along axis -2, stored transposed, "
        "elements=float8_e4m3fn[40, 4], scales=uint8[40, 1])"
    )
    assert "MXArray(shape=?" in repr(jax.tree.map(lambda _: None, mx))
    assert jax.tree.structure(
        jax.eval_shape(lambda x: quantize(x, 0, transposed=True), jnp.ones((4, 40)))
    ) == jax.tree.structure(mx)
    assert {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(mx)} == {
        ".elements",
        ".scales",
    }
    np.testing.assert_array_equal(dequantize(mx.mT), dequantize(mx).T)


def test_stacked_arrays_keep_their_block_axis_under_scan_and_vmap():
    x = jax.random.normal(jax.random.key(9), (3, 5, 64))
    stack = jax.vmap(lambda x: quantize(x, 1))(x)
    _, values = jax.lax.scan(lambda carry, mx: (carry, dequantize(mx)), 0, stack)
    np.testing.assert_array_equal(values, dequantize(quantize(x, 2)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(jnp.ones((4, 32), jnp.float16)), "float16"),
        (lambda: quantize(jnp.ones((4, 32)), 2), "axis 2"),
        (lambda: quantize(jnp.ones(32), transposed=True), "two axes"),
        (lambda: dequantize(quantize(jnp.ones((4, 32))), jnp.float16), "float16"),
        (lambda: mxfp8.quantization_stats(jnp.ones((32, 4)), quantize(jnp.ones((4, 32)))), r"\(32, 4\)"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_counts_that_would_pass_int32_are_refused():
    x = jax.ShapeDtypeStruct((2**16, 2**15), jnp.bfloat16)
    with pytest.raises(ValueError, match="2147483648 elements; its counts are int32"):
        jax.eval_shape(lambda x: mxfp8.quantization_stats(x, quantize(x)), x)
