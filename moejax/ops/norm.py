"""RMS normalisation with FP32 statistics. Letters: D the normalised width."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def rms_norm(x: jax.Array, scale_D: jax.Array, eps: jax.Array | float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis.

    Args:
      x: (..., D), any float dtype; statistics and the product with the scale are FP32.
      scale_D: FP32 learned scale; its gradient is FP32, never rounded to x's dtype.
      eps: added to the mean square.
    Returns:
      (..., D) in x's dtype.
    Source: Zhang and Sennrich, arXiv 1910.07467, eq. 4.
    """
    return _forward(x, scale_D, eps)[0]


def _forward(x, scale_D, eps):
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    # Residuals: x in its own dtype and one scalar a row. Plain autodiff would keep FP32 copies of x.
    return (x32 * inverse * scale_D).astype(x.dtype), (x, scale_D, inverse)


def _backward(residuals, dy):
    x, scale_D, inverse = residuals
    normed, dy32 = x.astype(jnp.float32) * inverse, dy.astype(jnp.float32)
    d_normed = dy32 * scale_D
    dx = inverse * (d_normed - normed * jnp.mean(d_normed * normed, axis=-1, keepdims=True))
    d_scale = jnp.sum(dy32 * normed, axis=tuple(range(x.ndim - 1)))
    return dx.astype(x.dtype), d_scale.astype(scale_D.dtype), None


rms_norm.defvjp(_forward, _backward)
