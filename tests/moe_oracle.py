"""The expert layer in NumPy, float64, token by token: an oracle that shares nothing with the code under test.

Gradients are written out from the formulas; `test_moe.py` checks them against finite differences of this forward.
"""

import numpy as np


def sigmoid(z):
    return 1.0 / (1.0 + np.exp(-z))


def activation(gate, up, name, limit=None, alpha=1.702):
    """(h, dh/dgate, dh/dup) of one token's vectors."""
    if name in ("swiglu_clamped", "swiglu_oai"):
        gate_open, up_open = gate <= limit, np.abs(up) <= limit
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    else:
        gate_open = up_open = np.ones(gate.shape, bool)
    if name == "geglu":
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        value = 0.5 * gate * (1 + np.tanh(inner))
        slope = 0.5 * (1 + np.tanh(inner)) + 0.5 * gate / np.cosh(inner) ** 2 * np.sqrt(2 / np.pi) * (
            1 + 3 * 0.044715 * gate**2
        )
    else:
        steep = alpha if name == "swiglu_oai" else 1.0
        value = gate * sigmoid(steep * gate)
        slope = sigmoid(steep * gate) * (1 + steep * gate * (1 - sigmoid(steep * gate)))
    shift = 1.0 if name == "swiglu_oai" else 0.0
    return value * (up + shift), slope * (up + shift) * gate_open, value * up_open


def layer(x, weight, expert, w_gate_up, w_down, b_gate_up, b_down, dy, act):
    """y, and the gradients of sum(y * dy) in x, weight, w_gate_up, w_down, b_gate_up, b_down. Slots with expert -1 do nothing."""
    x, weight, w_gate_up, w_down, b_gate_up, b_down, dy = (
        np.asarray(leaf, np.float64) for leaf in (x, weight, w_gate_up, w_down, b_gate_up, b_down, dy)
    )
    grads = [np.zeros_like(leaf) for leaf in (x, weight, w_gate_up, w_down, b_gate_up, b_down)]
    dx, d_weight, d_gate_up, d_down, db_gate_up, db_down = grads
    y = np.zeros_like(x)
    for t, k in np.argwhere(np.asarray(expert) >= 0):
        e = expert[t, k]
        gate, up = w_gate_up[e] @ x[t] + b_gate_up[e]
        h, h_gate, h_up = activation(gate, up, act.name, act.limit, act.alpha)
        out = w_down[e] @ h + b_down[e]
        y[t] += weight[t, k] * out
        d_weight[t, k] = out @ dy[t]
        d_out = weight[t, k] * dy[t]
        db_down[e] += d_out
        d_down[e] += np.outer(d_out, h)
        dh = w_down[e].T @ d_out
        da = np.stack([dh * h_gate, dh * h_up])
        db_gate_up[e] += da
        d_gate_up[e] += da[:, :, None] * x[t]
        dx[t] += np.einsum("cf,cfd->d", da, w_gate_up[e])
    return y, *grads
