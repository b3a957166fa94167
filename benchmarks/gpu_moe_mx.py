"""The single-GPU MXFP8 expert layer beside our own BF16 layer and torch's grouped GEMM, in one process on one GPU.

    python benchmarks/gpu_moe_mx.py --shapes qwen3-30b-a3b --peers --out benchmarks/results/h200/moe_layer_mx.jsonl

Protocol of gpu_moe.py: quantisation of activations is part of forward and backward; that of the weights, once per optimizer
step, is timed on its own (pass `weights`). The variants of a shape run in turn, several rounds, each pass after a pause of a
second, because the card's clock falls as it warms up; a figure is the median over rounds of the medians. torch runs once, after
them. Then every variant's results are held to the FP32 reference; a line says by how much they differ. FLOPs are 6 T K D F forward
and twice that backward.
"""

import argparse
import pathlib
import re
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "kernels_cuda"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import arguments
import c_api
import gpu_moe
import gpu_peers
import mx_c_api
import result_lines
import torch
from gpu_moe import FLOPS, SHAPES, Problem, dense_tflops, rested_ms

MAX_ERROR = 0.12  # elements of E4M3 with a scale per 32: a few percent of a product of two such operands

VARIANTS = {
    # impl suffix: (mode, wgrad in BF16, what is saved)
    "aligned": ("aligned", False, "gate_up"),
    "aligned-wgrad_bf16": ("aligned", True, "gate_up"),
    "aligned-gate_up_mx": ("aligned", False, "gate_up_mx"),
    "exact": ("exact", False, "gate_up"),
}
# The same with tokens on the M side, timed where asked for: not the default for shapes with few rows an expert.
TOKENS_M = {
    f"{name}-tokens_m": (*VARIANTS[name], dict.fromkeys(("gate_up", "down", "dgrad_gate_up"), "dispatched"))
    for name in ("aligned", "aligned-wgrad_bf16")
}


class Mx:
    """Forward and backward of one variant, ready to be timed."""

    def __init__(self, p: Problem, mode: str, wgrad_bf16: bool, save: str, ways: dict[str, str] | None = None):
        self.layer = layer = mx_c_api.MxLayer(p.tokens, p.top_k, p.experts, p.d, p.f, mode, wgrad_bf16, ways=ways)
        masters = p.w_gate_up.float(), p.w_down.float()
        weights = [layer.prepare(m) for m in masters]
        plan, saved = layer.new_plan(), layer.new_saved(save)
        y, dx, d_weight = torch.empty_like(p.x), torch.empty_like(p.x), torch.empty_like(p.weight)
        dw = [torch.empty_like(m) for m in masters]
        self.saved_bytes = sum(t.numel() * t.element_size() for t in saved)

        def forward():
            layer.schedule(p.expert, plan)
            layer.forward(p.x, p.weight, plan, *weights, y, saved)

        def backward():
            layer.backward(p.x, p.weight, p.dy, plan, *weights, saved, dx, d_weight, *dw)

        def prepare():
            for master, weight in zip(masters, weights, strict=True):
                layer.prepare(master, weight)

        self.results = {"y": y, "dx": dx, "d_weight": d_weight, "dw_gate_up": dw[0], "dw_down": dw[1]}
        self.passes = {
            "forward": forward,
            "backward": backward,
            "step": lambda: (forward(), backward()),
            "weights": prepare,
        }
        forward()
        self.weight_bytes = (
            sum(m.numel() for m in masters) * 6 if mode == "aligned" else sum(m.numel() for m in masters) * 8
        )


class Bf16:
    def __init__(self, p: Problem):
        layer = c_api.Layer(p.tokens, p.top_k, p.experts, p.d, p.f)
        plan = layer.new_plan()
        y, dx, d_weight = torch.empty_like(p.x), torch.empty_like(p.x), torch.empty_like(p.weight)
        gate_up = torch.empty(2, layer.rows, p.f, dtype=torch.bfloat16, device="cuda")
        dw = [torch.empty(w.shape, dtype=torch.float32, device="cuda") for w in (p.w_gate_up, p.w_down)]
        self.saved_bytes = gate_up.numel() * 2

        def forward():
            layer.schedule(p.expert, plan)
            layer.forward(p.x, p.weight, plan, p.w_gate_up, p.w_down, y, gate_up)

        def backward():
            layer.backward(p.x, p.weight, p.dy, plan, p.w_gate_up, p.w_down, gate_up, dx, d_weight, *dw)

        self.results = {"y": y, "dx": dx, "d_weight": d_weight, "dw_gate_up": dw[0], "dw_down": dw[1]}
        self.passes = {"forward": forward, "backward": backward, "step": lambda: (forward(), backward())}
        forward()


def print_profile(run, repeats: int = 5) -> None:
    """Microseconds per kernel and run; the grouped GEMMs by kind (0 gate/up, 1 down, 2 and 3 dgrad, 4 and 5 wgrad)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for e in prof.key_averages():
        if e.device_time_total > 0:
            found = re.search(r"(\w+)[<(]", e.key.replace("(anonymous namespace)::", ""))
            name = e.key[:30] if found is None else found[1] + "".join(re.findall(r"(?:Kind|Form)\)(\d)", e.key))
            times[name] = times.get(name, 0.0) + e.device_time_total / repeats
    print("    us: " + "  ".join(f"{name} {us:.0f}" for name, us in sorted(times.items())), flush=True)


def checked(name: str, p: Problem, impls: list[str]) -> dict[str, str]:
    """Relative errors of each implementation against FP32; raises ValueError where one computes something else."""
    expected = gpu_peers.reference(p)
    notes = {}
    for impl in impls:
        run = None
        try:
            run = Bf16(p) if impl == "moejax-native" else Mx(p, *(VARIANTS | TOKENS_M)[impl])
            for tensor in run.results.values():
                tensor.fill_(float("nan"))
            run.passes["forward"]()
            run.passes["backward"]()
            limit = gpu_moe.MAX_ERROR if impl == "moejax-native" else MAX_ERROR
            notes[impl] = gpu_moe.check(name, impl, run.results, expected, limit)
        except torch.OutOfMemoryError as error:
            print(f"{name}: {impl} not held to FP32: {str(error).splitlines()[0]}")
        del run
        torch.cuda.empty_cache()
    return notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes",
        type=arguments.names(SHAPES),
        default=",".join(SHAPES),
        help=f"of {', '.join(SHAPES)} (default: all)",
    )
    every = VARIANTS | TOKENS_M
    parser.add_argument(
        "--variants", type=arguments.names(every), default=",".join(VARIANTS), help=f"of {', '.join(every)}"
    )
    parser.add_argument(
        "--iterations", type=arguments.at_least(1), default=50, help="in all rounds together (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=arguments.at_least(1), default=2, help="(default: %(default)s)")
    parser.add_argument("--peers", action="store_true", help="also time torch._grouped_mm, in BF16")
    parser.add_argument("--profile", action="store_true", help="print time per kernel")
    result_lines.add_arguments(parser)
    args = parser.parse_args()
    if args.iterations < args.rounds:
        parser.error(f"--iterations {args.iterations} is less than --rounds {args.rounds}, so a round would have none")
    arguments.need_gpu(parser, torch.cuda.is_available(), c_api.load)
    base = {
        **result_lines.stamp(args.commit),
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        "bench": "moe_layer",
        "ranks": 1,
    }
    for name in args.shapes:
        p = Problem(name)
        dense = dense_tflops()
        print(f"{name}: dense cuBLAS 8192^3 BF16 {dense:.0f} TFLOP/s", flush=True)
        heat: dict[str, str] = {}
        times: dict[tuple[str, str], list[float]] = {}
        bytes_saved = {}
        weight_gbps = {}
        for _ in range(args.rounds):
            for impl in ("moejax-native", *args.variants):
                try:
                    run = Bf16(p) if impl == "moejax-native" else Mx(p, *every[impl])
                except torch.OutOfMemoryError as error:
                    print(f"{name}: {impl}: {str(error).splitlines()[0]}")
                    continue
                bytes_saved[impl] = run.saved_bytes
                for kind, call in run.passes.items():
                    count = args.iterations // args.rounds if kind != "weights" else 10
                    times.setdefault((impl, kind), []).append(rested_ms(call, count))
                heat[impl] = gpu_moe.temperature()
                if isinstance(run, Mx):
                    weight_gbps[impl] = run.weight_bytes
                if args.profile:
                    print(f"  {impl}")
                    print_profile(lambda run=run: (run.passes["forward"](), run.passes["backward"]()))
                del run
                torch.cuda.empty_cache()
        if args.peers:
            try:
                peer = gpu_peers.torch_grouped(p)
                for kind, ms in gpu_moe.peer_times(peer, max(10, args.iterations // 2)).items():
                    times[(peer.name, kind)] = [ms]
                del peer
            except torch.OutOfMemoryError as error:
                print(f"{name}: torch grouped_mm: {str(error).splitlines()[0]}")
        errors = checked(name, p, ["moejax-native", *args.variants])
        for (impl, kind), found in times.items():
            ms = statistics.median(found)
            ours = impl in every
            tflops = None if kind == "weights" else round(p.flops * FLOPS[kind] / ms / 1e9, 1)
            notes = f"dense cuBLAS BF16 {dense:.0f} TFLOP/s right before this shape; {len(found)} rounds"
            notes += "".join(f"; {note[impl]}" for note in (heat, errors) if note.get(impl))
            if impl in bytes_saved:
                notes += f"; residuals {bytes_saved[impl]} bytes besides the inputs"
            if impl.startswith("torch"):
                notes += "; BF16 weight gradients; step minus forward" if kind == "backward" else ""
            moved = weight_gbps.get(impl) if kind == "weights" else None
            line = base | {
                "recipe": "mxfp8" if ours else "bf16",
                "shape": name,
                "impl": f"moejax-native-{impl}" if ours else impl,
                "pass": kind,
                "tokens": p.tokens,
                "ms": round(ms, 4),
                "tflops": tflops,
                "bytes": moved,
                "gbps": round(moved / ms / 1e6, 1) if moved else None,
                "notes": notes,
            }
            print(f"{name:22s} {line['impl']:34s} {kind:9s} {ms:9.3f} ms {tflops or 0:7.1f} TFLOP/s", flush=True)
            result_lines.append(args.out, line)
        del p
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
