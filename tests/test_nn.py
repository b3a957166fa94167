"""`MoE` on its own, in a model of stock Flax layers: without a mesh, under explicit axes, under automatic axes."""

import dataclasses
import doctest
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moejax.nn.layers
import moejax.nn.moe
from moejax.config import ActivationConfig, MoEConfig, RouterConfig
from moejax.nn import MLP, Embedding, MoE, RouterBias
from moejax.nn.param import declare
from moejax.ops.activation import gated
from moejax.ops.mlp import gated_mlp

B, L, D, E, F, V = 8, 6, 16, 8, 24, 11
CONFIG = MoEConfig(
    num_experts=E,
    expert_width=F,
    shared_experts=1,
    shared_gate=True,
    backend="xla",
    router=RouterConfig(select_bias=True),
)


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


class StockModel(nnx.Module):
    """A user's model: Flax layers around `MoE`."""

    def __init__(self, *, rngs):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.moe = MoE(D, CONFIG, rngs=rngs)
        self.head = nnx.Linear(D, V, rngs=rngs)

    def __call__(self, token_BxL):
        x_BxLxD = self.embed(token_BxL)
        if jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
            # `nnx.Embed` cannot say where the rows it looks up should go: tokens are replicated, and its output is split.
            x_BxLxD = jax.reshard(x_BxLxD, jax.P("data"))
        y_BxLxD, stats = self.moe(x_BxLxD)
        return self.head(x_BxLxD + y_BxLxD), stats


TOKEN = np.random.default_rng(0).integers(0, V, size=(B, L)).astype(np.int32)


def loss_and_grads(graphdef, params, bias, token):
    def loss(params):
        logits, stats = nnx.merge(graphdef, params, bias)(token)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2), stats.count_E

    return jax.value_and_grad(loss, has_aux=True)(params)


@pytest.fixture(scope="module")
def without_mesh():
    graphdef, params, bias = nnx.split(StockModel(rngs=nnx.Rngs(0)), nnx.Param, RouterBias)
    return params, bias, jax.jit(loss_and_grads, static_argnums=0)(graphdef, params, bias, TOKEN)


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_a_mesh_changes_where_things_are_and_not_what_they_are(without_mesh, kind):
    params, bias, ((want_loss, want_count), want_grads) = without_mesh
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(jax.sharding.AxisType[kind],) * 2)
    with jax.set_mesh(mesh):
        graphdef = nnx.split(nnx.eval_shape(lambda: StockModel(rngs=nnx.Rngs(0))))[0]  # takes the mesh that is set
        experts = jax.tree_util.tree_map_with_path(
            lambda path, x: jax.device_put(x, jax.P("expert" if "experts" in jax.tree_util.keystr(path) else None)),
            params,
        )
        token = jax.device_put(TOKEN, jax.P() if kind == "Explicit" else jax.P("data"))
        state = jax.tree.map(lambda x: jax.device_put(x, jax.P()), bias)
        (loss, count), grads = jax.jit(loss_and_grads, static_argnums=0)(graphdef, experts, state, token)
    assert nnx.merge(graphdef, params, bias).moe.spec.ranks == 4
    np.testing.assert_array_equal(count, want_count)
    assert relative(loss, want_loss) < 1e-6
    for (path, got), want in zip(
        jax.tree_util.tree_flatten_with_path(grads)[0], jax.tree.leaves(want_grads), strict=True
    ):
        assert relative(got, want) < 1e-5, jax.tree_util.keystr(path)


def test_the_shared_expert_is_added_behind_its_gate():
    moe = MoE(D, CONFIG, rngs=nnx.Rngs(1))
    plain = MoE(D, dataclasses.replace(CONFIG, shared_experts=0, shared_gate=False), rngs=nnx.Rngs(2))
    plain.w_router, plain.experts = moe.w_router, moe.experts
    x = jax.random.normal(jax.random.key(0), (2, 5, D))
    with_shared, without = (jax.jit(lambda x, m=m: m(x)[0])(x) for m in (moe, plain))
    x64 = np.asarray(x, np.float64)
    gate, up = (x64 @ np.asarray(w, np.float64).T for w in moe.shared.w_gate_up[...])
    shared = (gate / (1 + np.exp(-gate)) * up) @ np.asarray(moe.shared.w_down[...], np.float64).T
    share = 1 / (1 + np.exp(-x64 @ np.asarray(moe.w_shared_gate[...], np.float64).T))
    assert relative(with_shared - without, share * shared) < 1e-5


def test_a_gate_without_shared_experts_is_refused():
    with pytest.raises(ValueError, match="there is nothing to gate"):
        MoE(D, dataclasses.replace(CONFIG, shared_experts=0), rngs=nnx.Rngs(0))


def test_layers_by_number_are_refused_by_a_layer_that_has_none():
    with pytest.raises(ValueError, match=r"bf16_layers is \(0,\), .* give the layers meant recipe='bf16'"):
        MoE(32, dataclasses.replace(CONFIG, expert_width=32, bf16_layers=(0,)), rngs=nnx.Rngs(0), recipe="mxfp8")


@pytest.mark.parametrize("field", [{"mx_mode": "aligned"}, {"wgrad": "bf16"}])
def test_settings_of_another_recipe_are_refused(field):
    with pytest.raises(
        ValueError, match=f"{next(iter(field))} has an effect only with recipe=mxfp8, but recipe is bf16"
    ):
        MoE(D, dataclasses.replace(CONFIG, **field), rngs=nnx.Rngs(0), recipe="bf16")


ACTS = [ActivationConfig(name, limit=0.7 if name.startswith("swiglu_") else None) for name in
        ("swiglu", "geglu", "swiglu_clamped", "swiglu_oai")]  # fmt: skip


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.name)
def test_gated_mlp_gradients_equal_those_of_plain_autodiff(act):
    mlp = MLP(D, F, rngs=nnx.Rngs(0), act=act)
    w_gate_up, w_down, x = mlp.w_gate_up[...], mlp.w_down[...], jax.random.normal(jax.random.key(1), (3, 5, D)) * 2

    def plain(x, w_gate_up, w_down):
        gate, up = jnp.einsum("...d,ifd->i...f", x, w_gate_up)
        return jnp.sum(jnp.sin(gated(gate, up, act) @ w_down.T))

    def ours(x, w_gate_up, w_down):
        return jnp.sum(jnp.sin(gated_mlp(x, w_gate_up, w_down, act)))

    got, want = (jax.jit(jax.grad(f, argnums=(0, 1, 2)))(x, w_gate_up, w_down) for f in (ours, plain))
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 1e-6


def test_bf16_modules_have_fp32_gradients_that_were_not_rounded():
    mlp = MLP(32, 40, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (64, 32), jnp.bfloat16)
    grad = jax.grad(lambda w: gated_mlp(x, mlp.w_gate_up[...], w, mlp.act).astype(jnp.float32).sum())(mlp.w_down[...])
    assert grad.dtype == jnp.float32
    assert float(jnp.mean(grad != grad.astype(jnp.bfloat16).astype(jnp.float32))) > 0.5


def test_our_embedding_keeps_the_sharding_of_explicit_tokens():
    embedding = Embedding(V, D, rngs=nnx.Rngs(0))
    table = embedding.table[...]

    def rows_and_grad(table, token):
        def value(table):
            layer = nnx.merge(nnx.split(embedding)[0], nnx.State({"table": nnx.Param(table)}))
            rows = layer(token)
            return jnp.sum(jnp.sin(rows)), rows

        (_, rows), grad = jax.value_and_grad(value, has_aux=True)(table)
        return rows, grad

    want_rows, want_grad = rows_and_grad(table, TOKEN)
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        rows, grad = jax.jit(rows_and_grad)(jax.device_put(table, jax.P()), jax.device_put(TOKEN, jax.P("data")))
        assert rows.sharding.spec == jax.P("data", None, None)
    np.testing.assert_array_equal(rows, want_rows)
    assert relative(grad, want_grad) < 1e-6


@pytest.mark.parametrize("axes", [("embed",), ("embed", "width")])
def test_axes_must_be_known_and_complete(axes):
    with pytest.raises(ValueError, match="expected one of"):
        declare(jnp.zeros((2, 3)), axes)


@pytest.mark.parametrize("module", [moejax.nn.layers, moejax.nn.moe], ids=lambda m: m.__name__)
def test_the_examples_of_the_docstrings_run(module):
    assert doctest.testmod(module, extraglobs={"jax": jax}).failed == 0


def test_the_example_of_an_own_model_learns(capsys):
    losses = runpy.run_path("docs/examples/own_model.py")["main"](60)
    assert losses[0] > 3.0 and losses[-1] < 0.5 * losses[0]
    assert "tokens per expert" in capsys.readouterr().out


def test_the_example_runs_its_experts_in_bf16_and_takes_their_copies():
    model = runpy.run_path("docs/examples/own_model.py")["OwnModel"](32, 64, nnx.Rngs(0))
    copies, token_BxL = model.moe.expert_copies(), np.arange(24).reshape(2, 12) % 32
    assert {leaf.dtype.name for leaf in jax.tree.leaves(copies)} == {"bfloat16"}
    whole, _ = model(token_BxL)
    np.testing.assert_array_equal(model(token_BxL, copies)[0], whole)
    nothing = jax.tree.map(jnp.zeros_like, copies)  # what the products read, so the experts then add nothing
    np.testing.assert_array_equal(model(token_BxL, nothing)[0], model.head(model.embed(token_BxL)))
