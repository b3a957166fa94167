"""Rotary position embedding: pairs of head dimensions turn by an angle proportional to the position.

Letters: B batch, L sequence, N heads, H head width, P rotated pairs.
Dimension i is paired with i + P ("halves", as in Llama and Hugging Face files), not with i + 1. Read `attention.py` next.
"""

import jax
import jax.numpy as jnp
import numpy as np


def rope_turns(
    position_BxL: jax.Array, head_dim: int, theta: float = 1.0e4, fraction: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every position's angles, computed once per forward and shared by all layers.

    Args:
      position_BxL: int32 positions; they restart at 0 in each document.
      head_dim: H.
      theta: base of the frequencies; pair i turns by theta^(-i / P) per position.
      fraction: share of each head that is rotated, from its start; the rest passes through.
    Returns:
      FP32 cos_BxLx1xP and sin_BxLx1xP, P = fraction * H / 2; the axis of 1 is that of the heads.
    Raises:
      ValueError: the rotated width is not a positive even number.
    Source: RoFormer, arXiv 2104.09864, eq. 15.
    """
    width = fraction * head_dim
    if width != int(width) or int(width) % 2 or not 0 < width <= head_dim:
        raise ValueError(
            f"rope_fraction {fraction} of head_dim {head_dim} rotates {width:g} dimensions: "
            "expected an even number between 2 and head_dim"
        )
    # FP64 on the host: exponents in FP32 lose a position per million at the low frequencies.
    frequency_P = theta ** (-np.arange(0, int(width), 2, dtype=np.float64) / width)
    angle_BxLx1xP = position_BxL[..., None, None].astype(jnp.float32) * jnp.asarray(frequency_P, jnp.float32)
    return jnp.cos(angle_BxLx1xP), jnp.sin(angle_BxLx1xP)


def rotate(x_BxLxNxH: jax.Array, turns: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns the first 2P dimensions of each head; FP32 inside, the input's dtype outside."""
    cos, sin = turns
    pairs = cos.shape[-1]
    first, second, rest = jnp.split(x_BxLxNxH, [pairs, 2 * pairs], axis=-1)
    first32, second32 = first.astype(jnp.float32), second.astype(jnp.float32)
    turned = [first32 * cos - second32 * sin, second32 * cos + first32 * sin]
    return jnp.concatenate([part.astype(x_BxLxNxH.dtype) for part in turned] + [rest], axis=-1)
