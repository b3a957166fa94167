"""Variants of the kernels in turn on one shape, on one GPU: whether their results have equal bits, and what each pass takes.

    python benchmarks/gpu_variants.py old.so new.so new.so@gate_up=gathered --shape qwen3-30b-a3b --recipes bf16,aligned

A variant is a build of the C library (`make cuda-library`), and the ways of its products where they are not the default ones. A
card lowers its clock with heat and power, so variants are compared within one call only: blocks of `--iterations` calls of each, in
rotation, `--rounds` times. By default the card is kept hot, as training keeps it; with `--rest` each block begins after a pause. A
block's figure is the median of its calls, by device events. Nothing is written: results of an experiment belong in NOTES.md. Exits
with 1 where bits differ.
"""

import argparse
import functools
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "kernels_cuda"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import arguments
import c_api
import gpu_moe
import mx_c_api
import torch
from gpu_moe_mx import print_profile

RECIPES = ("bf16", "aligned", "aligned-wgrad_bf16", "exact")
PASSES = ("forward", "backward")
PIECE = 1 << 27  # elements that are digested at a time


def variant(text: str) -> str:
    """An argparse type: a variant whose ways are known."""
    ways_of(text)
    return text


def ways_of(text: str) -> dict[str, str]:
    return arguments.pairs(c_api.KINDS, c_api.WAYS)(text.partition("@")[2])


def library_of(text: str) -> pathlib.Path:
    return pathlib.Path(text.partition("@")[0]).resolve()  # one file is loaded once, whatever it is called


class Memory:
    """Weights and results of one recipe, which all variants use: there is no room for a set each."""

    def __init__(self, p: gpu_moe.Problem, recipe: str, layer):
        self.y, self.dx, self.d_weight = torch.empty_like(p.x), torch.empty_like(p.x), torch.empty_like(p.weight)
        self.dw = [torch.empty(w.shape, dtype=torch.float32, device="cuda") for w in (p.w_gate_up, p.w_down)]
        self.gate_up = torch.empty(2, layer.rows, p.f, dtype=torch.bfloat16, device="cuda")
        masters = (p.w_gate_up, p.w_down)
        self.weights = list(masters) if recipe == "bf16" else [layer.prepare(w) for w in masters]

    def results(self) -> dict[str, torch.Tensor]:
        return {"y": self.y, "dx": self.dx, "d_weight": self.d_weight, "dw_gate_up": self.dw[0], "dw_down": self.dw[1]}


class Variant:
    """`text`: a library's path, and behind an @ its ways."""

    def __init__(self, text: str, p: gpu_moe.Problem, recipe: str, memory: Memory | None):
        library, chosen = library_of(text), ways_of(text)
        shape = (p.tokens, p.top_k, p.experts, p.d, p.f)
        if recipe == "bf16":
            layer = c_api.Layer(*shape, library=library, ways=chosen)
        else:
            mode, _, wgrad = recipe.partition("-")
            layer = mx_c_api.MxLayer(*shape, mode, wgrad == "wgrad_bf16", library=library, ways=chosen)
        self.text, self.layer = text, layer
        self.memory = m = memory or Memory(p, recipe, layer)
        saved = m.gate_up if recipe == "bf16" else (m.gate_up,)
        plan = layer.new_plan()

        def forward():
            layer.schedule(p.expert, plan)
            layer.forward(p.x, p.weight, plan, *m.weights, m.y, saved)

        def backward():
            layer.backward(p.x, p.weight, p.dy, plan, *m.weights, saved, m.dx, m.d_weight, *m.dw)

        self.passes = {"forward": forward, "backward": backward}

    def digests(self) -> dict[str, int]:
        """Of every result, of one forward and backward on memory full of ones."""
        for tensor in self.memory.results().values():
            tensor.view(torch.uint8).fill_(0xFF)
        self.layer.soil()
        for run in self.passes.values():
            run()
        return {name: digest(tensor) for name, tensor in self.memory.results().items()}


def digest(tensor: torch.Tensor) -> int:
    """A number that other bits, or the same ones elsewhere, would very likely change."""
    total = 0
    for piece in tensor.reshape(-1).split(PIECE):
        words = piece.view(torch.int16 if piece.element_size() == 2 else torch.int32)
        place = torch.arange(words.numel(), device="cuda", dtype=torch.int32) % 65521 + 1
        total = (total * 1000003 + int((words.long() * place).sum())) % (1 << 61)
    return total


def heat(seconds: float) -> None:
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


def block_ms(run, args: argparse.Namespace) -> float:
    if args.rest == 0:
        return gpu_moe.median_ms(run, args.iterations, warm_up=0)
    torch.cuda.synchronize()
    time.sleep(args.rest)
    return gpu_moe.median_ms(run, args.iterations)


def compare(p: gpu_moe.Problem, recipe: str, args: argparse.Namespace) -> bool:
    """One recipe: prints a line per variant and pass; whether all variants have equal bits."""
    variants: list[Variant] = []
    for text in args.variants:
        variants.append(Variant(text, p, recipe, variants[0].memory if variants else None))
    digests = [variant.digests() for variant in variants]
    for variant, found in zip(variants, digests, strict=True):
        other = [name for name, value in found.items() if value != digests[0][name]]
        print(f"{recipe} {variant.text}: {'other bits in ' + ', '.join(other) if other else 'equal bits'}", flush=True)
    torch.cuda.empty_cache()
    heat(args.heat)
    times: dict[tuple[str, str], list[float]] = {}
    for r in range(args.rounds):
        first = r % len(variants)
        for name in args.passes:
            for variant in variants[first:] + variants[:first]:
                times.setdefault((name, variant.text), []).append(block_ms(variant.passes[name], args))
    for (name, text), found in sorted(times.items(), key=lambda item: PASSES.index(item[0][0])):
        tflops = p.flops * gpu_moe.FLOPS[name] / statistics.median(found) / 1e9
        blocks = " ".join(f"{ms:.3f}" for ms in found)
        print(
            f"{recipe} {name:8s} {text:40s} {statistics.mean(found):8.4f} +- {statistics.pstdev(found):.4f} ms, "
            f"{tflops:6.1f} TFLOP/s at the median [{blocks}]",
            flush=True,
        )
    if args.profile:
        for variant in variants:
            for name in args.passes:
                print(f"{recipe} {name} {variant.text}")
                print_profile(variant.passes[name])
    return all(found == digests[0] for found in digests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", type=variant, help="LIBRARY.so, or LIBRARY.so@gate_up=gathered,...")
    parser.add_argument("--shape", choices=gpu_moe.SHAPES, required=True)
    parser.add_argument(
        "--recipes", type=arguments.names(RECIPES), default="bf16", help=f"of {', '.join(RECIPES)} (default: bf16)"
    )
    parser.add_argument(
        "--passes",
        type=arguments.names(PASSES),
        default=",".join(PASSES),
        help=f"of {', '.join(PASSES)} (default: both)",
    )
    parser.add_argument("--rounds", type=arguments.at_least(1), default=6, help="(default: %(default)s)")
    parser.add_argument(
        "--iterations", type=arguments.at_least(1), default=40, help="calls in a block (default: %(default)s)"
    )
    parser.add_argument("--heat", type=float, default=3.0, help="seconds of products before (default: %(default)s)")
    parser.add_argument("--rest", type=float, default=0.0, help="seconds of pause before each block (default: none)")
    parser.add_argument("--profile", action="store_true", help="print time per kernel")
    args = parser.parse_args()
    for text in args.variants:
        arguments.need_gpu(parser, torch.cuda.is_available(), functools.partial(c_api.load, library_of(text)))
    p = gpu_moe.Problem(args.shape)
    equal = [compare(p, recipe, args) for recipe in args.recipes]  # all of them
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
