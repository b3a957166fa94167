"""The Hopper MXFP8 layer and its quantisers on tiny shapes under the tools of compute-sanitizer, on a GPU of compute
capability 9.0. As sanitize.py.

    python tests/cuda/sanitize_mx.py --out LOGS      # all four at once; prints one line per tool, exits 1 if one found something
    python tests/cuda/sanitize_mx.py --run           # the shapes alone, as the tools run them
    python tests/cuda/sanitize_mx.py --judge LOG     # a racecheck log of the library that is built

Both modes, weight gradients in MXFP8 and in BF16, in tiles and in strips, saved, packed and recomputed residuals, accumulation.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "kernels_cuda"))

import race_reports
import sanitize

SHAPES = [  # T, K, E, D, F
    (65, 2, 3, 160, 96),
    (300, 1, 1, 96, 160),  # three K blocks in a weight gradient
    # Three rows a token and whole tiles of columns: columns quantised from tokens that are kept (quantize_gathered.cu), of
    # both sources two slices in some of 132 blocks.
    (40, 3, 4, 640, 32),
]
READERS = ("quantize_tile", "combine_kernel")  # of what bulk tensor stores wrote
MISREAD = (  # by racecheck
    race_reports.column_reuse,
    race_reports.weights_brought,
    race_reports.codes_taken,
    race_reports.codes_exchanged,
)


def run_shapes(unwritten: bool) -> None:
    """`unwritten`: outputs and workspaces start as allocated, not full of NaN."""
    import mx_c_api
    import torch

    def fresh(shape, dtype):
        return (
            torch.empty(shape, dtype=dtype, device="cuda")
            if unwritten
            else torch.full(shape, float("nan"), dtype=dtype, device="cuda")
        )

    if unwritten:
        mx_c_api.dirty_bytes = lambda *shape: torch.empty(shape, dtype=torch.uint8, device="cuda")
    for tokens, top_k, experts, d, f in SHAPES:
        generator = torch.Generator("cuda").manual_seed(0)
        randn = lambda *shape: torch.randn(shape, device="cuda", generator=generator)  # noqa: E731, B023
        x, dy = randn(tokens, d).bfloat16(), randn(tokens, d).bfloat16()
        weight, expert = torch.rand(tokens, experts, device="cuda", generator=generator).topk(top_k)
        w_gate_up, w_down = randn(experts, 2, f, d) * d**-0.5, randn(experts, d, f) * f**-0.5
        for mode, wgrad_bf16, save, way in (
            ("aligned", False, "gate_up", "dispatched"),
            ("aligned", False, "gate_up", "resident_fp8"),
            ("aligned", True, "recompute", "resident_512"),
            ("aligned", False, "gate_up_mx", "dispatched"),  # continues a buffer
            ("exact", False, "gate_up", "resident_rows"),
            ("aligned", True, "recompute", "tokens_n"),
        ):
            ways = {}
            if way != "tokens_n":  # which these few rows would take by themselves
                ways = dict.fromkeys(("gate_up", "down", "dgrad_gate_up"), "dispatched")
                ways |= dict.fromkeys(("wgrad_down", "wgrad_gate_up"), way)
            layer = mx_c_api.MxLayer(tokens, top_k, experts, d, f, mode, wgrad_bf16, ways=ways)
            weights = layer.prepare(w_gate_up), layer.prepare(w_down)
            plan, saved = layer.schedule(expert.int().contiguous(), layer.new_plan()), layer.new_saved(save)
            y, dx, d_weight = fresh(x.shape, x.dtype), fresh(x.shape, x.dtype), fresh(weight.shape, torch.float32)
            dw = [torch.ones_like(w_gate_up), torch.ones_like(w_down)]
            layer.forward(x, weight.contiguous(), plan, *weights, y, saved)
            layer.backward(
                x, weight.contiguous(), dy, plan, *weights, saved, dx, d_weight, *dw, accumulate=save == "gate_up_mx"
            )
            torch.cuda.synchronize()
            for result in (y, dx, d_weight, *dw):
                assert result.isfinite().all(), (mode, save)
            print(mode, wgrad_bf16, save, way, y.float().norm().item(), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run the shapes, without a tool")
    parser.add_argument("--judge", type=pathlib.Path, metavar="LOG", help="judge a log of racecheck; needs no GPU")
    parser.add_argument("--unwritten", action="store_true", help="with --run: do not fill memory first")
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("build/sanitize_mx"), help="folder for the logs"
    )
    parser.add_argument("--seconds", type=int, default=120, help="time for all tools together")
    args = parser.parse_args()
    if args.run:
        run_shapes(args.unwritten)
    elif args.judge:
        sys.exit(0 if sanitize.judge_races(args.judge.read_text(), MISREAD) else 1)
    else:
        sys.exit(0 if sanitize.run_tools(args.out, args.seconds, __file__, READERS, MISREAD) else 1)
