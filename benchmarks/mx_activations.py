"""What MXFP8 costs on the activations and gradients of a trained model: errors of the expert layer's outputs and gradients.

Run:    python -m benchmarks.mx_activations RUN --out benchmarks/results/h200/mx_activations.jsonl
        (on a GPU with XLA_FLAGS=--xla_gpu_autotune_level=0: tuning the oracle's many small products takes minutes)
RUN is a run folder with a checkpoint. One held-out batch goes through the model; the inputs, routing and output gradients of
some expert layers are kept, and each layer is computed again from them in every recipe, with the run's own weights.

Errors are relative norms, the worst expert's for gradients of weights, against
  fp32     FP32 products of FP32 weights, for every recipe;
  exact    canonical MXFP8 operands multiplied in FP32 (the oracle of block-scaled hardware), for both modes;
  operands the same operands multiplied in FP32: what is left is the summation, of the tensor core in mode aligned, and elements
           that fall across a tie because of it. `bias` is its signed part, sum(error * sign) / sum |value|;
  kept     the same again, from the gate and up that the kernels computed and kept, so that no such tie lies before a
           gradient's first product. d(weight) is then one FP8 product in FP32: its error is the tensor core's alone.
"""

import argparse
import dataclasses
import itertools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moejax.nn.moe
from benchmarks import result_lines
from moejax.checkpoint import Checkpoints
from moejax.config_load import config_from_dict
from moejax.data import heldout_batches, open_dataset
from moejax.ops import experts_native, experts_xla
from moejax.ops.backends import resolve_backend
from moejax.ops.loss import cross_entropy
from moejax.ops.moe import moe_ffn, prepare_experts
from moejax.ops.schedule import schedule
from moejax.training.run import read_stored
from moejax.training.state import abstract_state, make_skeleton, with_vocabulary

NAMES = ("y", "dx", "d_weight", "dw_gate_up", "dw_down")
# name: (recipe, mode, backend)
RECIPES = {
    "fp32": ("fp32", "exact", "xla"),
    "bf16": ("bf16", "exact", "native"),
    "exact-xla": ("mxfp8", "exact", "xla"),
    "aligned-xla": ("mxfp8", "aligned", "xla"),
    "exact": ("mxfp8", "exact", "native"),
    "aligned": ("mxfp8", "aligned", "native"),
}


def load_model(run: pathlib.Path):
    """Config and model of the newest checkpoint, its layers unrolled so that each can be looked into."""
    config = config_from_dict(read_stored(run / "config.yaml") or {})
    dataset = open_dataset(config.data)
    config = with_vocabulary(config, dataset.tokenizer.vocab_size)
    checkpoints = Checkpoints(run / "checkpoints", keep=config.checkpoint.keep)
    state, _ = checkpoints.restore(abstract_state(config), None)
    checkpoints.close()
    training = dataclasses.replace(config.training, scan_layers=False, remat="none")
    config = dataclasses.replace(config, training=training)
    return config, dataset, make_skeleton(config).merge(state.params, state.router_bias)


def record(config, model, batch) -> list[dict[str, jax.Array]]:
    """Of every expert layer: x, weight and expert of its tokens, and dy, the gradient of the batch's mean loss."""
    real = moejax.nn.moe.moe_layer
    shape = (*batch["token"].shape, config.model.d_model)

    def loss(deltas):
        seen: list[dict[str, jax.Array]] = []

        def watched(x, weight, expert, *rest):
            y, *others = real(x, weight, expert, *rest)
            seen.append({"x": x, "weight": weight, "expert": expert})
            return y + deltas[len(seen) - 1].astype(y.dtype), *others

        moejax.nn.moe.moe_layer = watched
        try:
            hidden, _ = model(batch["token"], batch["segment"], batch["position"])
        finally:
            moejax.nn.moe.moe_layer = real
        nats, tokens = cross_entropy(hidden, model.head_weight(), batch["target"], chunk=config.training.loss_chunk)
        return nats / tokens, seen

    layers = config.model.num_layers - config.model.dense_layers
    deltas = [jnp.zeros(shape, jnp.float32) for _ in range(layers)]
    (nats, seen), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(deltas)
    print(f"loss of the batch {float(nats):.4f} nats per token")
    flat = lambda leaf: leaf.reshape(-1, leaf.shape[-1])  # noqa: E731
    return [
        {name: flat(leaf) for name, leaf in one.items()} | {"dy": flat(dy)}
        for one, dy in zip(seen, gradients, strict=True)
    ]


def results(layer: dict[str, jax.Array], masters, spec) -> dict[str, np.ndarray]:
    """Outputs and gradients of one layer in FP64 arrays."""
    dtype = jnp.float32 if spec.recipe == "fp32" else jnp.bfloat16

    @jax.jit
    def run(x, weight, expert, dy, gate_up, down):
        plan = schedule(expert, spec)
        layer = lambda x, weight, *w: moe_ffn(x, weight, plan, prepare_experts(*w, spec), spec)  # noqa: E731
        y, pullback = jax.vjp(layer, x, weight, gate_up, down)
        return y, *pullback(dy)

    # The same BF16 values in every recipe: what is compared are the products.
    x, dy = (layer[name].astype(jnp.bfloat16).astype(dtype) for name in ("x", "dy"))
    found = run(x, layer["weight"], layer["expert"], dy, masters.w_gate_up_Ex2xFxD, masters.w_down_ExDxF)
    return {name: np.asarray(leaf, np.float64) for name, leaf in zip(NAMES, found, strict=True)}


def kept_gate_up(layer: dict[str, jax.Array], masters, spec) -> jax.Array:
    """(2, M, F) in BF16: gate and up of every row as the native kernels compute and keep them."""

    @jax.jit
    def run(x, weight, expert, gate_up, down):
        experts = prepare_experts(gate_up, down, spec)
        return experts_native.ffn_forward(x, weight, schedule(expert, spec), experts, spec)[1]

    x = layer["x"].astype(jnp.bfloat16)
    return run(x, layer["weight"], layer["expert"], masters.w_gate_up_Ex2xFxD, masters.w_down_ExDxF)


def gradients_from(gate_up_2xMxF, layer: dict[str, jax.Array], masters, spec) -> dict[str, np.ndarray]:
    """Gradients of one layer in FP64 arrays, from the xla backend's products of `spec` and this gate and up."""

    @jax.jit
    def run(gate_up_2xMxF, x, weight, expert, dy, gate_up, down):
        plan = schedule(expert, spec)
        token_M, used_Mx1 = plan.slot_M // spec.top_k, (plan.slot_M >= 0)[:, None]
        x_MxD, dy_MxD, weight_Mx1, gate_up_MxG = (
            jnp.where(used_Mx1, rows, 0)  # padding has no values of its own
            for rows in (
                x[token_M],
                dy[token_M],
                weight.reshape(-1, 1)[plan.slot_M],
                jnp.concatenate(list(gate_up_2xMxF), 1),
            )
        )
        experts = prepare_experts(gate_up, down, spec)
        dx_MxD, d_weight_M, d_experts = experts_xla.backward(
            x_MxD, dy_MxD, weight_Mx1[:, 0], gate_up_MxG, plan, experts, spec
        )
        dx_TxD = dx_MxD[plan.row_TxK].astype(jnp.float32).sum(1).astype(jnp.bfloat16)
        return dx_TxD, d_weight_M[plan.row_TxK], d_experts.w_gate_up_Ex2xFxD, d_experts.w_down_ExDxF

    x, dy = (layer[name].astype(jnp.bfloat16) for name in ("x", "dy"))
    found = run(gate_up_2xMxF, x, layer["weight"], layer["expert"], dy, masters.w_gate_up_Ex2xFxD, masters.w_down_ExDxF)
    return {name: np.asarray(leaf, np.float64) for name, leaf in zip(NAMES[1:], found, strict=True)}


def bias(got: np.ndarray, expected: np.ndarray) -> float:
    return float(((got - expected) * np.sign(expected)).sum() / np.abs(expected).sum())


def error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def worst(name: str, got: dict, expected: dict) -> float:
    """Relative norm; of the worst expert for weight gradients."""
    pairs: Any = [(got[name], expected[name])]
    if name.startswith("dw_"):
        pairs = [(a, b) for a, b in zip(got[name], expected[name], strict=True) if np.any(b)]
    return max(itertools.starmap(error, pairs))


def compare(found: dict[str, dict[str, np.ndarray]]) -> dict[str, dict[str, float]]:
    """Errors by comparison and tensor."""
    wanted = {f"{name} / fp32": (name, "fp32") for name in ("bf16", "exact", "aligned")}
    wanted |= {f"{name} / exact": (name, "exact-xla") for name in ("exact", "aligned-xla", "aligned")}
    wanted |= {"aligned / operands": ("aligned", "aligned-xla"), "aligned / kept": ("aligned", "kept")}
    out = {
        title: {name: worst(name, found[one], found[other]) for name in NAMES if name in found[other]}
        for title, (one, other) in wanted.items()
        if one in found and other in found
    }
    for title in ("aligned / operands", "aligned / kept"):
        if title in out:
            one, other = (found[name] for name in wanted[title])
            out[f"{title}, bias"] = {name: bias(one[name], other[name]) for name in out[title]}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=pathlib.Path)
    parser.add_argument("--rows", type=int, default=8, help="sequences of the batch")
    parser.add_argument("--layers", type=int, nargs="+", help="expert layers, from 0; default: first, middle, last")
    result_lines.add_arguments(parser)
    args = parser.parse_args()
    config, dataset, model = load_model(args.run)
    batch = {name: leaf[: args.rows] for name, leaf in next(heldout_batches(dataset, config)).items()}
    recorded = record(config, model, batch)
    (stack,) = model.expert_stacks()  # layers of one kind
    last = len(recorded) - 1
    for number in args.layers or sorted({0, last // 2, last}):
        masters = jax.tree.map(lambda leaf, number=number: leaf[number], stack.masters())
        found = {}
        for name, (recipe, mode, backend) in RECIPES.items():
            spec = model.segments[0].spec.replace(recipe=recipe, mx_mode=mode, backend=backend, save="gate_up")
            try:
                resolve_backend(spec)
            except ValueError as refused:
                print(f"{name}: {refused}")
                continue
            found[name] = results(recorded[number], masters, spec)
            if name == "aligned":
                gate_up = kept_gate_up(recorded[number], masters, spec)
                found["kept"] = gradients_from(gate_up, recorded[number], masters, spec.replace(backend="xla"))
        errors = compare(found)
        print(f"\nlayer {number:2d}{'':22s}" + "".join(f"{name:>12s}" for name in NAMES))
        for title, row in errors.items():
            print(f"  {title:30s}" + "".join(f"{row.get(name, np.nan):12.2e}" for name in NAMES), flush=True)
        line = {
            **result_lines.stamp(args.commit),
            "gpu": jax.devices()[0].device_kind,
            "versions": {"jax": jax.__version__},
            "bench": "mx_activations",
            "run": args.run.name,
            "layer": number,
            "tokens": int(batch["token"].size),
            "errors": errors,
        }
        result_lines.append(args.out, line)


if __name__ == "__main__":
    main()
