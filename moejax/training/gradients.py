"""Gradients of a whole batch: every device adds up those of its own rows, and each leaf is reduced once, at the end.

    gather dense weights over fsdp, make and gather copies of expert weights     once per step
    -> micro-batches: forward, backward, add to FP32 buffers                     no reduction, nothing of weight size but the sums
    -> reduce every buffer into the sharding of its parameter                    once per step

On a mesh all of it runs inside one `shard_map`: what a device computes is written here, not found by the compiler. The buffers
of a device cover the whole of every dense weight and all its own experts, not reduced over the replicas of the tokens.
A model that says so (`splits_by_hand`) also splits sequences (`context`) and heads (`tensor`) there, by `ops/hand_split.py`: of
what `tensor` splits, a device has its part of weights and gradients; everything else is the same on all devices of that axis.

Other models stay outside on meshes with such axes: there the compiler places the reductions of dense weights, and
`moe_layer` keeps those of expert weights out of the loop.

Read `step.py` next. Letters: B batch, L sequence, m micro-batches, E experts, N MoE layers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.config import Config
from moejax.mesh import RULES
from moejax.nn.moe import current_mesh
from moejax.ops import hand_split
from moejax.ops.balance import RouterStats, balance_loss
from moejax.ops.experts import ExpertWeights
from moejax.ops.loss import cross_entropy
from moejax.ops.moe import new_accumulator, reduce_accumulator
from moejax.ops.spec import EXPERT_AXIS, MoESpec, moe_spec
from moejax.training.state import Skeleton, model_class

Batch = Mapping[str, Any]
FSDP_AXIS = "fsdp"
BATCH_AXES = ("data", FSDP_AXIS, EXPERT_AXIS)  # the mesh axes that rows of the batch are split over


class Totals(NamedTuple):
    """Of the whole step, over all devices and micro-batches; taken before the first forward. int32 scalars."""

    real: jax.Array  # tokens that are no padding
    scored: jax.Array  # tokens with a target


class Sums(NamedTuple):
    """What the forward passes add up to, over all devices and micro-batches."""

    loss: jax.Array  # cross-entropy, nats per scored token
    balance: jax.Array  # balance and z losses, coefficients included
    stats: RouterStats | None  # stacked over MoE layers
    mx_counts: jax.Array | None = None  # of `mxfp8_rates`, for models with an `mx_probe`


class Prepared(NamedTuple):
    """Made once per step: what the products of the experts read."""

    stacks: tuple[ExpertWeights, ...] | None  # of `model.expert_stacks`; None: the model doesn't accumulate in place
    copies: Any  # of `model.expert_copies`, for models without stacks
    probe: jax.Array | None = None  # of `model.mx_probe`, for models with stacks that have one


def make_gradients(skeleton: Skeleton, config: Config) -> Callable[[Any, Any, Batch], tuple[Any, Sums, Totals]]:
    """(params, router_bias, batch) -> FP32 gradients in the shardings of the parameters, `Sums`, `Totals`.

    Call what it returns under the mesh of the parameters (`jax.set_mesh`), inside `jax.jit`. Batches are int32 arrays
    (m, B/m, L); the sum of all losses is what is differentiated.

    A model that has `expert_stacks` (docs/design.md §3) reads and accumulates its expert weights in place. Any other is
    differentiated as it is.
    """

    def gradients(params: Any, router_bias: Any, batch: Batch) -> tuple[Any, Sums, Totals]:
        totals = Totals(jnp.sum(batch["segment"] > 0), jnp.sum(batch["target"] >= 0))
        mesh = current_mesh()
        if mesh is None or not splits_by_hand(mesh, config):
            return *_accumulate(skeleton, config, params, router_bias, batch, totals, mesh=None), totals
        experts, _ = skeleton.partition(skeleton.specs(mesh))
        _, rest = skeleton.partition(skeleton.specs(mesh, _rules_inside(mesh, config)))
        run = jax.shard_map(
            functools.partial(_accumulate, skeleton, config, mesh=mesh),
            in_specs=(skeleton.join(experts, rest), jax.P(), jax.P(None, BATCH_AXES, hand_split.CONTEXT), jax.P()),
            out_specs=(skeleton.specs(mesh), jax.P()),
            check_vma=False,  # a model's own loops needn't declare what varies: nothing in here is summed by a transpose
        )
        return *run(params, router_bias, batch, totals), totals

    return gradients


def splits_by_hand(mesh: jax.sharding.AbstractMesh, config: Config) -> bool:
    """Whether a step runs inside one `shard_map`: its mesh splits rows, experts, masters, and what the model splits itself."""
    declared = getattr(model_class(config.model.module), "splits_by_hand", lambda _: ())(config)
    axes = (*BATCH_AXES, *declared)
    return all(axis in mesh.shape for axis in BATCH_AXES) and mesh.size == math.prod(
        mesh.shape.get(axis, 1) for axis in axes
    )


def _rules_inside(mesh: jax.sharding.AbstractMesh, config: Config) -> Mapping[str, Any]:
    """How dense weights are split while the step runs: over `tensor` alone, and key/value heads only where there are enough."""
    heads = hand_split.TENSOR if hand_split.TENSOR in mesh.shape else None
    enough = config.model.num_kv_heads % mesh.shape.get(hand_split.TENSOR, 1) == 0
    inside = {"heads": heads, "vocab": heads, "kv_heads": heads if enough else None}
    return {name: inside.get(name) for name in RULES}


def needs_counting_pass(config: Config) -> bool:
    """Whether the counts of the whole step must be known before its first micro-batch, at the price of one more forward."""
    balance = config.moe.balance
    return balance.aux_coef > 0 and balance.aux_scope == "global" and config.training.micro_batches > 1


def _accumulate(skeleton: Skeleton, config: Config, params, router_bias, batch, totals: Totals, *, mesh):
    """Gradients and sums of this device's rows, reduced at the end; `mesh` None: one device, or the compiler's business."""
    if mesh is None:
        return _accumulate_here(skeleton, config, params, router_bias, batch, totals, None)
    with hand_split.splitting(mesh):
        return _accumulate_here(skeleton, config, params, router_bias, batch, totals, mesh)


def _accumulate_here(skeleton: Skeleton, config: Config, params, router_bias, batch, totals: Totals, mesh):
    specs = None if mesh is None else skeleton.specs(mesh)
    with jax.named_scope("expert_copies"):
        prepared = _prepare(skeleton, params, router_bias, mesh)
    masters, rest = skeleton.partition(_whole(skeleton, params, specs, mesh))
    spec = moe_spec(config, current_mesh())

    def forward(rest, part, buffers=None, probe=None):
        model = skeleton.merge(skeleton.join(masters, rest), router_bias)
        inputs = (part["token"], part["segment"], part["position"])
        if prepared.stacks is None:
            return model, *model(*inputs, copies=prepared.copies), None
        if buffers is None:
            return model, *model(*inputs, experts=prepared.stacks), None
        observed = {} if probe is None else {"probe": probe}
        return model, *model(*inputs, experts=prepared.stacks, accumulator=buffers, **observed)

    count_NxE = None
    if needs_counting_pass(config):
        counts_mxNxE = jax.lax.map(lambda part: forward(rest, part)[2].count_E, batch)
        count_NxE = _over_devices(counts_mxNxE.sum(0, dtype=jnp.int32), mesh)

    def objective(part, rest, buffers, probe):
        model, hidden_BxLxD, stats, buffers = forward(rest, part, buffers, probe)
        nats, _ = cross_entropy(hidden_BxLxD, model.head_weight(), part["target"], chunk=config.training.loss_chunk)
        balance = _balance(stats, spec, totals.real, count_NxE, mesh)
        loss = nats / jnp.maximum(totals.scored, 1).astype(jnp.float32)
        return (loss + balance, buffers), Sums(loss, balance, stats)

    stacked, probe = prepared.stacks is not None, prepared.probe
    if not stacked:
        rest = skeleton.join(masters, rest)
        masters = jax.tree.map(lambda _: None, masters)
    buffers = None if prepared.stacks is None else tuple(new_accumulator(stack, spec) for stack in prepared.stacks)
    if config.training.micro_batches == 1:
        part = jax.tree.map(lambda x: x[0], batch)
        pullback: Any
        _, pullback, sums = jax.vjp(functools.partial(objective, part), rest, buffers, probe, has_aux=True)
        grads, buffers, mx_counts = pullback((jnp.float32(1.0), buffers))
    else:
        # One FP32 buffer per parameter: each backward adds into it where it makes the gradient, layer by layer.
        refs = jax.tree.map(lambda p: jax.new_ref(jnp.zeros_like(p)), rest)

        def micro_batch(buffers, part):
            pullback: Any
            _, pullback, sums = jax.vjp(functools.partial(objective, part), rest, buffers, probe, has_aux=True)
            by_value = jax.tree.map(lambda _: jax.ad.GradValue(), (buffers, probe))  # type: ignore[attr-defined]
            _, buffers, mx_counts = pullback.with_refs(refs, *by_value)((jnp.float32(1.0), buffers))
            return buffers, (sums, mx_counts)

        buffers, per_part = jax.lax.scan(micro_batch, buffers, batch)
        grads = jax.tree.map(lambda ref: ref[...], refs)
        sums, mx_counts = jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), per_part)

    if stacked:
        grads = skeleton.join(_of_masters(skeleton, masters, rest, router_bias, buffers), grads)
    return _reduce(skeleton, config, grads, specs, mesh), _over_devices(sums._replace(mx_counts=mx_counts), mesh)


def _prepare(skeleton: Skeleton, params, router_bias, mesh) -> Prepared:
    """Copies of the expert weights, from this device's shards, then gathered over fsdp: as bytes of the copies."""
    model = skeleton.merge(params, router_bias)
    if not hasattr(model, "expert_stacks"):
        specs = None if mesh is None else skeleton.specs(mesh)
        model = skeleton.merge(_whole(skeleton, params, specs, mesh), router_bias)
        return Prepared(None, jax.lax.stop_gradient(model.expert_copies()))
    stacks = jax.lax.stop_gradient(model.expert_stacks())
    probe = model.mx_probe() if hasattr(model, "mx_probe") else None
    if mesh is None or _size(mesh, FSDP_AXIS) == 1:
        return Prepared(stacks, None, probe)

    def whole_shapes(params):
        whole = _whole(skeleton, params, skeleton.specs(mesh), mesh)
        return skeleton.merge(whole, router_bias).expert_stacks()

    def gather(leaf, whole):
        axes = [axis for axis, (here, all_) in enumerate(zip(leaf.shape, whole.shape, strict=True)) if here != all_]
        return jax.lax.all_gather(leaf, FSDP_AXIS, axis=axes[0], tiled=True) if axes else leaf

    # The masters among them are read in recipe fp32 alone; elsewhere nobody asks for them, and they are not gathered.
    return Prepared(jax.tree.map(gather, stacks, jax.eval_shape(whole_shapes, params)), None, probe)


def _whole(skeleton: Skeleton, params, specs, mesh):
    """Parameters with expert masters gathered over fsdp; the others arrive whole."""
    if mesh is None or _size(mesh, FSDP_AXIS) == 1:
        return params
    masters, rest = skeleton.partition(params)
    places, _ = skeleton.partition(specs)

    def gather(leaf, spec):
        axis = _axis_of(spec, FSDP_AXIS)
        return leaf if axis is None else jax.lax.all_gather(leaf, FSDP_AXIS, axis=axis, tiled=True)

    return skeleton.join(jax.tree.map(gather, masters, places), rest)


def _of_masters(skeleton: Skeleton, masters, rest, router_bias, buffers):
    """Buffers of the stacks as gradients of the masters: `expert_stacks` cuts and joins them, its transpose goes back."""

    def stacks(masters):
        model = skeleton.merge(skeleton.join(masters, rest), router_bias)
        return tuple(stack.masters() for stack in model.expert_stacks())

    _, pullback = jax.vjp(stacks, masters)
    return pullback(tuple(reduce_accumulator(buffer) for buffer in buffers))[0]


def _reduce(skeleton: Skeleton, config: Config, grads, specs, mesh):
    """Sums every leaf over the devices that hold a part of its gradient, into the sharding of its parameter."""
    if mesh is None:
        return grads

    def reduce(leaf, spec, inside, expert):
        own = {EXPERT_AXIS} if expert else set()
        # Of `tensor` a device has its part, or what all have; only key/value heads that it shares are left to add.
        if not expert and (
            _axis_of(inside, hand_split.TENSOR) is not None or _axis_of(spec, hand_split.TENSOR) is None
        ):
            own.add(hand_split.TENSOR)
        axes = [axis for axis in mesh.axis_names if _size(mesh, axis) > 1 and axis not in own]
        for axis in axes:
            if (place := _axis_of(spec, axis)) is not None:
                leaf = jax.lax.psum_scatter(leaf, axis, scatter_dimension=place, tiled=True)
        whole = tuple(axis for axis in axes if _axis_of(spec, axis) is None)
        return jax.lax.psum(leaf, whole) if whole else leaf

    places, inside = (skeleton.partition(tree) for tree in (specs, skeleton.specs(mesh, _rules_inside(mesh, config))))
    masters, rest = (
        jax.tree.map(functools.partial(reduce, expert=expert), leaves, *trees)
        for leaves, *trees, expert in zip(skeleton.partition(grads), places, inside, (True, False))
    )
    return skeleton.join(masters, rest)


def _balance(stats, spec: MoESpec, real_tokens, count_NxE, mesh) -> jax.Array:
    """Balance and z losses of this device's rows, summed over MoE layers."""
    if stats is None:
        return jnp.float32(0.0)
    if spec.balance.aux_coef and spec.balance.aux_scope != "sequence":
        counts = _over_devices(stats.count_E, mesh)  # int32, no gradient: f is that of all devices' tokens
        if spec.balance.aux_scope == "global" and count_NxE is None:
            count_NxE = counts  # one micro-batch: it is the whole step
        stats = dataclasses.replace(stats, count_E=counts)
    return balance_loss(stats, spec, tokens=real_tokens, count_E=count_NxE)


def _over_devices(tree, mesh):
    """Sums over all tokens: devices of `tensor` have the same ones."""
    return tree if mesh is None else jax.lax.psum(tree, [a for a in mesh.axis_names if a != hand_split.TENSOR])


def _axis_of(spec: jax.P, name: str) -> int | None:
    """The axis of a tensor that mesh axis `name` shards."""
    for axis, entry in enumerate(spec):
        if name in ((entry,) if isinstance(entry, str) else entry or ()):
            return axis
    return None


def _size(mesh, axis: str) -> int:
    return dict(mesh.shape).get(axis, 1)
