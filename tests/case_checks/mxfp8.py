"""Checks of `tests/cases/mxfp8.yaml`: the format through its public functions, and the faults the cases name by their numbers."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moejax.ops.mxfp8 import MXArray, dequantize, quantize, to_e4m3
from moejax.ops.mxfp8_layout import deinterleave_scales, interleave_scales, scale_offset
from moejax.ops.mxfp8_matmul import FORMS, dot_general
from tests import mxfp8_oracle as oracle


def number(text) -> np.float32:
    """'1.75*2^-119', '3*2^-10', '-2^-10', 'inf', '448' as FP32, exactly."""
    text = str(text)
    if "2^" not in text:
        return np.float32(text)
    factor, exponent = text.split("2^")
    factor = factor.rstrip("*")
    factor = {"": 1.0, "-": -1.0}.get(factor) or float(factor)
    return np.float32(np.ldexp(factor, int(exponent)))


def bits_of(values) -> np.ndarray:
    return np.asarray(values, np.float32).view(np.uint32)


def same_bits(got, expected_bits) -> bool:
    """Equal FP32 bits; any NaN will do for a NaN."""
    if expected_bits & 0x7FFFFFFF > 0x7F800000:
        return bool(np.isnan(got))
    return int(bits_of(got)) == expected_bits


def bytes_of(mx: MXArray) -> np.ndarray:
    return np.asarray(mx.elements).view(np.uint8)


def scale_edge_table(case):
    for row in case["expect"]["rows"]:
        amax = number(row["amax"])
        assert same_bits(abs(amax), row["amax_bits"]) or np.isnan(amax), row
        block = np.zeros(case["given"]["block"], np.float32)
        block[0] = amax
        mx = quantize(jnp.asarray(block), 0)
        assert int(mx.scales[0]) == row["scale_code"], row
        assert int(bytes_of(mx)[0]) == row["element_byte"], row
        decoded = np.asarray(dequantize(mx))
        assert same_bits(decoded[0], row["decoded_bits"]), row
        if np.isfinite(amax):
            assert not decoded[1:].any(), row
        else:
            assert (bytes_of(mx) == row["element_byte"]).all() and np.isnan(decoded).all(), row


def element_cast(case):
    rows = case["expect"]["rows"]
    x = np.array([number(row["x"]) for row in rows], np.float32)
    expected = np.array([row["byte"] for row in rows], np.uint8)
    np.testing.assert_array_equal(np.asarray(to_e4m3(jnp.asarray(x))).view(np.uint8), expected)
    # The same inside a block whose scale is 1: 448 beside each finite number that scale 1 can hold.
    scale = case["given"]["scale_code"]
    for value, byte in zip(x, expected):
        if abs(value) <= 448:
            mx = quantize(jnp.asarray(np.array([448.0, value], np.float32)), 0)
            assert (int(mx.scales[0]), int(bytes_of(mx)[1])) == (scale, byte), value


def decode_codes(case):
    rows = case["expect"]["rows"]
    data = np.array([[row["element_byte"]] for row in rows], np.uint8)
    codes = np.array([[row["scale_code"]] for row in rows], np.uint8)
    decoded = np.asarray(dequantize(MXArray(jnp.asarray(data.view(jnp.float8_e4m3fn)), jnp.asarray(codes))))[:, 0]
    for got, row in zip(decoded, rows):
        assert same_bits(got, row["fp32_bits"]), row


def scale_rounds_up(case):
    def code(values):
        return np.asarray(quantize(jnp.asarray(np.asarray(values, np.float32)[:, None]), 1).scales)[:, 0].tolist()

    expect, given = case["expect"], case["given"]
    assert code(given["amax"]) == expect["scale_code"]
    assert expect["scale_code"] not in (case["wrong"]["floor"], case["wrong"]["nearest_e8m0_cast"])
    k = np.arange(-126, 128)
    power = np.ldexp(np.float32(1), k)
    expected = np.maximum(0, k + 119).tolist()
    assert code(power) == expected
    assert code(np.nextafter(power, np.float32(0))) == expected
    x = np.random.default_rng(0).standard_normal((4096, 32)).astype(np.float32)
    mx = quantize(jnp.asarray(x), 1)
    error = np.linalg.norm(np.asarray(dequantize(mx)) - x) / np.linalg.norm(x)
    assert abs(100 * error - expect["relative_rmse_percent"]) < 0.05
    scale = oracle.SCALE[np.asarray(mx.scales)]
    assert (np.abs(x) <= 448 * scale).all(), "a block clips"


def e4m3_in_both_directions(case):
    block = np.zeros(32, np.float32)
    block[:4] = case["given"]["gradient_block"]
    expect = case["expect"]
    for dtype in (jnp.float32, jnp.bfloat16):
        mx = quantize(jnp.asarray(block, dtype), 0)
        assert str(mx.elements.dtype) == expect["element_dtype"]
        assert int(mx.scales[0]) == expect["scale_code"]
        assert bytes_of(mx)[:4].tolist() == expect["element_bytes"]
    # The fault's numbers are what E5M2 bytes give when they are read as E4M3: our dtype refuses to be read so.
    for value, byte in case["given"]["e5m2_bytes"].items():
        raw = np.array([byte], np.uint8)
        assert float(raw.view(ml_dtypes.float8_e5m2)[0]) == float(value)
        assert float(raw.view(ml_dtypes.float8_e4m3fn)[0]) == case["wrong"]["e5m2_bytes_read_as_e4m3"][value]


def both_orientations(case):
    x = np.zeros((32, 32), np.float32)
    x[0, 0], x[0, 1] = 0.011, 448
    for axis, name in ((1, "blocks_along_rows"), (0, "blocks_along_columns")):
        expect = case["expect"][name]
        mx = quantize(jnp.asarray(x), axis)
        assert int(mx.scales[0, 0]) == expect["scale_code_at_0_0"]
        assert int(bytes_of(mx)[0, 0]) == expect["element_byte_at_0_0"]
        assert float(dequantize(mx)[0, 0]) == expect["decoded_at_0_0"]
    requantised = dequantize(quantize(dequantize(quantize(jnp.asarray(x), 1)), 0))
    assert float(requantised[0, 0]) == case["wrong"]["column_copy_quantised_from_the_row_copy"]


def poison_stays_visible(case):
    for poison in (np.inf, np.nan, -np.inf):
        x = np.ones((64, 64), np.float32)
        x[3, 40] = poison
        along_rows = quantize(jnp.asarray(x), 1)
        codes = np.full((64, 2), 119)
        codes[3, 1] = 255
        np.testing.assert_array_equal(np.asarray(along_rows.scales), codes)
        data = np.full((64, 64), 0x78)
        data[3, 32:] = 0x7F
        np.testing.assert_array_equal(bytes_of(along_rows), data)
        along_columns = quantize(jnp.asarray(x), 0)
        codes = np.full((2, 64), 119)
        codes[0, 40] = 255
        np.testing.assert_array_equal(np.asarray(along_columns.scales), codes)

        w, dy = quantize(jnp.ones((8, 64)), 1), quantize(jnp.ones((64, 8)), 0)
        y_expected = np.full((64, 8), 64.0)
        y_expected[3] = np.nan
        dw_expected = np.full((8, 64), 64.0)
        dw_expected[:, 40] = np.nan
        for form in FORMS:
            y = dot_general(along_rows, w, (((1,), (1,)), ((), ())), form=form)
            np.testing.assert_array_equal(np.asarray(y), y_expected, err_msg=form)
            dw = dot_general(dy, along_columns, (((0,), (0,)), ((), ())), form=form, aligned_rows=(1, 1))
            np.testing.assert_array_equal(np.asarray(dw), dw_expected, err_msg=form)


def scale_layout(case):
    given = case["given"]
    assert [scale_offset(m, kb, k) for m, kb, k in given["m_kb_K"]] == case["expect"]["offset"]
    m, kb = np.meshgrid(np.arange(256), np.arange(16), indexing="ij")
    offset = scale_offset(m, kb, 512)
    np.testing.assert_array_equal(np.sort(offset.ravel()), np.arange(4096))
    scales = np.random.default_rng(0).integers(0, 256, (256, 16), dtype=np.uint8)
    packed = interleave_scales(jnp.asarray(scales))
    np.testing.assert_array_equal(np.asarray(packed)[offset], scales)
    np.testing.assert_array_equal(np.asarray(deinterleave_scales(packed, 256, 16)), scales)


CHECKS = {
    "mxfp8-scale-edge-table": scale_edge_table,
    "mxfp8-element-cast": element_cast,
    "mxfp8-decode-codes": decode_codes,
    "mxfp8-scale-rounds-up": scale_rounds_up,
    "mxfp8-e4m3-in-both-directions": e4m3_in_both_directions,
    "mxfp8-both-orientations-from-the-source": both_orientations,
    "mxfp8-poison-stays-visible": poison_stays_visible,
    "mxfp8-scale-layout": scale_layout,
}
