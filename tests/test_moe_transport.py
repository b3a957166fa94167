"""Rows over the expert axis: every transport gives the bits of one device, for any routing, in bounded memory."""

import functools
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from moejax.config import Config, MeshConfig, MoEConfig, RouterConfig, TrainingConfig
from moejax.mesh import make_mesh
from moejax.ops.exchange_plan import chunk_rows, window_rows
from moejax.ops.moe import moe_ffn, moe_layer, prepare_experts
from moejax.ops.schedule import schedule
from moejax.ops.spec import MoESpec, moe_spec
from moejax.ops.transport import resolve_transport
from tests.test_moe_sharding import NAMES, B, D, E, F, K, layer_and_gradients, operands, run, spec_of

LENGTH = 48  # 8 rows of it: with 8 ranks a rank has 144 slots, more than a window of 128


def exchanging(ranks, **changes):
    return spec_of(ranks, "expert", transport="all_to_all", **changes)


def assert_same_bits(many, one, names=NAMES):
    for name in names:
        assert many[name].tobytes() == one[name].tobytes(), name


@functools.cache
def case(recipe="fp32", backend="xla"):
    """Operands and the results of one device."""
    values = operands(jnp.float32 if recipe == "fp32" else jnp.bfloat16, B, LENGTH)
    return values, run(spec_of(recipe=recipe, backend=backend), values)


@pytest.mark.parametrize(
    ("ranks", "minibatch_rows", "recipe", "backend"),
    [
        (2, 128, "fp32", "xla"),
        (4, None, "fp32", "xla"),
        (8, None, "fp32", "xla"),
        (8, 128, "fp32", "xla"),
        (4, 256, "bf16", "xla"),
        (2, 256, "fp32", "native"),
        (8, 128, "bf16", "native"),
    ],
)
def test_all_to_all_gives_the_bits_of_one_device(ranks, minibatch_rows, recipe, backend):
    values, one = case(recipe, backend)
    spec = exchanging(ranks, recipe=recipe, backend=backend, minibatch_rows=minibatch_rows)
    if minibatch_rows == 128:
        tokens = B * LENGTH // ranks
        assert window_rows(tokens, spec) == 128 < tokens * K  # several windows, even where routing is balanced
    assert_same_bits(run(spec, values, {"expert": ranks}), one)


def test_all_gather_gives_the_bits_of_the_fused_native_layer():
    values, one = case("fp32", "native")
    assert_same_bits(run(spec_of(4, "expert", backend="native"), values, {"expert": 4}), one)


@pytest.mark.parametrize(
    "mesh_shape",
    [{"expert": 4, "data": 2}, {"data": 2, "fsdp": 2, "expert": 2}, {"data": 2, "expert": 2, "tensor": 2}],
    ids=lambda shape: " x ".join(shape),
)
def test_other_axes_beside_it_split_the_tokens(mesh_shape):
    values, one = case()
    many = run(exchanging(mesh_shape["expert"], minibatch_rows=256), values, mesh_shape, AxisType.Auto)
    assert_same_bits(many, one, ("y", "dropped", "routed", "dx", "d_weight"))
    for name in ("d_gate_up", "d_down"):
        for expert in range(E):
            difference = np.linalg.norm(many[name][expert] - one[name][expert])
            assert difference <= 1e-6 * np.linalg.norm(one[name][expert]), (name, expert)


def skewed(kind, ranks):
    """Expert ids (B, LENGTH, K) where the experts of few ranks, or the tokens of few ranks, have all the work."""
    rng = np.random.default_rng(1)
    local = E // ranks
    expert = np.full((B * LENGTH, K), -1)
    if kind == "all to one rank":
        expert[:, :local] = np.stack([rng.permutation(local) for _ in expert])[:, :K] + (ranks - 1) * local
    elif kind == "one rank idle":
        others = [e for e in range(E) if e // local != 1]
        expert = np.stack([rng.choice(others, K, replace=False) for _ in expert])
    elif kind == "tokens on one rank":
        first = B * LENGTH // ranks
        expert[:first] = np.stack([rng.choice(E, K, replace=False) for _ in range(first)])
    return jnp.asarray(expert.reshape(B, LENGTH, K), jnp.int32)


@pytest.mark.parametrize("kind", ["all to one rank", "one rank idle", "tokens on one rank", "no tokens"])
def test_any_skew_is_computed_without_drops_by_the_same_program(kind):
    ranks = 4
    values = case()[0] | {"expert": skewed(kind, ranks)}
    one = run(spec_of(), values)
    spec = exchanging(ranks, minibatch_rows=256)
    compiled = layer_and_gradients._cache_size()
    many = run(spec, values, {"expert": ranks})
    assert layer_and_gradients._cache_size() <= compiled + 1  # routing is data: all kinds run one program
    assert_same_bits(many, one)
    assert many["dropped"] == 0 and many["routed"].sum() == (np.asarray(values["expert"]) >= 0).sum()


@pytest.mark.parametrize("transport", ["all_gather", "all_to_all"])
def test_an_expert_named_twice_by_a_token_is_refused_or_counted(transport):
    """Rows have room for each expert once per token: whatever more there is must not be lost, or read, in silence."""
    values = case()[0] | {"expert": jnp.zeros((B, LENGTH, K), jnp.int32)}
    spec = exchanging(8, minibatch_rows=256).replace(transport=transport)
    many = run(spec, values, {"expert": 8})
    tokens = B * LENGTH
    assert many["routed"].tolist() == [K * tokens] + [0] * (E - 1)
    if transport == "all_to_all":  # windows hold any number of rows
        assert_same_bits(many, run(spec_of(), values))
    else:  # the last rows of the order have none
        assert many["dropped"] == (K - 1) * tokens
        first = np.arange(tokens * K).reshape(B, LENGTH, K) < tokens
        kept = jnp.where(first, values["expert"], -1)
        assert_same_bits(
            many, run(spec_of(), values | {"expert": kept}), ("y", "dx", "d_weight", "d_gate_up", "d_down")
        )
    with jax.set_mesh(make_mesh(MeshConfig(data=1, expert=8), E)), pytest.raises(ValueError, match="an expert twice"):
        experts = prepare_experts(values["gate_up"], values["down"], spec)
        moe_layer(values["x"], values["weight"], values["expert"], experts, spec)


def test_memory_does_not_grow_with_the_ranks():
    """Each rank has as many tokens in both runs. What any routing may need grows fourfold; the buffers do not."""

    def temporaries(ranks, transport):
        values = operands(jnp.float32, ranks, 128)
        spec = spec_of(ranks, "expert", transport=transport, minibatch_rows=512)
        with jax.set_mesh(jax.make_mesh((ranks,), ("expert",), devices=jax.devices()[:ranks])):
            places = {"gate_up": jax.P("expert"), "down": jax.P("expert")}
            shapes = [
                jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(jax.sharding.get_mesh(), place))
                for name, leaf in values.items()
                for place in [places.get(name, jax.P("expert"))]
            ]
            compiled = layer_and_gradients.lower(spec, *shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(8, "all_to_all") < 1.2 * temporaries(2, "all_to_all")
    assert temporaries(8, "all_gather") > 1.5 * temporaries(2, "all_gather"), "the measure sees nothing"


@pytest.mark.parametrize("kind", [None, "all to one rank"])
def test_capacity_drops_the_same_slots_on_every_number_of_ranks(kind):
    values, _ = case()
    if kind is not None:
        values = values | {"expert": skewed(kind, 4)}
    one = run(spec_of(capacity_factor="0.75"), values)
    assert one["dropped"] > 0
    assert_same_bits(run(exchanging(4, capacity_factor="0.75"), values, {"expert": 4}), one)


def test_plans_of_both_transports_describe_the_same_rows():
    rng = np.random.default_rng(2)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(4 * 50)])
    ids[rng.random(ids.shape) < 0.2] = -1
    ids = jnp.asarray(ids, jnp.int32)
    mesh = jax.make_mesh((4,), ("expert",), devices=jax.devices()[:4])

    def plans(ids, transport):
        plan = schedule(ids, spec_of(4, "expert", transport=transport, capacity_factor="0.9"))
        return plan.count_E, plan.start_E, plan.routed_E

    with jax.set_mesh(mesh):
        ids = jax.device_put(ids, jax.P("expert"))
        got, want = (
            jax.jit(jax.shard_map(functools.partial(plans, transport=transport), out_specs=jax.P("expert")))(ids)
            for transport in ("all_to_all", "all_gather")
        )
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(want[0].sum()) < int(want[2].sum())


def test_moved_bytes_are_those_of_the_chunks():
    ranks, spec = 4, exchanging(4, minibatch_rows=256)
    values = case()[0] | {"expert": skewed("all to one rank", 4)}

    def moved(spec, mesh_shape):
        mesh = jax.make_mesh(tuple(mesh_shape.values()), tuple(mesh_shape))
        with jax.set_mesh(mesh):
            args = [jax.device_put(values[name], jax.P(mesh.axis_names)) for name in ("x", "weight", "expert")]
            experts = [jax.device_put(values[name], jax.P(spec.axis)) for name in ("gate_up", "down")]
            layer = lambda x, w, e, *m: moe_layer(x, w, e, prepare_experts(*m, spec), spec)[1].moved_bytes  # noqa: E731
            return float(jax.jit(layer)(*args, *experts))

    # 2 of 3 slots go to the two experts of the last rank: 96 rows from each of 4 ranks to each expert, 128-row aligned
    tokens = B * LENGTH // ranks
    chunk = chunk_rows(tokens, spec)
    assert window_rows(tokens, spec) == 256 and chunk == 64
    expected = 0
    for window in range(math.ceil(2 * 4 * tokens / 256)):  # 384 rows of each expert: 768 in all
        rows = range(window * 256, (window + 1) * 256)
        pair = max(sum(row % 384 // 96 == source for row in rows) for source in range(4))
        expected += ranks * (ranks - 1) * chunk * math.ceil(pair / chunk)
    assert moved(spec, {"expert": 4}) == expected * (5 * D * 4 + 8)
    assert moved(spec_of(4, "expert"), {"expert": 4}) == 3 * 4 * tokens * (3 * D * 4 + 4 * K + K * (2 * D * 4 + 4))
    assert moved(spec_of(), {"data": 2}) == 0


def ragged_reference(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`jax.lax.ragged_all_to_all` as its documentation defines it, from what all ranks hold; NaN if the sizes disagree."""
    rank = jax.lax.axis_index(axis_name)
    operands, inputs, sizes, outputs = (
        jax.lax.all_gather(leaf, axis_name) for leaf in (operand, input_offsets, send_sizes, output_offsets)
    )
    place = jnp.arange(output.shape[0])
    shape = (-1,) + (1,) * (output.ndim - 1)
    for source in range(operands.shape[0]):
        offset = place - outputs[source, rank]
        here = (offset >= 0) & (offset < sizes[source, rank])
        rows = operands[source][jnp.where(here, inputs[source, rank] + offset, 0)]
        output = jnp.where(here.reshape(shape), rows, output)
    return jnp.where(jnp.all(recv_sizes == sizes[:, rank]), output, jnp.nan)


@pytest.mark.parametrize("minibatch_rows", [None, 128])
def test_ragged_exchange_sends_exactly_the_rows(monkeypatch, minibatch_rows):
    """XLA has no ragged all-to-all on the CPU, so what we ask of it runs on a reference of it."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_reference)
    values, one = case()
    spec = spec_of(4, "expert", transport="ragged_all_to_all", minibatch_rows=minibatch_rows)
    assert_same_bits(run(spec, values, {"expert": 4}), one)


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["all_gather", "all_to_all", "ragged_all_to_all"])
def test_transports_on_gpus(transport):
    if (ranks := len(jax.devices())) < 2:
        pytest.skip("one GPU: nothing travels")
    values, one = case()
    spec = spec_of(2, "expert", transport=transport, minibatch_rows=512)
    assert ranks >= 2
    many = run(spec, values, {"expert": 2})
    assert_same_bits(many, one)


def config_of(**moe):
    moe = {"num_experts": 8, "expert_width": 32, "router": RouterConfig(top_k=2), **moe}
    return Config(moe=MoEConfig(**moe), training=TrainingConfig(remat="layer"))


def test_the_transport_is_chosen_by_bytes_or_by_name_and_logged_once(caplog):
    caplog.set_level(logging.INFO, "moejax.ops.transport")
    two, four = (make_mesh(MeshConfig(expert=ranks), 8) for ranks in (2, 4))
    few = config_of(router=RouterConfig(top_k=6))
    assert moe_spec(few, two).transport == "all_gather"  # 7 rows against 7.5
    assert moe_spec(few, four).transport == "all_to_all"
    assert moe_spec(few).transport == "all_gather" and not moe_spec(few).exchanges
    assert moe_spec(config_of(transport="all_gather"), four).transport == "all_gather"
    unsaved = Config(moe=MoEConfig(save="gate_up"))
    assert moe_spec(unsaved, four).transport == "all_gather"
    caplog.clear()
    for _ in range(3):
        moe_spec(config_of(expert_width=72), four)
    assert len(caplog.records) == 1
    assert (
        "4 ranks, K=2: transport all_to_all (rows sent per token, there and back: all_gather 9, all_to_all 3.75)"
        in caplog.text
    )


def test_a_ragged_exchange_between_processes_needs_a_flag_of_xla(monkeypatch):
    spec = spec_of(4, "expert", save="recompute")
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    monkeypatch.delenv("XLA_FLAGS")
    with pytest.raises(ValueError, match=r"its 4 ranks span processes of 1 GPUs.*use all_to_all, or set one"):
        resolve_transport(spec, "ragged_all_to_all", "gpu")
    assert resolve_transport(spec, "all_to_all", "gpu") == "all_to_all"
    flag = "--xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback"
    for given in (f"{flag}=true", f"--xla_other=2 {flag}", f"{flag}=false {flag}=1"):  # all ways that XLA takes
        monkeypatch.setenv("XLA_FLAGS", given)
        assert resolve_transport(spec, "ragged_all_to_all", "gpu") == "ragged_all_to_all"
    monkeypatch.setenv("XLA_FLAGS", f"{flag}=true {flag}=false")
    with pytest.raises(ValueError, match="use all_to_all, or set one"):
        resolve_transport(spec, "ragged_all_to_all", "gpu")
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(jax, "local_device_count", lambda: 4)  # a process per node: its ranks may be all inside
    assert resolve_transport(spec, "ragged_all_to_all", "gpu") == "ragged_all_to_all"


@pytest.mark.parametrize(
    ("moe", "message"),
    [
        ({"transport": "ring"}, "moe.transport is 'ring'; expected one of all_gather, all_to_all"),
        ({"transport": "ragged_all_to_all"}, "ragged_all_to_all cannot run here: XLA has no ragged all-to-all on cpu"),
        ({"minibatch_rows": 200}, "minibatch_rows is 200; expected a positive multiple of 128"),
    ],
)
def test_settings_that_cannot_work_are_refused(moe, message):
    with pytest.raises(ValueError, match=message):
        moe_spec(config_of(**moe), make_mesh(MeshConfig(expert=4), 8))


def test_saving_rows_and_exchanging_them_is_refused():
    config = Config(moe=MoEConfig(save="gate_up", transport="all_to_all"))
    with pytest.raises(ValueError, match="it keeps no rows for the backward, and save is gate_up"):
        moe_spec(config, make_mesh(MeshConfig(expert=4), 8))
    spec = MoESpec(E, D, F, router=RouterConfig(top_k=K), ranks=2, axis="expert", transport="all_to_all")
    assert resolve_transport(spec, None, "gpu") == "all_to_all"
    values = operands(jnp.float32)
    plan = schedule(values["expert"].reshape(-1, K), spec_of())
    x, weight = values["x"].reshape(-1, D), values["weight"].reshape(-1, K)
    with pytest.raises(ValueError, match="the plan is a Plan but the spec's transport is all_to_all with R = 2"):
        moe_ffn(x, weight, plan, prepare_experts(values["gate_up"], values["down"], spec), spec)


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["all_gather", "all_to_all", "ragged_all_to_all"])
@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_two_gpus_give_the_bits_of_one(recipe, transport):
    if jax.device_count() < 2:
        pytest.skip("one GPU")
    values, one = case(recipe)
    rows = None if transport == "all_gather" else 512
    spec = spec_of(2, "expert", recipe=recipe, backend="xla", transport=transport, minibatch_rows=rows)
    assert_same_bits(run(spec, values, {"expert": 2}), one)
