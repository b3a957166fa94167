"""Public implementations of the BF16 expert layer, one adapter each, for gpu_moe.py; and the FP32 reference that all are held to.

An adapter is a function of a `gpu_moe.Problem` that imports its package, lays the weights out as the package wants them (not timed)
and returns a `Peer`. Routing is the problem's own: what is timed is dispatch, the products, SwiGLU, combine and their backward.
None of the packages is a dependency of moejax; an adapter whose package is missing raises ImportError.
Letters: T tokens, K experts per token, E experts, D model width, F expert width.
"""

import dataclasses
import importlib.metadata
import os
from collections.abc import Callable

import torch


@dataclasses.dataclass
class Peer:
    """`forward` and `step` (forward and backward) are timed; `results`: y and gradients of the last step, as in `reference`."""

    name: str  # with its version
    forward: Callable[[], object]
    step: Callable[[], None]
    results: Callable[[], dict[str, torch.Tensor]]
    notes: str


def reference(p) -> dict[str, torch.Tensor]:
    """FP32 y_TxD, dx_TxD, d_weight_TxK, dw_gate_up_Ex2xFxD and dw_down_ExDxF of the layer, one expert at a time, by formula."""
    like = {"y": p.x, "dx": p.x, "d_weight": p.weight, "dw_gate_up": p.w_gate_up, "dw_down": p.w_down}
    out = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in like.items()}
    for e in range(p.experts):
        token, slot = (p.expert == e).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        x, dy, weight = p.x[token].float(), p.dy[token].float(), p.weight[token, slot, None]
        w_gate, w_up, w_down = p.w_gate_up[e, 0].float(), p.w_gate_up[e, 1].float(), p.w_down[e].float()
        gate, up = x @ w_gate.T, x @ w_up.T
        sigmoid = torch.sigmoid(gate)
        h = gate * sigmoid * up
        row = h @ w_down.T
        out["y"].index_add_(0, token, weight * row)
        out["d_weight"][token, slot] = (row * dy).sum(1)
        out["dw_down"][e] = (weight * dy).T @ h
        dh = (weight * dy) @ w_down
        d_gate, d_up = dh * up * sigmoid * (1 + gate * (1 - sigmoid)), dh * gate * sigmoid
        out["dw_gate_up"][e, 0], out["dw_gate_up"][e, 1] = d_gate.T @ x, d_up.T @ x
        out["dx"].index_add_(0, token, d_gate @ w_gate + d_up @ w_up)
    return out


def errors(found: dict, expected: dict) -> dict[str, float]:
    """Relative norms per tensor; of weight gradients the worst over experts. What must be zero and is not counts as infinite."""
    worst = {}
    for name, ref in expected.items():
        pairs = zip(found[name], ref, strict=True) if name.startswith("dw_") else [(found[name], ref)]
        norms = torch.stack([torch.stack(((a.float() - b).norm(), b.norm())) for a, b in pairs])
        ratios = torch.where((norms == 0).all(1), 0.0, norms[:, 0] / norms[:, 1])
        worst[name] = float("nan") if bool(ratios.isnan().any()) else ratios.max().item()
    return worst


def _autograd_peer(name, notes, layer, leaves, dy, gradients, discard=lambda: None) -> Peer:
    """A peer whose `layer()` returns y with an autograd graph over `leaves`; `gradients()` reads them in our layout."""
    last = {}

    def forward():
        y = layer()
        discard()
        return y

    def step():
        for leaf in leaves:
            leaf.grad = None
        last["y"] = layer()
        last["y"].backward(dy)

    return Peer(name, forward, step, lambda: {"y": last["y"].detach(), **gradients()}, notes)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


def _leaves(p) -> tuple[torch.Tensor, ...]:
    """x_TxD, weight_TxK, gate and up as one matrix (E x 2F x D), w_down: what most packages take."""
    return _leaf(p.x), _leaf(p.weight), _leaf(p.w_gate_up.view(p.experts, 2 * p.f, p.d)), _leaf(p.w_down)


def _gradients(x, weight, dw_gate_up, w_down) -> dict[str, torch.Tensor]:
    return {"dx": x.grad, "d_weight": weight.grad, "dw_gate_up": dw_gate_up, "dw_down": w_down.grad}


def torch_grouped(p) -> Peer:
    """The usual composition around torch._grouped_mm: sort, gather, two grouped products, SwiGLU, weighted sum over slots."""
    leaves = x, weight, w_gate_up, w_down = _leaves(p)

    def layer():
        flat = p.expert.view(-1)
        order = flat.argsort(stable=True)
        ends = torch.bincount(flat, minlength=p.experts).cumsum(0).int()
        rows = x[order // p.top_k]
        gate, up = torch._grouped_mm(rows, w_gate_up.transpose(1, 2), offs=ends).chunk(2, dim=1)
        out = torch._grouped_mm(torch.nn.functional.silu(gate) * up, w_down.transpose(1, 2), offs=ends)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return (out[back].view(p.tokens, p.top_k, p.d) * weight[..., None]).sum(1).to(x.dtype)

    def gradients():
        return _gradients(x, weight, w_gate_up.grad.view(p.w_gate_up.shape), w_down)

    return _autograd_peer(
        f"torch-grouped_mm-{torch.__version__}", "BF16 weight gradients", layer, leaves, p.dy, gradients
    )


def _quick_tuning(module) -> None:
    """Lets Triton's tuner time each configuration of the kernels of `module` for 10 ms, not 100."""
    import triton

    def bench(call, quantiles):
        return triton.testing.do_bench(call, warmup=2, rep=10, quantiles=quantiles)

    for kernel in vars(module).values():
        if isinstance(kernel, triton.runtime.Autotuner):
            kernel._do_bench = bench


def liger_triton(p) -> Peer:
    """Liger's Triton layer. It tunes itself at the first call for a shape."""
    from liger_kernel.ops import fused_moe, fused_moe_kernels

    _quick_tuning(fused_moe_kernels)
    leaves = x, weight, w_gate_up, w_down = _leaves(p)

    def layer():
        return fused_moe.LigerFusedMoEFunction.apply(x, w_gate_up, w_down, p.expert, weight)

    def gradients():
        return _gradients(x, weight, w_gate_up.grad.view(p.w_gate_up.shape), w_down)

    name = f"liger-triton-{importlib.metadata.version('liger-kernel')}"
    return _autograd_peer(name, "BF16 weight gradients", layer, leaves, p.dy, gradients)


def _start_liger_cute() -> None:
    """One process as the whole NVSHMEM job."""
    import torch.distributed as dist
    from liger_cute_kernels import nvshmem

    if dist.is_initialized():
        return
    if "libnvshmem_host.so" not in os.environ.get("LD_PRELOAD", ""):
        raise ImportError(
            "LigerCute needs NVSHMEM 3.6.5 for CUDA 12, and torch loads one of its own first: start python with "
            "LD_PRELOAD=PATH/libnvshmem_host.so.3:PATH/libcudart.so.12"
        )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    nvshmem.init_from_pg(dist.group.WORLD)


def liger_cute(p) -> Peer:
    """LigerCute on one rank: its persistent expert-parallel kernels with nobody to talk to. Combine weights are BF16.

    Measured with NVSHMEM_SYMMETRIC_SIZE=20G and LIGER_MOE_SM90_NONRDC=1, which lets it use the module it ships for Mixtral.
    """
    _start_liger_cute()
    from liger_cute_kernels import nvshmem, tvm_ffi
    from liger_kernel.ops.cute.ops import moe

    nvshmem.pool_clear_all()  # of the shape before
    tvm_ffi.moe_configure_symmetric(p.tokens, p.d, p.experts, p.top_k, 1, 1, 1)
    x, weight = _leaf(p.x), _leaf(p.weight.bfloat16())
    w_gate, w_up = _leaf(p.w_gate_up[:, 0].contiguous()), _leaf(p.w_gate_up[:, 1].contiguous())
    w_down = _leaf(p.w_down)

    def layer():
        return moe.moe_fused(x, p.expert, weight, w_gate, w_up, w_down, p.experts, p.top_k)

    def gradients():
        return _gradients(x, weight, torch.stack((w_gate.grad, w_up.grad), 1), w_down)

    name = f"liger-cute-{importlib.metadata.version('liger-cute-kernels')}"
    notes = "BF16 weight gradients and combine weights"
    leaves = (x, weight, w_gate, w_up, w_down)
    return _autograd_peer(
        name, notes, layer, leaves, p.dy, gradients, discard=lambda: tvm_ffi.moe_pop_fwd(tvm_ffi.team_world())
    )


def sonic_moe(p) -> Peer:
    """SonicMoE's two halves around our routing; gate and up rows interleaved, as it stores them. Tunes itself at the first call.

    0.1.2.post1 with quack-kernels 0.3.11 works beside torch 2.11, installed without dependencies: it asks for 2.9.1 or older.
    The first call compiles 80 variants, on QUACK_COMPILE_WORKERS cores; QUACK_CACHE_DIR keeps them and the tuner's choice.
    """
    import quack.autotuner
    import sonicmoe.functional as sonic
    import triton
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import reduction_over_k_gather

    _quick_tuning(reduction_over_k_gather)
    quack.autotuner.Autotuner.do_bench = staticmethod(
        lambda call, quantiles: triton.testing.do_bench(call, warmup=2, rep=10, quantiles=quantiles)
    )
    x, weight = _leaf(p.x), _leaf(p.weight)
    w_gate_up = _leaf(p.w_gate_up.transpose(1, 2).reshape(p.experts, 2 * p.f, p.d))
    w_down = _leaf(p.w_down)
    slots = p.tokens * p.top_k

    def layer():
        def ints(size):
            return torch.empty(size, dtype=torch.int32, device="cuda")

        count, offset, token_of_row, slot_of_row, row_of_slot = (
            ints(n) for n in (p.experts, p.experts + 1, slots, slots, slots)
        )
        sonic.TC_topk_router_metadata_triton(p.expert, p.experts, count, offset, token_of_row, slot_of_row, row_of_slot)
        rows = (token_of_row, slot_of_row, row_of_slot, None, False)
        swiglu = ActivationType.SWIGLU
        h, gate_up = sonic._UpProjection.apply(
            x, w_gate_up.permute(1, 2, 0), None, offset, slots, p.top_k, *rows, swiglu, False, False
        )
        return sonic._DownProjection.apply(
            h, gate_up, w_down.permute(1, 2, 0), None, weight, offset, p.tokens, p.top_k, *rows, swiglu
        )

    def gradients():
        return _gradients(x, weight, w_gate_up.grad.view(p.experts, p.f, 2, p.d).transpose(1, 2), w_down)

    name = f"sonic-moe-{importlib.metadata.version('sonic-moe')}"
    quack_version = importlib.metadata.version("quack-kernels")
    return _autograd_peer(
        name, f"BF16 weight gradients; quack {quack_version}", layer, (x, weight, w_gate_up, w_down), p.dy, gradients
    )


PEERS = {"torch": torch_grouped, "liger-triton": liger_triton, "liger-cute": liger_cute, "sonic-moe": sonic_moe}
