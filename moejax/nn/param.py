"""How a parameter is declared: FP32 value, initialiser, and the logical name of each axis.

Logical names are plain metadata (`variable.logical_axes`); `moejax.mesh` turns them into shardings. Names in use:

  embed  residual width (D)     mlp      width of an expert, dense or shared MLP (F)     expert  experts (E)
  heads  query heads x H        vocab    vocabulary (V)                                  layer   stacked layers
  kv_heads  key/value heads x H                                                          None    never sharded
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

LOGICAL_AXES = ("layer", "embed", "mlp", "expert", "heads", "kv_heads", "vocab")


def matrix(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], kind: type[nnx.Variable] = nnx.Param):
    """FP32 matrix, or stack of them, of shape (..., out, in): truncated normal, variance 1 / in.

    Leading axes count neither as fan-in nor as fan-out (an (E, F, D) weight has fan-in D).
    """
    # 0.8796 is the standard deviation of a standard normal cut at +-2.
    std = 1.0 / math.sqrt(shape[-1]) / 0.87962566
    value = std * jax.random.truncated_normal(rngs.params(), -2.0, 2.0, shape, jnp.float32)
    return declare(value, axes, kind)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], std: float) -> nnx.Param:
    """FP32 parameter from a normal distribution of this standard deviation."""
    return declare(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes)


def zeros(shape: tuple[int, ...], axes: tuple[str | None, ...], kind: type[nnx.Variable] = nnx.Param):
    return declare(jnp.zeros(shape, jnp.float32), axes, kind)


def ones(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    return declare(jnp.ones(shape, jnp.float32), axes)


def declare(value: jax.Array, axes: tuple[str | None, ...], kind: type[nnx.Variable] = nnx.Param):
    """A variable of `kind` with its logical axes.

    Raises:
      ValueError: not one name per axis, or a name that is not in LOGICAL_AXES.
    """
    unknown = [name for name in axes if name is not None and name not in LOGICAL_AXES]
    if len(axes) != value.ndim or unknown:
        raise ValueError(f"axes {axes} for shape {value.shape}: expected one of {LOGICAL_AXES} or None per axis")
    return kind(value, logical_axes=axes)
