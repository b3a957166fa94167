"""Splitting the tokens of a global batch over every device of the mesh, and putting them back: the way into `shard_map`.

Token order is the order of the flattened batch, and device order is mesh order, so each device holds a contiguous piece of the
global token order; the schedule's row order, and with it every bit of the expert layer, then depends on neither. Read
`moe.py` next.

Letters: B batch (one or more leading axes), T tokens.
"""

import math

import jax
import jax.numpy as jnp

from moejax.ops.spec import MoESpec


def open_mesh(spec: MoESpec) -> jax.sharding.AbstractMesh | None:
    """The mesh `shard_map` has to be opened over, or None: there is no mesh, or the caller is inside `shard_map` already.

    Raises:
      ValueError: the expert axis of the spec is not there, or has another size.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        if spec.ranks > 1:
            raise ValueError(
                f"experts are split over {spec.ranks} ranks of axis {spec.axis!r}: call under `jax.set_mesh(mesh)`"
            )
        return None
    if spec.axis is not None and mesh.shape.get(spec.axis) != spec.ranks:
        raise ValueError(
            f"the spec has {spec.ranks} expert ranks on axis {spec.axis!r}, the mesh has {dict(mesh.shape)}: "
            "make the spec with moe_spec(config, mesh) of this mesh"
        )
    manual = [name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == jax.sharding.AxisType.Manual]
    if manual and len(manual) < len(mesh.axis_names):
        raise ValueError(
            f"only axes {manual} of {mesh.axis_names} are manual here: open `shard_map` over all axes, or none"
        )
    return None if manual else mesh


def local_spec(shape: tuple[int, ...], mesh: jax.sharding.AbstractMesh) -> jax.P | None:
    """Rows and sequence over the axes that split them outside already, or None: there are none, or a size does not divide.

    On a mesh that splits sequences or heads a device then computes pieces of the rows it has. `split` would move nearly every
    token, because its pieces are cut from whole rows. Token order is another one; along `expert` it is that of `split`.
    """
    inner = tuple(name for name in ("context", "tensor") if name in mesh.shape)
    outer = tuple(name for name in mesh.axis_names if name not in inner)
    pieces = math.prod(mesh.shape[name] for name in inner)
    if pieces == 1 or shape[0] % math.prod(mesh.shape[name] for name in outer) or shape[1] % pieces:
        return None
    return jax.P(outer or None, inner)


def split(leaf: jax.Array, batch_axes: int, mesh: jax.sharding.AbstractMesh, fill) -> jax.Array:
    """(*B, ...) -> (T, ...) split over all axes of the mesh; T is filled up with `fill` to a multiple of the devices."""
    if _explicit(mesh):
        leaf = jax.reshard(leaf, _batch_spec(leaf.shape[0], leaf.ndim, mesh))
    batch, tail = leaf.shape[:batch_axes], leaf.shape[batch_axes:]
    leaf = leaf.reshape(math.prod(batch), *tail)
    missing = -leaf.shape[0] % mesh.size
    if missing:  # fewer tokens than devices, as in decoding: replicating them first is cheap
        leaf = jax.reshard(leaf, jax.P()) if _explicit(mesh) else leaf
        leaf = jnp.pad(leaf, ((0, missing), *[(0, 0)] * len(tail)), constant_values=fill)
    return jax.reshard(leaf, jax.P(_explicit(mesh))) if _explicit(mesh) else leaf


def merge(leaf: jax.Array, like: jax.Array, batch_axes: int, mesh: jax.sharding.AbstractMesh) -> jax.Array:
    """The inverse of `split`: into the shape and sharding of `like`."""
    batch = like.shape[:batch_axes]
    padded = leaf.shape[0] != math.prod(batch)
    if _explicit(mesh):
        spec = _batch_spec(batch[0], leaf.ndim, mesh)
        leaf = jax.reshard(leaf, jax.P() if padded else spec)
    if padded:
        leaf = leaf[: math.prod(batch)]
    if _explicit(mesh) and padded:
        leaf = jax.reshard(leaf, spec)
    leaf = leaf.reshape(*batch, *leaf.shape[1:])
    return jax.reshard(leaf, jax.typeof(like).sharding.spec) if _explicit(mesh) else leaf


def like(leaf: jax.Array, other: jax.Array, mesh: jax.sharding.AbstractMesh) -> jax.Array:
    """Into the sharding of `other`, where types carry shardings."""
    return jax.reshard(leaf, jax.typeof(other).sharding.spec) if _explicit(mesh) else leaf


def reshard(tree, specs, mesh: jax.sharding.AbstractMesh):
    """Moves every leaf to its spec, where types carry shardings; elsewhere `shard_map` does it."""
    explicit = _explicit(mesh)
    if not explicit:
        return tree
    return jax.tree.map(lambda leaf, spec: jax.reshard(leaf, _only(spec, explicit)), tree, specs)


def zeros(shape: tuple[int, ...], spec: jax.P, mesh: jax.sharding.AbstractMesh) -> jax.Array:
    """FP32 zeros, born in `spec`."""
    explicit = _explicit(mesh)
    if explicit:
        return jnp.zeros(shape, jnp.float32, out_sharding=_only(spec, explicit))
    return jax.lax.with_sharding_constraint(jnp.zeros(shape, jnp.float32), spec)


def _only(spec: jax.P, axes: tuple[str, ...]) -> jax.P:
    """The part of a spec that names these axes."""
    entries = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    return jax.P(*[tuple(name for name in entry if name in axes) or None for entry in entries])


def _batch_spec(batch: int, ndim: int, mesh) -> jax.P:
    """The leading axis over as many mesh axes, in order, as divide it; the others whole. What reshaping can keep track of."""
    axes: list[str] = []
    for name in _explicit(mesh):
        if batch % math.prod(mesh.shape[axis] for axis in [*axes, name]):
            break
        axes.append(name)
    return jax.P(tuple(axes) or None, *[None] * (ndim - 1))


def _explicit(mesh) -> tuple[str, ...]:
    """Names of the axes that types carry."""
    return tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == jax.sharding.AxisType.Explicit)
