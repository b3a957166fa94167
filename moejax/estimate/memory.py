"""Bytes on one device, by kind, from the shapes and shardings of the state and the traced step. No device is needed.

What lives between steps is exact: it is the sum over the leaves of `abstract_state`. What lives inside a step is a model
(`liveness.py`), of which the parts that have a formula are shown one by one:

  gathered     weights not sharded over fsdp while the step runs: dense FP32 masters, and in recipe fp32 those of the experts
  copies       compute copies of the expert weights, `expert_copies()`, whole over fsdp
  gradients    one FP32 buffer per weight of the device, whole over fsdp (docs/design.md §3: reduced once, at the end)
  activations  what the forward of a micro-batch keeps for its backward: outputs of its `jax.vjp` that are no inputs
  rows         the ring of row buffers of an expert layer: x, dY and dx of the rows that the device computes at a time
  working      the rest of the peak: what the layer, the loss or the optimizer that runs at the moment needs

Rows of the batch are split over data, fsdp and expert. Context divides L; activations are counted as if tensor split none of
them.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from moejax.checkpoint import named_leaves
from moejax.config import Config
from moejax.estimate.liveness import peak_bytes
from moejax.ops.backends import compute_dtype
from moejax.ops.exchange_plan import window_rows
from moejax.ops.schedule import rows_bound
from moejax.ops.spec import EXPERT_AXIS, TILE, moe_spec
from moejax.training.state import Skeleton, TrainState, abstract_state, make_skeleton
from moejax.training.step import make_step

Mesh = jax.sharding.AbstractMesh
_BATCH_AXES = ("data", "fsdp", EXPERT_AXIS)


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """What one device holds between steps. Exact."""

    expert_masters: int
    other_masters: int
    optimizer: int
    router_bias: int
    counters: int  # step and random key

    @property
    def total(self) -> int:
        return sum(dataclasses.asdict(self).values())


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """What one device needs beside its state while a step runs; see the module for what the kinds mean."""

    batch: int
    gathered: int
    copies: int
    gradients: int
    activations: int
    rows: int
    working: int

    @property
    def temporaries(self) -> int:
        """What XLA calls temporaries: all of it but the batch, which is an argument."""
        return sum(dataclasses.asdict(self).values()) - self.batch


def state_bytes(config: Config, mesh: Mesh) -> StateBytes:
    """Bytes of the training state on one device of `mesh`; all devices hold the same."""
    sizes = dict.fromkeys((field.name for field in dataclasses.fields(StateBytes)), 0)
    for name, leaf in named_leaves(abstract_on(config, mesh)).items():
        sizes[_kind(name)] += shard_bytes(leaf)
    return StateBytes(**sizes)


def step_bytes(config: Config, mesh: Mesh) -> StepBytes:
    """Bytes of one device inside a step."""
    state, skeleton, batch = abstract_step(config, mesh)
    peak = _traced_peak(config, mesh, state, skeleton, batch)
    local = skeleton_weights(state, mesh)
    fsdp, ranks = mesh.shape["fsdp"], mesh.shape[EXPERT_AXIS]
    gathered = 0
    if fsdp > 1:
        gathered = local["other"] + (local["expert"] if config.recipe == "fp32" else 0)
    copies = _bytes(_copies(skeleton, state)) // ranks
    gradients = local["other"] + local["expert"]
    activations, rows = activation_bytes(config, mesh), row_bytes(config, mesh)
    working = max(peak - gathered - copies - gradients - activations - rows, 0)
    return StepBytes(
        batch=sum(shard_bytes(leaf) for leaf in batch.values()),
        gathered=gathered, copies=copies, gradients=gradients, activations=activations, rows=rows, working=working,
    )  # fmt: skip


def abstract_on(config: Config, mesh: Mesh) -> TrainState:
    """`abstract_state` on a mesh without devices."""
    with jax.sharding.use_abstract_mesh(mesh):
        return abstract_state(config, mesh)  # type: ignore[arg-type]


def abstract_step(config: Config, mesh: Any) -> tuple[TrainState, Skeleton, dict[str, jax.ShapeDtypeStruct]]:
    """State, model and batch of a step, as shapes and shardings."""
    training = config.training
    shape = (training.micro_batches, training.global_batch // training.micro_batches, training.sequence_length)
    sharding = jax.NamedSharding(mesh, jax.P(None, _BATCH_AXES, "context"))
    names = ("token", "target", "segment", "position")
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for name in names}
    if isinstance(mesh, Mesh):
        with jax.sharding.use_abstract_mesh(mesh):
            return abstract_state(config, mesh), make_skeleton(config), batch  # type: ignore[arg-type]
    return abstract_state(config, mesh), make_skeleton(config), batch


def skeleton_weights(state: TrainState, mesh: Mesh) -> dict[str, int]:
    """FP32 bytes of the weights of one device when they are whole over fsdp: `expert` (its own) and `other`."""
    sizes = {"expert": 0, "other": 0}
    for name, leaf in named_leaves(state.params).items():
        spec = [_without(entry, "fsdp") for entry in leaf.sharding.spec]
        whole = jax.NamedSharding(mesh, jax.P(*spec)).shard_shape(leaf.shape)
        sizes["expert" if is_expert(name) else "other"] += math.prod(whole) * leaf.dtype.itemsize
    return sizes


def activation_bytes(config: Config, mesh: Mesh) -> int:
    """What the forward of one micro-batch keeps on one device for its backward."""
    local = local_config(config, mesh)
    skeleton = make_skeleton(local)
    state = abstract_state(local)
    training = local.training
    shape = (training.global_batch, training.sequence_length)
    token = jax.ShapeDtypeStruct(shape, jnp.int32)

    def kept(params, router_bias, token, segment, position):
        def hidden(params):
            model = skeleton.merge(params, router_bias)
            return model(token, segment, position, copies=jax.lax.stop_gradient(model.expert_copies()))[0]

        return jax.vjp(hidden, params)

    program = jax.make_jaxpr(kept)(state.params, state.router_bias, token, token, token)
    outside = set(program.jaxpr.invars) | set(program.jaxpr.constvars)
    values = {v for v in program.jaxpr.outvars if not isinstance(v, jax.extend.core.Literal) and v not in outside}
    weights = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((state.params, _copies(skeleton, state)))}
    avals: list[Any] = [value.aval for value in values]
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in avals if (a.shape, a.dtype) not in weights)


def row_bytes(config: Config, mesh: Mesh) -> int:
    """x, dY and dx of the rows of one layer that a device has at a time, in the compute dtype: one window, or all there may be."""
    training = config.training
    tokens = training.global_batch // training.micro_batches * training.sequence_length // mesh.size
    with jax.sharding.use_abstract_mesh(mesh):
        spec = moe_spec(config, mesh)
    bound = rows_bound(tokens * spec.ranks, spec)
    rows = min(window_rows(tokens, spec) + TILE, bound) if spec.exchanges else bound
    return 3 * rows * spec.d_model * compute_dtype(spec).itemsize


def local_config(config: Config, mesh: Mesh) -> Config:
    """The config of one device's share of a micro-batch, on a mesh of its own: the same rows per expert on average."""
    training = config.training
    split = math.prod(mesh.shape[axis] for axis in _BATCH_AXES)
    rows = max(training.global_batch // training.micro_batches // split, 1)
    length = max(training.sequence_length // mesh.shape["context"], 1)
    with jax.sharding.use_abstract_mesh(mesh):
        save = moe_spec(config, mesh).save
    return dataclasses.replace(
        config,
        training=dataclasses.replace(training, global_batch=rows, micro_batches=1, sequence_length=length),
        moe=dataclasses.replace(config.moe, save=save),
    )


def is_expert(name: str) -> bool:
    return "experts" in name.split(".")


def shard_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of one device's shard."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _traced_peak(config, mesh, state, skeleton, batch) -> int:
    with jax.sharding.use_abstract_mesh(mesh):
        program = jax.make_jaxpr(make_step(skeleton, config))(state, batch)
    leaves = [*jax.tree.leaves(state), *jax.tree.leaves(batch)]
    return peak_bytes(program, [shard_bytes(leaf) for leaf in leaves], donated=range(len(jax.tree.leaves(state))))


def _copies(skeleton: Skeleton, state: TrainState) -> Any:
    def copies(params, router_bias):
        return skeleton.merge(params, router_bias).expert_copies()

    plain = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (state.params, state.router_bias))
    return jax.eval_shape(copies, *plain)


def _kind(name: str) -> str:
    head, _, _ = name.partition(".")
    if head == "params":
        return "expert_masters" if is_expert(name) else "other_masters"
    return {"opt_state": "optimizer", "router_bias": "router_bias"}.get(head, "counters")


def _without(entry: Any, axis: str) -> Any:
    names = (entry,) if isinstance(entry, str) else entry or ()
    return tuple(name for name in names if name != axis) or None


def _bytes(tree: Any) -> int:
    leaves: Iterable[Any] = jax.tree.leaves(tree)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
