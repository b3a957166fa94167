"""The gated activations against FP64 formulas, and their derivatives where a formula has a corner."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import ActivationConfig
from moejax.ops.activation import check_activation, gated, gated_grad

LIMIT = 1.5
ACTS = {
    "swiglu": ActivationConfig("swiglu"),
    "swiglu_clamped": ActivationConfig("swiglu_clamped", limit=LIMIT),
    "swiglu_oai": ActivationConfig("swiglu_oai", limit=LIMIT),
    "geglu": ActivationConfig("geglu"),
}


def value_and_slopes(gate, up, act):
    """h, dh/dgate, dh/dup in FP64; on the limit the derivative is that of the inside."""
    clamped = act.limit is not None
    g, u = (np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT)) if clamped else (gate, up)
    alpha = act.alpha if act.name == "swiglu_oai" else 1.0
    if act.name == "geglu":
        z = np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)
        phi = 1 / (1 + np.exp(-2 * z))  # (1 + tanh z) / 2
        value, slope = g * phi, phi + 2 * g * phi * (1 - phi) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * g**2)
    else:
        sigmoid = 1 / (1 + np.exp(-alpha * g))
        value, slope = g * sigmoid, sigmoid + alpha * g * sigmoid * (1 - sigmoid)
    factor = u + 1 if act.name == "swiglu_oai" else u
    inside_g, inside_u = (gate <= LIMIT, np.abs(up) <= LIMIT) if clamped else (True, True)
    return value * factor, slope * factor * inside_g, value * inside_u


@pytest.mark.parametrize("name", ACTS)
def test_values_and_both_ways_to_the_derivative_on_and_off_the_limit(name):
    """Autodiff of `gated` (backend `dense`) and `gated_grad` (all others) must agree where a value lies exactly on the clamp."""
    act, grid = ACTS[name], np.array([-4.0, -LIMIT, -0.7, 0.0, 0.4, LIMIT, 2.5])
    gate, up = (axis.ravel() for axis in np.meshgrid(grid, grid))
    expected = value_and_slopes(gate, up, act)
    g, u = jnp.asarray(gate, jnp.float32), jnp.asarray(up, jnp.float32)
    h, pullback = jax.vjp(lambda g, u: gated(g, u, act), g, u)
    ones = jnp.ones_like(h)
    for got in ((h, *pullback(ones)), (h, *gated_grad(g, u, ones, act))):
        for value, want in zip(got, expected):
            np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["swiglu_clamped", "swiglu_oai"])
def test_clamping_keeps_nan_and_bounds_infinity(name):
    act, nan, inf = ACTS[name], jnp.float32(np.nan), jnp.float32(np.inf)
    one = jnp.float32(1.0)
    assert np.isnan(gated(nan, one, act)) and np.isnan(gated(one, nan, act))
    assert gated(inf, one, act) == gated(jnp.float32(LIMIT), one, act)
    for sign in (1, -1):
        assert gated(one, sign * inf, act) == gated(one, jnp.float32(sign * LIMIT), act)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (ActivationConfig("relu"), "act.name is 'relu'"),
        (ActivationConfig("swiglu_oai"), "act.limit is None; swiglu_oai needs a positive limit"),
        (ActivationConfig("swiglu_oai", limit=float("nan")), "act.limit is nan"),
        (ActivationConfig("geglu", limit=7.0), "geglu does not clamp"),
        (ActivationConfig("swiglu_oai", limit=7.0, alpha=float("nan")), "act.alpha is nan; expected a positive number"),
        (ActivationConfig("swiglu_oai", limit=7.0, alpha=0.0), "act.alpha is 0.0"),
    ],
)
def test_what_cannot_work_is_refused_by_name(act, message):
    with pytest.raises(ValueError, match=message):
        check_activation(act)
