"""The gated MLP of dense layers and shared experts. Letters: D model width, F hidden width. Experts are in `moe.py`."""

from functools import partial

import jax
import jax.numpy as jnp

from moejax.config import ActivationConfig
from moejax.ops.activation import gated, gated_grad
from moejax.ops.linear import linear


def gated_mlp(x: jax.Array, w_gate_up_2xFxD: jax.Array, w_down_DxF: jax.Array, act: ActivationConfig) -> jax.Array:
    """W_down act(W_gate x, W_up x).

    Args:
      x: (..., D) in the compute dtype: FP32 or BF16.
      w_gate_up_2xFxD: FP32 gate (index 0) and up (index 1) matrices.
      w_down_DxF: FP32 down matrix.
      act: the gated activation.
    Returns:
      (..., D) in the dtype of x. Gate, up and the hidden values are rounded to it; the weight gradients are FP32.
    """
    _, width, d_model = w_gate_up_2xFxD.shape
    gate_up = linear(x, w_gate_up_2xFxD.reshape(2 * width, d_model))
    return linear(_gated(gate_up, act), w_down_DxF)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gated(gate_up, act):
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return gated(gate, up, act).astype(gate_up.dtype)


def _gated_backward(act, gate_up, dh):
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return (jnp.concatenate(gated_grad(gate, up, dh.astype(jnp.float32), act), axis=-1).astype(gate_up.dtype),)


# The only residual is gate_up in its own dtype; plain autodiff would keep several FP32 arrays of that size.
_gated.defvjp(lambda gate_up, act: (_gated(gate_up, act), gate_up), _gated_backward)
