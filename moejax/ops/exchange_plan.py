"""The schedule of an expert layer whose rows travel by all-to-all: who sends how many rows where. Integer work only.

Ranks tell each other how many rows they have for every expert (R x E numbers), and from those each computes where its
rows lie in the order (expert, source rank, token, slot) of the rank that holds the expert: the order of `schedule.py`,
so the bits of the layer are the same. What one rank holds has no static bound worth allocating: all tokens may choose
one rank. So rows are handled in windows of a fixed size, as many as the fullest rank needs; borders fall on multiples
of 128 rows of the expert's own order, and never cut a short rest off the 128 rows before it. Read
`transport_exchange.py` next, which moves the rows.

Letters: T tokens of this rank, K experts per token, N = T K slots, R ranks, E experts of this rank, G all experts
(R E), W rows of a window.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax.ops.schedule import INT32_MAX, Groups, capacity, check_ids, rows_bound, stable_sort
from moejax.ops.spec import SCHEDULE_NAME, TILE, MoESpec

SLACK = 1.25  # a window and a chunk hold this many times the share of balanced routing; more costs memory, less rounds
_CHUNK_UNIT = 8  # rows
# Up to so many rows at the end of an expert stay with the 128 before them, as in `ffi/cpu/types.h`: products of a few rows
# are slow, and a BLAS may round them otherwise, so the same rows must be multiplied together whatever the windows.
_REST = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExchangePlan:
    """Rows of this rank's experts, and where this rank's slots go. All int32.

    Attributes:
      count_E: rows of each expert of this rank, after capacity.
      start_E: first row of each, a multiple of 128.
      routed_E: rows asked for, before capacity.
      kept_RxG: rows that each rank has for each expert of the group, after capacity.
      slot_N: this rank's flat slots `t K + s` in (expert, token, slot) order; -1 behind the last.
      place_TxK: where in slot_N each slot is; -1 if masked or dropped.
    """

    count_E: jax.Array
    start_E: jax.Array
    routed_E: jax.Array
    kept_RxG: jax.Array
    slot_N: jax.Array
    place_TxK: jax.Array


def schedule_exchange(expert_TxK: jax.Array, spec: MoESpec) -> ExchangePlan:
    """The plan of this rank's tokens. Inside `shard_map`; arguments and errors as in `schedule`."""
    check_ids(expert_TxK, spec)
    tokens, top_k = expert_TxK.shape
    slots, experts = tokens * top_k, spec.num_experts
    bound = rows_bound(tokens * spec.ranks, spec)
    if bound > INT32_MAX:
        raise ValueError(f"{tokens * spec.ranks} tokens x {top_k} slots do not fit an int32 schedule of {bound} rows")
    id_N = expert_TxK.reshape(slots)
    id_N = jnp.where((id_N >= 0) & (id_N < experts), id_N, experts)  # slots without a row sort behind all others
    sorted_id_N, sorted_slot_N = stable_sort(id_N, experts)

    asked_G = jnp.zeros(experts + 1, jnp.int32).at[id_N].add(1)[:experts]
    asked_RxG = jax.lax.all_gather(asked_G, spec.axis)
    limit = capacity(tokens * spec.ranks, spec)
    kept_RxG = asked_RxG
    if limit is not None:  # the last rows of the order go, so those of the last ranks
        kept_RxG = jnp.clip(limit - _exclusive(asked_RxG), 0, asked_RxG)
    rank = jax.lax.axis_index(spec.axis)
    index_N = jnp.minimum(sorted_id_N, experts - 1)
    within_N = jnp.arange(slots, dtype=jnp.int32) - _exclusive(asked_G)[index_N]
    keep_N = (sorted_id_N < experts) & (within_N < kept_RxG[rank][index_N])
    place_N = jnp.where(keep_N, jnp.cumsum(keep_N, dtype=jnp.int32) - 1, -1)
    # Both scatters write each place at most once, so their order cannot matter.
    beyond_N = slots + jnp.arange(slots, dtype=jnp.int32)
    slot_N = jnp.full(slots, -1, jnp.int32)
    slot_N = slot_N.at[jnp.where(keep_N, place_N, beyond_N)].set(sorted_slot_N, mode="drop", unique_indices=True)
    place_TxK = jnp.full(slots, -1, jnp.int32).at[sorted_slot_N].set(place_N, unique_indices=True)

    mine = functools.partial(_of_rank, rank=rank, experts=spec.local_experts)
    plan = ExchangePlan(
        count_E=mine(kept_RxG.sum(0, dtype=jnp.int32)),
        start_E=mine(_starts(kept_RxG, spec)),
        routed_E=mine(asked_RxG.sum(0, dtype=jnp.int32)),
        kept_RxG=kept_RxG,
        slot_N=slot_N,
        place_TxK=place_TxK.reshape(tokens, top_k),
    )
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, SCHEDULE_NAME), plan)


def window_rows(tokens: int, spec: MoESpec) -> int:
    """W: `spec.minibatch_rows`, or the share of balanced routing with some slack; never more than any routing needs.

    Args:
      tokens: T, of this rank.
    """
    rows = spec.minibatch_rows
    if rows is None:
        rows = math.ceil(SLACK * tokens * spec.top_k) + (TILE - 1) * spec.local_experts
    return min(-(-rows // TILE) * TILE, rows_bound(tokens * spec.ranks, spec))


def chunk_rows(tokens: int, spec: MoESpec) -> int:
    """C: rows that each pair of ranks exchanges in one round; balanced routing needs one round per window."""
    share = min(window_rows(tokens, spec), math.ceil(SLACK * tokens * spec.top_k))
    return -(-share // (spec.ranks * _CHUNK_UNIT)) * _CHUNK_UNIT


@dataclasses.dataclass(frozen=True)
class Routes:
    """Where the rows of every rank lie on every other, from the counts all ranks share.

    Attributes:
      first_RxG, end_RxG: rows [first, end) of each rank, in each expert, on the rank that holds it.
      sent_RxR: rows from each rank (first axis) to each other.
      windows: as many as the fullest rank needs, the same on all ranks.
      spacing: rows from border to border.
      rows: W, of a window: a rest may hang over its border.
    """

    first_RxG: jax.Array
    end_RxG: jax.Array
    sent_RxR: jax.Array
    windows: jax.Array
    spacing: int
    rows: int
    spec: MoESpec

    @classmethod
    def of(cls, plan: ExchangePlan, spec: MoESpec) -> "Routes":
        """Routes of a plan, in windows of `window_rows`."""
        tokens = plan.place_TxK.shape[0]
        spacing = window_rows(tokens, spec)
        first_RxG = _starts(plan.kept_RxG, spec) + _exclusive(plan.kept_RxG)
        end_RxG = first_RxG + plan.kept_RxG
        last = jnp.max(jnp.where(plan.kept_RxG > 0, end_RxG, 0))
        windows = (last + spacing - 1) // spacing
        rows = min(spacing + TILE, rows_bound(tokens * spec.ranks, spec))
        return cls(first_RxG, end_RxG, _by_rank(plan.kept_RxG, spec), windows, spacing, rows, spec)

    def window(self, index) -> "Window":
        """Rows between two borders, on every rank."""
        spec, origin = self.spec, index * self.spacing
        rank = jax.lax.axis_index(spec.axis)
        low_G, high_G = self._border(origin), self._border(origin + self.spacing)
        # counts of rows below a border are differences of clipped ends
        first_RxG, end_RxG = jnp.clip(self.first_RxG, low_G, high_G), jnp.clip(self.end_RxG, low_G, high_G)
        pair_RxR = _by_rank(end_RxG - first_RxG, spec)
        before_RxR = _by_rank(jnp.minimum(self.end_RxG, low_G) - jnp.minimum(self.first_RxG, low_G), spec)
        list_RxR = _exclusive(self.sent_RxR.T).T + before_RxR

        mine = functools.partial(_of_rank, rank=rank, experts=spec.local_experts)
        whole_first_ExR = mine(self.first_RxG.T)
        first_ExR, end_ExR = mine(first_RxG.T), mine(end_RxG.T)
        # a group with rows starts at a multiple of 128 anyway; one without may be cut anywhere
        start_E = (first_ExR[:, 0] + TILE - 1) // TILE * TILE - origin
        groups = Groups(count_E=end_ExR[:, -1] - first_ExR[:, 0], start_E=jnp.minimum(start_E, self.rows))

        # (expert, source) pieces are in row order, so the piece of a row is the last one that starts at or before it
        row_W = origin + jnp.arange(self.rows, dtype=jnp.int32)
        piece_W = jnp.searchsorted(whole_first_ExR.reshape(-1), row_W, side="right").astype(jnp.int32) - 1
        used_W = (row_W >= first_ExR.reshape(-1)[piece_W]) & (row_W < end_ExR.reshape(-1)[piece_W])
        source_W = piece_W % spec.ranks
        earlier_ExR = _exclusive(end_ExR - first_ExR)
        offset_W = (earlier_ExR - first_ExR).reshape(-1)[piece_W] + row_W
        return Window(pair_RxR, list_RxR, groups, used_W, source_W, offset_W, rank)

    def _border(self, row) -> jax.Array:
        """The border at or behind `row` on the rank of each expert (G,): behind it if a rest is there."""
        start_G, end_G = self.first_RxG[0], self.end_RxG[-1]
        rest_G = jnp.where((start_G < row) & (end_G > row) & (end_G - row <= _REST), end_G - row, 0)
        rest_R = rest_G.reshape(self.spec.ranks, self.spec.local_experts).max(1)
        return row + jnp.repeat(rest_R, self.spec.local_experts)


@dataclasses.dataclass(frozen=True)
class Window:
    """One window of rows on every rank. All int32.

    Attributes:
      pair_RxR: rows from each rank (first axis) to each other.
      list_RxR: where in the sender's slot_N the first of them is; they lie side by side.
      groups: rows of this rank's experts, counted from the start of the window.
      used_W: whether a row of this rank is no padding.
      source_W, offset_W: the rank that sends it, and its number among the rows of that rank in this window.
      rank: this one.
    """

    pair_RxR: jax.Array
    list_RxR: jax.Array
    groups: Groups
    used_W: jax.Array
    source_W: jax.Array
    offset_W: jax.Array
    rank: jax.Array

    def packed(self) -> tuple[jax.Array, jax.Array]:
        """Rows of this rank ordered by sender: the first of each sender, and the window's row at each place.

        Returns:
          first_R; row_W, arbitrary behind the last used row.
        """
        first_R = _exclusive(self.pair_RxR[:, self.rank])
        rows = self.used_W.shape[0]
        row_W = jnp.arange(rows, dtype=jnp.int32)
        place_W = jnp.where(self.used_W, first_R[self.source_W] + self.offset_W, rows + row_W)
        return first_R, jnp.zeros(rows, jnp.int32).at[place_W].set(row_W, mode="drop", unique_indices=True)


def _starts(kept_RxG, spec: MoESpec) -> jax.Array:
    """First row of every expert on its own rank, a multiple of 128."""
    count_RxE = kept_RxG.sum(0, dtype=jnp.int32).reshape(spec.ranks, spec.local_experts)
    padded_RxE = (count_RxE + TILE - 1) // TILE * TILE
    return (jnp.cumsum(padded_RxE, axis=1, dtype=jnp.int32) - padded_RxE).reshape(-1)


def _by_rank(value_RxG, spec: MoESpec) -> jax.Array:
    """Sums over the experts of each rank: (R, G) -> (R, R)."""
    return value_RxG.reshape(-1, spec.ranks, spec.local_experts).sum(2, dtype=jnp.int32)


def _of_rank(value_Gxany, rank, experts: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(value_Gxany, rank * experts, experts)


def _exclusive(value_Rxany) -> jax.Array:
    """Sums of the entries before each, along the first axis."""
    return jnp.cumsum(value_Rxany, axis=0, dtype=jnp.int32) - value_Rxany
