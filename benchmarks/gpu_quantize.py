"""The MXFP8 quantisers beside a plain copy on one GPU, in one process.

    python benchmarks/gpu_quantize.py --out benchmarks/results/h200/quantize.jsonl

Bytes are those that must move: the source read once, elements and codes written once. The copy (torch, device to
device) counts bytes read and written and is measured in the same run, before and after; the figure is the share of
the better one. Random data, several buffers in turn so that the L2 cache holds nothing of the next one. Protocol:
docs/benchmarks.md.
"""

import argparse
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "kernels_cuda"))
import arguments
import mx_c_api
import result_lines
import torch
from mx_c_api import Output

FORMS = {
    # name: (rows, columns), each (form, layout, transposed)
    "rows": (("mx", "plain", False), None),
    "rows_interleaved": (("mx", "interleaved", False), None),
    "columns": (None, ("mx", "interleaved", False)),
    "columns_transposed": (None, ("mx", "plain", True)),
    "both": (("mx", "interleaved", False), ("mx", "interleaved", False)),
    "both_transposed": (("mx", "plain", False), ("mx", "plain", True)),
    "aligned_rows": (("aligned", "plain", False), None),
    "aligned_columns_transposed": (None, ("aligned", "fragment", True)),
    "aligned_both_transposed": (("aligned", "plain", False), ("aligned", "plain", True)),
    "weights_both": (("aligned_tile", "plain", False), ("aligned_tile", "plain", True)),
}
SHAPE = (1, 65536, 4096)
SETS = 3


def median_ms(runs, iterations: int) -> float:
    """Median over `iterations` calls, taking `runs` in turn."""
    for run in runs:
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(iterations)]
    for i, (begin, end) in enumerate(events):
        begin.record()
        runs[i % len(runs)]()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(b.elapsed_time(e) for b, e in events)


def copy_tbps(iterations: int) -> float:
    source = [torch.randn(2**29, device="cuda").bfloat16() for _ in range(2)]
    target = [torch.empty_like(s) for s in source]
    runs = [lambda s=s, t=t: t.copy_(s) for s, t in zip(source, target, strict=True)]
    return 2 * 2 * 2**29 / median_ms(runs, iterations) / 1e9


def bytes_of(out: Output) -> int:
    return 0 if not out.c.elements else out.elements.numel() * out.elements.element_size() + out.codes.numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=arguments.at_least(1), default=50, help="(default: %(default)s)")
    result_lines.add_arguments(parser)
    args = parser.parse_args()
    arguments.need_gpu(parser, torch.cuda.is_available(), mx_c_api.load)
    lib = mx_c_api.load()
    first_copy = copy_tbps(args.iterations)
    lines = []
    for dtype in (torch.bfloat16, torch.float32):
        sources = [torch.randn(SHAPE, device="cuda").to(dtype) for _ in range(SETS)]
        for name, specs in FORMS.items():
            outputs = [
                [
                    Output(lib, SHAPE, by_rows, *(spec or ("none",)))
                    for by_rows, spec in zip((True, False), specs, strict=True)
                ]
                for _ in range(SETS)
            ]
            runs = [lambda s=s, o=o: mx_c_api.quantize(lib, s, *o) for s, o in zip(sources, outputs, strict=True)]
            ms = median_ms(runs, args.iterations)
            moved = sources[0].numel() * sources[0].element_size() + sum(bytes_of(o) for o in outputs[0])
            lines.append((name, str(dtype).removeprefix("torch."), ms, moved))
            del outputs, runs
    best_copy = max(first_copy, copy_tbps(args.iterations))
    print(f"copy: {best_copy:.2f} TB/s (first {first_copy:.2f})")
    for name, dtype, ms, moved in lines:
        tbps = moved / ms / 1e9
        print(f"{name:28s} {dtype:9s} {ms:8.4f} ms {tbps:5.2f} TB/s {tbps / best_copy:6.1%} of copy", flush=True)
        line = {
            **result_lines.stamp(args.commit),
            "gpu": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
            "bench": "quantize",
            "shape": "x".join(map(str, SHAPE)),
            "recipe": "mxfp8",
            "impl": "moejax-native",
            "pass": name,
            "ranks": 1,
            "tokens": SHAPE[1],
            "ms": round(ms, 4),
            "tflops": None,
            "bytes": moved,
            "gbps": round(1000 * tbps, 1),
            "notes": f"{dtype} source; copy {best_copy:.3f} TB/s in the same run, share {tbps / best_copy:.3f}",
        }
        result_lines.append(args.out, line)


if __name__ == "__main__":
    main()
