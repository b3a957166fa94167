"""The expert layer: dispatch, expert products, combine, as one differentiable function.

`moe_layer` is the global view a model calls; `moe_ffn` the local one, inside `shard_map`: one `custom_vjp` around
gathering rows, a backend that computes them, and the weighted sum of each token's slots. Nothing is ever scattered:
`Plan` holds both directions of the permutation, so forward and backward only gather, in a fixed order. Read
`backends.py` for what a backend is, `schedule.py` for the plan, `experts_xla.py` for the products and the rounding
points between them.

Letters: B batch, L sequence, T tokens of this rank, N tokens of its expert group (= R T), K experts per token, D model
width, F expert width, E experts, M rows after dispatch.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from moejax.ops import backends, hand_split, tokens, transport
from moejax.ops.backends import resolve_backend
from moejax.ops.exchange_plan import ExchangePlan
from moejax.ops.experts import ExpertWeights, add_copies, check_experts, prepare_experts
from moejax.ops.schedule import Plan, schedule
from moejax.ops.spec import GATE_UP_NAME, MoESpec
from moejax.ops.varying import vary_alike, zeros_like_varying

__all__ = [
    "DispatchStats",
    "ExpertWeights",
    "moe_ffn",
    "moe_layer",
    "new_accumulator",
    "prepare_experts",
    "reduce_accumulator",
    "resolve_backend",
]


def moe_ffn(
    x_TxD: jax.Array,
    weight_TxK: jax.Array,
    plan: Plan,
    experts: ExpertWeights,
    spec: MoESpec,
    accumulator: ExpertWeights | None = None,
):
    """y_t = sum over slots k of weight_tk * expert_{e(t,k)}(x_t). Local view: inside `shard_map` if `spec.ranks > 1`.

    Differentiable in x, weight and the FP32 masters of `experts`, whose gradients are FP32 and were never rounded to
    BF16. Weights are used as they are, neither normalised nor scaled. A slot without a row (masked, dropped) adds
    nothing.

    Args:
      x_TxD: FP32 or BF16 tokens of this rank.
      weight_TxK: FP32 combine weights.
      plan: from `schedule`, for the same tokens.
      experts: from `prepare_experts`; experts of this rank, or one layer of a stack of them (`ExpertWeights.of_layer`).
        Plain masters work too: their copies are then made on every call.
      spec: static description of the layer.
      accumulator: FP32 buffers shaped like the masters. They come back unchanged beside y, and it is the cotangent that
        accumulates: give the buffer as cotangent of the second output, and the cotangent of `accumulator` is buffer +
        dW (the masters then get none). Inside a step this keeps weight gradients in one place, with no addition of that
        size.
    Returns:
      y_TxD in the dtype of x; with `accumulator`, (y_TxD, accumulator).
    Raises:
      TypeError, ValueError: an argument does not fit the spec; the message names it.
    """
    _check_arguments(x_TxD, weight_TxK, plan, experts, spec, accumulator)
    if experts.copies is None:
        if experts.layer is not None and spec.recipe != "fp32":
            raise ValueError(
                "a stack of experts without copies: call prepare_experts on the stack, once, outside the layer scan"
            )
        experts = add_copies(experts, spec)
    x_TxD, weight_TxK, plan, experts, accumulator = vary_alike((x_TxD, weight_TxK, plan, experts, accumulator))
    if x_TxD.shape[0] == 0:  # not a row to gather, and gathering from nothing is refused
        y_TxD = x_TxD
    else:
        y_TxD, accumulator = _ffn(spec, x_TxD, weight_TxK, plan, experts, accumulator)
    return y_TxD if accumulator is None else (y_TxD, accumulator)


def moe_layer(
    x_BxLxD: jax.Array,
    weight_BxLxK: jax.Array,
    expert_BxLxK: jax.Array,
    experts: ExpertWeights,
    spec: MoESpec,
    accumulator: ExpertWeights | None = None,
):
    """The expert layer on arrays of the whole mesh: `schedule` and `moe_ffn`, inside the one `shard_map` they need.

    Works without a mesh, under explicit and under automatic axes, and inside a `shard_map` of the caller's (as the local
    view). Tokens are split over all axes of the mesh, experts over `spec.axis`. Outputs, dx, d_weight and expert
    gradients have the same bits for every number of expert ranks.

    Args:
      x_BxLxD: FP32 or BF16 tokens.
      weight_BxLxK, expert_BxLxK: FP32 combine weights and int32 expert ids (-1: masked), from `route`. The experts of a
        token are distinct.
      experts: from `prepare_experts`.
      spec: from `moe_spec`.
      accumulator: FP32 buffers from `new_accumulator`, used as in `moe_ffn`. Weight gradients then stay unreduced over
        the replicas of the experts until `reduce_accumulator`.
    Returns:
      y_BxLxD in the dtype and sharding of x, and `DispatchStats`; with `accumulator` it comes back as third.
    Raises:
      TypeError, ValueError: an argument does not fit the spec, or the mesh does not.
    """
    _check_layer_arguments(x_BxLxD, weight_BxLxK, expert_BxLxK, experts, spec)
    mesh = tokens.open_mesh(spec)
    if mesh is None:
        x_TxD, weight_TxK, expert_TxK = (a.reshape(-1, a.shape[-1]) for a in (x_BxLxD, weight_BxLxK, expert_BxLxK))
        if (split := hand_split.pieces(hand_split.TENSOR)) > 1:
            _check_capacity(x_TxD.shape[0], split, spec)
            leaves = ((x_TxD, 0.0), (weight_TxK, 0.0), (expert_TxK, -1))
            x_TxD, weight_TxK, expert_TxK = (hand_split.share(leaf, fill) for leaf, fill in leaves)
        y_TxD, stats, accumulator = _local_layer(
            x_TxD, weight_TxK, expert_TxK, experts, accumulator, spec=spec, mesh=None
        )
        if split > 1:
            y_TxD = hand_split.collect(y_TxD, math.prod(x_BxLxD.shape[:2]))
            stats = jax.tree.map(lambda leaf: jax.lax.psum(leaf, hand_split.TENSOR), stats)
        y_BxLxD = y_TxD.reshape(x_BxLxD.shape)
    elif expert_BxLxK.size == 0:  # nothing to split over devices
        none_E, y_BxLxD = jnp.zeros(spec.num_experts, jnp.int32), x_BxLxD
        stats = DispatchStats(none_E, none_E, dropped=jnp.int32(0), moved_bytes=jnp.float32(0.0))
    else:
        _check_capacity(expert_BxLxK[..., 0].size, mesh.size, spec)
        place = tokens.local_spec(x_BxLxD.shape, mesh)
        token_spec, expert_spec = place or jax.P(mesh.axis_names), jax.P(spec.axis)
        stack = () if experts.layer is None else (None,)  # the layer axis
        expert_specs = jax.tree.map(lambda leaf: jax.P(*stack, spec.axis) if leaf.ndim else jax.P(), experts)
        buffer_spec = jax.P(_replica_axes(mesh, spec), *stack, spec.axis)
        run = jax.shard_map(
            functools.partial(_local_layer, spec=spec, mesh=mesh),
            in_specs=(token_spec, token_spec, token_spec, expert_specs, buffer_spec),
            out_specs=(token_spec, DispatchStats(expert_spec, expert_spec, jax.P(), jax.P()), buffer_spec),
        )
        leaves = ((x_BxLxD, 0), (weight_BxLxK, 0), (expert_BxLxK, -1))
        x, weight, expert = (
            tokens.reshard(leaf, place, mesh) if place else tokens.split(leaf, 2, mesh, fill=fill)
            for leaf, fill in leaves
        )
        y, stats, accumulator = run(x, weight, expert, tokens.reshard(experts, expert_specs, mesh), accumulator)
        y_BxLxD = tokens.like(y, x_BxLxD, mesh) if place else tokens.merge(y, x_BxLxD, 2, mesh)
    return (y_BxLxD, stats) if accumulator is None else (y_BxLxD, stats, accumulator)


def new_accumulator(experts: ExpertWeights, spec: MoESpec) -> ExpertWeights:
    """FP32 zeros for `moe_layer(accumulator=…)`: the masters' shapes behind a leading axis of their replicas on the mesh.

    That axis is sharded over the axes the experts are replicated over, so a device holds one copy, its own.
    """
    mesh = tokens.open_mesh(spec)
    replicas = 1 if mesh is None else mesh.size // spec.ranks

    def zeros(leaf):
        shape = (replicas, *leaf.shape)
        if mesh is None:
            return jnp.zeros(shape, jnp.float32)
        return tokens.zeros(shape, jax.P(_replica_axes(mesh, spec), *stack, spec.axis), mesh)

    stack = (None,) * (experts.w_down_ExDxF.ndim - 3)
    return jax.tree.map(zeros, experts.masters())


def reduce_accumulator(accumulator: ExpertWeights) -> ExpertWeights:
    """Sums the replicas' weight gradients: once per optimizer step, after the last micro-batch."""
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), accumulator)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DispatchStats:
    """Rows of every expert, over the whole mesh. int32 unless said; sums, so they add over micro-batches.

    Attributes:
      routed_E: slots that chose the expert.
      count_E: of these, the ones within capacity: what it computed.
      dropped: slots over capacity, all experts.
      moved_bytes: FP32 bytes that all devices send to others over the expert axis, in one forward and one backward.
    """

    routed_E: Any  # Any: in a tree of specs or axes, each is one of those
    count_E: Any
    dropped: Any
    moved_bytes: Any


def _local_layer(x, weight, expert, experts, accumulator, *, spec, mesh):
    """Tokens are (T, …), or (B, L, …) where both are split."""
    x_TxD, weight_TxK, expert_TxK = (leaf.reshape(-1, leaf.shape[-1]) for leaf in (x, weight, expert))
    plan = schedule(expert_TxK, spec)
    if accumulator is None:
        y_TxD = moe_ffn(x_TxD, weight_TxK, plan, experts, spec)
    else:
        mine = jax.tree.map(lambda leaf: leaf[0], accumulator)  # the replica axis has one entry on each device
        y_TxD, mine = moe_ffn(x_TxD, weight_TxK, plan, experts, spec, accumulator=mine)
        accumulator = jax.tree.map(lambda leaf: leaf[None], mine)
    moved = transport.load(spec).moved_bytes(plan, spec)
    stats = DispatchStats(plan.routed_E, plan.count_E, jnp.sum(plan.routed_E - plan.count_E), moved)
    if mesh is not None:
        replica_axes, every_axis = _replica_axes(mesh, spec), mesh.axis_names
        axes = DispatchStats(replica_axes, replica_axes, dropped=every_axis, moved_bytes=every_axis)
        stats = DispatchStats(**{name: jax.lax.psum(getattr(stats, name), getattr(axes, name)) for name in vars(axes)})
    return y_TxD.reshape(x.shape), stats, accumulator


def _replica_axes(mesh, spec: MoESpec) -> tuple[str, ...]:
    """The axes experts are replicated over."""
    return tuple(name for name in mesh.axis_names if name != spec.axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ffn(spec, x_TxD, weight_TxK, plan, experts, accumulator):
    return _ffn_forward(spec, x_TxD, weight_TxK, plan, experts, accumulator)[0]


def _ffn_forward(spec, x_TxD, weight_TxK, plan, experts, accumulator):
    backend = backends.load(spec)
    residuals = (x_TxD, weight_TxK, plan, experts)
    experts = experts if hasattr(backend, "STACKED") else experts.sliced()
    if _fused(backend, spec):
        y_TxD, saved = backend.ffn_forward(x_TxD, weight_TxK, plan, experts, spec)
    else:
        way = transport.load(spec)
        run = functools.partial(_run_forward, backend, experts, spec)
        y_TxKxD, saved = way.forward(x_TxD, plan, run, spec)
        with jax.named_scope("moe_combine"):
            y_TxD = _combine(backend, y_TxKxD, weight_TxK, way.used_slots(plan, spec), x_TxD.dtype)
    saved = jax.tree.map(lambda leaf: checkpoint_name(leaf, GATE_UP_NAME), saved)
    return (y_TxD, accumulator), (*residuals, saved)


def _ffn_backward(spec, residuals, cotangents):
    x_TxD, weight_TxK, plan, experts, saved = residuals
    dy_TxD, buffer = cotangents
    backend = backends.load(spec)
    layer, whole = experts.layer, buffer
    if layer is not None and buffer is None:
        raise ValueError(
            "a layer of stacked experts is differentiated without accumulator: its gradient would be a stack of zeros around "
            "one layer, for every layer. Pass accumulator=, or scan over slices of the stack"
        )
    if layer is not None and not hasattr(backend, "STACKED"):
        buffer = buffer.of_layer(layer).sliced()
        experts = experts.sliced()
    if _fused(backend, spec):
        dx_TxD, d_weight_TxK, d_experts = backend.ffn_backward(
            x_TxD, weight_TxK, dy_TxD, saved, plan, experts, spec, accumulator=buffer
        )
    else:
        start = buffer
        if start is None and spec.exchanges:  # one window continues where the one before it ended
            start = jax.tree.map(lambda leaf: zeros_like_varying(leaf.shape, jnp.float32, leaf), experts.masters())
        run = functools.partial(_run_backward, backend, experts, spec)
        dx_TxKxD, d_weight_TxK, d_experts = transport.load(spec).backward(
            x_TxD, dy_TxD, weight_TxK, saved, plan, run, start, spec
        )
        with jax.named_scope("moe_combine"):
            dx_TxD = _sum_slots(dx_TxKxD).astype(x_TxD.dtype)
            d_weight_TxK = d_weight_TxK.astype(weight_TxK.dtype)
    # None is "no cotangent": for the plan, the copies, and whichever of masters and accumulator did not get the
    # gradient.
    if buffer is None:
        return dx_TxD, d_weight_TxK, None, d_experts, None
    if layer is not None and not hasattr(backend, "STACKED"):
        d_experts = jax.tree.map(
            lambda stack, leaf: jax.lax.dynamic_update_index_in_dim(stack, leaf, layer, 0), whole, d_experts
        )
    return dx_TxD, d_weight_TxK, None, None, d_experts


_ffn.defvjp(_ffn_forward, _ffn_backward)


def _fused(backend, spec: MoESpec) -> bool:
    return spec.ranks == 1 and hasattr(backend, "ffn_forward")


def _run_forward(backend, experts, spec, x_MxD, plan):
    return backend.forward(x_MxD, plan, experts, spec)


def _run_backward(backend, experts, spec, x_MxD, dy_MxD, weight_M, saved, plan, buffer):
    return backend.backward(x_MxD, dy_MxD, weight_M, saved, plan, experts, spec, accumulator=buffer)


def _combine(backend, y_TxKxD: jax.Array, weight_TxK: jax.Array, used_TxK: jax.Array, dtype) -> jax.Array:
    """Sum over k of weight * value in slot order in FP32, rounded once to `dtype`."""
    if hasattr(backend, "combine"):
        return backend.combine(y_TxKxD, weight_TxK, used_TxK, dtype)
    # 0 * NaN is NaN: the weight of a slot without a row is as unread as its value
    used_weight_TxK = jnp.where(used_TxK, weight_TxK, 0.0).astype(jnp.float32)

    def add(slot, total_TxD):
        value_TxD = jax.lax.dynamic_index_in_dim(y_TxKxD, slot, axis=1, keepdims=False).astype(jnp.float32)
        weight_Tx1 = jax.lax.dynamic_slice_in_dim(used_weight_TxK, slot, 1, axis=1)
        return total_TxD + weight_Tx1 * value_TxD

    # A loop, because a compiler may join a product and a sum into one operation with one rounding, or not, depending on
    # what else it fuses them with. Inside the loop there is nothing else, so the bits do not depend on the program around.
    zero_TxD = zeros_like_varying((y_TxKxD.shape[0], y_TxKxD.shape[2]), jnp.float32, y_TxKxD)
    return jax.lax.fori_loop(0, y_TxKxD.shape[1], add, zero_TxD).astype(dtype)


def _sum_slots(value_TxKxD: jax.Array) -> jax.Array:
    """Sum over k in slot order in FP32; the caller rounds once."""
    total_TxD = jnp.zeros((), jnp.float32)
    for slot in range(value_TxKxD.shape[1]):
        total_TxD = total_TxD + value_TxKxD[:, slot].astype(jnp.float32)
    return total_TxD


def _check_layer_arguments(x_BxLxD, weight_BxLxK, expert_BxLxK, experts, spec):
    batch = x_BxLxD.shape[:2]
    expected = {"x": (*batch, spec.d_model), "weight": (*batch, spec.top_k), "expert": (*batch, spec.top_k)}
    for name, leaf in {"x": x_BxLxD, "weight": weight_BxLxK, "expert": expert_BxLxK}.items():
        if leaf.ndim != 3 or leaf.shape != expected[name]:
            letters = "(B, L, D)" if name == "x" else "(B, L, K)"
            raise ValueError(f"{name} has shape {leaf.shape}; expected {letters} = {expected[name]}")
    traced = isinstance(expert_BxLxK, jax.core.Tracer)
    if spec.ranks > 1 and expert_BxLxK.size and not traced and getattr(expert_BxLxK, "is_fully_addressable", True):
        sorted_BxLxK = np.sort(np.asarray(expert_BxLxK), axis=-1)
        if np.any((sorted_BxLxK[..., 1:] == sorted_BxLxK[..., :-1]) & (sorted_BxLxK[..., 1:] >= 0)):
            raise ValueError(
                "expert names an expert twice for one token; expected K distinct ids, or -1 for a masked slot"
            )
    check_experts(experts, spec)


def _check_capacity(tokens_here: int, devices: int, spec: MoESpec) -> None:
    if spec.capacity_factor is not None and tokens_here % devices:
        raise ValueError(
            f"{tokens_here} tokens do not split over {devices} devices, and with capacity_factor the padding would change "
            "what is dropped: use a multiple"
        )


def _tokens_of(plan, spec: MoESpec) -> int:
    """T that the plan was made for."""
    if isinstance(plan, ExchangePlan) != spec.exchanges:
        raise ValueError(
            f"the plan is a {type(plan).__name__} but the spec's transport is {spec.transport} with R = {spec.ranks}: "
            "make both with one spec"
        )
    return plan.place_TxK.shape[0] if spec.exchanges else plan.row_TxK.shape[0] // spec.ranks


def _check_arguments(x_TxD, weight_TxK, plan, experts, spec, accumulator):
    tokens_here = _tokens_of(plan, spec)
    if x_TxD.shape != (tokens_here, spec.d_model):
        raise ValueError(
            f"x has shape {x_TxD.shape}; expected (T, D) = ({tokens_here}, {spec.d_model}), T of the plan, D of the spec"
        )
    if x_TxD.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"x is {x_TxD.dtype}; expected float32 or bfloat16")
    if weight_TxK.shape != (tokens_here, spec.top_k) or weight_TxK.dtype != jnp.float32:
        raise ValueError(
            f"weight is {weight_TxK.dtype}{weight_TxK.shape}; expected float32 (T, K) = ({tokens_here}, {spec.top_k})"
        )
    check_experts(experts, spec)
    rows_E = plan.count_E.shape[0]
    leading = experts.w_down_ExDxF.shape[:-2]
    if len(leading) != 1 + (experts.layer is not None) or leading[-1] != rows_E:
        raise ValueError(
            f"experts hold w_down of shape {experts.w_down_ExDxF.shape}, the plan is for {rows_E} local experts: "
            f"pass the slice of this rank, (E / R, D, F) with R = {spec.ranks}"
        )
    _check_copies(experts, spec)
    if accumulator is not None:
        expected, given = (_leaves(tree) for tree in (experts.masters(), accumulator))
        if expected != given:
            given_text, expected_text = ", ".join(given), ", ".join(expected)
            raise ValueError(
                f"accumulator holds {given_text}; expected FP32 buffers shaped like the masters, {expected_text}"
            )


def _check_copies(experts: ExpertWeights, spec: MoESpec) -> None:
    """Raises ValueError if the copies are not those that `spec` makes: another recipe, backend or `mx_mode` reads other ones."""
    if experts.copies is None:
        return
    expected = jax.eval_shape(lambda masters: add_copies(masters, spec).copies, experts.masters())
    # A tree's structure has static parts too, such as the blocks of an MXArray: its text shows all of it.
    structures = {str(jax.tree.structure(tree)) for tree in (experts.copies, expected)}
    if len(structures) == 1 and _leaves(experts.copies) == _leaves(expected):
        return
    given, read = (", ".join(_leaves(tree)) or "none" for tree in (experts.copies, expected))
    raise ValueError(
        f"experts hold copies that this layer does not read: {given}; recipe {spec.recipe} on backend {spec.backend} reads "
        f"{read}: make them by prepare_experts with the spec of the layer"
    )


def _leaves(tree) -> list[str]:
    return [f"{leaf.dtype}{leaf.shape}" for leaf in jax.tree.leaves(tree)]
