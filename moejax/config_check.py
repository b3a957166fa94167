"""What must hold between the fields of a config, beyond each field's own type and bounds.

`config_load.load` calls `problems` on every config it builds, before anything touches a device. The rules of the expert
layer itself live beside the layer (`ops/routing.py`, `ops/activation.py`) and are called from here.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

from moejax.config import Config, DistributedConfig, MeshConfig, ModelConfig, MoEConfig
from moejax.ops.activation import check_activation
from moejax.ops.backends import WIDTH_UNITS, fitting_widths
from moejax.ops.schedule import parse_capacity_factor
from moejax.ops.spec import check_router, recipe_problems

_STEP_SEQUENCES = 2**20  # more would take minutes to put together, and no run wants them
_STEP_TOKENS = 2**31 - 1  # counts of tokens are int32
_LEAST_STALL = 10  # seconds


def problems(config: Config) -> list[str]:
    """One line for each rule that `config` breaks, naming the key; empty if it can run."""
    return [
        *_model(config.model),
        *_experts(config.moe),
        *_recipe(config),
        *_layers(config),
        *_training(config),
        *_mesh(config.mesh, config),
        *_distributed(config.distributed),
    ]


def _model(model: ModelConfig) -> Iterator[str]:
    if model.num_heads % model.num_kv_heads:
        yield (
            f"model.num_kv_heads is {model.num_kv_heads}, which does not divide model.num_heads={model.num_heads}: "
            f"use one of {_divisors(model.num_heads)}"
        )
    rotated = model.head_dim * model.rope_fraction
    if rotated != int(rotated) or int(rotated) % 2:
        yield (
            f"model.rope_fraction is {model.rope_fraction}, which rotates {rotated:g} of model.head_dim={model.head_dim} "
            "dimensions: it must be an even whole number"
        )
    if model.dense_layers > model.num_layers:
        yield f"model.dense_layers is {model.dense_layers}, but model.num_layers is {model.num_layers}"
    if model.dense_layers and model.dense_width is None:
        yield f"model.dense_width is not set, but model.dense_layers is {model.dense_layers}: give the dense MLP a width"
    if ":" not in model.module.strip(":"):
        yield f"model.module is {model.module!r}: expected module:Class, such as models.decoder:Decoder"


def _experts(moe: MoEConfig) -> Iterator[str]:
    yield from _caught("moe.router", check_router, moe.router, moe.num_experts)
    yield from _caught("moe.act", check_activation, moe.act)
    if moe.capacity_factor is not None:
        yield from _caught("moe.capacity_factor", parse_capacity_factor, moe.capacity_factor)
    if moe.balance.bias_rate and not moe.router.select_bias:
        yield (
            f"moe.balance.bias_rate is {moe.balance.bias_rate}, but there is no bias to move: "
            "set moe.router.select_bias=true"
        )
    if moe.balance.bias_recentre and not moe.balance.bias_rate:
        yield "moe.balance.bias_recentre is true, but moe.balance.bias_rate is 0, so no update is made"
    if moe.shared_gate and not moe.shared_experts:
        yield "moe.shared_gate is true, but moe.shared_experts is 0: there is nothing to gate"


def _recipe(config: Config) -> Iterator[str]:
    unit = WIDTH_UNITS[config.recipe]
    for key, width in (("model.d_model", config.model.d_model), ("moe.expert_width", config.moe.expert_width)):
        if width % unit:
            yield (
                f"{key} is {width}, but recipe={config.recipe} needs a multiple of {unit}: use {fitting_widths(width, unit)}"
            )
    yield from recipe_problems(config.moe, config.recipe)


def _layers(config: Config) -> Iterator[str]:
    layers = max(config.model.num_layers - config.model.dense_layers, 0)
    if config.moe.router.hash_layers > layers:
        yield f"moe.router.hash_layers is {config.moe.router.hash_layers}, but the model has {layers} MoE layers"
    missing = [layer for layer in config.moe.bf16_layers if not -layers <= layer < layers]
    for layer in missing:
        yield (
            f"moe.bf16_layers: layer {layer} does not exist; the model has {layers} MoE layers, numbered from 0, "
            "or from -1 backwards"
        )
    chosen = [layer % layers for layer in config.moe.bf16_layers] if layers and not missing else []
    for layer in sorted({layer for layer in chosen if chosen.count(layer) > 1}):
        yield f"moe.bf16_layers names MoE layer {layer} more than once"


def _training(config: Config) -> Iterator[str]:
    training = config.training
    if training.global_batch % training.micro_batches:
        yield (
            f"training.micro_batches is {training.micro_batches}, which does not divide "
            f"training.global_batch={training.global_batch}: use one of {_divisors(training.global_batch)}"
        )
    tokens = training.global_batch * training.sequence_length
    if training.global_batch > _STEP_SEQUENCES:
        yield (
            f"training.global_batch is {training.global_batch:,} sequences in one step: expected at most {_STEP_SEQUENCES:,}; "
            "it counts sequences, not tokens"
        )
    elif tokens > _STEP_TOKENS:
        yield (
            f"training.global_batch x training.sequence_length is {tokens:,} tokens in one step: expected at most "
            f"{_STEP_TOKENS:,}, which is what int32 can count"
        )
    if config.moe.save in ("gate_up", "gate_up_mx") and training.remat == "layer":
        yield (
            f"moe.save is {config.moe.save}, but training.remat=layer does not keep it, so it would be computed twice: "
            "use training.remat=minimal or none, or moe.save=recompute"
        )


def _mesh(mesh: MeshConfig, config: Config) -> Iterator[str]:
    sizes = {
        "data": mesh.data,
        "fsdp": mesh.fsdp,
        "expert": mesh.expert,
        "context": mesh.context,
        "tensor": mesh.tensor,
    }
    for axis, size in sizes.items():
        if size < 1 and size != -1:
            yield f"mesh.{axis} is {size}: expected a number of devices, or -1 for what is left"
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        yield f"mesh.{free[1]} is -1, and so is mesh.{free[0]}: at most one axis can take what is left"
    for axis, key, value in (
        ("expert", "moe.num_experts", config.moe.num_experts),
        ("context", "training.sequence_length", config.training.sequence_length),
        ("tensor", "model.num_heads", config.model.num_heads),
    ):
        size = sizes[axis]
        if size > 0 and value % size:
            yield f"mesh.{axis} is {size}, which does not divide {key}={value}: use one of {_divisors(value)}"


def _distributed(given: DistributedConfig) -> Iterator[str]:
    values = {
        "distributed.coordinator": given.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS"),
        "distributed.processes": given.processes,
        "distributed.process": given.process,
    }
    there = [f"{key}={value}" for key, value in values.items() if value is not None]
    if 0 < given.stall_seconds < _LEAST_STALL:
        yield (
            f"distributed.stall_seconds is {given.stall_seconds}; expected at least {_LEAST_STALL}, or 0 for never: a loaded "
            "machine may not run a thread for some seconds"
        )
    if given.coordinator is None and given.processes is None and given.process is None:
        return
    for key in (key for key, value in values.items() if value is None):
        yield f"{key} is not set, but {' and '.join(there)}: give all three, or none under Slurm, Open MPI or Kubernetes"


def _caught(key: str, check: Callable[..., Any], *values: Any) -> Iterator[str]:
    """The rule that `check`, a function of the expert layer, raises about the section `key`."""
    try:
        check(*values)
    except ValueError as error:
        yield f"{key}: {error}"


def _divisors(number: int) -> str:
    found = [n for n in range(1, number + 1) if number % n == 0] if number < 1 << 20 else [1]
    return ", ".join(map(str, found))
