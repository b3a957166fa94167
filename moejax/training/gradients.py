"""Gradients of a whole batch: every device adds up those of its own rows, and each leaf is reduced once, at the end.

    gather dense weights over fsdp, make and gather copies of expert weights     once per step
    -> micro-batches: forward, backward, add to FP32 buffers                     no reduction, nothing of weight size but the sums
    -> reduce every buffer into the sharding of its parameter                    once per step

On a mesh all of it runs inside one `shard_map`: what a device computes is written here, not found by the compiler. The buffers
of a device cover the whole of every dense weight and all its own experts, not reduced over the replicas of the tokens.

Meshes whose `context` or `tensor` axis splits a sequence or a head stay outside it: there the compiler places the
reductions of dense weights, and `moe_layer` keeps those of expert weights out of the loop.

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
from moejax.nn.moe import current_mesh
from moejax.ops.balance import RouterStats, balance_loss
from moejax.ops.experts import ExpertWeights
from moejax.ops.loss import cross_entropy
from moejax.ops.moe import new_accumulator, reduce_accumulator
from moejax.ops.spec import EXPERT_AXIS, MoESpec, moe_spec
from moejax.training.state import Skeleton

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


class Prepared(NamedTuple):
    """Made once per step: what the products of the experts read."""

    stacks: tuple[ExpertWeights, ...] | None  # of `model.expert_stacks`; None: the model doesn't accumulate in place
    copies: Any  # of `model.expert_copies`, for models without stacks


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
        if mesh is None or not splits_by_hand(mesh):
            return *_accumulate(skeleton, config, params, router_bias, batch, totals, mesh=None), totals
        experts, rest = skeleton.partition(skeleton.specs(mesh))
        params_in = skeleton.join(experts, jax.tree.map(lambda _: jax.P(), rest, is_leaf=_is_spec))
        run = jax.shard_map(
            functools.partial(_accumulate, skeleton, config, mesh=mesh),
            in_specs=(params_in, jax.P(), jax.P(None, BATCH_AXES), jax.P()),
            out_specs=(skeleton.specs(mesh), jax.P()),
            check_vma=False,  # a model's own loops needn't declare what varies: nothing in here is summed by a transpose
        )
        return *run(params, router_bias, batch, totals), totals

    return gradients


def splits_by_hand(mesh: jax.sharding.AbstractMesh) -> bool:
    """Whether a step runs inside one `shard_map`: its mesh splits nothing but rows, experts and masters."""
    return mesh.size == math.prod(mesh.shape.get(axis, 0) for axis in BATCH_AXES)


def needs_counting_pass(config: Config) -> bool:
    """Whether the counts of the whole step must be known before its first micro-batch, at the price of one more forward."""
    balance = config.moe.balance
    return balance.aux_coef > 0 and balance.aux_scope == "global" and config.training.micro_batches > 1


def _accumulate(skeleton: Skeleton, config: Config, params, router_bias, batch, totals: Totals, *, mesh):
    """Gradients and sums of this device's rows, reduced at the end; `mesh` None: one device, or the compiler's business."""
    specs = None if mesh is None else skeleton.specs(mesh)
    with jax.named_scope("expert_copies"):
        prepared = _prepare(skeleton, params, router_bias, mesh)
    masters, rest = skeleton.partition(_whole(skeleton, params, specs, mesh))
    spec = moe_spec(config, current_mesh())

    def forward(rest, part, buffers=None):
        model = skeleton.merge(skeleton.join(masters, rest), router_bias)
        inputs = (part["token"], part["segment"], part["position"])
        if prepared.stacks is None:
            return model, *model(*inputs, copies=prepared.copies), None
        if buffers is None:
            return model, *model(*inputs, experts=prepared.stacks), None
        return model, *model(*inputs, experts=prepared.stacks, accumulator=buffers)

    count_NxE = None
    if needs_counting_pass(config):
        counts_mxNxE = jax.lax.map(lambda part: forward(rest, part)[2].count_E, batch)
        count_NxE = _over_devices(counts_mxNxE.sum(0, dtype=jnp.int32), mesh)

    def objective(rest, buffers, part):
        model, hidden_BxLxD, stats, buffers = forward(rest, part, buffers)
        nats, _ = cross_entropy(hidden_BxLxD, model.head_weight(), part["target"], chunk=config.training.loss_chunk)
        balance = _balance(stats, spec, totals.real, count_NxE, mesh)
        loss = nats / jnp.maximum(totals.scored, 1).astype(jnp.float32)
        return (loss + balance, buffers), Sums(loss, balance, stats)

    stacked = prepared.stacks is not None
    if not stacked:
        rest = skeleton.join(masters, rest)
        masters = jax.tree.map(lambda _: None, masters)
    buffers = None if prepared.stacks is None else tuple(new_accumulator(stack, spec) for stack in prepared.stacks)
    if config.training.micro_batches == 1:
        part = jax.tree.map(lambda x: x[0], batch)
        _, pullback, sums = jax.vjp(lambda rest, buffers: objective(rest, buffers, part), rest, buffers, has_aux=True)
        grads, buffers = pullback((jnp.float32(1.0), buffers))
    else:
        # One FP32 buffer per parameter: each backward adds into it where it makes the gradient, layer by layer.
        refs = jax.tree.map(lambda p: jax.new_ref(jnp.zeros_like(p)), rest)

        def micro_batch(buffers, part):
            pullback: Any
            _, pullback, sums = jax.vjp(lambda rest, b: objective(rest, b, part), rest, buffers, has_aux=True)
            by_value = jax.tree.map(lambda _: jax.ad.GradValue(), buffers)  # type: ignore[attr-defined]
            _, buffers = pullback.with_refs(refs, by_value)((jnp.float32(1.0), buffers))
            return buffers, sums

        buffers, per_part = jax.lax.scan(micro_batch, buffers, batch)
        grads = jax.tree.map(lambda ref: ref[...], refs)
        sums = jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), per_part)

    if stacked:
        grads = skeleton.join(_of_masters(skeleton, masters, rest, router_bias, buffers), grads)
    return _reduce(skeleton, grads, specs, mesh), _over_devices(sums, mesh)


def _prepare(skeleton: Skeleton, params, router_bias, mesh) -> Prepared:
    """Copies of the expert weights, from this device's shards, then gathered over fsdp: as bytes of the copies."""
    model = skeleton.merge(params, router_bias)
    if not hasattr(model, "expert_stacks"):
        specs = None if mesh is None else skeleton.specs(mesh)
        model = skeleton.merge(_whole(skeleton, params, specs, mesh), router_bias)
        return Prepared(None, jax.lax.stop_gradient(model.expert_copies()))
    stacks = jax.lax.stop_gradient(model.expert_stacks())
    if mesh is None or _size(mesh, FSDP_AXIS) == 1:
        return Prepared(stacks, None)

    def whole_shapes(params):
        whole = _whole(skeleton, params, skeleton.specs(mesh), mesh)
        return skeleton.merge(whole, router_bias).expert_stacks()

    def gather(leaf, whole):
        axes = [axis for axis, (here, all_) in enumerate(zip(leaf.shape, whole.shape, strict=True)) if here != all_]
        return jax.lax.all_gather(leaf, FSDP_AXIS, axis=axes[0], tiled=True) if axes else leaf

    # The masters among them are read in recipe fp32 alone; elsewhere nobody asks for them, and they are not gathered.
    return Prepared(jax.tree.map(gather, stacks, jax.eval_shape(whole_shapes, params)), None)


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


def _reduce(skeleton: Skeleton, grads, specs, mesh):
    """Sums every leaf over the devices that hold a part of its gradient, into the sharding of its parameter."""
    if mesh is None:
        return grads

    def reduce(leaf, spec, own_axes):
        axes = [axis for axis in mesh.axis_names if _size(mesh, axis) > 1 and axis not in own_axes]
        for axis in axes:
            if (place := _axis_of(spec, axis)) is not None:
                leaf = jax.lax.psum_scatter(leaf, axis, scatter_dimension=place, tiled=True)
        whole = tuple(axis for axis in axes if _axis_of(spec, axis) is None)
        return jax.lax.psum(leaf, whole) if whole else leaf

    masters, rest = (
        jax.tree.map(functools.partial(reduce, own_axes=own), leaves, places)
        for leaves, places, own in zip(skeleton.partition(grads), skeleton.partition(specs), ((EXPERT_AXIS,), ()))
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
    return tree if mesh is None else jax.lax.psum(tree, mesh.axis_names)


def _axis_of(spec: jax.P, name: str) -> int | None:
    """The axis of a tensor that mesh axis `name` shards."""
    for axis, entry in enumerate(spec):
        if name in ((entry,) if isinstance(entry, str) else entry or ()):
            return axis
    return None


def _size(mesh, axis: str) -> int:
    return dict(mesh.shape).get(axis, 1)


def _is_spec(leaf) -> bool:
    return isinstance(leaf, jax.P)
