"""The expert layer against a float64 oracle, `xla` against `dense`, and the properties its contract promises.

Sharding: `test_moe_sharding.py`. What is compiled: `test_moe_compiled.py`. MXFP8: `test_mxfp8_experts.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import ActivationConfig, RouterConfig
from moejax.ops.moe import ExpertWeights, moe_ffn, prepare_experts
from moejax.ops.schedule import schedule
from moejax.ops.spec import MoESpec
from tests import moe_oracle as oracle

E, D, F, T = 5, 24, 40, 150
NAMES = ("y", "dx", "d_weight", "d_gate_up", "d_down", "db_gate_up", "db_down")
PER_EXPERT = NAMES[3:]


def spec_of(top_k=2, **changes):
    router = RouterConfig(top_k=top_k, norm_topk=top_k > 1)
    return MoESpec(E, D, F, router=router, expert_bias=True).replace(**changes)


def operands(tokens=T, seed=0, top_k=2):
    """x, weight, masters, biases and dy as FP32; the weights do not sum to one."""
    rng = np.random.default_rng(seed)
    values = (
        rng.standard_normal((tokens, D)),
        rng.random((tokens, top_k)) + 0.25,
        rng.standard_normal((E, 2, F, D)) / D**0.5,
        rng.standard_normal((E, D, F)) / F**0.5,
        rng.standard_normal((E, 2, F)) / 4,
        rng.standard_normal((E, D)) / 4,
        rng.standard_normal((tokens, D)),
    )
    return [value.astype(np.float32) for value in values]


def routings(tokens=T, top_k=2, seed=1):
    """Named (tokens, K) expert ids: the shapes that have broken grouped kernels."""
    rng = np.random.default_rng(seed)
    skewed = np.argsort(rng.random((tokens, E)) + [0, 0.3, 9, 0.5, 0.8], axis=1)[:, :top_k]
    masked = np.where(rng.random((tokens, 1)) < 0.3, -1, skewed)
    one_each = np.full((tokens, top_k), -1)
    for expert in range(E):
        one_each[7 * expert, 0] = expert  # groups of size 1
    on_one = np.full((tokens, top_k), -1)
    on_one[:, 0] = 3
    return {"skewed, expert 2 empty": skewed, "masked tokens": masked, "groups of one": one_each, "all on one": on_one}


@functools.partial(jax.jit, static_argnums=0)
def run(spec, x, weight, expert, w_gate_up, w_down, b_gate_up, b_down, dy):
    """y and all gradients, as in the oracle."""
    plan = schedule(expert, spec)

    def layer(x, weight, *masters):
        return moe_ffn(x, weight, plan, prepare_experts(masters[0], masters[1], spec, *masters[2:]), spec)

    y, pullback = jax.vjp(layer, x, weight, w_gate_up, w_down, b_gate_up, b_down)
    return y, *pullback(dy.astype(y.dtype))


def call(spec, values, expert, dtype=jnp.float32):
    x, weight, *masters, dy = values
    return run(spec, jnp.asarray(x, dtype), weight, jnp.asarray(expert, jnp.int32), *masters, jnp.asarray(dy, dtype))


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    size = np.linalg.norm(want)
    return np.linalg.norm(got - want) / size if size else np.linalg.norm(got)


def check_leaves(got, want, bound, where=""):
    """Relative norm of each tensor, and of each expert of the weight gradients."""
    for name, a, b in zip(NAMES, got, want):
        assert relative(a, b) <= bound, (where, name, relative(a, b))
        if name in PER_EXPERT:
            for expert in range(E):
                assert relative(a[expert], b[expert]) <= bound, (where, name, expert, relative(a[expert], b[expert]))


def test_oracle_gradients_are_those_of_its_own_forward():
    x, weight, *masters, dy = operands(tokens=3)
    expert = np.array([[0, 1], [1, 4], [-1, 3]])
    act = ActivationConfig(name="swiglu_oai", limit=1.0)
    leaves = [np.asarray(leaf, np.float64) for leaf in (x, weight, *masters)]
    _, *grads = oracle.layer(*leaves[:2], expert, *leaves[2:], dy, act)
    rng = np.random.default_rng(3)
    for index, grad in enumerate(grads):
        direction = rng.standard_normal(grad.shape)
        ends = []
        for step in (1e-6, -1e-6):
            moved = list(leaves)
            moved[index] = leaves[index] + step * direction
            ends.append(np.sum(oracle.layer(*moved[:2], expert, *moved[2:], dy, act)[0] * dy))
        numeric = (ends[0] - ends[1]) / 2e-6
        assert abs(numeric - np.sum(grad * direction)) < 1e-6 * max(1.0, abs(numeric))


@pytest.mark.parametrize("backend", ["dense", "xla"])
def test_fp32_layer_and_gradients_equal_the_float64_oracle(backend):
    x, weight, *masters, dy = values = operands()
    spec = spec_of(backend=backend)
    for name, expert in routings().items():
        want = oracle.layer(x, weight, expert, *masters, dy, spec.act)
        check_leaves(call(spec, values, expert), want, 1e-6, name)


@pytest.mark.parametrize(
    "act",
    [
        ActivationConfig(name="swiglu_clamped", limit=0.7),
        ActivationConfig(name="swiglu_oai", limit=0.7),
        ActivationConfig(name="geglu"),
    ],
    ids=lambda act: act.name,
)
def test_activation_variants_equal_the_float64_oracle(act):
    x, weight, *masters, dy = values = operands()
    expert = routings()["masked tokens"]
    check_leaves(call(spec_of(act=act), values, expert), oracle.layer(x, weight, expert, *masters, dy, act), 1e-6)


@pytest.mark.parametrize("top_k", [1, E])
@pytest.mark.parametrize("tokens", [1, 67])
def test_one_expert_per_token_and_all_experts_per_token(top_k, tokens):
    x, weight, *masters, dy = values = operands(tokens, top_k=top_k)
    expert = np.argsort(np.random.default_rng(5).random((tokens, E)), axis=1)[:, :top_k]
    spec = spec_of(top_k)
    want = oracle.layer(x, weight, expert, *masters, dy, spec.act)
    check_leaves(call(spec, values, expert), want, 1e-6)


def test_bf16_layer_is_close_to_the_oracle_and_its_weight_gradients_are_fp32():
    values, spec = operands(), spec_of(recipe="bf16")
    # the oracle sees what the layer sees: tokens already rounded to BF16
    rounded = [np.asarray(jnp.asarray(leaf, jnp.bfloat16), np.float32) for leaf in (values[0], values[-1])]
    for name, expert in routings().items():
        got = call(spec, values, expert, jnp.bfloat16)
        want = oracle.layer(rounded[0], values[1], expert, *values[2:-1], rounded[1], spec.act)
        check_leaves(got, want, 2e-2, name)
        check_leaves(got, call(spec.replace(backend="dense"), values, expert, jnp.bfloat16), 2e-2, name)
        assert [str(leaf.dtype) for leaf in got] == ["bfloat16"] * 2 + ["float32"] * 5
    # "never rounded to BF16": most elements of a gradient are not BF16 numbers
    d_down = np.asarray(got[4][3])
    assert np.mean(d_down == np.asarray(jnp.asarray(d_down, jnp.bfloat16), np.float32)) < 0.1


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_experts_without_tokens_get_exactly_zero_gradients(recipe):
    expert = routings()["skewed, expert 2 empty"]
    got = call(spec_of(recipe=recipe), operands(), expert)
    for name, leaf in zip(NAMES, got):
        if name in PER_EXPERT:
            assert not np.asarray(leaf[2]).any(), name
            assert all(np.asarray(leaf[expert]).any() for expert in (0, 1, 3, 4)), name
    nobody = call(spec_of(recipe=recipe), operands(), np.full((T, 2), -1))
    assert not any(np.asarray(leaf).any() for leaf in nobody)


def test_two_runs_and_saved_or_recomputed_gate_up_give_equal_bits():
    values = operands()
    expert = routings()["masked tokens"]
    for recipe, dtype in (("fp32", jnp.float32), ("bf16", jnp.bfloat16)):
        runs = [
            call(spec_of(recipe=recipe, save=save), values, expert, dtype)
            for save in ("recompute", "recompute", "gate_up")
        ]
        for other in runs[1:]:
            for name, a, b in zip(NAMES, runs[0], other):
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), (recipe, name)


def test_an_experts_rows_have_the_same_bits_whatever_else_is_in_the_batch():
    """Alone, and among other tokens for other experts: outputs, dx, d_weight and the expert's gradients."""
    values = operands()
    chosen = np.random.default_rng(2).random(T) < 0.5
    expert = np.where(chosen[:, None], [3, -1], routings()["skewed, expert 2 empty"])
    expert[~chosen & (expert == 3).any(axis=1)] = [0, 1]
    subset = [leaf[chosen] if leaf.shape[0] == T else leaf for leaf in values]
    for recipe, dtype in (("fp32", jnp.float32), ("bf16", jnp.bfloat16)):
        among = call(spec_of(recipe=recipe), values, expert, dtype)
        alone = call(spec_of(recipe=recipe), subset, expert[chosen], dtype)
        for name, a, b in zip(NAMES, among, alone):
            a, b = (np.asarray(leaf)[3] if name in PER_EXPERT else np.asarray(leaf) for leaf in (a, b))
            a = a if name in PER_EXPERT else a[chosen]
            assert a.tobytes() == b.tobytes(), (recipe, name)


@pytest.mark.parametrize("backend", ["dense", "xla"])
def test_what_masked_tokens_hold_is_never_read(backend):
    x, weight, *masters, dy = operands()
    expert = routings()["masked tokens"]
    masked = (expert < 0).all(axis=1)
    dirty = [np.where(masked[:, None], np.nan, leaf) for leaf in (x, dy)]
    spec = spec_of(backend=backend)
    clean = call(spec, (x, weight, *masters, dy), expert)
    if backend == "dense":  # it runs masked tokens too; finite dirt must not matter
        dirty = [np.where(masked[:, None], 1e3, leaf) for leaf in (x, dy)]
    dirty_weight = np.where(masked[:, None], np.nan, weight).astype(np.float32)
    for name, a, b in zip(NAMES, call(spec, (dirty[0], dirty_weight, *masters, dirty[1]), expert), clean):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), name


@pytest.mark.parametrize("backend", ["dense", "xla"])
def test_a_batch_without_tokens_gives_no_rows_and_zero_gradients(backend):
    x, weight, *masters, dy = operands(tokens=0)
    y, *grads = call(spec_of(backend=backend), (x, weight, *masters, dy), np.zeros((0, 2)))
    assert y.shape == x.shape
    for name, grad, leaf in zip(NAMES[1:], grads, (x, weight, *masters)):
        assert grad.shape == leaf.shape and not np.any(grad), name


def test_weights_are_neither_normalised_nor_scaled():
    x, weight, *rest = operands()
    expert = routings()["skewed, expert 2 empty"]
    once, twice = (call(spec_of(), (x, factor * weight, *rest), expert)[0] for factor in (1, 2))
    np.testing.assert_array_equal(2 * np.asarray(once), np.asarray(twice))


def micro_batches(spec, count=3):
    """Stacked operands of a few micro-batches, and the masters."""
    values = operands(tokens=64 * count)
    expert = routings(64 * count)["masked tokens"]
    split = [
        jnp.asarray(leaf).reshape(count, 64, -1) for leaf in (values[0], values[1], expert.astype(np.int32), values[-1])
    ]
    dtype = jnp.float32 if spec.recipe == "fp32" else jnp.bfloat16
    x, weight, ids, dy = split
    return (x.astype(dtype), weight, ids, dy.astype(dtype)), [jnp.asarray(leaf) for leaf in values[2:-1]]


def gradients_by(form, spec, parts, masters):
    """Weight gradients over micro-batches in a scan, in one of the three forms."""
    experts = prepare_experts(*masters[:2], spec, *masters[2:])

    def layer(x, weight, ids, masters, accumulator=None):
        prepared = dataclasses.replace(masters, copies=experts.copies)
        return moe_ffn(x, weight, schedule(ids, spec), prepared, spec, accumulator=accumulator)

    def value(buffer, part):
        x, weight, ids, dy = part
        (_, _), pullback = jax.vjp(lambda buffer: layer(x, weight, ids, experts.masters(), buffer), buffer)
        return pullback((dy, buffer))[0], None

    def plain(total, part):
        x, weight, ids, dy = part
        _, pullback = jax.vjp(lambda masters: layer(x, weight, ids, masters), experts.masters())
        return jax.tree.map(jnp.add, total, pullback(dy)[0]), None

    if form == "refs":
        refs = jax.tree.map(jax.new_ref, experts.zeros())

        def into_refs(carry, part):
            x, weight, ids, dy = part
            _, pullback = jax.vjp(lambda masters: layer(x, weight, ids, masters), experts.masters())
            pullback.with_refs(refs)(dy)
            return carry, None

        jax.lax.scan(into_refs, 0, parts)
        return jax.tree.map(lambda ref: ref[...], refs)
    return jax.lax.scan({"value": value, "plain": plain}[form], experts.zeros(), parts)[0]


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_every_form_of_accumulation_gives_one_result(recipe):
    spec = spec_of(recipe=recipe)
    parts, masters = micro_batches(spec)
    by_form = {
        form: jax.jit(functools.partial(gradients_by, form, spec))(parts, masters)
        for form in ("plain", "refs", "value")
    }
    for name in ("w_gate_up_Ex2xFxD", "w_down_ExDxF", "b_gate_up_Ex2xF", "b_down_ExD"):
        plain, refs, value = (np.asarray(getattr(by_form[form], name)) for form in ("plain", "refs", "value"))
        assert plain.tobytes() == refs.tobytes(), name
        for expert in range(E):
            assert relative(value[expert], plain[expert]) < 1e-6, (name, expert)
        assert not value[2].any()


def test_copies_are_made_on_the_spot_from_plain_masters_and_carry_no_gradient():
    x, weight, *masters, dy = operands()
    spec = spec_of(recipe="bf16")
    plan = schedule(jnp.asarray(routings()["masked tokens"], jnp.int32), spec)
    x, dy = jnp.asarray(x, jnp.bfloat16), jnp.asarray(dy, jnp.bfloat16)

    @jax.jit
    def gradients(experts):
        return jax.vjp(lambda experts: moe_ffn(x, weight, plan, experts, spec), experts)[1](dy)[0]

    prepared = prepare_experts(*masters[:2], spec, *masters[2:])
    with_copies, without = gradients(prepared), gradients(ExpertWeights(*map(jnp.asarray, masters)))
    assert prepared.copies is not None and not any(
        np.asarray(leaf).any() for leaf in jax.tree.leaves(with_copies.copies)
    )
    for a, b in zip(jax.tree.leaves(with_copies.masters()), jax.tree.leaves(without)):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_program_that_allows_64_bit_types_gets_the_same_layer():
    values, expert = operands(tokens=9), routings()["masked tokens"][:9]
    want = call(spec_of(), values, expert)
    with jax.enable_x64(True):
        got = call(spec_of(), values, expert)
    for name, a, b in zip(NAMES, got, want):
        assert a.dtype == b.dtype and relative(a, b) < 1e-6, name


def test_bad_arguments_are_refused_by_name():
    x, weight, *masters, _ = (jnp.asarray(leaf) for leaf in operands())
    spec = spec_of()
    experts = prepare_experts(*masters[:2], spec, *masters[2:])
    plan = schedule(jnp.zeros((T, 2), jnp.int32), spec)
    gate_up, down, *biases = masters

    def ffn(x=x, weight=weight, **more):
        return moe_ffn(x, weight, plan, experts, spec, **more)

    refused = [
        (ValueError, r"x has shape \(150, 23\); expected \(T, D\) = \(150, 24\)", lambda: ffn(x[:, 1:])),
        (TypeError, r"x is float16", lambda: ffn(x.astype(jnp.float16))),
        (ValueError, r"weight is bfloat16", lambda: ffn(weight=weight.astype(jnp.bfloat16))),
        (ValueError, r"accumulator holds", lambda: ffn(accumulator=ExpertWeights(gate_up, down))),
        (
            TypeError,
            r"w_down_ExDxF is bfloat16",
            lambda: prepare_experts(gate_up, down.astype(jnp.bfloat16), spec, *biases),
        ),
        (
            ValueError,
            r"w_gate_up_Ex2xFxD has shape .* F = 40",
            lambda: prepare_experts(gate_up[:, :, 1:], down, spec, *biases),
        ),
        (ValueError, r"b_gate_up_Ex2xF is missing", lambda: prepare_experts(gate_up, down, spec)),
    ]
    for error, message, attempt in refused:
        with pytest.raises(error, match=message):
            attempt()


@pytest.mark.parametrize(
    ("prepared", "read", "said"),
    [
        ({"recipe": "bf16"}, {"recipe": "fp32"}, "recipe fp32 on backend xla reads none"),
        ({"recipe": "bf16"}, {"recipe": "bf16", "backend": "dense"}, "recipe bf16 on backend dense reads none"),
    ],
)
def test_copies_prepared_for_another_recipe_or_backend_are_refused(prepared, read, said):
    x, weight, w_gate_up, w_down, b_gate_up, b_down, _ = operands()
    experts = prepare_experts(w_gate_up, w_down, spec_of(**prepared), b_gate_up, b_down)
    spec = spec_of(**read)
    plan = schedule(jnp.asarray(routings()["masked tokens"], jnp.int32), spec)
    with pytest.raises(ValueError, match="experts hold copies that this layer does not read: .*bfloat16.*" + said):
        moe_ffn(x, weight, plan, experts, spec)
