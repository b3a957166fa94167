"""What quantising the activations and gradients of an expert layer loses, counted while it trains.

Underflow and a pile of elements at the top of their range precede divergence (arXiv:2506.20752), so a run in recipe mxfp8
logs both per layer, for the layer's input x as the first forward product reads it and for the gradient dY of its output as
the first backward product does. The definition is that of `mxfp8.quantization_stats`, on BF16 values in blocks along D, on
every backend and in both modes: the loss of canonical MXFP8.

A backward pass can return nothing but cotangents, so counts travel as one: `observe` is the identity with a second
argument, `probe`, whose "gradient" they are. Like gradients they add over micro-batches, layers' scans and devices.

Letters: T tokens, D model width, N MoE layers.
"""

import jax
import jax.numpy as jnp

from moejax import native
from moejax.native import cuda_mx_calls
from moejax.ops.mxfp8 import quantization_stats, quantize

OPERANDS = ("x", "dy")
COUNTS = ("nonzero", "underflowed", "saturated")


def new_probe(layers: int) -> jax.Array:
    """Zeros (N, operands, counts): what `observe` is given, one entry per layer."""
    return jnp.zeros((layers, len(OPERANDS), len(COUNTS)), jnp.float32)


@jax.custom_vjp
def observe(x_TxD: jax.Array, y_TxD: jax.Array, probe: jax.Array, real_T: jax.Array) -> jax.Array:
    """y as it is. The cotangent of `probe` is what `loss_counts` says of x and of the cotangent of y.

    Args:
      x_TxD: input of the layer; gets no gradient from here.
      y_TxD: its output.
      probe: FP32 (operands, counts), of any value.
      real_T: int32, negative for tokens that visit no expert.
    """
    return y_TxD


def _observe_forward(x_TxD, y_TxD, probe, real_T):
    return y_TxD, (loss_counts(x_TxD, real_T), real_T)


def _observe_backward(residuals, dy_TxD):
    of_x, real_T = residuals
    return None, dy_TxD, jnp.stack([of_x, loss_counts(dy_TxD, real_T)]), None


observe.defvjp(_observe_forward, _observe_backward)


def loss_counts(x_TxD: jax.Array, real_T: jax.Array) -> jax.Array:
    """FP32 (counts): elements of real tokens that are finite and not zero, and of those how many become zero in MXFP8 and how
    many sit at 448, the top of their block's range.

    Args:
      x_TxD: FP32 or BF16, read as BF16; D a multiple of 32.
      real_T: int32, negative for tokens that do not count.
    """
    x_TxD = x_TxD.astype(jnp.bfloat16)
    if _native():
        return cuda_mx_calls.loss_counts(x_TxD, real_T)
    x_TxD = jnp.where((real_T >= 0)[:, None], x_TxD, jnp.zeros((), x_TxD.dtype))
    stats = quantization_stats(x_TxD, quantize(x_TxD, -1))
    return jnp.stack([getattr(stats, name) for name in COUNTS]).astype(jnp.float32)


def rates(counts: jax.Array) -> dict[str, jax.Array]:
    """`mx_underflow_x`, `mx_saturation_x`, `mx_underflow_dy`, `mx_saturation_dy`: FP32 shares of the nonzero elements, of each
    layer; 0 of nothing is 0.

    Args:
      counts: (N, operands, counts), summed over a step.
    """
    found = {}
    for i, operand in enumerate(OPERANDS):
        nonzero, underflowed, saturated = (counts[:, i, k] for k in range(len(COUNTS)))
        found[f"mx_underflow_{operand}"] = underflowed / jnp.maximum(nonzero, 1.0)
        found[f"mx_saturation_{operand}"] = saturated / jnp.maximum(nonzero, 1.0)
    return found


def _native() -> bool:
    """Whether the Hopper kernel can count. It sees one device's tokens, so no axis may be left to the compiler."""
    if jax.default_backend() == "cpu" or native.missing("_cuda"):
        return False
    if not str(getattr(jax.devices()[0], "compute_capability", "")).startswith("9."):
        return False
    mesh = jax.sharding.get_abstract_mesh()
    manual = jax.sharding.AxisType.Manual
    return mesh.empty or all(size == 1 or kind == manual for size, kind in zip(mesh.axis_sizes, mesh.axis_types))
