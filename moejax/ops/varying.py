"""Values inside `shard_map` carry the mesh axes they vary over; loops and custom derivatives need these to agree.

Outside `shard_map` (and with `check_vma=False`) everything here does nothing.
"""

import jax
import jax.numpy as jnp


def vary_alike(tree):
    """Marks every leaf as varying over all axes that any leaf varies over.

    A cotangent must vary over the same axes as its primal; the transpose of this cast is the sum over replicas that a
    replicated operand (weights under data parallelism) needs.
    """
    axes = frozenset().union(*(_axes(leaf) for leaf in jax.tree.leaves(tree)))
    return jax.tree.map(lambda leaf: _vary(leaf, axes), tree)


def zeros_like_varying(shape: tuple[int, ...], dtype, like: jax.Array) -> jax.Array:
    """Zeros that vary over the axes `like` varies over: a loop state that will hold values computed from `like`."""
    return _vary(jnp.zeros(shape, dtype), _axes(like))


def _vary(leaf, axes):
    missing = tuple(sorted(axes - _axes(leaf)))
    return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf


def _axes(leaf) -> frozenset:
    kind = jax.typeof(leaf)
    # jax 0.12 moved the attribute; 0.11 has it on the type itself
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma
