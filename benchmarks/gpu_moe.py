"""The single-GPU BF16 expert layer beside other implementations (gpu_peers.py) and a dense cuBLAS product, on one GPU.

    python benchmarks/gpu_moe.py --shapes qwen3-30b-a3b,mixtral-8x7b --out benchmarks/results/h200/moe_layer.jsonl

Protocol (docs/benchmarks.md): a pause of a second before each pass, warm-up, then `--iterations` runs timed with device events,
median. Forward includes building the schedule and writes all residuals (gate and up); backward runs on saved residuals, overwrites
FP32 weight gradients and excludes the schedule; step is both, one after the other; a peer's backward is its step less its forward.
Every result is first held to an FP32 reference. FLOPs are 6 T K D F forward and twice that backward: padding is not counted.
Random data.
Letters: T tokens, K experts per token, E experts, D model width, F expert width.
"""

import argparse
import functools
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "kernels_cuda"))
import arguments
import c_api
import gpu_peers
import result_lines
import torch

OURS = "moejax-native"
MAX_ERROR = 5e-2  # BF16 layers are within 1e-2 of FP32
FLOPS = {"forward": 1, "backward": 2, "backward_accumulate": 2, "step": 3}  # by pass, in units of the forward's
NOTES = {"backward_accumulate": "FP32 weight gradients added to the buffer; "}

SHAPES = {  # E, K, D, F, T
    "qwen3-30b-a3b": (128, 8, 2048, 768, 8192),
    "mixtral-8x7b": (8, 2, 4096, 14336, 8192),
    "qwen3.5-397b-a17b": (512, 10, 4096, 1024, 8192),
    "kimi-k2-share": (6, 1, 7168, 2048, 65536),
    "glm-5.2-share": (4, 1, 6144, 2048, 65536),
    "deepseek-v4-pro-share": (6, 1, 7168, 3072, 65536),
}


def median_ms(run, iterations: int, warm_up: int = 5) -> float:
    for _ in range(warm_up):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(iterations)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(b.elapsed_time(e) for b, e in events)


def rested_ms(run, iterations: int) -> float:
    """Median after a second's pause: no pass of an implementation starts on a card that another has just heated."""
    torch.cuda.synchronize()
    time.sleep(1.0)
    return median_ms(run, iterations)


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


def temperature() -> str:
    """Of the card, now: its clock falls with heat. Empty where nvidia-smi does not say."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=temperature.gpu", "--format=csv,noheader", f"--id={_uuid()}"]
    found = subprocess.run(query, capture_output=True, text=True, check=False)
    return f"{found.stdout.strip()} C after" if found.returncode == 0 else ""


def _uuid() -> str:
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def dense_tflops(size: int = 8192) -> float:
    """What the card makes of a cuBLAS product at this time; taken right before each shape."""
    a = torch.randn(size, size, device="cuda").bfloat16()
    b = torch.randn(size, size, device="cuda").bfloat16()
    return 2 * size**3 / rested_ms(lambda: a @ b, 50) / 1e9


def print_profile(run, repeats: int = 5) -> None:
    """Microseconds per kernel and run, the grouped GEMMs by kind (0 gate/up, 1 down, 2 and 3 dgrad, 4 and 5 wgrad)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    times = {}
    for e in prof.key_averages():
        if e.device_time_total > 0:
            found = re.search(r"(?:KindSet|TokensN|Resident(?:Rows)?)<\(moe::Kind\)(\d)|(\w+)\(", e.key)
            name = e.key[:30] if found is None else f"gemm{found[1]}" if found[1] else found[2]
            times[name] = times.get(name, 0.0) + e.device_time_total / repeats
    print("    us: " + "  ".join(f"{name} {us:.0f}" for name, us in sorted(times.items())), flush=True)


def ours(name: str, p: Problem, expected: dict, args: argparse.Namespace) -> tuple[str, dict, str]:
    layer = c_api.Layer(p.tokens, p.top_k, p.experts, p.d, p.f, ways=args.ways)
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

    forward()
    backward()
    found = {"y": y, "dx": dx, "d_weight": d_weight, "dw_gate_up": dw_gate_up, "dw_down": dw_down}
    notes = check(name, OURS, found, expected)
    out = {"forward": rested_ms(forward, args.iterations), "backward": rested_ms(backward, args.iterations)}
    out["step"] = rested_ms(lambda: (forward(), backward()), args.iterations)
    out["backward_accumulate"] = rested_ms(lambda: backward(True), max(10, args.iterations // 5))
    if args.profile:
        print_profile(lambda: (forward(), backward()))
    ways = ",".join(f"{kind}={way}" for kind, way in args.ways.items())
    return OURS, out, f"ways {ways or 'by default'}; {notes}"


def peer_times(peer: gpu_peers.Peer, iterations: int) -> dict:
    forward, step = rested_ms(peer.forward, iterations), rested_ms(peer.step, iterations)
    return {"forward": forward, "backward": step - forward, "step": step}


def check(name: str, impl: str, found: dict, expected: dict, limit: float = MAX_ERROR) -> str:
    """Relative errors against the FP32 reference in one line; a result that is plainly another function raises ValueError."""
    errors = gpu_peers.errors(found, expected)
    line = ", ".join(f"{tensor} {error:.1e}" for tensor, error in errors.items())
    print(f"{name:24s} {impl:32s} relative errors: {line}", flush=True)
    if not all(error < limit for error in errors.values()):
        raise ValueError(f"{impl} does not compute the layer, relative errors against FP32: {line}")
    return f"relative errors {line}"


def peer_run(name: str, peer_name: str, p: Problem, expected: dict, iterations: int) -> tuple[str, dict, str]:
    """Name with version, milliseconds by pass, notes."""
    peer = gpu_peers.PEERS[peer_name](p)
    peer.step()
    notes = check(name, peer.name, peer.results(), expected)
    return peer.name, peer_times(peer, iterations), f"{peer.notes}; backward is step minus forward; {notes}"


def record(path: pathlib.Path | None, base: dict, p: Problem, impl: str, times: dict, notes: str, dense: float) -> None:
    """Prints one line per pass, and appends it to the file as JSON."""
    notes = "; ".join(filter(None, [notes, f"dense cuBLAS {dense:.0f} TFLOP/s right before this shape", temperature()]))
    for kind, ms in times.items():
        tflops = p.flops * FLOPS[kind] / ms / 1e9
        line = base | {
            "impl": impl, "pass": kind, "tokens": p.tokens, "ms": round(ms, 4), "tflops": round(tflops, 1),
            "bytes": None, "gbps": None, "notes": NOTES.get(kind, "") + notes,
        }  # fmt: skip
        print(f"{base['shape']:24s} {impl:32s} {kind:20s} {ms:9.3f} ms {tflops:7.1f} TFLOP/s", flush=True)
        result_lines.append(path, line)


def measure(name: str, args: argparse.Namespace, base: dict) -> int:
    """One shape: ours, then the peers, or after them. A peer that fails or lacks its package prints why and stops nobody.

    Returns how many were timed.
    """
    p = Problem(name)
    expected = gpu_peers.reference(p)
    dense = dense_tflops()
    print(f"{name}: dense cuBLAS 8192^3 BF16 {dense:.0f} TFLOP/s", flush=True)
    runs = [(peer, functools.partial(peer_run, name, peer, p, expected, args.iterations)) for peer in args.peers]
    if not args.no_ours:
        runs.insert(len(runs) if args.ours_last else 0, (OURS, functools.partial(ours, name, p, expected, args)))
    timed = 0
    for implementation, run in runs:
        try:
            result = run()
        except Exception:
            if implementation == OURS:
                raise
            print(f"{name}: {implementation} did not run:\n{traceback.format_exc()}", flush=True)
        else:
            record(args.out, base | {"shape": name}, p, *result, dense)
            timed += 1
        torch.cuda.empty_cache()
    torch.cuda.synchronize()
    return timed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes",
        type=arguments.names(SHAPES),
        default=",".join(SHAPES),
        help=f"of {', '.join(SHAPES)} (default: all)",
    )
    parser.add_argument(
        "--iterations", type=arguments.at_least(1), default=50, help="timed runs of each pass (default: %(default)s)"
    )
    parser.add_argument(
        "--peers",
        type=arguments.names(gpu_peers.PEERS, none=True),
        default="",
        help=f"also time these, comma-separated: {', '.join(gpu_peers.PEERS)}",
    )
    parser.add_argument(
        "--no-ours", action="store_true", help="time the peers alone (a peer that needs a process of its own)"
    )
    parser.add_argument(
        "--ours-last", action="store_true", help="time ours after the peers: who comes later finds a warmer card"
    )
    parser.add_argument(
        "--ways",
        type=arguments.pairs(c_api.KINDS, c_api.WAYS),
        default="",
        help=f"how ours runs its products, as gate_up=gathered,...: products {', '.join(c_api.KINDS)}; ways "
        f"{', '.join(c_api.WAYS)} (docs/native.md says which product has which)",
    )
    parser.add_argument("--profile", action="store_true", help="print time per kernel")
    result_lines.add_arguments(parser)
    args = parser.parse_args()
    if args.no_ours and not args.peers:
        parser.error("--no-ours leaves nothing to time: name peers with --peers")
    if args.no_ours and (args.ways or args.profile or args.ours_last):
        parser.error("--ways, --profile and --ours-last are about ours, which --no-ours leaves out")
    arguments.need_gpu(parser, torch.cuda.is_available(), None if args.no_ours else c_api.load)
    base = {
        **result_lines.stamp(args.commit), "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda}, "bench": "moe_layer", "recipe": "bf16", "ranks": 1,
    }  # fmt: skip
    timed = sum(measure(name, args, base) for name in args.shapes)
    return 0 if timed else 1


if __name__ == "__main__":
    sys.exit(main())
