"""The decoder: against an FP64 oracle, and what must hold whatever the weights (causality, documents, scan, remat, presets)."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.decoder import Decoder, _hash_table
from moejax.config import Config, ModelConfig, MoEConfig, RouterConfig, TrainingConfig
from moejax.config_load import load
from moejax.nn import Experts, HashTable, RouterBias
from moejax.nn.stack import make_stack
from moejax.ops.loss import cross_entropy
from moejax.ops.spec import moe_spec
from tests import decoder_oracle
from tests.tracing import equations

pytestmark = pytest.mark.quick_compile

CONFIG = Config(
    model=ModelConfig(
        vocab_size=41, d_model=32, num_layers=3, dense_layers=1, dense_width=40, num_heads=4, num_kv_heads=2, head_dim=12,
        qk_norm="head", rope_fraction=0.5, init_std=0.5,
    ),
    moe=MoEConfig(
        num_experts=5, expert_width=24, shared_experts=2, shared_width=8, shared_gate=True, backend="xla",
        router=RouterConfig(score_fn="sigmoid", select_bias=True, route_scale=1.5),
    ),
)  # fmt: skip
SMALL = dataclasses.replace(
    CONFIG,
    model=dataclasses.replace(CONFIG.model, num_layers=2, dense_layers=0, dense_width=None),
    moe=MoEConfig(num_experts=5, expert_width=24, backend="xla"),
)
LENGTH = 19


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def with_training(config, **changes):
    return dataclasses.replace(config, training=TrainingConfig(**changes))


def with_moe(config, **changes):
    return dataclasses.replace(config, moe=dataclasses.replace(config.moe, **changes))


@functools.cache
def graph(config):
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), nnx.Param, RouterBias)


@functools.cache
def parts(config=CONFIG):
    """Graph, parameters and router state, drawn by NumPy: norm scales are not 1, selection biases not 0, layers not alike."""
    graphdef, params, state = graph(config)
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        noise = rng.normal(size=leaf.shape)
        if "scale" in jax.tree_util.keystr(path):
            noise = 1 + 0.2 * noise
        elif "w_" in jax.tree_util.keystr(path):
            noise /= np.sqrt(leaf.shape[-1])
        return jnp.asarray(noise * (0.2 if "bias" in jax.tree_util.keystr(path) else 1), leaf.dtype)

    with jax.ensure_compile_time_eval():  # it may be called, and is cached, while a function is traced
        return graphdef, *(jax.tree_util.tree_map_with_path(draw, tree) for tree in (params, state))


def batch():
    """Two rows of packed documents; the second ends in padding."""
    rng = np.random.default_rng(1)
    lengths = [[7, 12], [4, 11, -4]]
    token = rng.integers(0, 41, size=(2, LENGTH))
    segment = np.stack(
        [np.concatenate([np.full(abs(n), i + 1 if n > 0 else 0) for i, n in enumerate(row)]) for row in lengths]
    )
    position = np.stack([np.concatenate([np.arange(abs(n)) for n in row]) for row in lengths])
    target = np.where(segment > 0, np.roll(token, -1, axis=1), -1)
    target[0, [6, -1]] = target[1, [3, 14]] = -1
    return {"token": token, "segment": segment, "position": position, "target": target}


def loss(params, graphdef, state):
    data = batch()
    model = nnx.merge(graphdef, params, state)
    hidden, stats = model(*(jnp.asarray(data[name], jnp.int32) for name in ("token", "segment", "position")))
    total, count = cross_entropy(hidden, model.head_weight(), jnp.asarray(data["target"], jnp.int32), chunk=10)
    return total / count, (hidden, stats)


@functools.cache
def loss_and_gradients(config=CONFIG):
    graphdef, (_, params, state) = graph(config)[0], parts()
    run = jax.jit(jax.value_and_grad(lambda params, state: loss(params, graphdef, state), has_aux=True))
    (value, aux), grads = run(params, state)
    return value, aux, nnx.to_pure_dict(grads)


def test_hidden_states_and_loss_match_the_fp64_oracle():
    _, params, state = parts()
    value, (hidden, stats), _ = loss_and_gradients()
    data, bias = batch(), nnx.to_pure_dict(state)["moe_layers"]["moe"]["select_bias"]
    inputs = (nnx.to_pure_dict(params), CONFIG, data["token"], data["segment"], data["position"])
    assert relative(hidden, decoder_oracle.hidden_states(*inputs, bias)) < 3e-6
    assert relative(value, decoder_oracle.mean_nll(*inputs, data["target"], bias)) < 1e-6
    real = int((data["segment"] > 0).sum())
    np.testing.assert_array_equal(stats.tokens, [real, real])
    np.testing.assert_array_equal(stats.count_E.sum(-1), [2 * real, 2 * real])


def test_every_gradient_leaf_matches_finite_differences_of_the_oracle():
    _, params, state = parts()
    _, _, grads = loss_and_gradients()
    pure, data = nnx.to_pure_dict(params), batch()
    bias = nnx.to_pure_dict(state)["moe_layers"]["moe"]["select_bias"]
    flat, structure = jax.tree.flatten(pure)
    flat = [np.asarray(leaf, np.float64) for leaf in flat]
    rng, step = np.random.default_rng(2), 1e-6
    for i, (path, grad) in enumerate(jax.tree_util.tree_flatten_with_path(grads)[0]):
        # Half along the gradient, half random: neither a wrong direction nor a wrong size can hide.
        grad = np.asarray(grad, np.float64)
        noise = rng.normal(size=grad.shape)
        direction = grad / np.linalg.norm(grad) + noise / np.linalg.norm(noise)
        values = []
        for sign in (1, -1):
            moved = [*flat[:i], flat[i] + sign * step * direction, *flat[i + 1 :]]
            tree = jax.tree.unflatten(structure, moved)
            values.append(
                decoder_oracle.mean_nll(
                    tree, CONFIG, data["token"], data["segment"], data["position"], data["target"], bias
                )
            )
        slope = (values[0] - values[1]) / (2 * step)
        assert abs(slope - (grad * direction).sum()) < 2e-5 * np.linalg.norm(grad), jax.tree_util.keystr(path)


def test_no_gradient_reaches_later_positions_or_other_documents():
    graphdef, params, state = parts()
    token = jnp.asarray(np.random.default_rng(0).permutation(41)[None, :LENGTH], jnp.int32)  # all different: a row each
    segment = jnp.asarray(np.repeat([1, 2], [7, 12])[None], jnp.int32)
    direction = jax.random.normal(jax.random.key(0), (32,))

    @jax.jit
    def reach(params, at):
        def value(params):
            return nnx.merge(graphdef, params, state)(token, segment)[0][0, at] @ direction

        table = nnx.to_pure_dict(jax.grad(value)(params))["embedding"]["table"]
        return jnp.linalg.norm(table[token[0]], axis=-1)

    for at, first in ((4, 0), (6, 0), (7, 7), (15, 7)):
        norms = np.asarray(reach(params, at))
        assert (norms[first : at + 1] > 0).all()
        assert not norms[:first].any() and not norms[at + 1 :].any()


VARIANTS = [
    {"scan_layers": False},
    {"remat": "layer"},
    pytest.param({"remat": "minimal"}, marks=pytest.mark.slow),
    pytest.param({"remat": "layer", "scan_layers": False}, marks=pytest.mark.slow),
    pytest.param({"remat": "minimal", "scan_layers": False}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("training", VARIANTS, ids=str)
def test_scan_and_remat_change_no_value(training):
    value, (hidden, stats), grads = loss_and_gradients(with_training(CONFIG, **training))
    want_value, (want_hidden, want_stats), want_grads = loss_and_gradients()
    assert relative(value, want_value) < 1e-6 and relative(hidden, want_hidden) < 1e-6
    np.testing.assert_array_equal(stats.count_E, want_stats.count_E)
    for (path, got), want in zip(
        jax.tree_util.tree_flatten_with_path(grads)[0], jax.tree.leaves(want_grads), strict=True
    ):
        assert relative(got, want) < 1e-6, jax.tree_util.keystr(path)


def _primitives(config):
    graphdef, (_, params, state) = graph(config)[0], parts()
    gradient = jax.grad(lambda params, state: loss(params, graphdef, state)[0])
    closed = jax.make_jaxpr(gradient)(params, state)
    names = [equation.primitive.name for equation in equations(closed)]
    return {name: names.count(name) for name in ("top_k", "sort", "exp", "dot_general")}


def test_remat_recomputes_products_but_never_the_choice_of_experts():
    none, minimal, layer = (_primitives(with_training(CONFIG, remat=policy)) for policy in ("none", "minimal", "layer"))
    for policy in (minimal, layer):
        assert policy["top_k"] == none["top_k"] > 0
        assert policy["sort"] == none["sort"] > 0
    assert layer["dot_general"] > minimal["dot_general"] > none["dot_general"]
    assert layer["exp"] > minimal["exp"]  # minimal keeps the attention output and its log-sum-exp


def test_an_unknown_remat_policy_is_refused():
    with pytest.raises(ValueError, match="none, minimal, layer"):
        loss_and_gradients(with_training(CONFIG, remat="layers"))


def test_copies_made_once_per_step_give_the_same_bits():
    config = dataclasses.replace(with_moe(CONFIG, expert_width=32), recipe="bf16")
    graphdef, params, state = parts(config)
    token = jnp.asarray(batch()["token"], jnp.int32)

    @jax.jit
    def both(params, state):
        model = nnx.merge(graphdef, params, state)
        return model(token)[0], model(token, copies=model.expert_copies())[0]

    here, before = both(params, state)
    assert here.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(here, np.float32), np.asarray(before, np.float32))


def test_layers_of_another_recipe_leave_the_parameter_tree_alone():
    base = with_moe(CONFIG, expert_width=32)
    mixed = dataclasses.replace(with_moe(base, bf16_layers=(0,)), recipe="mxfp8")
    graphdef, params, state = parts(mixed)
    shapes = [jax.tree.map(jnp.shape, nnx.to_pure_dict(tree)) for tree in (params, parts(base)[1])]
    assert shapes[0] == shapes[1]
    model = nnx.merge(graphdef, params, state)
    assert [(s.spec.recipe, s.layers) for s in model.segments] == [("bf16", 1), ("mxfp8", 1)]
    token = jnp.asarray(batch()["token"], jnp.int32)

    @jax.jit
    def run(params):
        return model_of(graphdef, params)(token), model_of(graph(base)[0], params)(token)[0]

    def model_of(graphdef, params):
        return nnx.merge(graphdef, params, state)

    (hidden, stats), exact = run(params)
    assert stats.count_E.shape == (2, 5)
    assert 1e-3 < relative(hidden, exact) < 0.2


def test_hash_layers_choose_by_their_table():
    config = with_moe(SMALL, router=RouterConfig(top_k=2, hash_layers=1))
    graphdef, params, state = parts(config)
    assert {type(v) for v in jax.tree.leaves(state, is_leaf=lambda v: isinstance(v, nnx.Variable))} == {HashTable}
    table = np.argsort(np.random.default_rng(4).random((1, 41, 5)), axis=-1)[..., :2].astype(np.int32)
    nnx.replace_by_pure_dict(state, {"hash_table": table})
    token = jnp.full((1, 6), 17, jnp.int32)
    _, stats = jax.jit(lambda params, state: nnx.merge(graphdef, params, state)(token))(params, state)
    np.testing.assert_array_equal(stats.count_E[0], np.bincount(np.repeat(table[0, 17], 6), minlength=5))
    assert stats.count_E[1].sum() == 12  # the second layer chooses by its logits


def test_initial_hash_tables_hold_distinct_experts():
    config = with_moe(SMALL, num_experts=4, router=RouterConfig(top_k=3, hash_layers=2))
    table = np.asarray(_hash_table(nnx.Rngs(0), config.moe, 50)[...])
    assert table.shape == (2, 50, 3) and table.min() == 0 and table.max() == 3
    assert (np.diff(np.sort(table, axis=-1), axis=-1) > 0).all()
    assert (table[0] != table[1]).any()


def test_tied_embeddings_are_the_head():
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, tie_embeddings=True))
    graphdef, params, state = parts(config)
    assert "head" not in nnx.to_pure_dict(params)
    table = nnx.to_pure_dict(params)["embedding"]["table"]
    np.testing.assert_array_equal(nnx.merge(graphdef, params, state).head_weight(), table)


def test_layers_and_experts_start_different_with_the_fan_in_of_one_expert():
    spec = moe_spec(SMALL)
    experts = make_stack(lambda rngs: Experts(spec, rngs=rngs), 2, nnx.Rngs(0))
    assert experts.w_down.get_metadata("logical_axes") == ("layer", "expert", "embed", "mlp")
    w_gate_up, w_down = np.asarray(experts.w_gate_up[...]), np.asarray(experts.w_down[...])
    assert relative(w_gate_up.std(), 32**-0.5) < 0.03
    assert relative(w_down.std(), 24**-0.5) < 0.03
    assert len(np.unique(w_down[:, :, 0, 0])) == 10


@pytest.mark.slow
def test_parameters_are_born_sharded_with_the_same_values():
    config = dataclasses.replace(SMALL, model=dataclasses.replace(SMALL.model, num_layers=1))

    def init():
        return nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(3)), nnx.Param))

    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.tree.map(lambda x: jax.NamedSharding(mesh, jax.P(*[None] * (x.ndim - 1), "fsdp")), jax.eval_shape(init))
    sharded = jax.jit(init, out_shardings=place)()
    w_down = sharded["moe_layers"]["moe"]["experts"]["w_down"]
    assert {shard.data.shape for shard in w_down.addressable_shards} == {(1, 5, 32, 6)}
    for got, want in zip(jax.tree.leaves(sharded), jax.tree.leaves(init()), strict=True):
        np.testing.assert_allclose(
            got, want, rtol=3e-6
        )  # the random bits are equal; the compiler orders erf_inv's products


# Computed from the published configs and within 1 % of the published sizes; no weights needed.
PARAMETERS = {
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "olmoe-1b-7b": 6_919_161_856,
    "glm-4.5": 352_797_829_024,
    "glm-4.5-air": 106_852_251_264,
}


@pytest.mark.parametrize("preset", PARAMETERS)
def test_presets_have_the_published_number_of_parameters(preset):
    config = load(None, [f"preset={preset}"])
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state)) == PARAMETERS[preset]


def test_logical_axes_name_every_axis_of_every_variable():
    config = with_moe(CONFIG, router=RouterConfig(select_bias=True, router_bias=True, hash_layers=1), expert_bias=True)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention_bias=True))
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    for path, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Variable):
            assert len(variable.get_metadata("logical_axes")) == len(variable.shape), path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, "model.vocab_size is not set"),
        ({"dense_width": None}, "set model.dense_width"),
        ({"dense_layers": 4}, "dense_layers is 4 but num_layers is 3"),
        ({"num_kv_heads": 3}, "num_heads is 4 and num_kv_heads 3"),
    ],
)
def test_models_that_cannot_be_built_say_why(changes, message):
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, **changes))
    with pytest.raises(ValueError, match=message):
        Decoder(config, rngs=nnx.Rngs(0))
