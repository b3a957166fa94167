"""`moe_layer` over meshes of up to eight devices: the same bits for every number of expert ranks, under both kinds of axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from moejax.config import RouterConfig
from moejax.ops.moe import moe_layer, new_accumulator, prepare_experts, reduce_accumulator
from moejax.ops.spec import MoESpec

E, D, F, K, B, L = 8, 24, 40, 3, 8, 11
NAMES = ("y", "dropped", "routed", "dx", "d_weight", "d_gate_up", "d_down")


def spec_of(ranks=1, axis=None, **changes):
    return MoESpec(E, D, F, router=RouterConfig(top_k=K), axis=axis, ranks=ranks).replace(**changes)


def operands(dtype, batch=B, length=L):
    """Unequal groups, one expert without tokens, every tenth token masked."""
    rng = np.random.default_rng(0)
    expert = np.argsort(rng.random((batch, length, E)) + 0.1 * np.arange(E) + 9 * (np.arange(E) == 5), axis=-1)[..., :K]
    expert = np.where(rng.random((batch, length, 1)) < 0.1, -1, expert)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    return {
        "x": normal(batch, length, D).astype(dtype),
        "weight": jnp.asarray(rng.random((batch, length, K)), jnp.float32),
        "expert": jnp.asarray(expert, jnp.int32),
        "gate_up": normal(E, 2, F, D) / D**0.5,
        "down": normal(E, D, F) / F**0.5,
        "dy": normal(batch, length, D).astype(dtype),
    }


@functools.partial(jax.jit, static_argnums=0)
def layer_and_gradients(spec, x, weight, expert, gate_up, down, dy):
    def layer(x, weight, gate_up, down):
        return moe_layer(x, weight, expert, prepare_experts(gate_up, down, spec), spec)

    y, pullback, stats = jax.vjp(layer, x, weight, gate_up, down, has_aux=True)
    return y, stats.dropped, stats.routed_E, *pullback(dy)


def run(spec, values, mesh_shape=None, kind=AxisType.Explicit, place=True):
    """The named results as NumPy arrays. `place`: operands arrive sharded as a training step has them."""
    if mesh_shape is None:
        return dict(zip(NAMES, map(np.asarray, layer_and_gradients(spec, *values.values()))))
    mesh = jax.make_mesh(tuple(mesh_shape.values()), tuple(mesh_shape), axis_types=(kind,) * len(mesh_shape))
    with jax.set_mesh(mesh):
        if place:
            tokens, experts = jax.P(tuple(mesh_shape)), jax.P(spec.axis)
            specs = {"gate_up": experts, "down": experts}
            values = {name: jax.device_put(leaf, specs.get(name, tokens)) for name, leaf in values.items()}
        return dict(zip(NAMES, map(np.asarray, layer_and_gradients(spec, *values.values()))))


@pytest.mark.parametrize(("recipe", "every_ranks"), [("fp32", (1, 2, 4, 8)), ("bf16", (4,))])
def test_every_number_of_expert_ranks_gives_the_same_bits(recipe, every_ranks):
    dtype = jnp.float32 if recipe == "fp32" else jnp.bfloat16
    values = operands(dtype)
    one = run(spec_of(recipe=recipe), values)
    assert one["routed"][5] == 0 and not one["d_down"][5].any()
    for ranks in every_ranks:
        many = run(spec_of(ranks, "expert", recipe=recipe), values, {"expert": ranks})
        for name in NAMES:
            assert many[name].tobytes() == one[name].tobytes(), (ranks, name)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
@pytest.mark.parametrize(
    ("mesh_shape", "place"),
    [
        ({"data": 2, "expert": 2, "context": 2}, True),
        ({"data": 2, "fsdp": 2, "expert": 2}, False),
        ({"data": 8}, True),
    ],
    ids=["context", "fsdp", "no expert axis"],
)
def test_other_axes_split_the_tokens_and_change_only_the_order_of_sums(mesh_shape, place, kind):
    values = operands(jnp.float32)
    one = run(spec_of(), values)
    ranks = mesh_shape.get("expert", 1)
    many = run(spec_of(ranks, "expert" if ranks > 1 else None), values, mesh_shape, kind, place)
    for name in ("y", "dropped", "routed", "dx", "d_weight"):  # of one token each: nothing is summed over tokens
        np.testing.assert_array_equal(many[name], one[name], err_msg=name)
    for name in ("d_gate_up", "d_down"):
        for expert in range(E):
            difference = np.linalg.norm(many[name][expert] - one[name][expert])
            assert difference <= 1e-6 * np.linalg.norm(one[name][expert]), (name, expert)


def test_fewer_tokens_than_devices():
    """As in decoding: the missing tokens are masked ones, and their experts see nothing of them."""
    values = operands(jnp.float32, batch=1, length=3)
    one = run(spec_of(), values)
    for kind in (AxisType.Explicit, AxisType.Auto):
        many = run(spec_of(4, "expert"), values, {"data": 2, "expert": 4}, kind, place=False)
        np.testing.assert_array_equal(many["y"], one["y"])
        np.testing.assert_array_equal(many["routed"], one["routed"])
        np.testing.assert_allclose(many["d_down"], one["d_down"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
@pytest.mark.parametrize("transport", ["all_gather", "all_to_all"])
def test_no_tokens_at_all(kind, transport):
    values = operands(jnp.float32, length=0)
    many = run(spec_of(4, "expert", transport=transport), values, {"tensor": 2, "expert": 4}, kind, place=False)
    assert many["y"].shape == many["dx"].shape == (B, 0, D) and many["d_weight"].shape == (B, 0, K)
    assert many["routed"].tolist() == [0] * E and not many["d_gate_up"].any() and not many["d_down"].any()


def test_drops_do_not_depend_on_the_ranks_and_are_counted():
    values = operands(jnp.float32)
    one = run(spec_of(capacity_factor="0.75"), values)
    assert one["dropped"] > 0
    four = run(spec_of(4, "expert", capacity_factor="0.75"), values, {"expert": 4})
    for name in NAMES:
        assert four[name].tobytes() == one[name].tobytes(), name
    with pytest.raises(ValueError, match="9 tokens do not split over 4 devices"):
        run(spec_of(4, "expert", capacity_factor="0.75"), operands(jnp.float32, 1, 9), {"expert": 4}, place=False)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
def test_accumulated_gradients_stay_on_their_replica_until_reduced(kind):
    values = operands(jnp.float32)
    one = run(spec_of(), values)
    spec = spec_of(2, "expert")
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(kind,) * 2)

    def accumulate(x, weight, expert, gate_up, down, dy):
        experts = prepare_experts(gate_up, down, spec)
        buffer = new_accumulator(experts, spec)
        for _ in range(2):

            def layer(buffer):
                y, _, buffer = moe_layer(x, weight, expert, experts, spec, accumulator=buffer)
                return y, buffer

            pullback = jax.vjp(layer, buffer)[1]
            (buffer,) = pullback((dy, buffer))
        return buffer

    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(leaf, jax.P(("data", "expert"))) for name, leaf in values.items()}
        placed |= {name: jax.device_put(values[name], jax.P("expert")) for name in ("gate_up", "down")}
        compiled = jax.jit(accumulate).lower(*placed.values()).compile()
        buffer = compiled(*placed.values())
        assert buffer.w_down_ExDxF.shape == (2, E, D, F)
        assert {shard.data.shape for shard in buffer.w_down_ExDxF.addressable_shards} == {(1, E // 2, D, F)}
        total = jax.jit(reduce_accumulator)(buffer)
    # the buffer never meets the other replica's: no collective moves anything of its size
    local = E // 2 * D * F
    for line in compiled.as_text().splitlines():
        assert "all-reduce" not in line or f"f32[{local}" not in line and f"[{E // 2}," not in line, line
    for name, leaf in (("d_gate_up", total.w_gate_up_Ex2xFxD), ("d_down", total.w_down_ExDxF)):
        difference = np.linalg.norm(np.asarray(leaf) - 2 * one[name])
        assert difference <= 1e-6 * np.linalg.norm(2 * one[name]), name


def test_a_stack_of_layers_is_used_in_place_on_every_rank():
    """Layer 1 of a stack of two, by index, over two ranks and two replicas: as the layer alone on one device."""
    values = operands(jnp.bfloat16)
    one = run(spec_of(recipe="bf16"), values)
    spec = spec_of(2, "expert", recipe="bf16")

    @jax.jit
    def of_stack(x, weight, expert, gate_up, down, dy):
        experts = prepare_experts(jnp.stack([-gate_up, gate_up]), jnp.stack([down, down]), spec)
        buffer = new_accumulator(experts, spec)

        def layer(x, buffer):
            y, _, buffer = moe_layer(x, weight, expert, experts.of_layer(1), spec, accumulator=buffer)
            return y, buffer

        (y, _), pullback = jax.vjp(layer, x, buffer)
        dx, buffer = pullback((dy, buffer))
        return y, dx, reduce_accumulator(buffer)

    for kind in (AxisType.Explicit, AxisType.Auto):
        with jax.set_mesh(jax.make_mesh((2, 2), ("data", "expert"), axis_types=(kind,) * 2)):
            experts = jax.P("expert")
            placed = {name: jax.device_put(leaf, jax.P(("data", "expert"))) for name, leaf in values.items()}
            placed |= {name: jax.device_put(values[name], experts) for name in ("gate_up", "down")}
            y, dx, total = of_stack(*placed.values())
        assert np.asarray(y).tobytes() == one["y"].tobytes() and np.asarray(dx).tobytes() == one["dx"].tobytes()
        assert not np.asarray(total.w_down_ExDxF[0]).any()
        for leaf, want in ((total.w_gate_up_Ex2xFxD, one["d_gate_up"]), (total.w_down_ExDxF, one["d_down"])):
            assert np.linalg.norm(np.asarray(leaf[1]) - want) <= 1e-6 * np.linalg.norm(want)


def test_a_mesh_that_does_not_fit_is_refused():
    values = operands(jnp.float32)
    with pytest.raises(ValueError, match="split over 4 ranks of axis 'expert': call under"):
        run(spec_of(4, "expert"), values)
    with pytest.raises(ValueError, match="4 expert ranks on axis 'expert', the mesh has {'expert': 2}"):
        run(spec_of(4, "expert"), values, {"expert": 2}, place=False)
