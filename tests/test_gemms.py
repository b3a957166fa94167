"""The list of expert products says what a program computes, not what its config or its scopes claim."""

import jax
import jax.numpy as jnp
import pytest

from moejax import native
from moejax.config import RouterConfig
from moejax.ops.gemms import Gemm, count_gemms, format_gemms, gemm_scope, list_gemms, match_names
from moejax.ops.moe import moe_ffn, prepare_experts
from moejax.ops.mxfp8 import dequantize, quantize
from moejax.ops.schedule import schedule
from moejax.ops.spec import MoESpec

X, W = jnp.ones((4, 64)), jnp.ones((3, 96, 64))


def product(x, w, name="fprop.down"):
    with gemm_scope(name):
        return x @ w.T


def values(x):
    return dequantize(quantize(x))


def listed(function, *arguments, only=None):
    return list_gemms(jax.make_jaxpr(function)(*arguments), only)


def in_region(x, w):
    with jax.named_scope("moe_experts"):
        return product(x, w)


@pytest.mark.parametrize(
    ("prepare_x", "prepare_w", "precision"),
    [
        (values, values, "mxfp8"),
        (values, lambda w: w, "mixed"),  # an operand that fell back in silence
        (lambda x: x, lambda w: w, "fp32"),
        (lambda x: x.astype(jnp.bfloat16), lambda w: w.astype(jnp.bfloat16), "bf16"),
    ],
)
def test_precision_is_that_of_the_operands(prepare_x, prepare_w, precision):
    assert listed(lambda x, w: in_region(prepare_x(x), prepare_w(w)), X, W[0]) == [Gemm("", "fprop", "down", precision)]


def test_data_is_followed_through_loops_branches_and_calls():
    copies = quantize(W)

    def program(x, copies):
        def block(i, total):
            w = dequantize(jax.tree.map(lambda leaf: leaf[i], copies))
            return total + jax.lax.cond(i > 1, jax.jit(product), lambda x, w: 2 * product(x, w), total[:, :64], w)

        with jax.named_scope("moe_experts"):
            start = product(values(x), dequantize(copies)[0], "fprop.gate_up")
            return jax.lax.fori_loop(0, x[0, 0].astype(int), block, start)

    gemms = listed(program, X, copies)
    assert [(g.kind, g.matrix, g.precision) for g in gemms] == [
        ("fprop", "gate_up", "mxfp8"),
        ("fprop", "down", "mixed"),  # the loop multiplies its own sum, which is no E4M3 data
    ]
    assert {g.count for g in gemms} == {1, 2}, "two branches"


def test_a_loop_carry_that_becomes_quantised_is_seen():
    def program(x, w):
        with jax.named_scope("moe_experts"):

            def step(carry, _):
                held, out = carry
                return (values(held), product(held, values(w))), None

            return jax.lax.scan(step, (x, jnp.zeros((4, 96))), None, length=3)[0][1]

    assert listed(program, X, W[0]) == [Gemm("", "fprop", "down", "mxfp8")]


def test_scans_over_layers_multiply_and_dots_outside_the_layer_are_not_listed():
    def program(x, ws):
        def layer(x, w):
            with jax.named_scope("layers.0"):
                y = in_region(values(x), values(w))
            return x + y @ w, None

        return jax.lax.scan(jax.checkpoint(layer), x, ws)[0].sum()

    assert listed(program, X, W) == [Gemm("layers.0", "fprop", "down", "mxfp8", 3)]
    assert listed(program, X, W, only="layers.*")
    with pytest.raises(ValueError, match=r"'layers\.1' matches none of 'layers\.0'"):
        listed(program, X, W, only="layers.1")


def test_recomputed_products_are_listed_but_not_counted():
    def program(x, w):
        y = in_region(values(x), values(w))
        with jax.named_scope("moe_experts"):
            return y.sum() + product(values(x), values(w), "recompute.gate_up").sum()

    assert count_gemms(jax.make_jaxpr(program)(X, W[0])) == {"mxfp8": 1}
    assert "mxfp8  recompute gate_up  x1" in format_gemms(listed(program, X, W[0]))


def test_products_run_again_by_remat_are_recomputed_ones():
    def program(x, w):
        return jnp.sum(jax.checkpoint(in_region)(x, w) ** 2)

    gemms = list_gemms(jax.make_jaxpr(jax.grad(program))(X, W[0]))
    assert [gemm.kind for gemm in gemms].count("fprop") == 1
    assert "recompute" in [gemm.kind for gemm in gemms]


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("layers.0.mlp", ["layers.0.mlp"]),
        ("layers.*", ["layers.0.mlp", "layers.1.mlp"]),
        ("*.mlp", ["layers.0.mlp", "layers.1.mlp"]),
    ],
)
def test_patterns_match_whole_names_and_dots_are_dots(pattern, matched):
    assert match_names(pattern, ["layers.0.mlp", "layers.1.mlp", "layers00mlp", "layers00mlps"]) == matched


def test_a_pattern_that_matches_nothing_is_an_error():
    with pytest.raises(ValueError, match="matches none of 'a', 'b'"):
        match_names("a.b", ["a", "b"])


def test_native_kernels_are_as_precise_as_the_weights_they_are_given():
    if reason := native.missing("_cpu"):
        pytest.skip(reason)
    ids, x, weight = jnp.zeros((3, 1), jnp.int32), jnp.ones((3, 64)), jnp.ones((3, 1))

    def gradient(recipe, wgrad, save):
        router = RouterConfig(top_k=1, norm_topk=False)
        spec = MoESpec(2, 64, 96, router=router, recipe=recipe, wgrad=wgrad, backend="native", save=save)

        def loss(x, w_gate_up, w_down):
            experts = prepare_experts(w_gate_up, w_down, spec)
            return moe_ffn(x, weight, schedule(ids, spec), experts, spec).sum()

        masters = jnp.ones((2, 2, 96, 64)), jnp.ones((2, 64, 96))
        return jax.make_jaxpr(jax.grad(loss, argnums=(1, 2)))(x, *masters)

    assert count_gemms(gradient("mxfp8", "recipe", "gate_up")) == {"mxfp8": 6}
    assert count_gemms(gradient("mxfp8", "bf16", "recompute")) == {"mxfp8": 4, "bf16": 2}
    assert count_gemms(gradient("fp32", "recipe", "gate_up")) == {"fp32": 6}
    kinds = [gemm.kind for gemm in list_gemms(gradient("bf16", "recipe", "recompute"))]
    assert sorted(kinds) == ["dgrad", "dgrad", "fprop", "fprop", "recompute", "wgrad", "wgrad"]
