"""Grouped-query attention with RoPE and optional norms of queries and keys.

Letters: B batch, L sequence, S cached positions, D model width, N query heads, C key/value heads, H head width.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.config import ModelConfig
from moejax.nn import param
from moejax.nn.layers import RMSNorm
from moejax.ops import attention_split, hand_split
from moejax.ops.attention import attend, attention
from moejax.ops.linear import linear
from moejax.ops.norm import rms_norm
from moejax.ops.rope import rotate


class Attention(nnx.Module):
    """Causal self-attention inside each document of a packed row.

    1. q, k, v = W_q x, W_k x, W_v x (+ biases).
    2. Optional RMS norm of q and k: per head, or over all heads together (`qk_norm`).
    3. Rotate q and k; attend; W_o.

    Attributes:
      w_q (N H, D), w_k and w_v (C H, D), w_o (D, N H): FP32 masters.
      b_q, b_k, b_v: biases if `attention_bias`, else None.
      q_norm, k_norm: RMSNorm, or None.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        d_model, head_dim = config.d_model, config.head_dim
        if config.num_heads % config.num_kv_heads:
            raise ValueError(
                f"num_heads is {config.num_heads} and num_kv_heads {config.num_kv_heads}: the second must divide the first"
            )
        q_width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self.w_q = param.matrix(rngs, (q_width, d_model), ("heads", "embed"))
        self.w_k = param.matrix(rngs, (kv_width, d_model), ("kv_heads", "embed"))
        self.w_v = param.matrix(rngs, (kv_width, d_model), ("kv_heads", "embed"))
        self.w_o = param.matrix(rngs, (d_model, q_width), ("embed", "heads"))
        biases = config.attention_bias
        self.b_q = param.zeros((q_width,), ("heads",)) if biases else None
        self.b_k = param.zeros((kv_width,), ("kv_heads",)) if biases else None
        self.b_v = param.zeros((kv_width,), ("kv_heads",)) if biases else None
        self.q_norm, self.k_norm = _qk_norms(config, q_width, kv_width)
        self.qk_norm = config.qk_norm
        self.implementation = config.attention
        self.head_dim = head_dim
        self.num_kv_heads = config.num_kv_heads

    def __call__(self, x_BxLxD: jax.Array, turns: tuple[jax.Array, jax.Array], segment_BxL: jax.Array) -> jax.Array:
        """Attention output before the residual is added.

        Args:
          x_BxLxD: FP32 or BF16.
          turns: of `rope_turns`, for the position of each token in its document.
          segment_BxL: int32 document of each token.
        Returns:
          (B, L, D) in the dtype of x.
        """
        with jax.named_scope("attention"):
            q, k, v = self._project(hand_split.enter(x_BxLxD), turns)
            out_BxLxNH = attention(q, k, v, segment_BxL, implementation=self.implementation)
            return hand_split.leave(linear(out_BxLxNH, self.w_o[...]))

    def decode(
        self,
        x_BxLxD: jax.Array,
        turns: tuple[jax.Array, jax.Array],
        position: jax.Array,
        cache: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """The same for the positions `position` to `position + L - 1` of one document, with keys and values of the earlier ones.

        Args:
          position: int32 scalar; the caller makes sure that position + L <= S.
          cache: k_BxSxCxH, v_BxSxCxH.
        Returns:
          (B, L, D), and the cache with the new keys and values written.
        """
        q, k, v = self._project(x_BxLxD, turns)
        k_cache, v_cache = (
            jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), position, axis=1)
            for old, new in zip(cache, (k, v), strict=True)
        )
        query_L = position + jnp.arange(x_BxLxD.shape[1])
        seen_LxS = jnp.arange(k_cache.shape[1]) <= query_L[:, None]
        return linear(attend(q, k_cache, v_cache, seen_LxS), self.w_o[...]), (k_cache, v_cache)

    def _project(self, x_BxLxD, turns) -> tuple[jax.Array, jax.Array, jax.Array]:
        q = _linear(x_BxLxD, self.w_q, self.b_q)
        k = _linear(x_BxLxD, self.w_k, self.b_k)
        v = _linear(x_BxLxD, self.w_v, self.b_v)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.reshape(*x.shape[:2], -1, self.head_dim) for x in (q, k, v))
        if self.qk_norm == "head":
            q, k = (
                rms_norm(x, hand_split.enter(norm.scale[...]), norm.eps)
                for x, norm in ((q, self.q_norm), (k, self.k_norm))
            )
        if hand_split.pieces(hand_split.TENSOR) > 1 and k.shape[2] == self.num_kv_heads:  # whole: devices share heads
            k, v = (attention_split.own_head(x, q.shape[2]) for x in (k, v))
        return rotate(q, turns), rotate(k, turns), v


def _linear(x, w, b):
    return linear(x, w[...], None if b is None else b[...])


def _qk_norms(config: ModelConfig, q_width: int, kv_width: int):
    if config.qk_norm == "none":
        return None, None
    if config.qk_norm == "head":
        return tuple(RMSNorm(config.head_dim, eps=config.norm_eps, axes=(None,)) for _ in range(2))
    return (
        RMSNorm(q_width, eps=config.norm_eps, axes=("heads",)),
        RMSNorm(kv_width, eps=config.norm_eps, axes=("kv_heads",)),
    )
