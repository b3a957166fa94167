"""The native layer under JAX's transformations: jit, grad, remat, scan, vmap, shard_map, donation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.native import calls
from moejax.ops.moe import moe_ffn
from moejax.ops.schedule import schedule
from tests.native_support import assert_same_bits, make_problem, needs_native, relative_norm

pytestmark = needs_native


def layer_of(problem):
    spec, plan = problem.spec, schedule(jnp.asarray(problem.expert_TxK), problem.spec)
    return lambda x, weight, masters: moe_ffn(x, weight, plan, masters, spec)


@pytest.fixture(scope="module")
def problem():
    return make_problem([20, 0, 33, 7], 16, 24, top_k=2, save="gate_up")


def two_devices():
    return jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])


def loss_of(problem, layer):
    return lambda x, weight, masters: jnp.sum(layer(x, weight, masters) * problem.dy_TxD)


def test_remat_and_scan_repeat_the_same_bits(problem):
    layer = layer_of(problem)
    arguments = (jnp.asarray(problem.x_TxD), jnp.asarray(problem.weight_TxK), problem.masters())

    def stack(wrap):
        def loss(x, weight, masters):
            x, _ = jax.lax.scan(lambda x, _: (wrap(layer)(x, weight, masters), None), x, None, length=2)
            return jnp.sum(x * problem.dy_TxD)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))

    plain = stack(lambda f: f)(*arguments)
    assert_same_bits(stack(jax.checkpoint)(*arguments), plain)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(plain))


def test_saved_residual_is_named_for_remat_policies(problem):
    """Kept by name: the forward runs once. Not kept: it is a pure call and runs again."""
    loss = loss_of(problem, layer_of(problem))
    arguments = (jnp.asarray(problem.x_TxD), jnp.asarray(problem.weight_TxK), problem.masters())

    def forwards(policy):
        text = str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy), argnums=2))(*arguments))
        return text.count("moejax_moe_forward")

    assert forwards(jax.checkpoint_policies.save_only_these_names("moe_gate_up", "moe_schedule")) == 1
    assert forwards(None) == 2


def test_vmap_runs_elements_in_sequence(problem):
    layer = layer_of(problem)
    x = jnp.stack([jnp.asarray(problem.x_TxD), jnp.asarray(problem.x_TxD)[::-1]])
    weight, masters = jnp.asarray(problem.weight_TxK), problem.masters()
    mapped = jax.jit(jax.vmap(layer, in_axes=(0, None, None)))(x, weight, masters)
    one = jax.jit(layer)
    assert_same_bits(mapped, jnp.stack([one(x[0], weight, masters), one(x[1], weight, masters)]))


def test_accumulator_continues_and_its_memory_becomes_the_result(problem):
    spec, plan = problem.spec, schedule(jnp.asarray(problem.expert_TxK), problem.spec)
    masters = problem.masters()

    def backward(buffer, x, dy, weight):
        _, pullback = jax.vjp(lambda acc: moe_ffn(x, weight, plan, masters, spec, accumulator=acc), masters.zeros())
        return pullback((dy, buffer))[0]

    arguments = (jnp.asarray(problem.x_TxD), jnp.asarray(problem.dy_TxD), jnp.asarray(problem.weight_TxK))
    step = jax.jit(backward, donate_argnums=0)
    fresh = step(masters.zeros(), *arguments)
    text = step.lower(masters.zeros(), *arguments).compile().as_text()
    copies = [line for line in text.splitlines() if " copy(" in line and "f32[4,2,24,16]" in line]
    assert not copies, copies
    buffer = jax.tree.map(lambda leaf: leaf + 1.0, fresh)
    pointer = buffer.w_gate_up_Ex2xFxD.unsafe_buffer_pointer()
    twice = step(buffer, *arguments)
    assert twice.w_gate_up_Ex2xFxD.unsafe_buffer_pointer() == pointer
    for a, b in zip(jax.tree.leaves(twice), jax.tree.leaves(fresh)):
        assert relative_norm(a, 2.0 * np.asarray(b) + 1.0) < 1e-6
    assert_same_bits(fresh, jax.tree.map(np.asarray, jax.jit(backward)(masters.zeros(), *arguments)))


def test_refs_accumulate_over_micro_batches(problem):
    layer = layer_of(problem)
    masters, x, weight = problem.masters(), jnp.asarray(problem.x_TxD), jnp.asarray(problem.weight_TxK)
    one = jax.grad(loss_of(problem, layer), argnums=2)(x, weight, masters)

    @jax.jit
    def two():
        refs = jax.tree.map(lambda leaf: jax.new_ref(jnp.zeros_like(leaf)), masters)
        for _ in range(2):
            _, pullback = jax.vjp(lambda masters: layer(x, weight, masters), masters)
            pullback.with_refs(refs)(jnp.asarray(problem.dy_TxD))
        return jax.tree.map(lambda ref: ref[...], refs)

    for a, b in zip(jax.tree.leaves(two()), jax.tree.leaves(one)):
        assert relative_norm(a, 2.0 * np.asarray(b)) < 1e-6


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_types_results_as_varying(problem, check_vma):
    """Tokens over two devices, weights replicated: each device's values, and the summed gradient. An expert has other rows on each,
    and OpenBLAS's last bits may depend on their number.
    """
    mesh = two_devices()
    spec = problem.spec
    T = problem.x_TxD.shape[0] // 2 * 2
    x, dy, weight, expert = (
        jnp.asarray(a[:T]) for a in (problem.x_TxD, problem.dy_TxD, problem.weight_TxK, problem.expert_TxK)
    )

    def local(x, weight, expert, masters):
        return moe_ffn(x, weight, schedule(expert, spec), masters, spec)

    P = jax.P
    layer = jax.shard_map(
        local, mesh=mesh, in_specs=(P("data"), P("data"), P("data"), P()), out_specs=P("data"), check_vma=check_vma
    )
    loss = lambda layer: lambda x, weight, masters: jnp.sum(layer(x, weight, expert, masters) * dy)  # noqa: E731
    arguments = (x, weight, problem.masters())
    y = jax.jit(lambda x, w, m: layer(x, w, expert, m))(*arguments)
    assert relative_norm(y, jax.jit(local)(x, weight, expert, arguments[2])) < 1e-6
    got = jax.jit(jax.grad(loss(layer), argnums=(0, 1, 2)))(*arguments)
    expected = jax.jit(jax.grad(loss(local), argnums=(0, 1, 2)))(*arguments)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert relative_norm(a, b) < 1e-6


def test_replicated_out_specs_of_varying_results_are_refused():
    mesh = two_devices()
    rows = lambda x: calls.dispatch(x, jnp.zeros((4,), jnp.int32), 1, jnp.float32)  # noqa: E731
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(jax.shard_map(rows, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P()))(jnp.ones((4, 8)))


def test_calls_are_pure_so_unused_ones_go_and_equal_ones_merge(problem):
    x, slot = jnp.asarray(problem.x_TxD), jnp.zeros((128,), jnp.int32)
    unused = jax.jit(lambda x: (calls.dispatch(x, slot, 1, jnp.float32), x + 1)[1]).lower(x).compile().as_text()
    assert "moejax_dispatch" not in unused
    twice = jax.jit(lambda x: calls.dispatch(x, slot, 1, jnp.float32) + calls.dispatch(x, slot, 1, jnp.float32))
    assert twice.lower(x).compile().as_text().count('custom_call_target="moejax_dispatch"') == 1


def test_programs_carry_no_host_value(problem):
    """The program is the same text every time it is traced: no pointer, time or id in an attribute."""
    loss = loss_of(problem, layer_of(problem))
    arguments = (jnp.asarray(problem.x_TxD), jnp.asarray(problem.weight_TxK), problem.masters())
    texts = [jax.jit(jax.grad(lambda *a: loss(*a))).lower(*arguments).as_text() for _ in range(2)]
    assert texts[0] == texts[1]
