"""`python -m moejax.tune`: measures how the grouped products of an expert layer run fastest on this GPU, and remembers it.

    python -m moejax.tune --experts 128 --top-k 8 --d-model 2048 --width 768 --tokens 8192

Every product has one or more ways to run, all of equal bits: rows of tokens dispatched or read where they are, tokens on
the M or the N side of the tensor-core product. The forward is timed for each way of its products, the backward for each of
its own, one product at a time with the others as they are best; the result goes to the user's cache
(`moejax/native/ways.py`), which every later run reads.

Letters: T tokens, K experts per token, E experts, D model width, F expert width.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from moejax import native
from moejax.config import ActivationConfig, RouterConfig
from moejax.native import cuda_calls, ways
from moejax.native.calls import Operands, Rows
from moejax.ops.schedule import schedule
from moejax.ops.spec import MoESpec

_FORWARD = ("gate_up", "down")
_BACKWARD = ("dgrad_down", "dgrad_gate_up", "wgrad_down", "wgrad_gate_up")


def tune(
    entry: ways.Entry, *, rounds: int = 5, calls: int = 10, seed: int = 0, log: Callable[[str], None] = print
) -> ways.Entry:
    """The entry with the fastest way of every product that has a choice.

    Args:
      entry: sizes; its ways are where the search starts.
      rounds: times each way is measured, in turn with the others, so that a clock that sinks hits all; the median counts.
      calls: layer calls per measurement.
      seed: of the data: uniform routing, normal values.
      log: takes a line per way.
    Raises:
      RuntimeError: two ways gave different bits, a defect of the kernels on this GPU: nothing is chosen by speed then.
    """
    module = native.module("_cuda")
    ways.apply()  # whatever applies it later must not undo what is set here
    forward, backward = _problem(entry, seed)
    chosen = dict(entry.ways)
    for products, run in ((_FORWARD, forward), (_BACKWARD, backward)):
        for product in products:
            candidates = [ways.WAYS[way] for way in module.ways_of(ways.PRODUCTS.index(product), *entry.sizes())]
            if len(candidates) < 2:
                continue

            def use(way, product=product):
                module.set_ways([dataclasses.replace(entry, ways=chosen | {product: way}).as_native()])

            first = None
            for way in candidates:
                use(way)
                bits = [int(_checksum(leaf)) for leaf in jax.tree.leaves(run())]
                if first is not None and bits != first:
                    raise RuntimeError(
                        f"{product}: {way} gives other bits than {candidates[0]} on this GPU; please report it"
                    )
                first = bits
            times: dict[str, list[float]] = {way: [] for way in candidates}
            for _ in range(rounds):
                for way in candidates:
                    use(way)
                    times[way].append(_milliseconds(run, calls))
            medians = {way: statistics.median(values) for way, values in times.items()}
            chosen[product] = min(medians, key=medians.__getitem__)
            name = "forward" if products is _FORWARD else "backward"
            log(f"{product}: " + ", ".join(f"{way} {ms:.3f} ms" for way, ms in medians.items()) + f" a {name}")
    return dataclasses.replace(entry, ways=chosen)


def _problem(entry: ways.Entry, seed: int):
    """Forward and backward of a layer on random data, as functions without arguments that return arrays."""
    T, K, E, D, F = entry.sizes()
    keys = jax.random.split(jax.random.key(seed), 6)
    x, dy = (jax.random.normal(key, (T, D), jnp.bfloat16) for key in keys[:2])
    w_gate_up = jax.random.normal(keys[2], (E, 2, F, D), jnp.bfloat16) * D**-0.5
    w_down = jax.random.normal(keys[3], (E, D, F), jnp.bfloat16) * F**-0.5
    _, expert = jax.lax.top_k(jax.random.uniform(keys[4], (T, E)), K)
    weight = jax.random.uniform(keys[5], (T, K))
    spec = MoESpec(
        num_experts=E, d_model=D, expert_width=F, router=RouterConfig(top_k=K), recipe="bf16", backend="native"
    )
    plan = jax.jit(lambda expert: schedule(expert, spec))(expert.astype(jnp.int32))
    act = ActivationConfig("swiglu")

    @jax.jit
    def forward(x, weight, plan, w_gate_up, w_down):
        rows = Rows(plan.count_E, plan.start_E, plan.slot_M, plan.row_TxK)
        return cuda_calls.moe_forward(x, weight, rows, Operands(w_gate_up, w_down), act=act, save=True)

    @jax.jit
    def backward(x, dy, weight, saved, plan, w_gate_up, w_down):
        rows = Rows(plan.count_E, plan.start_E, plan.slot_M, plan.row_TxK)
        operands, none = Operands(w_gate_up, w_down), (None, None)
        return [
            out
            for out in cuda_calls.moe_backward(x, dy, weight, saved, rows, operands, none, None, act=act)
            if out is not None
        ]

    _, saved = forward(x, weight, plan, w_gate_up, w_down)
    return (  # y alone: rows of gate and up that nobody reads may hold anything
        lambda: forward(x, weight, plan, w_gate_up, w_down)[0],
        lambda: backward(x, dy, weight, saved, plan, w_gate_up, w_down),
    )


@jax.jit
def _checksum(x: jax.Array) -> jax.Array:
    """uint32 of all bits and their places; integer sums have no order."""
    words = jax.lax.bitcast_convert_type(x, jnp.uint32 if x.dtype.itemsize == 4 else jnp.uint16).astype(jnp.uint32)
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis in range(words.ndim):
        place = place * 31 + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    return jnp.sum((words + 1) * (place * jnp.uint32(2654435761) | 1), dtype=jnp.uint32)


def _milliseconds(run, calls: int) -> float:
    """Of one call, the first one after a change left out."""
    jax.block_until_ready(run())
    begin = time.perf_counter()
    for _ in range(calls):
        out = run()
    jax.block_until_ready(out)
    return (time.perf_counter() - begin) * 1e3 / calls


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m moejax.tune", description=(__doc__ or "").split("\n\n")[0])
    for name in ("experts", "top-k", "d-model", "width", "tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args(arguments)
    sizes = {name: getattr(args, name) for name in ("tokens", "top_k", "experts", "d_model", "width")}
    wrong = [
        f"--{name.replace('_', '-')} is {size}; expected a positive number" for name, size in sizes.items() if size < 1
    ]
    if not wrong and args.top_k > args.experts:
        wrong.append(
            f"--top-k is {args.top_k} and --experts {args.experts}: a token cannot have more experts than there are"
        )
    # A recorded command buffer would replay the launches of the way it was recorded with.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
    if not wrong:
        if jax.default_backend() != "gpu":
            wrong.append(
                f"JAX runs on {jax.default_backend()} here; the Hopper kernels are tuned on the GPU they will run on"
            )
        elif missing := native.missing("_cuda"):
            wrong.append(missing)
    if wrong:
        print(f"moejax.tune: {wrong[0]}", file=sys.stderr)
        return 2
    gpu = jax.devices()[0].device_kind
    known = {entry.sizes(): entry for entry in ways.entries(gpu)}
    entry = ways.Entry(**sizes, ways={})
    print(f"{gpu}: {entry.sizes()} as (T, K, E, D, F)", flush=True)
    found = tune(known.get(entry.sizes(), entry), log=lambda line: print(line, flush=True))
    table = ways.read(ways.cache_file())
    table[gpu] = [e for e in table.get(gpu, []) if e.sizes() != found.sizes()] + [found]
    ways.write(ways.cache_file(), table)
    print(f"{found.ways}, kept in {ways.cache_file()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
