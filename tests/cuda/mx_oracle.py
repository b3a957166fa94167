"""Reference of the MXFP8 expert layer: the operands of ops/mxfp8.py, products in FP64, one expert at a time, through
torch.

Letters: T tokens, K experts per token, E experts, D model width, F expert width.
"""

import jax
import jax.numpy as jnp
import oracle
import torch

from moejax.ops import mxfp8
from moejax.ops.mxfp8_matmul import align


def operand(x: torch.Tensor, axis: int, mode: str, group_rows: int = 1) -> torch.Tensor:
    """What the products read of x, in FP64: quantised along `axis`, re-based in mode aligned."""
    mx = mxfp8.quantize(jax.dlpack.from_dlpack(x.contiguous()), axis)
    if mode == "aligned":
        mx = align(mx, group_rows)
    return torch.from_dlpack(mxfp8.dequantize(mx, jnp.float32)).double()


def padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Zero rows up to `rows`, a multiple of 128: the same for all experts, so that JAX compiles once."""
    return torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[0]))


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.float().bfloat16()


def slot_gradients(name, gate, up, dh):
    """d(gate), d(up) of dh through the activation, from BF16 gate and up, in FP64."""
    gate, up = (t.double().detach().requires_grad_() for t in (gate, up))
    oracle.activation(name, gate, up).backward(dh)
    return gate.grad, up.grad


def layer(name, x, weight, expert_TxK, w_gate_up, w_down, dy, mode, wgrad_bf16=False, saved=None):
    """y and gradients (dx, d_weight, dw_gate_up, dw_down) with the rounding points of the contract. x, dy BF16,
    masters FP32.

    `saved`: (gate_up BF16 (2, M, F), row_TxK) of the kernels, to start the backward from; it then shows the
    backward's own error.
    """
    T, K = expert_TxK.shape
    y, dx = (
        torch.zeros(T, x.shape[1], dtype=torch.float64, device=x.device),
        torch.zeros(T, x.shape[1], dtype=torch.float64, device=x.device),
    )
    d_weight = torch.zeros(T, K, dtype=torch.float64, device=x.device)
    dw_gate_up, dw_down = torch.zeros_like(w_gate_up), torch.zeros_like(w_down)
    rows = max(int((expert_TxK == e).sum()) for e in range(w_down.shape[0]))
    rows += -rows % 128
    for e in range(w_down.shape[0]):
        slots = (expert_TxK.reshape(-1) == e).nonzero().view(-1)  # in (token, slot) order
        if len(slots) == 0:
            continue
        n, token = len(slots), slots // K
        rows_x, rows_dy, w = padded(x[token], rows), padded(dy[token], rows), weight.reshape(-1)[slots, None].double()
        up_f = [operand(w_gate_up[e, i], -1, mode, 128) for i in range(2)]
        gate, up = (bf16(operand(rows_x, -1, mode) @ m.T) for m in up_f)
        if saved is not None:
            rows_of_slots = saved[1].reshape(-1)[slots].long()
            gate, up = (padded(saved[0][i, rows_of_slots], rows) for i in range(2))
        h = bf16(oracle.activation(name, gate.double(), up.double()))
        rows_y = bf16(operand(h, -1, mode) @ operand(w_down[e], -1, mode, 128).T)[:n].double()
        y.index_add_(0, token, w * rows_y)

        dh0 = operand(rows_dy, -1, mode) @ operand(w_down[e], -2, mode, 128)
        d_weight.view(-1)[slots] = (h.double() * dh0).sum(1)[:n]
        w = padded(w, rows)
        da = [bf16(t) for t in slot_gradients(name, gate, up, w * dh0)]
        scaled_h = bf16(w * h.double())
        rows_dx = sum(operand(da[i], -1, mode) @ operand(w_gate_up[e, i], -2, mode, 128) for i in range(2))
        dx.index_add_(0, token, bf16(rows_dx)[:n].double())

        along_rows = (lambda t: t.double()) if wgrad_bf16 else (lambda t: operand(t, -2, mode))
        dw_down[e] = (along_rows(rows_dy).T @ along_rows(scaled_h)).float()
        for i in range(2):
            dw_gate_up[e, i] = (along_rows(da[i]).T @ along_rows(rows_x)).float()
    return y, dx, d_weight, dw_gate_up, dw_down
