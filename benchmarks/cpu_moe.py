"""The whole SwiGLU expert layer on a CPU against three `jax.lax.ragged_dot`s and three dense products of the same FLOPs.

Run:    python -m benchmarks.cpu_moe            # a few minutes on 2 cores; appends to benchmarks/results/<machine>/cpu_moe.jsonl
Shapes: E32 D256 F512 K1, 4096 tokens, random routing (docs/design.md, benchmark protocol), and three others of SHAPES.

moejax' forward includes the schedule, dispatch and combine and writes its residuals (weights and x stay where they are);
the peers get rows that are already sorted and do none of that. `backward` runs on saved residuals, `step` is both in one
program. All of them run in turn in one process, so the ratios hold even where the times do not; each figure is a median.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import platform
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import result_lines
from moejax.config import RouterConfig
from moejax.ops.moe import moe_ffn, prepare_experts, resolve_backend
from moejax.ops.schedule import schedule
from moejax.ops.spec import MoESpec


@dataclasses.dataclass(frozen=True)
class Shape:
    """E experts, D and F their widths, K experts per token, T tokens."""

    E: int
    D: int
    F: int
    K: int
    T: int

    def __str__(self) -> str:
        return f"E{self.E} D{self.D} F{self.F} K{self.K}"


SHAPES = (
    Shape(32, 256, 512, 1, 4096),  # the bar
    Shape(64, 256, 256, 4, 1024),  # small experts, 64 rows each
    Shape(8, 512, 1024, 2, 2048),  # few, wide experts
    Shape(16, 384, 1536, 1, 2000),  # nothing is a power of two
)
PASSES = ("forward", "backward", "step")
# Before each timed call: XLA frees the temporaries of the call before on a thread of its own, after the results are ready, and
# giving back a few hundred MB took 6 ms of the next one's time.
SETTLE_SECONDS = 0.05


def moejax_layer(spec, expert, x, weight, w_gate_up, w_down):
    """Schedule, dispatch, products, combine."""
    plan = schedule(expert, spec)
    return moe_ffn(x, weight, plan, prepare_experts(w_gate_up, w_down, spec), spec)


def ragged_layer(group_sizes, x_sorted, w_gate, w_up, w_down):
    """Three `ragged_dot`s on rows sorted beforehand; weights contraction-first, as it wants them."""
    gate = jax.lax.ragged_dot(x_sorted, w_gate, group_sizes)
    up = jax.lax.ragged_dot(x_sorted, w_up, group_sizes)
    return jax.lax.ragged_dot(jax.nn.silu(gate) * up, w_down, group_sizes)


def dense_layer(_, x, w_gate, w_up, w_down):
    """Three dense products of the same FLOPs."""
    return (jax.nn.silu(x @ w_gate) * (x @ w_up)) @ w_down


def passes(function, routing, *operands):
    """Compiled forward (with residuals), backward and both, as functions without arguments.

    Args:
      function: (routing, *operands) to y, differentiable in the operands.
      routing: int32 array that says which rows belong to which expert; an argument of the compiled programs, so that
        none of the work on it is done at compile time.
    """

    def forward_and_pullback(routing, *operands):
        return jax.vjp(functools.partial(function, routing), *operands)

    forward, complete = without_inputs(forward_and_pullback, routing, *operands)
    y, pullback = complete(forward())
    dy = jax.random.normal(jax.random.key(9), y.shape, y.dtype)
    backward = jax.jit(lambda pullback, dy: pullback(dy))

    @jax.jit
    def step(dy, routing, *operands):
        y, pullback = forward_and_pullback(routing, *operands)
        return y, pullback(dy)  # y too: without it the last product would go as dead code

    return {
        "forward": forward,
        "backward": lambda: backward(pullback, dy),
        "step": lambda: step(dy, routing, *operands),
    }


def without_inputs(function, *args):
    """`function(*args)` compiled without those results that are its own arguments.

    Residuals such as weights are kept by reference. A compiled program that returned an argument would copy it, which no
    training step does and which took as long as the products here.

    Returns:
      A function without arguments that computes the other leaves of the result, and one that makes the result from them.
    """
    program, result = jax.make_jaxpr(function, return_shape=True)(*args)
    inputs = jax.tree.leaves(args)
    source = [
        next((i for i, argument in enumerate(program.jaxpr.invars) if argument is leaf), None)
        for leaf in program.jaxpr.outvars
    ]

    @jax.jit
    def compute(*args):
        return [leaf for leaf, at in zip(jax.tree.leaves(function(*args)), source, strict=True) if at is None]

    def complete(computed):
        computed = iter(computed)
        leaves = [next(computed) if at is None else inputs[at] for at in source]
        return jax.tree.unflatten(jax.tree.structure(result), leaves)

    return lambda: compute(*args), complete


def build(recipe: str, shape: Shape) -> dict[str, dict]:
    """{impl: {pass: callable}} on the same random data."""
    E, D, F, K = shape.E, shape.D, shape.F, shape.K
    keys = jax.random.split(jax.random.key(0), 6)
    x = jax.random.normal(keys[0], (shape.T, D), jnp.float32 if recipe == "fp32" else jnp.bfloat16)
    expert = jax.lax.top_k(jax.random.uniform(keys[1], (shape.T, E)), K)[1].astype(jnp.int32)  # K distinct ones
    weight = jax.random.uniform(keys[2], (shape.T, K), jnp.float32)
    w_gate_up = jax.random.normal(keys[3], (E, 2, F, D), jnp.float32) / D**0.5
    w_down = jax.random.normal(keys[4], (E, D, F), jnp.float32) / F**0.5

    built = {}
    for backend in ("xla", "native"):
        spec = MoESpec(
            E, D, F, router=RouterConfig(top_k=K, norm_topk=False), recipe=recipe, backend=backend, save="gate_up"
        )
        try:
            resolve_backend(spec)
        except ValueError as refusal:
            print(f"skipped moejax-{backend}: {refusal}")
            continue
        layer = functools.partial(moejax_layer, spec)
        built[f"moejax-{backend}"] = passes(layer, expert, x, weight, w_gate_up, w_down)

    dtype = x.dtype
    order = jnp.argsort(expert.reshape(-1), stable=True)
    x_sorted = x[order // K]
    group_sizes = jnp.bincount(expert.reshape(-1), length=E).astype(jnp.int32)
    transposed = [jnp.swapaxes(w, 1, 2).astype(dtype) for w in (w_gate_up[:, 0], w_gate_up[:, 1], w_down)]
    built[f"jax-ragged_dot-{jax.__version__}"] = passes(ragged_layer, group_sizes, x_sorted, *transposed)
    built["dense"] = passes(dense_layer, group_sizes, x_sorted, *[w[0] for w in transposed])
    return built


def measure(built: dict[str, dict], iterations: int, slow_iterations: int) -> dict[str, dict[str, float]]:
    """Median milliseconds per implementation and pass. The slow peer gets fewer iterations."""
    times = {impl: {name: [] for name in PASSES} for impl in built}
    for functions in built.values():
        for name in PASSES:
            jax.block_until_ready(functions[name]())  # compile
    for iteration in range(iterations):
        for impl, functions in built.items():
            if "ragged" in impl and iteration >= slow_iterations:
                continue
            for name in PASSES:
                time.sleep(SETTLE_SECONDS)
                start = time.perf_counter()
                jax.block_until_ready(functions[name]())
                times[impl][name].append((time.perf_counter() - start) * 1e3)
    return {impl: {name: float(np.median(t)) for name, t in by_pass.items()} for impl, by_pass in times.items()}


def records(medians: dict, recipe: str, shape: Shape, notes: str) -> list[dict]:
    """One dict per implementation and pass, with the two ratios."""
    ragged = next(impl for impl in medians if "ragged" in impl)
    useful = shape.T * shape.K * shape.D * shape.F
    flops = {"forward": 6 * useful, "backward": 12 * useful, "step": 18 * useful}
    return [
        {
            **result_lines.stamp(),
            "gpu": None,
            "versions": {"python": platform.python_version(), "jax": jax.__version__},
            "bench": "cpu_moe",
            "shape": str(shape),
            "recipe": recipe,
            "impl": impl,
            "pass": name,
            "ranks": 1,
            "tokens": shape.T,
            "ms": round(ms, 3),
            "tflops": round(flops[name] / ms / 1e9, 4),
            "bytes": None,
            "gbps": None,
            "ratio_to_ragged_dot": round(medians[ragged][name] / ms, 2),
            "share_of_dense": round(medians["dense"][name] / ms, 3),
            "notes": notes,
        }
        for impl, by_pass in medians.items()
        for name, ms in by_pass.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--slow-iterations", type=int, default=3, help="of ragged_dot, which takes seconds each")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of SHAPES, from the first")
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}core", help="folder under benchmarks/results")
    args = parser.parse_args()

    path = pathlib.Path(__file__).parent / "results" / args.machine / "cpu_moe.jsonl"
    print(f"{'shape':20} {'implementation':24} {'pass':9} {'ms':>9} {'x ragged_dot':>13} {'of dense':>9}")
    for shape in SHAPES[: args.shapes]:
        load = os.getloadavg()[0]
        medians = measure(build(args.recipe, shape), args.iterations, args.slow_iterations)
        notes = (
            f"{_cpu_name()}, {os.cpu_count()} cores, load average {load:.2f} before and {os.getloadavg()[0]:.2f} after; medians "
            f"of {args.iterations} ({args.slow_iterations} for ragged_dot); peers on sorted rows, without dispatch"
        )
        lines = records(medians, args.recipe, shape, notes)
        for line in lines:
            result_lines.append(path, line)
            ratios = f"{line['ratio_to_ragged_dot']:12.1f}x {line['share_of_dense']:9.0%}"
            print(f"{line['shape']:20} {line['impl']:24} {line['pass']:9} {line['ms']:9.2f} {ratios}", flush=True)
        print(notes)
    print(f"appended to {path}")


def _cpu_name() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown CPU"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")


if __name__ == "__main__":
    main()
