"""MXFP8 from the exact rational rule, in NumPy float64, which holds every number here exactly and never flushes.

Written from the definition, not from `moejax.ops.mxfp8`: the scale is found among all codes by comparison, the element
among all E4M3 values by distance. Products of
decoded operands in float64 are the oracle of everything above.
"""

import numpy as np

BLOCK = 32
SCALE = np.ldexp(1.0, np.arange(255) - 127)  # value of codes 0..254
E4M3 = np.array(  # value of bytes 0x00..0x7E: 7 - exponent bias, 3 mantissa bits, subnormals below 2^-6
    [(b % 8) * 2.0**-9 if b < 8 else (1 + (b % 8) / 8) * 2.0 ** (b // 8 - 7) for b in range(127)]
)
MIDPOINT = (E4M3[:-1] + E4M3[1:]) / 2


def scale_codes(amax):
    """Smallest s with 448 * 2^(s - 127) >= amax; 255 for NaN and Inf."""
    amax = np.asarray(amax, np.float64)
    finite = np.isfinite(amax)
    return np.where(finite, np.searchsorted(448.0 * SCALE, np.where(finite, amax, 0.0), side="left"), 255).astype(
        np.uint8
    )


def element_bytes(y):
    """Nearest E4M3 byte, ties to the even byte, saturating, NaN to 0x7F."""
    y = np.asarray(y, np.float64)
    magnitude = np.where(np.isnan(y), 0.0, np.abs(y))
    below = np.searchsorted(MIDPOINT, magnitude, side="left")  # ties land on the lower neighbour ...
    tie = (below < len(MIDPOINT)) & (MIDPOINT[np.minimum(below, len(MIDPOINT) - 1)] == magnitude)
    byte = np.where(tie & (below % 2 == 1), below + 1, below)  # ... unless its byte is odd
    byte = byte | np.where(np.signbit(y), 0x80, 0)
    return np.where(np.isnan(y), 0x7F, byte).astype(np.uint8)


def quantize(x, axis=-1):
    """x float64 (or exact in it) -> (bytes, codes), both in x's axis order."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        x = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    size = x.shape[-1]
    blocks = np.concatenate([x, np.zeros((*x.shape[:-1], -size % BLOCK))], -1).reshape(
        *x.shape[:-1], -(-size // BLOCK), BLOCK
    )
    with np.errstate(invalid="ignore"):
        codes = scale_codes(np.max(np.abs(blocks), -1))
    poisoned = codes == 255
    with np.errstate(invalid="ignore"):
        scaled = blocks / SCALE[np.where(poisoned, 127, codes)][..., None]
    data = np.where(poisoned[..., None], 0x7F, element_bytes(scaled)).astype(np.uint8)
    data = data.reshape(*x.shape[:-1], -(-size // BLOCK) * BLOCK)[..., :size]
    return np.moveaxis(data, -1, axis), np.moveaxis(codes, -1, axis)


def dequantize(data, codes, axis=-1):
    """(bytes, codes) -> float64."""
    data, codes = np.moveaxis(data, axis, -1), np.moveaxis(codes, axis, -1)
    value = np.concatenate([E4M3, [np.nan], -E4M3, [np.nan]])[data]
    scale = np.where(codes == 255, np.nan, SCALE[np.minimum(codes, 254)])
    return np.moveaxis(value * np.repeat(scale, BLOCK, -1)[..., : data.shape[-1]], -1, axis)


def round_trip(x, axis=-1):
    return dequantize(*quantize(x, axis), axis)


def to_bf16(x):
    """float64 or float32 -> the nearest BF16 of the FP32 rounding, as float64."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)
