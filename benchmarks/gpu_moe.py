"""The single-GPU BF16 expert layer beside torch's grouped GEMM and a dense cuBLAS product, in one process on one GPU.

    python benchmarks/gpu_moe.py --shapes qwen3-30b-a3b,mixtral-8x7b --out benchmarks/results/h200/moe_layer.jsonl

Protocol (docs/benchmarks.md): warm-up, then `--iterations` runs timed with device events, median. Forward includes building the
schedule and writes all residuals (gate and up); backward runs on saved residuals, overwrites FP32 weight gradients and excludes the
schedule. FLOPs are 6 T K D F forward and twice that backward: padding is not counted. Random data.
Letters: T tokens, K experts per token, E experts, D model width, F expert width.
"""

import argparse
import contextlib
import datetime
import json
import pathlib
import re
import statistics
import subprocess
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "kernels_cuda"))
import c_api

SHAPES = {  # E, K, D, F, T
    "qwen3-30b-a3b": (128, 8, 2048, 768, 8192),
    "mixtral-8x7b": (8, 2, 4096, 14336, 8192),
    "qwen3.5-397b-a17b": (512, 10, 4096, 1024, 8192),
    "kimi-k2-share": (6, 1, 7168, 2048, 65536),
    "glm-5.2-share": (4, 1, 6144, 2048, 65536),
    "deepseek-v4-pro-share": (6, 1, 7168, 3072, 65536),
}


def median_ms(run, iterations: int) -> float:
    for _ in range(5):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(iterations)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(b.elapsed_time(e) for b, e in events)


class Problem:
    def __init__(self, name: str, seed: int = 0):
        self.experts, self.top_k, self.d, self.f, self.tokens = SHAPES[name]
        g = torch.Generator(device="cuda").manual_seed(seed)

        def randn(*shape, scale=1.0):
            out = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            return out.normal_(0, scale, generator=g)

        self.x, self.dy = randn(self.tokens, self.d), randn(self.tokens, self.d)
        self.w_gate_up = randn(self.experts, 2, self.f, self.d, scale=self.d**-0.5)
        self.w_down = randn(self.experts, self.d, self.f, scale=self.f**-0.5)
        scores = torch.rand(self.tokens, self.experts, device="cuda", generator=g)
        weight, expert = scores.topk(self.top_k, dim=1)
        self.weight, self.expert = (weight / weight.sum(1, keepdim=True)).contiguous(), expert.int().contiguous()
        self.flops = 6 * self.tokens * self.top_k * self.d * self.f


def dense_tflops(size: int = 8192) -> float:
    a = torch.randn(size, size, device="cuda").bfloat16()
    b = torch.randn(size, size, device="cuda").bfloat16()
    return 2 * size**3 / median_ms(lambda: a @ b, 50) / 1e9


def print_profile(run, repeats: int = 5) -> None:
    """Microseconds per kernel and run, the grouped GEMMs by kind (0 gate/up, 1 down, 2 and 3 dgrad, 4 and 5 wgrad)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    times = {}
    for e in prof.key_averages():
        if e.device_time_total > 0:
            found = re.search(r"KindSet<\(moe::Kind\)(\d)|(\w+)\(", e.key)
            name = e.key[:30] if found is None else f"gemm{found[1]}" if found[1] else found[2]
            times[name] = times.get(name, 0.0) + e.device_time_total / repeats
    print("    us: " + "  ".join(f"{name} {us:.0f}" for name, us in sorted(times.items())), flush=True)


def ours(p: Problem, iterations: int, profile: bool) -> dict:
    layer = c_api.Layer(p.tokens, p.top_k, p.experts, p.d, p.f)
    plan = layer.new_plan()
    y, dx = torch.empty_like(p.x), torch.empty_like(p.x)
    gate_up = torch.empty(2, layer.rows, p.f, dtype=torch.bfloat16, device="cuda")
    d_weight = torch.empty_like(p.weight)
    dw_gate_up = torch.empty(p.w_gate_up.shape, dtype=torch.float32, device="cuda")
    dw_down = torch.empty(p.w_down.shape, dtype=torch.float32, device="cuda")

    def forward():
        layer.schedule(p.expert, plan)
        layer.forward(p.x, p.weight, plan, p.w_gate_up, p.w_down, y, gate_up)

    def backward(accumulate=False):
        layer.backward(
            p.x,
            p.weight,
            p.dy,
            plan,
            p.w_gate_up,
            p.w_down,
            gate_up,
            dx,
            d_weight,
            dw_gate_up,
            dw_down,
            accumulate=accumulate,
        )

    out = {"forward": median_ms(forward, iterations), "backward": median_ms(backward, iterations)}
    out["backward_accumulate"] = median_ms(lambda: backward(True), max(10, iterations // 5))
    if profile:
        print_profile(lambda: (forward(), backward()))
    return out


def torch_grouped(p: Problem, iterations: int) -> dict:
    """The usual composition around torch._grouped_mm: sort, gather, two grouped products, SwiGLU, weighted scatter by slot."""
    w_gate_up = p.w_gate_up.view(p.experts, 2 * p.f, p.d).detach().requires_grad_()
    w_down = p.w_down.detach().requires_grad_()
    x, weight = p.x.detach().requires_grad_(), p.weight.detach().requires_grad_()

    def forward():
        flat = p.expert.view(-1)
        order = flat.argsort(stable=True)
        ends = torch.bincount(flat, minlength=p.experts).cumsum(0).int()
        rows = x[order // p.top_k]
        gate, up = torch._grouped_mm(rows, w_gate_up.transpose(1, 2), offs=ends).chunk(2, dim=1)
        out = torch._grouped_mm(torch.nn.functional.silu(gate) * up, w_down.transpose(1, 2), offs=ends)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return (out[back].view(p.tokens, p.top_k, p.d) * weight[..., None]).sum(1).to(x.dtype)

    def both():
        for t in (x, weight, w_gate_up, w_down):
            t.grad = None
        forward().backward(p.dy)

    fwd, step = median_ms(forward, iterations), median_ms(both, iterations)
    return {"forward": fwd, "backward": step - fwd}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--peers", action="store_true", help="also time torch._grouped_mm")
    parser.add_argument("--profile", action="store_true", help="print time per kernel")
    parser.add_argument("--out", type=pathlib.Path, help="append JSON lines here")
    parser.add_argument("--commit", default="", help="commit of the code; asked of git if empty")
    args = parser.parse_args()
    commit = args.commit
    if not commit:
        with contextlib.suppress(OSError):
            commit = subprocess.run(
                ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
            ).stdout.strip()
    dense = dense_tflops()
    print(f"dense cuBLAS 8192^3 BF16: {dense:.0f} TFLOP/s", flush=True)
    base = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": commit, "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda}, "bench": "moe_layer", "recipe": "bf16", "ranks": 1,
    }  # fmt: skip
    for name in args.shapes.split(","):
        p = Problem(name)
        results = {"moejax-native": ours(p, args.iterations, args.profile)}
        torch.cuda.empty_cache()
        if args.peers:
            try:
                results[f"torch-grouped_mm-{torch.__version__}"] = torch_grouped(p, max(10, args.iterations // 2))
            except torch.OutOfMemoryError as error:
                print(f"{name}: torch grouped_mm: {str(error).splitlines()[0]}")
        for impl, times in results.items():
            for kind, ms in times.items():
                flops = p.flops * (1 if kind == "forward" else 2)
                tflops = flops / ms / 1e9
                notes = f"dense cuBLAS {dense:.0f} TFLOP/s in the same run"
                if kind == "backward_accumulate":
                    notes += "; FP32 weight gradients added to the buffer"
                elif impl.startswith("torch") and kind == "backward":
                    notes += "; BF16 weight gradients; step minus forward"
                line = base | {
                    "shape": name, "impl": impl, "pass": kind, "tokens": p.tokens, "ms": round(ms, 4), "tflops": round(tflops, 1),
                    "bytes": None, "gbps": None, "notes": notes,
                }  # fmt: skip
                print(f"{name:24s} {impl:32s} {kind:20s} {ms:9.3f} ms {tflops:7.1f} TFLOP/s", flush=True)
                if args.out:
                    args.out.parent.mkdir(parents=True, exist_ok=True)
                    with args.out.open("a") as f:
                        f.write(json.dumps(line) + "\n")
        del p
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
