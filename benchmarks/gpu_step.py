"""The whole training step on one GPU: tokens per second, peak memory, and where the time goes, with `native` and `xla` experts.

    python benchmarks/gpu_step.py --out benchmarks/results/h200/step.jsonl
    python benchmarks/gpu_step.py --impl native --set training.loss_chunk=8192

Qwen3-30B-A3B cut to 4 layers (3.11 billion parameters), batch 4 x 4096, FP32 masters, AdamW, clipping, recipe bf16: the step that
`train.py` compiles, on random tokens and random weights. Every implementation runs in a process of its own, so that peak memory is
its own. After the warm-up each step is waited for; the result is the median. The split is read from a profile of two steps of
another process, without CUDA graphs, in which XLA says for every kernel what part of the program it belongs to.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import arguments, result_lines  # noqa: E402

IMPLS = ("native", "xla")
NO_GPU = 3  # exit code of a measurement that has no GPU to run on
BASE = ROOT / "benchmarks" / "qwen3-30b-a3b-4layers.yaml"

# A kernel belongs to the first part whose pattern its name, or the scopes of its operation, match.
PARTS = {
    "experts": r"\bmoe::|moe_dispatch|moe_experts|moe_combine|moejax_cuda_moe|gemm\.(fprop|dgrad|wgrad|recompute)",
    "attention": r"attention|cudnn|fmha",
    "head and loss": r"head_and_loss",
    "optimizer": r"optimizer",
    "router and schedule": r"router|moe_schedule|schedule",
    "expert copies": r"expert_copies",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--impl", type=arguments.names(IMPLS), default="native,xla", help="expert backends, separated by commas"
    )
    parser.add_argument("--iterations", type=arguments.at_least(1), default=50, help="(default: %(default)s)")
    parser.add_argument(
        "--xla-iterations",
        type=arguments.at_least(1),
        default=5,
        help="of backend xla, whose steps take many times as long",
    )
    parser.add_argument("--set", nargs="*", default=[], help="config fields to change, dotted")
    result_lines.add_arguments(parser)
    parser.add_argument("--kernels", type=int, default=0, help="also print the slowest kernels of each part")
    parser.add_argument("--no-profile", action="store_true", help="leave out the split")
    parser.add_argument("--child", choices=("time", "profile"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print("RESULT " + json.dumps(measure(args.impl[0], args)), flush=True)
        return
    if importlib.util.find_spec("jax") is None:
        parser.error("needs moejax's own environment, this one has no jax: .venv/bin/python benchmarks/gpu_step.py")
    failed = []
    for impl in args.impl:
        iterations = args.xla_iterations if impl == "xla" else args.iterations
        try:
            result = _run_child(args, impl, iterations, "time")
            if not args.no_profile:
                result |= _run_child(args, impl, 2, "profile")
        except RuntimeError as error:
            print(f"{impl}: {error}", flush=True)
            failed.append(impl)
            continue
        result_lines.append(args.out, result_lines.stamp(args.commit) | result)
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


def _run_child(args, impl: str, iterations: int, child: str) -> dict:
    """One measurement in a process of its own."""
    command = [sys.executable, __file__, "--child", child, "--impl", impl, "--iterations", str(iterations)]
    command += ["--kernels", str(args.kernels), "--set", *args.set]
    environment = dict(os.environ)
    if child == "profile":
        environment["XLA_FLAGS"] = environment.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    result = None
    for text in process.stdout or ():
        if text.startswith("RESULT "):
            result = json.loads(text[7:])
        else:
            print(text, end="", flush=True)
    if process.wait() == NO_GPU:
        sys.exit("gpu_step.py needs a GPU, and JAX finds none here (python -m moejax.info says what it finds)")
    if process.returncode or result is None:
        raise RuntimeError(f"the {child} run failed with exit code {process.returncode}")
    return result


def measure(impl: str, args) -> dict:
    """One implementation: compiles the step, times it, profiles it. Returns a result line without date and commit."""
    import jax
    import jaxlib

    if jax.default_backend() != "gpu":
        sys.exit(NO_GPU)

    from moejax.config_load import load
    from moejax.mesh import make_mesh
    from moejax.training.compiling import compile_step
    from moejax.training.state import create_state, make_skeleton, parameter_counts
    from moejax.training.step import make_step, split_batch

    config = load(str(BASE), [f"moe.backend={impl}", "model.vocab_size=151936", *args.set])
    training = config.training
    with jax.set_mesh(make_mesh(config.mesh, config.moe.num_experts, axis_type=jax.sharding.AxisType.Auto)):
        mesh = jax.sharding.get_mesh()
        started = time.perf_counter()
        state = create_state(config, mesh)
        total, active = parameter_counts(state.params, config)
        batches = [
            jax.device_put(split_batch(_random_batch(config, seed), training.micro_batches)) for seed in range(4)
        ]
        step, _ = compile_step(make_step(make_skeleton(config), config), state, batches[0])
        print(
            f"{impl}: {total:,} parameters, {active:,} active; compiled after {time.perf_counter() - started:.0f} s",
            flush=True,
        )
        losses = []
        for i in range(min(5, args.iterations)):
            state, metrics = step(state, batches[i % 4])
            losses.append(float(metrics["loss"]))
        times = []
        for i in range(args.iterations):
            begin = time.perf_counter()
            state, metrics = step(state, batches[i % 4])
            jax.block_until_ready((state, metrics))
            times.append(time.perf_counter() - begin)
        losses.append(float(metrics["loss"]))
        if args.child == "profile":
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    for i in range(2):
                        state, metrics = step(state, batches[i])
                    jax.block_until_ready((state, metrics))
                (trace,) = pathlib.Path(folder).rglob("*.xplane.pb")
                return _report(*_split(trace, step.as_text(), steps=2), args)
    peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    tokens, seconds = training.global_batch * training.sequence_length, statistics.median(times)
    spread = f"{min(times) * 1e3:.1f} to {max(times) * 1e3:.1f}"
    print(f"{impl}: {tokens / seconds:,.0f} tokens/s, {seconds * 1e3:.1f} ms per step ({spread})", flush=True)
    print(f"{impl}: peak {peak / 2**30:.1f} GiB, losses {losses}", flush=True)
    flops = _flops(config)
    notes = (
        f"attention {config.model.attention}, remat {training.remat}, loss_chunk {training.loss_chunk}, "
        f"micro_batches {training.micro_batches}, batch {training.global_batch} x {training.sequence_length}"
    )
    return {
        "gpu": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__},
        "bench": "train_step",
        "shape": "qwen3-30b-a3b-4-layers",
        "recipe": config.recipe,
        "impl": f"moejax-{impl}",
        "pass": "step",
        "ranks": 1,
        "tokens": tokens,
        "ms": round(seconds * 1e3, 2),
        "tflops": round(flops / seconds / 1e12, 1),
        "bytes": None,
        "gbps": None,
        "tokens_per_second": round(tokens / seconds),
        "peak_bytes": peak,
        "parameters": total,
        "iterations": len(times),
        "notes": "; ".join([notes, *args.set]),
    }


def _report(split: dict[str, float], kernels: dict[str, list], window: float, args) -> dict:
    for part, ms in split.items():
        print(f"    {part:20s} {ms:8.2f} ms", flush=True)
        for name, kernel_ms, count in kernels[part][: args.kernels]:
            print(f"        {kernel_ms:8.3f} ms {count:6d} x  {name[:200]}", flush=True)
    print(
        f"    all kernels {sum(split.values()):.1f} ms, a step from its first to its last {window:.1f} ms", flush=True
    )
    return {"split_ms": {part: round(ms, 2) for part, ms in split.items()}}


def _random_batch(config, seed: int) -> dict:
    """Random tokens, four documents of unequal length in every row."""
    import numpy as np

    rng = np.random.default_rng(seed)
    rows, length = config.training.global_batch, config.training.sequence_length
    token = rng.integers(0, config.model.vocab_size, (rows, length), np.int32)
    cuts = np.sort(rng.integers(1, length, (rows, 3)), axis=1)
    segment = 1 + (np.arange(length)[None, :, None] >= cuts[:, None]).sum(-1).astype(np.int32)
    starts = np.concatenate([np.zeros((rows, 1), np.int64), cuts], axis=1)
    position = (np.arange(length) - np.take_along_axis(starts, segment - 1, axis=1)).astype(np.int32)
    target = np.where(np.roll(segment, -1, axis=1) == segment, np.roll(token, -1, axis=1), -1).astype(np.int32)
    target[:, -1] = -1
    return {"token": token, "target": target, "segment": segment, "position": position}


def _flops(config) -> float:
    """Useful FLOPs of a step: six per parameter that acts on a token, and the causal half of attention."""
    model, moe, training = config.model, config.moe, config.training
    attention = model.d_model * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    experts = 3 * moe.router.top_k * model.d_model * moe.expert_width + model.d_model * moe.num_experts
    matrices = model.num_layers * (attention + experts) + config.model.vocab_size * model.d_model
    scores = model.num_layers * 2 * model.num_heads * model.head_dim * training.sequence_length
    return training.global_batch * training.sequence_length * (6.0 * matrices + 3.0 * scores)


def _split(trace: pathlib.Path, program: str, steps: int) -> tuple[dict[str, float], dict[str, list], float]:
    """Milliseconds of kernel time per step and part, kernels of each part (name, ms, runs), and the window of a step in ms."""
    import jax

    scopes = dict(re.findall(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name=\"([^\"]*)\"", program, re.M))
    totals: dict[str, float] = dict.fromkeys([*PARTS, "other"], 0.0)
    found: dict[str, dict[str, list]] = {part: {} for part in totals}
    first, last = float("inf"), 0.0
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = {str(name): str(value) for name, value in event.stats}
                operation = stats.get("hlo_op", "")
                about = " ".join(
                    [event.name, stats.get("name", ""), stats.get("tf_op", ""), operation, scopes.get(operation, "")]
                )
                part = next((part for part, pattern in PARTS.items() if re.search(pattern, about)), "other")
                totals[part] += event.duration_ns / 1e6 / steps
                first, last = min(first, event.start_ns), max(last, event.start_ns + event.duration_ns)
                entry = found[part].setdefault(
                    f"{event.name} [{operation}] {scopes.get(operation, '')[-80:]}", [0.0, 0]
                )
                entry[0] += event.duration_ns / 1e6 / steps
                entry[1] += 1
    ranked = {
        part: sorted(((name, ms, count // steps) for name, (ms, count) in kernels.items()), key=lambda k: -k[1])
        for part, kernels in found.items()
    }
    return totals, ranked, (last - first) / 1e6 / steps


if __name__ == "__main__":
    main()
