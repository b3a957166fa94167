"""The real step, compiled for a mesh of fake CPU devices: what the compiler says, beside what is estimated."""

import collections
import dataclasses
import re
import time

import jax

from moejax.config import Config
from moejax.estimate.memory import abstract_step
from moejax.mesh import make_mesh
from moejax.training.step import make_step

_COLLECTIVE = re.compile(
    r" (all-to-all|ragged-all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("
)


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """Per device: bytes of arguments and temporaries, and how often each kind of collective stands in the program."""

    devices: int
    seconds: float
    argument_bytes: int
    temporary_bytes: int
    collectives: dict[str, int]


def compile_step(config: Config) -> CompiledStep:
    """Compiles the training step of `config` on its mesh; nothing is allocated and nothing runs.

    Needs as many devices as the mesh has: set `jax_num_cpu_devices` before JAX's first use.
    """
    mesh = make_mesh(config.mesh, config.moe.num_experts, axis_type=jax.sharding.AxisType.Auto)
    started = time.monotonic()
    with jax.set_mesh(mesh):
        state, skeleton, batch = abstract_step(config, mesh)
        shardings = (jax.tree.map(lambda leaf: leaf.sharding, state), jax.NamedSharding(mesh, jax.P()))
        step = jax.jit(make_step(skeleton, config), donate_argnums=0, out_shardings=shardings)
        compiled = step.lower(state, batch).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None  # XLA on the CPU knows both
    return CompiledStep(
        devices=mesh.size,
        seconds=time.monotonic() - started,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        collectives=dict(collections.Counter(_COLLECTIVE.findall(text))),
    )
