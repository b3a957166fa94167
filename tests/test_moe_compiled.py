"""What the compiled program of a training step does with the experts: read where they lie, accumulate in place, choose once.

Read from XLA's own text, so a copy that JAX never mentions counts too.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import RouterConfig
from moejax.ops.moe import ExpertWeights, moe_ffn, prepare_experts
from moejax.ops.schedule import schedule
from moejax.ops.spec import GATE_UP_NAME, SCHEDULE_NAME, MoESpec

E, D, F, K, T = 6, 24, 40, 2, 32
LAYERS, MICRO_BATCHES = 5, 3
SIZES = {layers * size for layers in (1, LAYERS) for size in (E * 2 * F * D, E * D * F)}
_IN_PLACE = ("parameter", "get-tuple-element", "bitcast", "tuple", "while", "conditional")


def spec_of(recipe="bf16", **changes):
    return MoESpec(E, D, F, router=RouterConfig(top_k=K), recipe=recipe).replace(**changes)


def operands(spec, layers=()):
    rng = np.random.default_rng(0)
    dtype = jnp.float32 if spec.recipe == "fp32" else jnp.bfloat16
    expert = np.argsort(rng.random((MICRO_BATCHES, T, E)), axis=-1)[..., :K]
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    parts = (
        normal(MICRO_BATCHES, T, D).astype(dtype),
        jnp.asarray(rng.random((MICRO_BATCHES, T, K)), jnp.float32),
        jnp.asarray(expert, jnp.int32),
        normal(MICRO_BATCHES, T, D).astype(dtype),
    )
    return parts, normal(*layers, E, 2, F, D) / D**0.5, normal(*layers, E, D, F) / F**0.5


def accumulate_one_layer(spec, parts, gate_up, down):
    """Micro-batches of one layer into one buffer."""
    experts = prepare_experts(gate_up, down, spec)

    def micro_batch(buffer, part):
        x, weight, expert, dy = part
        plan = schedule(expert, spec)
        layer = lambda x, buffer: moe_ffn(x, weight, plan, experts, spec, accumulator=buffer)  # noqa: E731
        (_, _), pullback = jax.vjp(layer, x, buffer)
        dx, buffer = pullback((dy, buffer))
        return buffer, dx

    return jax.lax.scan(micro_batch, experts.zeros(), parts)


def accumulate_scanned_layers(spec, parts, gate_up, down):
    """Micro-batches of a rematerialised scan over a stack of layers that is handed over whole, with an index."""
    experts = prepare_experts(gate_up, down, spec)

    def micro_batch(buffer, part):
        x, weight, expert, dy = part
        plan = schedule(expert, spec)

        @jax.checkpoint
        def block(carry, layer):
            x, buffer = carry
            y, buffer = moe_ffn(x, weight, plan, experts.of_layer(layer), spec, accumulator=buffer)
            return (x + y, buffer), None

        layers = lambda x, buffer: jax.lax.scan(block, (x, buffer), jnp.arange(LAYERS))[0]  # noqa: E731
        (_, _), pullback = jax.vjp(layers, x, buffer)
        dx, buffer = pullback((dy, buffer))
        return buffer, dx

    return jax.lax.scan(micro_batch, experts.zeros(), parts)


def accumulate_sliced_layers(spec, parts, gate_up, down):
    """The same sums the plain way: the scan slices the stack, and gradients are added afterwards."""
    experts = prepare_experts(gate_up, down, spec)

    def micro_batch(total, part):
        x, weight, expert, dy = part
        plan = schedule(expert, spec)

        def layers(x, masters):
            block = lambda x, one: (x + moe_ffn(x, weight, plan, one, spec), None)  # noqa: E731
            return jax.lax.scan(block, x, dataclasses.replace(masters, copies=experts.copies))[0]

        _, pullback = jax.vjp(layers, x, experts.masters())
        dx, more = pullback(dy)
        return jax.tree.map(jnp.add, total, more), dx

    return jax.lax.scan(micro_batch, experts.zeros(), parts)


def weight_sized_work(text: str, sizes: set[int] = SIZES) -> list[str]:
    """Instructions inside loops whose result is as large as an expert stack, other than updates in place."""
    computations, name = {}, None
    for line in text.splitlines():
        header = re.match(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header:
            name = header.group(1)
            computations[name] = []
        elif name is not None:
            computations[name].append(line.strip())
    found = []
    for body in set(re.findall(r"body=%?([\w.\-]+)", text)):
        for line in computations[body]:
            result = re.match(r"(?:ROOT )?%?[\w.\-]+ = \w+\[([\d,]+)\]\S* ([\w\-]+)\(", line)
            if result is None or result.group(2) in _IN_PLACE:
                continue
            called = re.search(r"calls=%?([\w.\-]+)", line)
            if called and any(
                "ROOT" in inner and "dynamic-update-slice(" in inner for inner in computations[called.group(1)]
            ):
                continue
            if math.prod(map(int, result.group(1).split(","))) in sizes:
                found.append(line)
    return found


def compiled(function, spec, layers=()):
    arguments = operands(spec, layers)
    return jax.jit(functools.partial(function, spec)).lower(*arguments).compile(), arguments


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_micro_batch_loop_neither_copies_nor_casts_expert_weights(recipe):
    program, _ = compiled(accumulate_one_layer, spec_of(recipe))
    assert weight_sized_work(program.as_text()) == []


def test_scanned_layers_are_read_and_accumulated_where_they_lie():
    stacked, arguments = compiled(accumulate_scanned_layers, spec_of(), (LAYERS,))
    assert weight_sized_work(stacked.as_text()) == []
    sliced, _ = compiled(accumulate_sliced_layers, spec_of(), (LAYERS,))
    assert weight_sized_work(sliced.as_text()), "the search finds nothing where there is something to find"
    for got, want in zip(jax.tree.leaves(stacked(*arguments)), jax.tree.leaves(sliced(*arguments))):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        for one, other in zip(got, want):
            assert np.linalg.norm(one - other) <= 1e-6 * np.linalg.norm(other)


def test_backends_that_take_one_layer_are_given_a_slice():
    spec = spec_of("fp32", backend="dense")
    (x, weight, expert, dy), gate_up, down = operands(spec, (LAYERS,))
    experts = prepare_experts(gate_up, down, spec)
    plan = schedule(expert[0], spec)

    @jax.jit
    def of_stack(dy, zeros):
        layer = lambda buffer: moe_ffn(x[0], weight[0], plan, experts.of_layer(3), spec, accumulator=buffer)  # noqa: E731
        (y, _), pullback = jax.vjp(layer, zeros)
        return y, pullback((dy, zeros))[0]

    @jax.jit
    def of_slice(dy, masters):
        y, pullback = jax.vjp(lambda masters: moe_ffn(x[0], weight[0], plan, masters, spec), masters)
        return y, pullback(dy)[0]

    y, buffer = of_stack(dy[0], experts.zeros())
    want, gradient = of_slice(dy[0], prepare_experts(gate_up[3], down[3], spec))
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(buffer.w_down_ExDxF[3], gradient.w_down_ExDxF)
    assert not np.asarray(buffer.w_down_ExDxF)[[0, 1, 2, 4]].any()


def test_a_stack_is_refused_where_it_would_be_copied():
    spec = spec_of("bf16")
    (x, weight, expert, _), gate_up, down = operands(spec, (LAYERS,))
    plan = schedule(expert[0], spec)
    with pytest.raises(ValueError, match="a stack of experts without copies"):
        moe_ffn(x[0], weight[0], plan, ExpertWeights(gate_up, down).of_layer(1), spec)
    experts = prepare_experts(gate_up, down, spec)
    with pytest.raises(ValueError, match="without accumulator"):
        jax.vjp(lambda x: moe_ffn(x, weight[0], plan, experts.of_layer(1), spec), x[0])[1](x[0])


def count(text, pattern):
    return len(re.findall(pattern, text))


def test_selection_is_not_recomputed_and_gate_up_only_if_not_saved():
    """Counted in the gradient of a rematerialised layer, as JAX hands it to XLA."""
    policy = jax.checkpoint_policies.save_only_these_names(SCHEDULE_NAME, GATE_UP_NAME)
    found = {}
    for save in ("recompute", "gate_up"):
        spec = spec_of("fp32", save=save)
        (x, weight, expert, dy), gate_up, down = operands(spec)

        @functools.partial(jax.checkpoint, policy=policy)
        def layer(x, experts, spec=spec, weight=weight[0], expert=expert[0]):
            return moe_ffn(x, weight, schedule(expert, spec), experts, spec)

        experts = prepare_experts(gate_up, down, spec)
        gradient = jax.make_jaxpr(lambda x, experts, dy, layer=layer: jax.vjp(layer, x, experts)[1](dy))(
            x[0], experts, dy[0]
        )
        text = str(gradient)
        # the sort of the schedule has one operand of T K keys; the loop over used experts sorts E of them
        assert count(text, rf"i32\[{T * K}\] = sort|:i32\[{T * K}\][^\n]* = sort") == 1, save
        found[save] = count(text, r"dot_general")
    # gate_up runs once more unless it was saved; everything else is the same
    assert found["recompute"] - found["gate_up"] == 1, found
