"""The MXFP8 format: blocks of 32 E4M3 elements that share one E8M0 scale, and the casts into and out of it.

A block is 32 consecutive elements along the contraction axis of the product the operand goes into; element q of a block
with scale code s has the value q * 2^(s - 127), and code 255 is NaN. `quantize` and `dequantize` are integer arithmetic
on the FP32 bits, because XLA on the CPU flushes subnormals in arithmetic and in comparisons: every platform gives the
same bits, jitted or not.

Scales are rounded up: the smallest code with 448 * 2^(s - 127) >= amax (arXiv:2506.08027; cuBLAS and TransformerEngine
do the same), so finite input never saturates. A block with a NaN or an Inf is poisoned as a whole, code 255 and
elements 0x7F.

Products of MXArrays: `mxfp8_matmul.py`. The scale layout of Blackwell's tensor cores: `mxfp8_layout.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

BLOCK = 32
E4M3_MAX = 448.0
NAN_CODE = 255  # the E8M0 code that is not a number
NAN_BYTE = 0x7F  # the E4M3 byte that is not a number

_ABS = 0x7FFFFFFF
_INF = 0x7F800000
_MANTISSA = 0x7FFFFF
_BITS_448 = 0x43E00000
_SIXTEEN_K = 0x46800000  # bits of 2^14: adding it to a positive number below 2^-6 rounds that to a multiple of 2^-9


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class MXArray:
    """An array in MXFP8: a pytree of two arrays that shard, stack and checkpoint like any others. No gradient.

    `axis` counts from the end, so that an MXArray keeps its meaning when `scan` or `vmap` strips a leading axis.
    Elements and scales have the same axes in the same order, so one PartitionSpec serves both if shards along the block
    axis are multiples of 32.

    Attributes:
      elements: float8_e4m3fn, in storage order.
      scales: uint8 E8M0 codes, in storage order: the shape of `elements` with the block axis n replaced by
        ceil(n / 32).
      axis: the axis blocks run along, negative, as an axis of the array (not of the storage).
      transposed: whether the last two axes are stored swapped.
    """

    elements: jax.Array
    scales: jax.Array
    axis: int = dataclasses.field(default=-1, metadata={"static": True})
    transposed: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array it stands for."""
        shape = tuple(self.elements.shape)
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    @property
    def ndim(self) -> int:
        return len(self.elements.shape)

    @property
    def storage_axis(self) -> int:
        """The block axis as an axis of `elements` and `scales`, negative."""
        return _swapped(self.axis) if self.transposed else self.axis

    @property
    def mT(self) -> "MXArray":
        """The last two axes exchanged: the same bytes, read the other way; nothing is requantised."""
        if self.ndim < 2:
            raise ValueError(f"mT needs two axes, got an MXArray of shape {self.shape}")
        return dataclasses.replace(self, axis=_swapped(self.axis), transposed=not self.transposed)

    def __repr__(self) -> str:
        def leaf(x):
            return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") and hasattr(x, "shape") else repr(x)

        kind = f"blocks of {BLOCK} along axis {self.axis}" + (", stored transposed" if self.transposed else "")
        shape = self.shape if hasattr(self.elements, "shape") else "?"
        return f"MXArray(shape={shape}, {kind}, elements={leaf(self.elements)}, scales={leaf(self.scales)})"


def quantize(x: jax.Array, axis: int = -1, *, transposed: bool = False) -> MXArray:
    """Rounds an array to MXFP8 with blocks along one axis.

    Quantise each operand along the contraction of its product, always from the high-precision source: the two
    orientations of a tensor are different numbers, and neither is made from the other. A last block shorter than 32 is
    a block of its own.

    Args:
      x: FP32 or BF16, at least one axis; subnormals count, NaN and Inf poison their block.
      axis: the axis that blocks run along.
      transposed: store the last two axes swapped (a column-wise copy whose contraction is contiguous in memory).
    Returns:
      MXArray of x's shape.
    Raises:
      TypeError: x is neither float32 nor bfloat16.
      ValueError: there is no such axis, or `transposed` with fewer than two axes.
    Source: OCP Microscaling v1.0 with scales rounded up; `docs/mxfp8.md`.
    """
    x = jnp.asarray(x)
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"quantize got {x.dtype}{list(x.shape)}, it takes float32 or bfloat16: cast first, once")
    axis = _negative(axis, x.ndim)
    if transposed and x.ndim < 2:
        raise ValueError(f"quantize(transposed=True) got shape {x.shape}, it needs at least two axes")
    return _quantize(x, axis, transposed)


def dequantize(mx: MXArray, dtype=jnp.float32) -> jax.Array:
    """The values of an MXArray, in its shape.

    FP32 is exact, subnormals included, save for magnitudes of 2^128 and more, which are Inf. BF16 is exact for codes
    3..246; below that the smallest elements lose bits, at 247 elements of 256 and more overflow. Code 255 or a NaN
    element gives NaN.

    Args:
      mx: what `quantize` made.
      dtype: float32 or bfloat16.
    Raises:
      TypeError: another dtype.
    """
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"dequantize got dtype {jnp.dtype(dtype)}, it gives float32 or bfloat16")
    return _dequantize(mx, jnp.dtype(dtype))


def scale_code(amax_bits: jax.Array) -> jax.Array:
    """E8M0 code of a block, from the FP32 bits of its largest magnitude.

    Args:
      amax_bits: int32, sign bit clear; anything from 0x7F800000 up stands for NaN or Inf.
    Returns:
      int32 code: the smallest s with 448 * 2^(s - 127) >= amax, or 255.
    """
    # 448 = 1.75 * 2^8, so the exponent minus 8, plus one when the mantissa is above 1.75
    code = jnp.maximum((amax_bits >> 23) - 8 + ((amax_bits & _MANTISSA) > 0x600000), 0)
    # The one magnitude whose product with fl32(1/448), the form hardware uses, rounds to 2^-127 although amax / 448 is
    # just above it
    code = jnp.where(amax_bits == 0x04600001, 0, code)
    return jnp.where(amax_bits >= _INF, NAN_CODE, code)


def to_e4m3(x: jax.Array) -> jax.Array:
    """FP32 to E4M3: nearest even, saturating at 448 (Inf too), NaN to 0x7F, the sign of zeros kept.

    `x.astype(jnp.float8_e4m3fn)` is not this cast: it turns everything above 464 into NaN.

    Args:
      x: float32 or bfloat16.
    Returns:
      float8_e4m3fn of the same shape.
    """
    bits = _bits(jnp.asarray(x))
    magnitude = bits & _ABS
    byte = round_to_e4m3(jnp.minimum(magnitude, _BITS_448)) | _sign_byte(bits)
    return as_e4m3(jnp.where(magnitude > _INF, NAN_BYTE, byte))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MXStats:
    """What a quantisation lost, as int32 counts, which add over tensors, micro-batches and ranks.

    Attributes:
      elements: all elements.
      nonzero: finite elements that were not zero.
      underflowed: of those, how many became zero.
      saturated: of those, how many sit on the largest magnitude of their block's scale, 448.
      blocks: all blocks.
      poisoned: blocks with a NaN or Inf.
    """

    elements: jax.Array
    nonzero: jax.Array
    underflowed: jax.Array
    saturated: jax.Array
    blocks: jax.Array
    poisoned: jax.Array

    def rates(self) -> dict[str, jax.Array]:
        """FP32 shares: `underflow` and `saturation` of nonzero elements, `poison` of blocks; 0 of nothing is 0."""

        def share(part, whole):
            return part / jnp.maximum(whole, 1).astype(jnp.float32)

        return {
            "underflow": share(self.underflowed, self.nonzero),
            "saturation": share(self.saturated, self.nonzero),
            "poison": share(self.poisoned, self.blocks),
        }


def quantization_stats(x: jax.Array, mx: MXArray) -> MXStats:
    """Counts what `mx = quantize(x, …)` lost. Underflow and a pile of elements at the top of their range precede
    divergence (arXiv:2506.20752), so both are logged per layer.

    Args:
      x: the source.
      mx: its quantisation.
    Raises:
      ValueError: the shapes differ, or there are too many elements for int32 counts.
    """
    if x.shape != mx.shape:
        raise ValueError(
            f"quantization_stats got x of shape {x.shape} and an MXArray of shape {mx.shape}: they must be one tensor's"
        )
    if x.size > jnp.iinfo(jnp.int32).max:
        raise ValueError(
            f"quantization_stats got shape {x.shape}, {x.size} elements; its counts are int32: pass parts of the tensor"
        )
    magnitude = _bits(x) & _ABS
    byte = element_bytes(mx) & 0x7F
    byte = jnp.swapaxes(byte, -1, -2) if mx.transposed else byte
    real = (magnitude > 0) & (magnitude < _INF)
    count = functools.partial(jnp.sum, dtype=jnp.int32)
    return MXStats(
        elements=jnp.int32(magnitude.size),
        nonzero=count(real),
        underflowed=count(real & (byte == 0)),
        saturated=count(real & (byte == 0x7E)),
        blocks=jnp.int32(mx.scales.size),
        poisoned=count(mx.scales == NAN_CODE),
    )


def relative_rmse(x: jax.Array, mx: MXArray) -> jax.Array:
    """||dequantize(mx) - x|| / ||x||, FP32. 2.65 % for Gaussian blocks of an FP32 source."""
    x = x.astype(jnp.float32)
    return jnp.linalg.norm((dequantize(mx) - x).ravel()) / jnp.linalg.norm(x.ravel())


@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantize(x: jax.Array, axis: int, transposed: bool) -> MXArray:
    stored_axis = _swapped(axis) if transposed else axis
    bits = _bits(jnp.swapaxes(x, -1, -2) if transposed else x)
    size = bits.shape[stored_axis]
    blocks = split_blocks(bits, stored_axis)
    code = jax.lax.expand_dims(scale_code(jnp.max(blocks & _ABS, axis=stored_axis)), [stored_axis + bits.ndim + 1])
    byte = jnp.where(code == NAN_CODE, NAN_BYTE, round_to_e4m3(_rescaled(blocks & _ABS, code)) | _sign_byte(blocks))
    elements = jax.lax.slice_in_dim(merge_blocks(byte.astype(jnp.uint8), stored_axis), 0, size, axis=stored_axis)
    return MXArray(as_e4m3(elements), jnp.squeeze(code, stored_axis).astype(jnp.uint8), axis, transposed)


@functools.partial(jax.jit, static_argnums=1)
def _dequantize(mx: MXArray, dtype) -> jax.Array:
    axis = mx.storage_axis
    size = mx.elements.shape[axis]
    byte = split_blocks(element_bytes(mx), axis)
    code = jax.lax.expand_dims(mx.scales.astype(jnp.int32), [axis + byte.ndim])
    value = jax.lax.bitcast_convert_type(decode_bits(byte, code), jnp.float32)
    value = jax.lax.slice_in_dim(merge_blocks(value, axis), 0, size, axis=axis)
    value = jnp.swapaxes(value, -1, -2) if mx.transposed else value
    return value.astype(dtype)


def _rescaled(magnitude: jax.Array, code: jax.Array) -> jax.Array:
    """Bits of magnitude * 2^(127 - code), as signed exponent and mantissa: below the FP32 range they are negative."""
    # A subnormal is its mantissa * 2^-149; the int-to-float conversion normalises it. Above code 100 it rounds to zero.
    normalised = _bits((magnitude & _MANTISSA).astype(jnp.float32))
    return jnp.where(
        magnitude <= _MANTISSA,
        normalised + ((-22 - jnp.minimum(code, 100)) << 23),
        magnitude + ((127 - code) << 23),
    )


def round_to_e4m3(bits: jax.Array) -> jax.Array:
    """The E4M3 byte nearest to a magnitude of at most 448, ties to even. Negative bits stand for tiny magnitudes."""
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    tiny = jax.lax.bitcast_convert_type(jnp.maximum(bits, 0), jnp.float32)
    subnormal = _bits(tiny + jnp.float32(2.0**14)) - _SIXTEEN_K
    return jnp.where(bits >= (127 - 6) << 23, normal, subnormal)


def decode_bits(byte: jax.Array, code: jax.Array) -> jax.Array:
    """FP32 bits of an element byte under a scale code, exactly, subnormal results included."""
    magnitude = byte & 0x7F
    subnormal = _bits(magnitude.astype(jnp.float32) * jnp.float32(2.0**-9))
    bits = jnp.where(magnitude < 8, subnormal, (magnitude << 20) + ((127 - 7) << 23))
    exponent = (bits >> 23) + code - 127
    shifted = ((bits & _MANTISSA) | (_MANTISSA + 1)) >> jnp.clip(1 - exponent, 0, 31)
    value = jnp.where(exponent > 0, (exponent << 23) | (bits & _MANTISSA), shifted)
    value = jnp.where(exponent >= 255, _INF, value)
    value = jnp.where(magnitude == 0, 0, value)
    value = jnp.where((magnitude == NAN_BYTE) | (code == NAN_CODE), 0x7FC00000, value)
    return value | ((byte & 0x80) << 24)


def split_blocks(x: jax.Array, axis: int, block: int = BLOCK) -> jax.Array:
    """[…, n, …] to […, ceil(n / block), block, …], the last block filled up with zeros; `axis` is negative."""
    position = axis + x.ndim
    short = -x.shape[position] % block
    if short:
        x = jnp.pad(x, [(0, short if i == position else 0) for i in range(x.ndim)])
    return x.reshape(*x.shape[:position], x.shape[position] // block, block, *x.shape[position + 1 :])


def merge_blocks(x: jax.Array, axis: int) -> jax.Array:
    """The inverse of `split_blocks`, padding included."""
    position = axis + x.ndim
    return x.reshape(*x.shape[: position - 1], x.shape[position - 1] * x.shape[position], *x.shape[position + 1 :])


def _bits(x: jax.Array) -> jax.Array:
    """FP32 bits as int32. BF16 widens by a shift: a conversion might flush."""
    if x.dtype == jnp.bfloat16:
        return jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32) << 16
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _sign_byte(bits: jax.Array) -> jax.Array:
    return (bits >> 24) & 0x80


def element_bytes(mx: MXArray) -> jax.Array:
    """The E4M3 bytes as int32, in storage order."""
    return jax.lax.bitcast_convert_type(mx.elements, jnp.uint8).astype(jnp.int32)


def as_e4m3(byte: jax.Array) -> jax.Array:
    """Integer bytes as float8_e4m3fn."""
    return jax.lax.bitcast_convert_type(byte.astype(jnp.uint8), jnp.float8_e4m3fn)


def _negative(axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis {axis} does not exist in an array of {ndim} axes")
    return axis - ndim if axis >= 0 else axis


def _swapped(axis: int) -> int:
    return {-1: -2, -2: -1}.get(axis, axis)
