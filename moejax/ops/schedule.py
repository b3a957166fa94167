"""The schedule of an expert layer: which row of the expert buffers each (token, slot) gets. Integer work only.

`schedule` turns expert ids into a `Plan`. Rows of one expert are contiguous, start at a multiple of 128 and follow the
order (source rank, token, slot), which for contiguous token sharding is the global token order; so a plan never
depends on how tokens are split over ranks. Read `moe.py` next, which moves the rows.

Letters: T tokens, K experts per token, E experts (of this rank in a `Plan`), R ranks, M rows after dispatch, N = T K
slots, W minibatches.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from moejax.ops.spec import SCHEDULE_NAME, TILE, MoESpec, parse_capacity_factor

INT32_MAX = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """Which rows belong to which expert: all that the products need of a plan. int32; fields as in `Plan`."""

    count_E: jax.Array
    start_E: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Where the rows of this rank's experts are. All int32.

    With `spec.ranks > 1`, T counts the tokens of the whole expert group and E the experts of this rank.

    Attributes:
      count_E: rows of each expert, after capacity.
      start_E: first row of each expert, a multiple of 128.
      row_TxK: row of each (token, slot); -1 if masked, dropped, or of another rank's expert.
      slot_M: flat slot `t K + s` of each row; -1 in padding.
      routed_E: rows asked for, before capacity.
    """

    count_E: jax.Array
    start_E: jax.Array
    row_TxK: jax.Array
    slot_M: jax.Array
    routed_E: jax.Array


def schedule(expert_TxK: jax.Array, spec: MoESpec) -> Any:
    """Assigns a row to every slot whose expert lives here. Local view: inside `shard_map` if `spec.ranks > 1`.

    Args:
      expert_TxK: int32 expert ids of this rank's tokens, 0..E-1 over all ranks, or -1 for a masked slot. Those of a token
        are distinct; over several ranks what a token names again may find no room, and counts as dropped.
      spec: reads num_experts, ranks, axis, transport, capacity_factor.
    Returns:
      A `Plan` over the tokens of the whole expert group (R T of them) for the experts of this rank; an `ExchangePlan`
      (`exchange_plan.py`) if rows travel by all-to-all.
    Raises:
      TypeError: the ids are not int32.
      ValueError: the ids have another K, or (where they are concrete) lie outside -1..E-1; too many slots for int32.
    """
    if spec.exchanges:
        from moejax.ops.exchange_plan import schedule_exchange  # late: it imports this file

        return schedule_exchange(expert_TxK, spec)
    check_ids(expert_TxK, spec)
    first_expert: int | jax.Array = 0
    if spec.ranks > 1:
        # Ids are a few bytes per token, and with all of them every rank knows the global order.
        expert_TxK = jax.lax.all_gather(expert_TxK, spec.axis, axis=0, tiled=True)
        first_expert = jax.lax.axis_index(spec.axis) * spec.local_experts
    tokens, top_k = expert_TxK.shape
    slots, experts = tokens * top_k, spec.local_experts
    rows = rows_bound(tokens, spec)
    if max(slots, rows) + slots > INT32_MAX:  # dropped slots get places beyond the rows
        raise ValueError(
            f"{tokens} tokens x {top_k} slots do not fit an int32 schedule of {rows} rows: use smaller micro-batches"
        )

    local_N = expert_TxK.reshape(slots) - first_expert
    local_N = jnp.where(
        (local_N >= 0) & (local_N < experts), local_N, experts
    )  # slots without a row sort behind all others
    sorted_local_N, sorted_slot_N = stable_sort(local_N, experts)

    routed_E = jnp.zeros(experts + 1, jnp.int32).at[local_N].add(1)[:experts]
    limit = capacity(tokens, spec)
    if limit is None and top_k > experts:
        limit = (
            tokens  # what `rows_bound` has room for: more only where a token names an expert twice, and counted then
        )
    count_E = routed_E if limit is None else jnp.minimum(routed_E, limit)
    padded_E = (count_E + TILE - 1) // TILE * TILE
    start_E = jnp.cumsum(padded_E) - padded_E
    offset_E = jnp.cumsum(routed_E) - routed_E

    here_N = sorted_local_N < experts
    index_N = jnp.minimum(sorted_local_N, experts - 1)
    rank_N = jnp.arange(slots, dtype=jnp.int32) - offset_E[index_N]
    keep_N = here_N & (rank_N < count_E[index_N])
    row_N = jnp.where(keep_N, start_E[index_N] + rank_N, -1)
    # Both scatters write each place at most once, so their order cannot matter.
    slot_M = (
        jnp.full(rows, -1, jnp.int32)
        .at[jnp.where(keep_N, row_N, rows + jnp.arange(slots, dtype=jnp.int32))]
        .set(sorted_slot_N, mode="drop", unique_indices=True)
    )
    row_TxK = jnp.full(slots, -1, jnp.int32).at[sorted_slot_N].set(row_N, unique_indices=True).reshape(tokens, top_k)
    plan = Plan(count_E=count_E, start_E=start_E, row_TxK=row_TxK, slot_M=slot_M, routed_E=routed_E)
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, SCHEDULE_NAME), plan)


def stable_sort(local_N: jax.Array, experts: int, largest_key: int = INT32_MAX) -> tuple[jax.Array, jax.Array]:
    """Slots in (expert, slot) order: int32 expert of each sorted slot (`experts` for none), and the slots themselves.

    One key holds both numbers where they fit, so that keys are distinct and every correct sort gives the same order;
    sorting single integers is the fastest form there is (0.9 ms per 2^16 slots less than argsort on two CPU cores).
    """
    slots = local_N.shape[0]
    if slots * (experts + 1) > largest_key:
        sorted_slot_N = jnp.argsort(local_N, stable=True).astype(jnp.int32)
        return local_N[sorted_slot_N], sorted_slot_N
    key_N = jnp.sort(local_N * slots + jnp.arange(slots, dtype=jnp.int32))
    sorted_local_N = key_N // slots
    return sorted_local_N, key_N - sorted_local_N * slots


def rows_bound(tokens: int, spec: MoESpec) -> int:
    """M: rows that hold any routing of T tokens (of the whole expert group), padding included; a multiple of 128."""
    rows = tokens * min(spec.top_k, spec.local_experts)
    limit = capacity(tokens, spec)
    if limit is not None:
        rows = min(rows, limit * spec.local_experts)
    used_experts = min(spec.local_experts, rows)  # an empty expert needs no padding: matters when one token is decoded
    return -(-(rows + (TILE - 1) * used_experts) // TILE) * TILE


def capacity(tokens: int, spec: MoESpec) -> int | None:
    """C, the rows an expert may have: ceil(T K cf / E) in exact arithmetic, at least 1, at most T; None if dropless.

    Args:
      tokens: T, tokens of the whole expert group, padding included (so that C is static).
    Raises:
      ValueError: `spec.capacity_factor` is not a positive decimal number.
    """
    if spec.capacity_factor is None:
        return None
    factor = parse_capacity_factor(spec.capacity_factor)
    wanted = -(-(tokens * spec.top_k * factor) // spec.num_experts)
    return min(tokens, max(1, int(wanted)))


def dropped_rows(plan) -> jax.Array:
    """Slots of this rank's experts that found no room, int32."""
    return jnp.sum(plan.routed_E - plan.count_E)


def minibatches(plan: Plan, rows_per_minibatch: int) -> tuple[jax.Array, jax.Array]:
    """Cuts the M rows into windows of `rows_per_minibatch` and gives each expert's share of every window.

    Groups start at multiples of 128 and so do windows, so a border always falls on a multiple of 128 rows of the
    expert's own order: the tile a row belongs to never depends on the window size.

    Returns:
      int32 first_WxE (row of the whole buffer) and count_WxE (real rows, 0 if the expert has none in the window).
    Raises:
      ValueError: `rows_per_minibatch` is not a positive multiple of 128.
    """
    if rows_per_minibatch <= 0 or rows_per_minibatch % TILE:
        raise ValueError(f"rows_per_minibatch is {rows_per_minibatch}; expected a positive multiple of {TILE}")
    windows = -(-plan.slot_M.shape[0] // rows_per_minibatch)
    low_Wx1 = (jnp.arange(windows, dtype=jnp.int32) * rows_per_minibatch)[:, None]
    first_WxE = jnp.clip(plan.start_E, low_Wx1, low_Wx1 + rows_per_minibatch)
    last_WxE = jnp.clip(plan.start_E + plan.count_E, low_Wx1, low_Wx1 + rows_per_minibatch)
    return first_WxE, last_WxE - first_WxE


def check_ids(expert_TxK, spec: MoESpec) -> None:
    """Raises as `schedule` says."""
    if expert_TxK.dtype != jnp.int32:
        raise TypeError(f"expert ids are {expert_TxK.dtype}; expected int32")
    if expert_TxK.ndim != 2 or expert_TxK.shape[1] != spec.top_k:
        raise ValueError(
            f"expert ids have shape {expert_TxK.shape}; expected (T, {spec.top_k}), K = top_k = {spec.top_k}"
        )
    if expert_TxK.size and not isinstance(expert_TxK, jax.core.Tracer):
        expert_TxK = np.asarray(expert_TxK)  # of jax.numpy it would be traced when called inside jit
        low, high = int(expert_TxK.min()), int(expert_TxK.max())
        if low < -1 or high >= spec.num_experts:
            raise ValueError(
                f"expert ids lie in {low}..{high}; expected 0..{spec.num_experts - 1}, or -1 for a masked slot"
            )
