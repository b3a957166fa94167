"""Independent references for the GPU expert layer: the plan in NumPy, the layer in FP32 through torch's autograd."""

import math

import numpy as np
import torch

GROUP = 128


def plan(expert_TxK: np.ndarray, experts: int, rows: int, first_expert: int = 0, capacity: int = 2**31 - 1) -> dict:
    """The Plan of docs/design.md section 2, by a stable argsort."""
    flat = expert_TxK.reshape(-1) - first_expert
    local = np.where((flat >= 0) & (flat < experts), flat, experts)
    order = np.argsort(local, kind="stable")
    routed = np.bincount(local, minlength=experts + 1)[:experts]
    count = np.minimum(routed, capacity)
    padded = (count + GROUP - 1) // GROUP * GROUP
    start = np.concatenate([[0], np.cumsum(padded)[:-1]])
    row = np.full(flat.shape, -1, np.int64)
    slot = np.full(rows, -1, np.int64)
    at = 0
    for e in range(experts):
        kept = order[at : at + count[e]]
        row[kept] = start[e] + np.arange(count[e])
        slot[start[e] : start[e] + count[e]] = kept
        at += routed[e]
    return {
        "count_E": count,
        "start_E": start,
        "row_TxK": row.reshape(expert_TxK.shape),
        "slot_M": slot,
        "routed_E": routed,
    }


def activation(name: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if name == "swiglu":
        return torch.nn.functional.silu(gate) * up
    if name == "geglu":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    if name == "swiglu_clamped":
        return torch.nn.functional.silu(gate) * up
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def layer(name, x, weight, expert_TxK, w_gate_up, w_down, dy, biases=None):
    """FP32 y and gradients (dx, d_weight, dw_gate_up, dw_down, db_gate_up, db_down) of the expert layer, one expert at a time."""
    if biases is None:
        biases = (w_gate_up.new_zeros(w_gate_up.shape[:3]), w_down.new_zeros(w_down.shape[:2]))
    leaves = [t.detach().float().requires_grad_() for t in (x, weight, w_gate_up, w_down, *biases)]
    x, weight, w_gate_up, w_down, b_gate_up, b_down = leaves
    y = 0 * x + sum(0 * leaf.sum() for leaf in leaves)  # in the graph even when every expert is empty
    for e in range(w_down.shape[0]):
        token, slot = (expert_TxK == e).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        gate = x[token] @ w_gate_up[e, 0].T + b_gate_up[e, 0]
        up = x[token] @ w_gate_up[e, 1].T + b_gate_up[e, 1]
        out = activation(name, gate, up) @ w_down[e].T + b_down[e]
        y = y.index_add(0, token, out * weight[token, slot, None])
    y.backward(dy.float())
    return y.detach(), *(leaf.grad for leaf in leaves)


def relative(out: torch.Tensor, ref: torch.Tensor) -> float:
    """norm(out - ref) / norm(ref) in FP64; NaN stays NaN; an all-zero reference asks for exact zeros."""
    out, ref = out.double(), ref.double()
    norm = ref.norm().item()
    difference = (out - ref).norm().item()
    if math.isnan(difference):
        return math.nan
    return difference / norm if norm > 0 else (0.0 if difference == 0 else math.inf)
