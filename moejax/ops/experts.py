"""`ExpertWeights`: the parameters of an expert layer, and what the products of the precision recipe read instead of them.

Read `moe.py` next. Letters: D model width, F expert width, E experts.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from moejax.ops import backends
from moejax.ops.spec import MoESpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """FP32 masters of the experts, and the operands made from them. A pytree.

    Gradients, and the accumulators they are added to, have this type too, with `copies` None.

    Attributes:
      w_gate_up_Ex2xFxD: gate (index 0) and up (index 1) matrices.
      w_down_ExDxF: down matrices.
      b_gate_up_Ex2xF, b_down_ExD: biases, or None.
      copies: what the recipe's products read; made by `prepare_experts`, private to the backend, without a gradient.
      None: the
        products read the masters, or nothing has been prepared yet.
      layer: int32, or None. With it every leaf has a layer axis in front, and this is the one to use: a scan over layers
        that hands over the whole stack and an index never copies a slice of it. See `of_layer`.
    """

    w_gate_up_Ex2xFxD: jax.Array
    w_down_ExDxF: jax.Array
    b_gate_up_Ex2xF: jax.Array | None = None
    b_down_ExD: jax.Array | None = None
    copies: Any = None
    layer: jax.Array | None = None

    def masters(self) -> "ExpertWeights":
        """The same without `copies` and `layer`: what has a gradient."""
        return dataclasses.replace(self, copies=None, layer=None)

    def of_layer(self, layer: jax.Array) -> "ExpertWeights":
        """One layer of a stack, by reference."""
        return dataclasses.replace(self, layer=jnp.asarray(layer, jnp.int32))

    def sliced(self) -> "ExpertWeights":
        """The layer itself, copied out of the stack; without a stack, nothing changes."""
        if self.layer is None:
            return self
        stack = dataclasses.replace(self, layer=None)
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, self.layer, keepdims=False), stack)

    def flat(self) -> "ExpertWeights":
        """A stack of N layers as one layer of N E experts: no copy. Which of them are meant is up to the plan (`flat_counts`)."""
        stack = dataclasses.replace(self, layer=None)
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), stack)

    def zeros(self) -> "ExpertWeights":
        """FP32 zeros in the shape of the masters: an empty gradient accumulator."""
        return jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), self.masters())


def flat_counts(plan: Any, experts: ExpertWeights) -> Any:
    """The plan of one layer, for `experts.flat()`: all N E experts, of which only those of `experts.layer` have rows.

    Args:
      plan: a `Plan`, or anything with int32 count_E and start_E.
      experts: a stack, with its layer.
    """
    layers, local_experts = experts.w_down_ExDxF.shape[:2]
    first = jnp.asarray(experts.layer, jnp.int32) * local_experts
    none = jnp.zeros(layers * local_experts, jnp.int32)
    count, start = (jax.lax.dynamic_update_slice(none, leaf, (first,)) for leaf in (plan.count_E, plan.start_E))
    return dataclasses.replace(plan, count_E=count, start_E=start)


def prepare_experts(
    w_gate_up: jax.Array,
    w_down: jax.Array,
    spec: MoESpec,
    b_gate_up: jax.Array | None = None,
    b_down: jax.Array | None = None,
) -> ExpertWeights:
    """Packs masters and the copies the recipe's products read: nothing (fp32), BF16, or MX in both orientations.

    Call it once per optimizer step, outside the micro-batch loop and outside `jax.grad`; `moe_ffn` makes missing copies
    itself, on every call.

    Args:
      w_gate_up: FP32 (E, 2, F, D); E counts all experts, or those of this rank inside `shard_map`. Layers may be
      stacked in front.
      w_down: FP32 (E, D, F).
      spec: reads the widths, recipe, backend and expert_bias.
      b_gate_up: FP32 (E, 2, F), if `spec.expert_bias`.
      b_down: FP32 (E, D), if `spec.expert_bias`.
    Raises:
      TypeError: a master is not FP32.
      ValueError: a shape does not fit the spec, or the spec breaks a rule of the recipe or backend.
    """
    experts = ExpertWeights(w_gate_up, w_down, b_gate_up, b_down)
    check_experts(experts, spec)
    return add_copies(experts, spec)


def add_copies(experts: ExpertWeights, spec: MoESpec) -> ExpertWeights:
    """Fills `copies`; no gradient flows through them."""
    masters = jax.tree.map(jax.lax.stop_gradient, experts.masters())
    backend = backends.load(spec)
    return dataclasses.replace(experts, copies=jax.tree.map(jax.lax.stop_gradient, backend.prepare(masters, spec)))


def check_experts(experts: ExpertWeights, spec: MoESpec) -> None:
    """Raises unless the masters are FP32 and have the shapes of `spec`."""
    D, F = spec.d_model, spec.expert_width
    expected = {
        "w_gate_up_Ex2xFxD": ("(E, 2, F, D)", (2, F, D)),
        "w_down_ExDxF": ("(E, D, F)", (D, F)),
        "b_gate_up_Ex2xF": ("(E, 2, F)", (2, F)),
        "b_down_ExD": ("(E, D)", (D,)),
    }
    allowed = sorted({spec.num_experts, spec.local_experts}, reverse=True)
    for name, (letters, tail) in expected.items():
        leaf = getattr(experts, name)
        if name.startswith("b_") and (leaf is not None) != spec.expert_bias:
            given = "given" if leaf is not None else "missing"
            raise ValueError(f"{name} is {given}, but moe.expert_bias is {spec.expert_bias}: make the two agree")
        if leaf is None:
            continue
        if leaf.dtype != jnp.float32:
            raise TypeError(
                f"{name} is {leaf.dtype}; masters are float32 in every recipe, the copies are made from them"
            )
        split = leaf.ndim - len(tail)
        if split < 1 or leaf.shape[split:] != tail or leaf.shape[split - 1] not in allowed:
            experts_text = " or ".join(str(number) for number in allowed)
            raise ValueError(
                f"{name} has shape {leaf.shape}; expected {letters} with E = {experts_text}, D = {D}, F = {F} of the spec"
            )
