"""How rows travel between the ranks of the expert axis, with XLA collectives. Inside `shard_map`; with R = 1 nothing travels.

Every rank gathers all tokens of its expert group and computes the rows of its own experts (`schedule` gathers the ids
alike). The value of each slot then goes back to the token's rank from the one rank that has it, by all-to-all and a
selection, not by a sum: nothing is rounded or reordered on the way, so the layer's bits do not depend on R. Read
`moe.py` next.

Letters: T tokens of this rank, N tokens of the whole expert group (= R T), K experts per token, D model width.
"""

import jax
import jax.numpy as jnp

from moejax.ops.spec import MoESpec


def gather_tokens(value_Txany: jax.Array, spec: MoESpec) -> jax.Array:
    """Rows of all ranks of the expert group, in rank order: (T, …) -> (N, …)."""
    if spec.ranks == 1:
        return value_Txany
    return jax.lax.all_gather(value_Txany, spec.axis, axis=0, tiled=True)


def return_slots(value_NxKxany: jax.Array, row_NxK: jax.Array, spec: MoESpec) -> jax.Array:
    """Brings each slot's value home from the rank that computed it: (N, K, …) on every rank -> (T, K, …).

    Args:
      value_NxKxany: this rank's values; read only where row_NxK >= 0.
      row_NxK: rows of the plan; at most one rank of the group has a row for a slot.
    Returns:
      The values, zero for slots that no rank computed.
    """
    mine_NxK = row_NxK >= 0
    if spec.ranks > 1:
        # (N, …) -> (R, T, …): block r is for the tokens of rank r; afterwards block r is what rank r sends us.
        mine_RxTxK, value_RxTxKxany = (_exchange(array, spec) for array in (mine_NxK, value_NxKxany))
        owner_1xTxK = jnp.argmax(mine_RxTxK, axis=0)[None]
        index = owner_1xTxK.reshape(owner_1xTxK.shape + (1,) * (value_RxTxKxany.ndim - 3))
        value_NxKxany = jnp.take_along_axis(value_RxTxKxany, index, axis=0)[0]
        mine_NxK = jnp.any(mine_RxTxK, axis=0)
    mask = mine_NxK.reshape(mine_NxK.shape + (1,) * (value_NxKxany.ndim - 2))
    return jnp.where(mask, value_NxKxany, jnp.zeros((), value_NxKxany.dtype))


def _exchange(value_Nxany: jax.Array, spec: MoESpec) -> jax.Array:
    blocks_RxTxany = value_Nxany.reshape(spec.ranks, -1, *value_Nxany.shape[1:])
    return jax.lax.all_to_all(blocks_RxTxany, spec.axis, split_axis=0, concat_axis=0)
