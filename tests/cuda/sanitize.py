"""The Hopper expert layer on tiny shapes under the four tools of compute-sanitizer, on a GPU of compute capability 9.0.

    python tests/cuda/sanitize.py --out LOGS      # all four at once; prints one line per tool, exits 1 if one found something
    python tests/cuda/sanitize.py --run           # the shapes alone, as the tools run them

Memory starts full of NaN, except under initcheck, which would take that for data: there it starts as it was allocated. initcheck
does not see bulk tensor stores as writes either, so it reports every read of their results by ordinary loads. Those of the kernels
that have such sources are counted apart and not held against them; that they read nothing else is what the tests show on memory
full of NaN. Any other kernel's read of what nothing wrote is an error.

racecheck's reports are judged pair by pair (race_reports.py); those known to be ordered are counted apart.

Forward, backward from saved gate and up, backward with recompute and accumulation, on dirty memory, held to the FP32 oracle; and
the ways of many rows, which these few would not take by themselves.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import race_reports

TOOLS = ("memcheck", "synccheck", "racecheck")  # at once; initcheck follows
READERS = ("combine_kernel",)  # of what bulk tensor stores wrote
MISREAD = (race_reports.dots_taken,)  # by racecheck
# What experts with many rows take: x gathered in the forward, and dispatched for the weight gradients by dgrad_gate_up.
MANY_ROWS = {
    **{"gate_up": "gathered", "wgrad_down": "resident_rows", "wgrad_gate_up": "resident_rows"},
    **dict.fromkeys(("down", "dgrad_down", "dgrad_gate_up"), "dispatched"),
}
BESIDE = MANY_ROWS | {"gate_up": "beside"}  # x dispatched in two parts
SHAPES = {
    # name: (group sizes or None, K, E, T, D, F, activation), as in test_expert_layer.py
    "tiny_one_slot": ([3, 0, 130], 1, 3, None, 72, 40, "swiglu"),
    "tiny_two_slots": (None, 2, 3, 65, 136, 72, "swiglu"),
}
# Tasks for more than a round of 132 multiprocessors, so that some stand in front of the cut.
TWO_PARTS = ([3000, 0, 7000], 1, 3, None, 72, 40, "swiglu")


def run_shapes(unwritten: bool) -> None:
    """`unwritten`: outputs and workspaces start as allocated, not full of NaN."""
    import test_expert_layer as layer
    import torch

    if unwritten:
        layer.c_api._dirty = lambda shape, dtype: torch.empty(shape, dtype=dtype, device="cuda")
        layer.c_api.Layer.soil = lambda self: None
    layer.CASES.update(SHAPES | {"two_parts": TWO_PARTS})
    # Not held to the oracle here: so many rows torch adds up in several blocks, by memory that initcheck takes for unwritten.
    case = layer.build("two_parts")
    whole, parts = (layer.run(case, ways=BESIDE | {"gate_up": way}) for way in ("dispatched", "beside"))
    assert all(torch.equal(whole[key], parts[key]) for key in ("y", "dx", "d_weight", "dw_gate_up", "dw_down"))
    print("two_parts: equal bits")
    for name in SHAPES:
        case = layer.build(name)
        plain = layer.run(case)
        found = layer.errors(case, plain)
        assert all(error <= layer.BF16_TOLERANCE for error in found.values()), (name, found)
        start = (torch.ones_like(plain["dw_gate_up"]), torch.ones_like(plain["dw_down"]))
        other = layer.run(case, recompute=True, accumulate_into=start)
        assert torch.equal(other["y"], plain["y"]) and torch.equal(other["dx"], plain["dx"]), name
        many = layer.run(case, ways=MANY_ROWS)
        for key in ("y", "dx", "d_weight", "dw_gate_up", "dw_down"):
            assert torch.equal(many[key], plain[key]), (name, key)
        print(name, found)


def run_tools(out: pathlib.Path, seconds: int, program: str, readers: tuple[str, ...], misread=()) -> bool:
    """All tools on `program --run`, with a line each; whether none found anything.

    `misread`: kinds of pairs that racecheck may report (race_reports.py).
    """
    out.mkdir(parents=True, exist_ok=True)
    # Every tensor an allocation of its own, so that memcheck sees its end.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    running = {}
    for tool in TOOLS:
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "1000000"]
        command += [sys.executable, program, "--run"]
        log = (out / f"{tool}.log").open("w")
        running[tool] = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    clean, end = True, time.monotonic() + seconds
    for tool, process in running.items():
        try:
            code = process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = f"stopped after {seconds} s"
        log = (out / f"{tool}.log").read_text()
        summary = [line for line in log.splitlines() if "SUMMARY" in line]
        print(f"{tool}: exit {code}; {summary[-1].strip('= ') if summary else 'no summary'}", flush=True)
        if tool == "racecheck" and code == 9:
            clean = judge_races(log, misread) and clean
        else:
            clean = clean and code == 0

    command = ["compute-sanitizer", "--tool", "initcheck", "--print-limit", "1000000", "--show-backtrace", "no"]
    done = subprocess.run(
        [*command, sys.executable, program, "--run", "--unwritten"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    counts, others = unwritten_reads(done.stdout, readers)
    text = f"initcheck: exit {done.returncode}; reads of bulk stores' results {counts}; others {len(others)}"
    (out / "initcheck.log").write_text("\n".join([text, *sorted(set(others))]) + "\n")
    print(text, flush=True)
    return clean and not others and done.returncode == 0


def judge_races(log: str, misread) -> bool:
    """Prints what racecheck's reports are; whether all of them are of the kinds `misread`."""
    built = pathlib.Path(__file__).resolve().parents[2] / "build" / "cuda" / "libmoe_cuda_c.so"
    library = pathlib.Path(os.environ.get("MOEJAX_CUDA_LIBRARY") or built)  # as c_api.py, which needs torch
    try:
        counts, others = race_reports.judge(log, library, misread)
    except (RuntimeError, ValueError) as error:
        print(f"racecheck: {error}", flush=True)
        return False
    print(f"racecheck: pairs known to be ordered {counts}; others {len(others)}", *others[:20], sep="\n  ", flush=True)
    return not others and "Target application returned an error" not in log  # 9 stands for either


def unwritten_reads(log: str, readers: tuple[str, ...]) -> tuple[dict[str, int], list[str]]:
    """Reads of memory that initcheck saw nothing write: how many in each of `readers`, and the kernels of the others."""
    kernels = re.findall(r"Uninitialized.*?\n=+\s+at (.*)", log)
    others = [name for name in kernels if not any(reader in name for reader in readers)]
    return {reader: sum(reader in name for name in kernels) for reader in readers}, others


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run the shapes, without a tool")
    parser.add_argument("--unwritten", action="store_true", help="with --run: do not fill memory first")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/sanitize"), help="folder for the logs")
    parser.add_argument("--seconds", type=int, default=120, help="time for all tools together")
    args = parser.parse_args()
    if args.run:
        run_shapes(args.unwritten)
    else:
        sys.exit(0 if run_tools(args.out, args.seconds, __file__, READERS, MISREAD) else 1)
