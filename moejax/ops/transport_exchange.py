"""Rows by all-to-all: each travels once to the rank of its expert, and its result once back. Inside `shard_map`.

Window by window (`exchange_plan.py`): the rows of the window arrive in the order of the plan, the backend computes them,
the results go home. All buffers have a fixed size, whatever the routing: a window on the receiving side, one value per
own slot on the sending side. Skew costs more windows, never memory, and nothing is dropped.

  all_to_all          equal chunks between all pairs, in as many rounds as the fullest pair needs; every platform
  ragged_all_to_all   exactly the rows there are, in one call per window; XLA has it on GPUs

Letters: T tokens of this rank, K experts per token, N = T K slots in the order of slot_N, R ranks, E experts of this
rank, W rows of a window, C rows of a chunk, D model width.
"""

import jax
import jax.numpy as jnp

from moejax.ops import backends
from moejax.ops.exchange_plan import ExchangePlan, Routes, Window, chunk_rows
from moejax.ops.experts import ExpertWeights
from moejax.ops.spec import MoESpec
from moejax.ops.varying import vary_alike, zeros_like_varying

RAGGED = "ragged_all_to_all"


def forward(x_TxD: jax.Array, plan: ExchangePlan, run, spec: MoESpec):
    """Results of this rank's slots before the combine weight.

    Args:
      x_TxD: tokens of this rank.
      run: the backend's `forward`, (x_MxD, groups) -> y_MxD, saved.
    Returns:
      y_TxKxD in the compute dtype, zero for slots without a row; and None, as nothing is kept for the backward.
    """
    routes = Routes.of(plan, spec)
    x_TxD = x_TxD.astype(backends.compute_dtype(spec))

    def one_window(index, home):
        window = routes.window(index)
        with jax.named_scope("moe_dispatch"):
            (x_WxD,) = _dispatch((x_TxD,), plan, window, spec)
        with jax.named_scope("moe_experts"):
            y_WxD, _ = run(x_WxD, window.groups)
        with jax.named_scope("moe_combine"):
            return _return((y_WxD,), home, window, spec)

    home = (zeros_like_varying((plan.slot_N.shape[0], spec.d_model), x_TxD.dtype, x_TxD),)
    (y_NxD,) = jax.lax.fori_loop(0, routes.windows, one_window, home)
    return _slots(y_NxD, plan), None


def backward(x_TxD, dy_TxD, weight_TxK, saved, plan: ExchangePlan, run, buffer: ExpertWeights, spec: MoESpec):
    """Gradients of `forward`; x travels again, as keeping the rows would need room for any routing.

    Args:
      run: the backend's `backward`, (x_MxD, dy_MxD, weight_M, saved, groups, buffer) -> dx_MxD, d_weight_M, buffer.
      buffer: FP32 weight gradients to continue from, window after window.
    Returns:
      dx_TxKxD in the compute dtype, d_weight_TxK FP32, buffer.
    """
    routes = Routes.of(plan, spec)
    dtype = backends.compute_dtype(spec)
    values = x_TxD.astype(dtype), dy_TxD.astype(dtype), weight_TxK.astype(jnp.float32).reshape(-1)

    def one_window(index, state):
        home, buffer = state
        window = routes.window(index)
        with jax.named_scope("moe_dispatch"):
            x_WxD, dy_WxD, weight_W = _dispatch(values, plan, window, spec)
        with jax.named_scope("moe_experts_grad"):
            dx_WxD, d_weight_W, buffer = run(x_WxD, dy_WxD, weight_W, None, window.groups, buffer)
        with jax.named_scope("moe_combine"):
            return _return((dx_WxD, d_weight_W), home, window, spec), buffer

    slots = plan.slot_N.shape[0]
    home = (
        zeros_like_varying((slots, spec.d_model), dtype, x_TxD),
        zeros_like_varying((slots,), jnp.float32, x_TxD),
    )
    (dx_NxD, d_weight_N), buffer = jax.lax.fori_loop(0, routes.windows, one_window, (home, buffer))
    return _slots(dx_NxD, plan), _slots(d_weight_N, plan), buffer


def used_slots(plan: ExchangePlan, spec: MoESpec) -> jax.Array:
    """bool (T, K): slots that have a row somewhere."""
    return plan.place_TxK >= 0


def moved_bytes(plan: ExchangePlan, spec: MoESpec) -> jax.Array:
    """FP32 bytes that this rank sends to others for one forward and one backward, chunks filled up included."""
    routes = Routes.of(plan, spec)
    others_R = jnp.arange(spec.ranks) != jax.lax.axis_index(spec.axis)

    def rows_of(index, rows):
        window = routes.window(index)
        if spec.transport == RAGGED:
            here_R, back_R = window.pair_RxR[window.rank], window.pair_RxR[:, window.rank]
            sent, given = (jnp.sum(jnp.where(others_R, pair_R, 0)).astype(jnp.float32) for pair_R in (here_R, back_R))
        else:
            chunk = chunk_rows(plan.place_TxK.shape[0], spec)
            sent = given = (_rounds(window, chunk) * (chunk * (spec.ranks - 1))).astype(jnp.float32)
        return rows[0] + sent, rows[1] + given

    zero = zeros_like_varying((), jnp.float32, plan.kept_RxG)
    sent, given = jax.lax.fori_loop(0, routes.windows, rows_of, (zero, zero))
    width = spec.d_model * backends.compute_dtype(spec).itemsize
    return sent * (3 * width + 4) + given * (2 * width + 4)


def _dispatch(values, plan: ExchangePlan, window: Window, spec: MoESpec):
    """Rows of this window from all ranks, padding zero. Values of two axes are per token, (T, D), of one per slot, (N,)."""

    def fetch(value, place):
        slot = plan.slot_N[place]
        return value[slot // spec.top_k if value.ndim > 1 else slot]

    if spec.transport == RAGGED:
        return _dispatch_ragged([fetch(value, jnp.arange(plan.slot_N.shape[0])) for value in values], window, spec)
    rows, chunk = window.used_W.shape[0], chunk_rows(plan.place_TxK.shape[0], spec)

    def one_round(index, arrived):
        place_RxC, sent_RxC = _chunk_places(window, index, chunk)
        here_W = window.used_W & (window.offset_W // chunk == index)
        from_W = jnp.where(here_W, window.source_W * chunk + window.offset_W % chunk, 0)
        done = []
        for value, array in zip(values, arrived, strict=True):
            sent = _where(sent_RxC, fetch(value, place_RxC), 0)
            got = jax.lax.all_to_all(sent, spec.axis, split_axis=0, concat_axis=0)
            done.append(_where(here_W, got.reshape(-1, *value.shape[1:])[from_W], array))
        return tuple(done)

    empty = tuple(zeros_like_varying((rows, *value.shape[1:]), value.dtype, value) for value in values)
    return jax.lax.fori_loop(0, _rounds(window, chunk), one_round, empty)


def _return(values, home, window: Window, spec: MoESpec):
    """Writes the window's results (W, …) into the senders' arrays (N, …)."""
    first_R, row_W = window.packed()
    if spec.transport == RAGGED:
        return _return_ragged([value[row_W] for value in values], home, first_R, window, spec)
    slots = home[0].shape[0]
    chunk = chunk_rows(slots // spec.top_k, spec)
    beyond_RC = slots + jnp.arange(spec.ranks * chunk, dtype=jnp.int32)

    def one_round(index, home):
        column_C = index * chunk + jnp.arange(chunk, dtype=jnp.int32)
        filled_RxC = column_C < window.pair_RxR[:, window.rank, None]
        row_RxC = row_W[jnp.where(filled_RxC, first_R[:, None] + column_C, 0)]
        place_RxC, sent_RxC = _chunk_places(window, index, chunk)
        place_RC = jnp.where(sent_RxC.reshape(-1), place_RxC.reshape(-1), beyond_RC)
        done = []
        for value, array in zip(values, home, strict=True):
            got = jax.lax.all_to_all(_where(filled_RxC, value[row_RxC], 0), spec.axis, split_axis=0, concat_axis=0)
            got = got.reshape(-1, *value.shape[1:])
            # each place is written once, in one round of one window
            done.append(array.at[place_RC].set(got, mode="drop", unique_indices=True))
        return tuple(done)

    return jax.lax.fori_loop(0, _rounds(window, chunk), one_round, tuple(home))


def _rounds(window: Window, chunk: int) -> jax.Array:
    return (jnp.max(window.pair_RxR) + chunk - 1) // chunk


def _chunk_places(window: Window, index, chunk: int):
    """Places in slot_N of the rows this rank sends to each in round `index`: int32 (R, C), and which of them exist."""
    column_C = index * chunk + jnp.arange(chunk, dtype=jnp.int32)
    exists_RxC = column_C < window.pair_RxR[window.rank, :, None]
    return jnp.where(exists_RxC, window.list_RxR[window.rank, :, None] + column_C, 0), exists_RxC


def _dispatch_ragged(values_N, window: Window, spec: MoESpec):
    rank, pair_RxR = window.rank, window.pair_RxR
    rows = window.used_W.shape[0]
    sent_R, received_R = pair_RxR[rank], pair_RxR[:, rank]
    sizes = window.list_RxR[rank], sent_R, _before(pair_RxR)[rank], received_R
    place_W = jnp.where(window.used_W, _before(received_R)[window.source_W] + window.offset_W, 0)
    arrived = []
    for value in values_N:
        packed = _ragged(value, zeros_like_varying((rows, *value.shape[1:]), value.dtype, value), sizes, spec)
        arrived.append(_where(window.used_W, packed[place_W], 0))
    return tuple(arrived)


def _return_ragged(packed_W, home, first_R, window: Window, spec: MoESpec):
    rank = window.rank
    sizes = first_R, window.pair_RxR[:, rank], window.list_RxR[:, rank], window.pair_RxR[rank]
    return tuple(_ragged(value, array, sizes, spec) for value, array in zip(packed_W, home, strict=True))


def _ragged(value, output, sizes, spec: MoESpec) -> jax.Array:
    """`sizes`: where each rank's rows start here, how many they are, where they go there, how many come from each."""
    value, output, *sizes_R = vary_alike((value, output, *sizes))
    return jax.lax.ragged_all_to_all(value, output, *sizes_R, axis_name=spec.axis)


def _before(value_Rxany):
    return jnp.cumsum(value_Rxany, axis=0, dtype=jnp.int32) - value_Rxany


def _where(mask, value, other):
    return jnp.where(mask.reshape(mask.shape + (1,) * (value.ndim - mask.ndim)), value, jnp.asarray(other, value.dtype))


def _slots(value_Nxany, plan: ExchangePlan) -> jax.Array:
    """(N, …) in the order of slot_N -> (T, K, …), zero where a slot has no row."""
    used_TxK = plan.place_TxK >= 0
    return _where(used_TxK, value_Nxany[jnp.where(used_TxK, plan.place_TxK, 0)], 0)
