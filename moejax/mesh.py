"""Device meshes, and the one table that maps logical axes of tensors to mesh axes.

A mesh has five axes, always, in this order (the last varies fastest over the devices, so neighbours share it):
  data      replicas of everything, experts too
  fsdp      shards of masters, optimizer moments and dense weights
  expert    expert-parallel ranks (R); inside a node, or an NVL72 rack, if the axes after it are 1
  context   shards of the sequence
  tensor    shards of heads, output head and embedding

Parameters declare logical names (`nn/param.py`); `logical_to_spec` turns them into a `PartitionSpec`. Nothing is repaired in
silence: what does not fit raises. Read `mesh_plan.py` next: which mesh for which model and machine, and why.
"""

import logging
import math
import types
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType

from moejax.config import MeshConfig

AXES = ("data", "fsdp", "expert", "context", "tensor")

# Logical axis -> mesh axis, several mesh axes, or None (never sharded). Expert weights end up over expert x fsdp, all
# other matrices over fsdp (their D), heads and vocabulary also over tensor. F is never sharded, so that the products
# of an expert stay on one device.
RULES: Mapping[str, str | tuple[str, ...] | None] = types.MappingProxyType(
    {
        "layer": None,
        "embed": "fsdp",
        "mlp": None,
        "expert": "expert",
        "heads": "tensor",
        "kv_heads": "tensor",
        "vocab": "tensor",
        "batch": ("data", "fsdp", "expert"),
        "sequence": "context",
        "token": AXES,  # rows of the flattened batch inside the expert region
    }
)

logger = logging.getLogger(__name__)


def make_mesh(
    config: MeshConfig,
    num_experts: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    axis_type: AxisType = AxisType.Explicit,
) -> jax.sharding.Mesh:
    """The mesh a config describes, over all given devices.

    Args:
      config: devices per axis; at most one -1, which takes what is left.
      num_experts: E; the expert axis must divide it. None: a model without experts.
      devices: default: all devices of all processes.
      axis_type: Explicit (shardings are part of types), or Auto.
    Raises:
      ValueError: the sizes do not multiply to the device count, or the expert axis does not divide the experts. The
        message has the device count, the sizes, and what would fit.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = resolve_axes(config, len(devices), num_experts)
    grid = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(axis_type,) * len(sizes), devices=devices)
    logger.info("mesh %s over %d devices", _text(sizes), len(devices))
    return grid


def resolve_axes(config: MeshConfig, device_count: int, num_experts: int | None = None) -> dict[str, int]:
    """Devices per axis with -1 filled in; the checks of `make_mesh`, without devices."""
    sizes = {name: getattr(config, name) for name in AXES}
    wrong = [name for name, size in sizes.items() if size != -1 and size < 1]
    open_axes = [name for name, size in sizes.items() if size == -1]
    if wrong:
        raise ValueError(
            f"mesh axis {wrong[0]} is {sizes[wrong[0]]}: expected a positive number, or -1 for what is left"
        )
    if len(open_axes) > 1:
        raise ValueError(
            f"mesh axes {' and '.join(open_axes)} are both -1: only one can take what is left of {device_count}"
        )
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if device_count % fixed or (not open_axes and fixed != device_count):
        what = "do not divide by" if open_axes else "are not"
        raise ValueError(
            f"{device_count} devices {what} {fixed}: mesh is {_text(sizes)}; {_fitting(sizes, device_count, num_experts)}"
        )
    sizes.update(dict.fromkeys(open_axes, device_count // fixed))
    if num_experts is not None and num_experts % sizes["expert"]:
        raise ValueError(
            f"expert axis has {sizes['expert']} of {device_count} devices but num_experts is {num_experts}: "
            f"mesh is {_text(sizes)}; {_fitting(sizes, device_count, num_experts)}"
        )
    return sizes


def logical_to_spec(
    names: Sequence[str | None],
    tensor_name: str,
    shape: Sequence[int] | None = None,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    rules: Mapping[str, str | tuple[str, ...] | None] = RULES,
) -> jax.P:
    """The `PartitionSpec` of a tensor, from the logical names of its axes.

    Args:
      names: one logical name, or None, per axis.
      tensor_name: for messages.
      shape: checked against the mesh, if both are given.
      mesh: for the sizes and names of its axes.
      rules: logical to mesh axes.
    Raises:
      ValueError: a name without a rule, a mesh axis the mesh lacks, a mesh axis on two axes of the tensor, or a size
        that does not divide. Each names the tensor and what collides.
    """
    if shape is not None and len(shape) != len(names):
        raise ValueError(f"{tensor_name} has shape {tuple(shape)} but {len(names)} logical axes {tuple(names)}")
    used: dict[str, str | None] = {}
    entries = []
    for i, name in enumerate(names):
        if name is not None and name not in rules:
            raise ValueError(f"{tensor_name}: logical axis {name!r} has no sharding rule; known: {', '.join(rules)}")
        entry = rules[name] if name is not None else None
        axes = (entry,) if isinstance(entry, str) else entry or ()
        for axis in axes:
            if mesh is not None and axis not in mesh.shape:
                raise ValueError(
                    f"{tensor_name}: the rules put {name!r} on mesh axis {axis!r}, but the mesh has {tuple(mesh.axis_names)}"
                )
            if axis in used:
                raise ValueError(
                    f"{tensor_name}: mesh axis {axis!r} is on two of its axes, {used[axis]!r} and {name!r}: "
                    "change the rule of one of them"
                )
            used[axis] = name
        shards = math.prod(mesh.shape[axis] for axis in axes) if mesh is not None else 1
        if shape is not None and shape[i] % shards:
            raise ValueError(
                f"{tensor_name}: axis {name!r} has size {shape[i]}, which does not divide over {shards} devices of mesh axes "
                f"{', '.join(axes)}"
            )
        entries.append(entry)
    return jax.P(*entries)


def named_sharding(
    mesh: jax.sharding.Mesh, names: Sequence[str | None], tensor_name: str, shape: Sequence[int] | None = None
) -> jax.sharding.NamedSharding:
    """The sharding of a tensor on a mesh by `RULES`; errors as in `logical_to_spec`."""
    return jax.NamedSharding(mesh, logical_to_spec(names, tensor_name, shape, mesh))


def _fitting(sizes: Mapping[str, int], device_count: int, num_experts: int | None) -> str:
    """What would fit: expert axes beside the other fixed axes, `data` taking the rest."""
    others = math.prod(size for name, size in sizes.items() if name not in ("data", "expert") and size != -1)
    if device_count % others:
        names = [name for name, size in sizes.items() if name not in ("data", "expert") and size > 1]
        return f"{' x '.join(names)} = {others} must divide {device_count}"
    left = device_count // others
    fits = [r for r in range(1, left + 1) if left % r == 0 and (num_experts is None or num_experts % r == 0)]
    experts = "" if num_experts is None else f" and num_experts = {num_experts}"
    pairs = ", ".join(f"data={left // r} expert={r}" for r in fits)
    return f"with the other axes as they are, {pairs} would fit {device_count} devices{experts}"


def _text(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in sizes.items())
