"""Linear, Embedding, RMSNorm and the gated MLP: parameters around `moejax.ops`.

Parameter names say what a leaf is: `w_*` matrices (out, in), `b_*` biases, `scale` of a norm, `table` of an embedding.
Letters: D model width, F hidden width, V vocabulary, I in, O out.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.config import ActivationConfig
from moejax.nn import param
from moejax.ops import hand_split
from moejax.ops.linear import linear
from moejax.ops.mlp import gated_mlp
from moejax.ops.norm import rms_norm


def compute_dtype(recipe: str) -> jnp.dtype:
    """Dtype of activations and of the operands of dense products: FP32 in recipe fp32, BF16 in bf16 and mxfp8."""
    return jnp.dtype(jnp.float32 if recipe == "fp32" else jnp.bfloat16)


class Linear(nnx.Module):
    """y = x W^T (+ b), operands in the dtype of x, FP32 master and gradient.

    Example:
      >>> from flax import nnx
      >>> from moejax.nn import Linear
      >>> layer = Linear(8, 4, axes=("vocab", "embed"), rngs=nnx.Rngs(0))
      >>> layer(jax.numpy.ones((2, 3, 8))).shape
      (2, 3, 4)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rngs: nnx.Rngs,
        axes: tuple[str | None, str | None] = (None, None),
        use_bias: bool = False,
        std: float | None = None,
    ):
        shape = (out_features, in_features)
        self.w_OxI = param.matrix(rngs, shape, axes) if std is None else param.normal(rngs, shape, axes, std)
        self.b_O = param.zeros((out_features,), axes[:1]) if use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        return linear(x, self.w_OxI[...], None if self.b_O is None else self.b_O[...])


class Embedding(nnx.Module):
    """Rows of an FP32 table, rounded to `dtype` on the way out."""

    def __init__(self, vocab_size: int, d_model: int, *, rngs: nnx.Rngs, std: float = 0.02, dtype=jnp.float32):
        self.table = param.normal(rngs, (vocab_size, d_model), ("vocab", "embed"), std)
        self.dtype = jnp.dtype(dtype)

    def __call__(self, token_BxL: jax.Array) -> jax.Array:
        return self._rows(token_BxL).astype(self.dtype)

    def _rows(self, token_BxL):
        table_VxD, sharding = self.table[...], jax.typeof(token_BxL).sharding
        if hand_split.pieces(hand_split.TENSOR) > 1:
            size = table_VxD.shape[0]
            own_BxL = token_BxL - jax.lax.axis_index(hand_split.TENSOR) * size
            here_BxLx1 = ((own_BxL >= 0) & (own_BxL < size))[..., None]
            return hand_split.leave(jnp.where(here_BxLx1, table_VxD[jnp.clip(own_BxL, 0, size - 1)], 0.0))
        if jax.sharding.AxisType.Explicit not in sharding.mesh.axis_types:
            return table_VxD[token_BxL]
        # Under explicit axes a look-up must say where its rows go: with their tokens.
        rows = jax.P(*sharding.spec, *[None] * (token_BxL.ndim + 1 - len(sharding.spec)))
        return table_VxD.at[token_BxL].get(out_sharding=rows)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, statistics in FP32."""

    def __init__(self, width: int, *, eps: float = 1.0e-6, axes: tuple[str | None] = ("embed",)):
        self.scale = param.ones((width,), axes)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.scale[...], self.eps)


class MLP(nnx.Module):
    """Gated MLP of dense layers, and of shared experts: n of width F are one of width n F, because their outputs are summed."""

    def __init__(
        self, d_model: int, width: int, *, rngs: nnx.Rngs, act: ActivationConfig | None = None, dtype=jnp.float32
    ):
        self.w_gate_up = param.matrix(rngs, (2, width, d_model), (None, "mlp", "embed"))
        self.w_down = param.matrix(rngs, (d_model, width), ("embed", "mlp"))
        self.act = act or ActivationConfig()
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return gated_mlp(x.astype(self.dtype), self.w_gate_up[...], self.w_down[...], self.act).astype(x.dtype)
