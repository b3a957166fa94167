"""Compiles the training step of a published shape for a rack of fake devices; checks its collectives and its bytes. Nothing runs.

    XLA_FLAGS=--xla_force_host_platform_device_count=72 python -m tests.big_models qwen3-30b-a3b data=9,expert=8 [bf16]

Prints a line of JSON, with what `moejax.estimate` says of the same step. DeepSeek-V3 and Kimi-K2 have grouped-query attention
here instead of their own; their expert layers, widths and vocabularies are as published (arXiv 2412.19437; arXiv 2507.20534).
"""

import dataclasses
import json
import sys
import time

import jax

from moejax.config import BalanceConfig, Config, MeshConfig, ModelConfig, MoEConfig, RouterConfig, TrainingConfig
from moejax.estimate.memory import state_bytes, step_bytes
from moejax.mesh import named_sharding
from moejax.mesh_plan import config_mesh
from moejax.training.state import abstract_state, make_skeleton
from moejax.training.step import make_step
from tests.hlo_checks import check_expert_parallel_step, over

MICRO_BATCHES = 2
_SIGMOID = RouterConfig(top_k=8, score_fn="sigmoid", select_bias=True, route_scale=2.5)
SHAPES = {
    "qwen3-30b-a3b": Config(
        model=ModelConfig(
            vocab_size=151936, d_model=2048, num_layers=48, num_heads=32, num_kv_heads=4, head_dim=128, qk_norm="head"
        ),
        moe=MoEConfig(num_experts=128, expert_width=768, router=RouterConfig(top_k=8)),
    ),
    "deepseek-v3": Config(
        model=ModelConfig(
            vocab_size=129280, d_model=7168, num_layers=61, dense_layers=3, dense_width=18432, num_heads=128,
            num_kv_heads=8, head_dim=128,
        ),
        moe=MoEConfig(
            num_experts=256, expert_width=2048, shared_experts=1,
            router=dataclasses.replace(_SIGMOID, n_group=8, topk_group=4), balance=BalanceConfig(bias_rate=1e-3),
        ),
    ),
    "kimi-k2": Config(
        model=ModelConfig(
            vocab_size=163840, d_model=7168, num_layers=61, dense_layers=1, dense_width=18432, num_heads=64,
            num_kv_heads=8, head_dim=128,
        ),
        moe=MoEConfig(
            num_experts=384, expert_width=2048, shared_experts=1, router=dataclasses.replace(_SIGMOID, route_scale=2.827),
        ),
    ),
}  # fmt: skip


def config_of(name: str, mesh: MeshConfig, devices: int, recipe: str) -> Config:
    """The shape on a mesh, one sequence of 4096 per device and micro-batch, layers computed again."""
    training = TrainingConfig(
        global_batch=devices * MICRO_BATCHES, micro_batches=MICRO_BATCHES, sequence_length=4096, remat="layer"
    )
    shape = SHAPES[name]
    moe = dataclasses.replace(shape.moe, backend="xla", transport="all_to_all")
    return dataclasses.replace(shape, recipe=recipe, mesh=mesh, training=training, moe=moe)


def compile_step(config: Config, mesh: jax.sharding.Mesh):
    """The compiled step of `config`; its kernels are not optimised, its program is."""
    training = config.training
    with jax.set_mesh(mesh):
        rows = training.global_batch // training.micro_batches
        shape = (training.micro_batches, rows, training.sequence_length)
        sharding = named_sharding(mesh, (None, "batch", "sequence"), "batch", shape)
        leaf = jax.ShapeDtypeStruct(shape, "int32", sharding=sharding)
        batch = dict.fromkeys(("token", "target", "segment", "position"), leaf)
        step = jax.jit(make_step(make_skeleton(config), config), donate_argnums=0)
        return step.lower(abstract_state(config, mesh), batch).compile({"xla_backend_optimization_level": 0})


def check(config: Config, mesh: jax.sharding.Mesh) -> tuple[dict, str]:
    """Compiles the step and checks it; returns what was found, and the program.

    Raises:
      AssertionError: a collective that must not be there, or one that is missing; or the state is not of the size estimated.
    """
    started = time.monotonic()
    compiled = compile_step(config, mesh)
    copies = 2 if mesh.shape["fsdp"] > 1 else 0  # gate/up and down, each for all layers at once
    text = compiled.as_text()
    found = check_expert_parallel_step(text, mesh, width=config.moe.expert_width, copies=copies)
    memory = compiled.memory_analysis()
    state, step = state_bytes(config, mesh.abstract_mesh), step_bytes(config, mesh.abstract_mesh)
    assert memory.argument_size_in_bytes == state.total + step.batch, (memory, state, step)
    report = {
        "seconds": round(time.monotonic() - started, 1),
        "exchanges": len(over(found, "all-to-all", "expert")),
        "expert_gathers_over_fsdp": copies,
        "collectives": len(found),
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "estimated_temporary_bytes": step.temporaries,
    }
    return report, text


def main(name: str, axes: str, recipe: str = "bf16") -> None:
    sizes = {axis: int(size) for axis, size in (part.split("=") for part in axes.split(","))}
    mesh_config = MeshConfig(**{"data": 1, **sizes})
    devices = mesh_config.data * mesh_config.fsdp * mesh_config.expert
    config = config_of(name, mesh_config, devices, recipe)
    mesh = config_mesh(config, jax.devices()[:devices])
    print(json.dumps({"shape": name, "mesh": axes, "recipe": recipe} | check(config, mesh)[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
