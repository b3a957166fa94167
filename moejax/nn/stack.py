"""Stacks of equal layers: one module whose variables have a leading layer axis, to be scanned or unrolled."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx


def make_stack(make: Callable[[nnx.Rngs], Any], layers: int, rngs: nnx.Rngs) -> Any:
    """`make(rngs)` for each layer, with its own key, as one module of stacked variables.

    The logical axes of every variable get "layer" in front, so that nobody derives a sharding one axis short from them.
    Returns None for 0 layers.
    """
    if layers == 0:
        return None
    graphdef: Any = None

    def one(key):
        nonlocal graphdef
        graphdef, state = nnx.split(make(nnx.Rngs(params=key)))
        return state

    state = jax.vmap(one)(jax.random.split(rngs.params(), layers))
    for variable in jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        variable.set_metadata(logical_axes=("layer", *variable.get_metadata("logical_axes")))
    return nnx.merge(graphdef, state)


def split_stack(tree: Any, sizes: list[int] | None = None) -> list[Any]:
    """Cuts every leaf along its layer axis: into pieces of these sizes, or (None) into single layers without that axis.

    One operation per leaf, whose transpose is one concatenation: slices would be transposed to padded sums of stack size.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not leaves or sizes == [leaves[0].shape[0]]:
        return [tree]
    single = sizes is None
    sizes = [1] * leaves[0].shape[0] if sizes is None else sizes
    columns = [jax.lax.split(leaf, sizes, axis=0) for leaf in leaves]
    pieces = [[column[i] for column in columns] for i in range(len(sizes))]
    if single:
        pieces = [[leaf.reshape(leaf.shape[1:]) for leaf in piece] for piece in pieces]
    return [jax.tree.unflatten(structure, piece) for piece in pieces]
