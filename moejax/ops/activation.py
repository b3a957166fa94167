"""The gated activations of an expert, of gate g and up u, with their derivatives. FP32 in, FP32 out.

`moe.py` decides what is rounded around them; these functions round nothing. Used forward by every product h = act(g,
u), and backward by hand-written rules, because the expert layer is one custom_vjp.
"""

import math

import jax
import jax.numpy as jnp

from moejax.config import ActivationConfig

_CLAMPED = ("swiglu_clamped", "swiglu_oai")
_SQRT_2_OVER_PI = 0.7978845608028654
_GELU_CUBIC = 0.044715  # of the tanh form of GELU, Hendrycks & Gimpel, arXiv 1606.08415


def check_activation(act: ActivationConfig) -> None:
    """Raises ValueError for an unknown name, an alpha that is no slope, or a limit that is missing, not positive or ignored."""
    if act.name not in ("swiglu", "geglu", *_CLAMPED):
        raise ValueError(f"act.name is {act.name!r}; expected one of swiglu, swiglu_clamped, swiglu_oai, geglu")
    if act.name in _CLAMPED and not (act.limit is not None and act.limit > 0):
        raise ValueError(f"act.limit is {act.limit}; {act.name} needs a positive limit (7.0 in gpt-oss)")
    if not (act.alpha > 0 and math.isfinite(act.alpha)):
        raise ValueError(f"act.alpha is {act.alpha}; expected a positive number (1.702 in gpt-oss)")
    if act.name not in _CLAMPED and act.limit is not None:
        raise ValueError(f"act.limit is {act.limit}, but {act.name} does not clamp: use swiglu_clamped, or limit: null")


def gated(gate: jax.Array, up: jax.Array, act: ActivationConfig) -> jax.Array:
    """h = act(gate, up), elementwise.

    swiglu: silu(g) u (Shazeer, arXiv 2002.05202). swiglu_clamped: the same after g = min(g, limit), u = clip(u, -limit,
    limit).
    swiglu_oai: same clamp, g sigmoid(alpha g) (u + 1) (gpt-oss model card, arXiv 2508.10925). geglu: gelu_tanh(g) u.
    """
    gate, up = _clamped(gate, up, act)
    value, _ = _gate_value_and_slope(gate, act)
    return value * (up + 1.0 if act.name == "swiglu_oai" else up)


def gated_grad(gate: jax.Array, up: jax.Array, dh: jax.Array, act: ActivationConfig) -> tuple[jax.Array, jax.Array]:
    """(d_gate, d_up) of `gated` for the cotangent dh. Beyond the clamp the derivative is 0, exactly on the limit 1."""
    gate_in, up_in = gate, up
    gate, up = _clamped(gate, up, act)
    value, slope = _gate_value_and_slope(gate, act)
    d_gate = dh * slope * (up + 1.0 if act.name == "swiglu_oai" else up)
    d_up = dh * value
    if act.limit is not None:
        # written as "beyond the limit" so that NaN keeps its derivative, and stays visible
        d_gate = jnp.where(gate_in > act.limit, 0.0, d_gate)
        d_up = jnp.where(jnp.abs(up_in) > act.limit, 0.0, d_up)
    return d_gate, d_up


def _clamped(gate: jax.Array, up: jax.Array, act: ActivationConfig) -> tuple[jax.Array, jax.Array]:
    """min(g, limit) and clip(u, -limit, limit) of the clamped variants; NaN stays NaN.

    Selections, because JAX halves the derivatives of minimum and clip where a value is exactly on the limit, as it often is in
    BF16.
    """
    if act.limit is None:
        return gate, up
    return jnp.where(gate > act.limit, act.limit, gate), jnp.where(
        jnp.abs(up) > act.limit, act.limit * jnp.sign(up), up
    )


def _gate_value_and_slope(gate: jax.Array, act: ActivationConfig) -> tuple[jax.Array, jax.Array]:
    """The factor made of the gate, and its derivative in the gate."""
    if act.name == "geglu":
        # (1 + tanh z) / 2 as sigmoid(2 z): 1 + tanh cancels, 0.2 % at a gate of -4. The sigmoid is exactly 0 or 1 long before
        # 30, and the cube of a huge gate would be Inf, and Inf * 0 NaN.
        bounded = jnp.clip(gate, -30.0, 30.0)
        sigmoid = jax.nn.sigmoid(2.0 * _SQRT_2_OVER_PI * (bounded + _GELU_CUBIC * bounded**3))
        inner_slope = 2.0 * _SQRT_2_OVER_PI * (1.0 + 3.0 * _GELU_CUBIC * bounded**2)
        return gate * sigmoid, sigmoid + gate * (sigmoid * (1.0 - sigmoid) * inner_slope)
    alpha = act.alpha if act.name == "swiglu_oai" else 1.0
    sigmoid = jax.nn.sigmoid(alpha * gate)
    return gate * sigmoid, sigmoid + alpha * gate * sigmoid * (1.0 - sigmoid)
