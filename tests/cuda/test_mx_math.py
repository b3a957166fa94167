"""The scalar maths of the CUDA quantisers (kernels_cuda/quantize_math.h), compiled for the host, against ops/mxfp8.py:
equal bits. Needs a C++ compiler, no GPU; the kernels themselves are compared in test_quantize.py.
"""

import ctypes
import pathlib
import shutil
import subprocess

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moejax.ops import mxfp8
from moejax.ops.mxfp8_layout import scale_offset
from moejax.ops.mxfp8_matmul import align

ROOT = pathlib.Path(__file__).resolve().parents[2]
CXX = shutil.which("g++") or shutil.which("clang++")

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler on PATH")


@pytest.fixture(scope="module")
def lib(tmp_path_factory):
    target = tmp_path_factory.mktemp("mx_math") / "mx_math.so"
    # no contraction, no flushing: what the device does
    command = [CXX, "-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC", f"-I{ROOT / 'kernels_cuda'}"]
    done = subprocess.run(
        [*command, str(ROOT / "tests/cuda/mx_math.cc"), "-o", str(target)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lib = ctypes.CDLL(str(target))
    lib.interleaved_offset.restype = ctypes.c_int64
    return lib


def run(function, *arrays, numbers=()):
    function(*(a.ctypes.data_as(ctypes.c_void_p) for a in arrays), *(ctypes.c_int64(n) for n in numbers))


def random_bits(n, seed=0):
    """FP32 bit patterns: any at all, and near every power of two."""
    rng = np.random.default_rng(seed)
    anything = rng.integers(0, 2**32, n, dtype=np.uint32)
    near = (np.arange(256, dtype=np.uint32) << 23)[:, None] + np.array(
        [0, 1, 2, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFE, 0x7FFFFF, 0x080000, 0x180000, 0x100000], np.uint32
    )
    return np.concatenate([anything, near.ravel(), near.ravel() | np.uint32(1 << 31)])


def bf16_bits():
    return np.arange(2**16, dtype=np.uint32) << 16


def test_scale_codes_of_every_bf16_maximum(lib):
    for bits in (bf16_bits(), random_bits(200_000)):
        amax = bits & np.uint32(0x7FFFFFFF)
        code = np.empty(amax.size, np.uint8)
        run(lib.scale_codes, amax, code, numbers=[amax.size])
        np.testing.assert_array_equal(
            code, np.asarray(mxfp8.scale_code(jnp.asarray(amax.view(np.int32)))).astype(np.uint8)
        )


def test_elements_round_to_nearest_even(lib):
    for bits in (bf16_bits(), random_bits(200_000, 1)):
        byte = np.empty(bits.size, np.uint8)
        run(lib.to_e4m3, bits, byte, numbers=[bits.size])
        expected = np.asarray(mxfp8.to_e4m3(jnp.asarray(bits.view(np.float32)))).view(np.uint8)
        np.testing.assert_array_equal(byte, expected)


def blocks(kind, rows=64, width=256, seed=2):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, width)).astype(np.float32)
    if kind == "spread":  # neighbouring blocks many binades apart, so that re-based elements turn subnormal and vanish
        x *= np.exp2(rng.integers(-30, 30, (rows, width // 32))).repeat(32, 1).astype(np.float32)
    elif kind == "special":
        x.reshape(-1)[rng.integers(0, x.size, 40)] = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32).repeat(10)
        x[3:9] *= np.float32(2.0**-130)
        x[9:12] = 0
        x[12:15] *= np.float32(2.0**120)
    elif kind == "bits":
        x = random_bits(rows * width, seed)[: rows * width].view(np.float32).reshape(rows, width)
    return np.ascontiguousarray(x)


@pytest.mark.parametrize("kind", ["gaussian", "spread", "special", "bits"])
@pytest.mark.parametrize("aligned", [False, True])
def test_blocks_have_the_bits_of_the_reference(lib, kind, aligned):
    x = blocks(kind, width=224 if kind == "spread" else 256)  # 224: the last group of 128 is short
    rows, width = x.shape
    byte, code = np.empty((rows, width), np.uint8), np.empty((rows, width // 32), np.uint8)
    run(lib.quantize_rows, x.view(np.uint32), byte, code, numbers=[rows, width, aligned])
    expected = mxfp8.quantize(jnp.asarray(x))
    expected = align(expected) if aligned else expected
    np.testing.assert_array_equal(code, np.asarray(expected.scales))
    np.testing.assert_array_equal(byte, np.asarray(expected.elements).view(np.uint8))


def every_maximum():
    """Each BF16 magnitude as the largest of a block, in all places of a group in turn; the others are smaller."""
    bits = np.arange(2**15, dtype=np.uint16).repeat(32).reshape(-1, 128)
    rng = np.random.default_rng(5)
    smaller = (bits * rng.random(bits.shape)).astype(np.uint16)
    smaller[:, ::32] = bits[:, ::32]
    return smaller | (rng.integers(0, 2, bits.shape) << 15).astype(np.uint16)


@pytest.mark.parametrize("kind", ["gaussian", "spread", "special", "bits", "every maximum"])
@pytest.mark.parametrize("aligned", [0, 1, 2])  # 2: factors of two blocks at once
def test_pairs_of_bf16_have_the_bits_of_the_reference(lib, kind, aligned):
    if kind == "every maximum":
        bits = every_maximum()
    else:
        x = blocks(kind, width=224 if kind == "spread" else 256)
        bits = np.asarray(jnp.asarray(x).astype(jnp.bfloat16)).view(np.uint16)
        if kind == "bits":
            bits = np.random.default_rng(6).integers(0, 2**16, x.shape).astype(np.uint16)
    rows, width = bits.shape
    byte, code = np.empty((rows, width), np.uint8), np.empty((rows, width // 32), np.uint8)
    run(lib.quantize_bf16_rows, bits, byte, code, numbers=[rows, width, aligned])
    expected = mxfp8.quantize(jnp.asarray(bits.view(ml_dtypes.bfloat16)))
    expected = align(expected) if aligned else expected
    np.testing.assert_array_equal(code, np.asarray(expected.scales))
    np.testing.assert_array_equal(byte, np.asarray(expected.elements).view(np.uint8))


def test_factors_of_two_blocks_make_the_elements_of_each(lib):
    lib.factors_that_differ.restype = ctypes.c_int64
    assert lib.factors_that_differ() == 0


def test_one_rounding_gives_the_elements_of_two_where_the_kernels_trust_it(lib):
    counts = np.empty(3, np.int64)
    lib.rounded_once(ctypes.c_int(28), counts.ctypes.data_as(ctypes.c_void_p))
    values, differ, missed = counts
    assert values > 10**7 and differ > 10**4  # the difference is there to be found
    assert missed == 0


def test_product_scale_is_the_product_of_both(lib):
    a, b = (g.ravel().astype(np.uint8) for g in np.meshgrid(np.arange(255), np.arange(255)))
    bits = np.empty(a.size, np.uint32)
    run(lib.product_scales, a, b, bits, numbers=[a.size])
    with np.errstate(over="ignore", under="ignore"):
        expected = np.exp2(a.astype(np.float64) + b - 254.0)
        expected = np.where(expected < 2.0**-149, 0.0, expected).astype(np.float32)
    np.testing.assert_array_equal(bits.view(np.float32), expected)


def test_interleaved_layout_is_that_of_the_library(lib):
    for columns in (32, 128, 160, 1024):
        for row in (0, 1, 31, 32, 127, 128, 300):
            for block in range(-(-columns // 32)):
                got = lib.interleaved_offset(ctypes.c_int64(row), ctypes.c_int64(block), ctypes.c_int64(columns))
                assert got == scale_offset(row, block, columns)


def test_fragment_order_gives_each_lane_its_columns(lib):
    positions = [lib.fragment_position(c) for c in range(128)]
    assert sorted(positions) == list(range(128))
    for quarter in range(4):  # lane % 4 holds columns 8 j + 2 (lane % 4) + i, in order
        mine = [8 * j + 2 * quarter + i for j in range(16) for i in range(2)]
        assert [positions[c] for c in mine] == list(range(32 * quarter, 32 * quarter + 32))


def test_platform_keeps_subnormals(lib):
    """The reference is integer arithmetic; this fails if the host maths were built to flush."""
    assert jax.default_backend() in ("cpu", "gpu")
    x = np.full((1, 32), 2.0**-130, np.float32)
    byte, code = np.empty((1, 32), np.uint8), np.empty((1, 1), np.uint8)
    run(lib.quantize_rows, x.view(np.uint32), byte, code, numbers=[1, 32, False])
    assert code[0, 0] == 0 and (byte == 0x20).all()  # 0.125 * 2^-127
