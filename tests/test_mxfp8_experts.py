"""Recipe mxfp8 of the expert layer: accuracy bands against FP32, and the exact numbers against a float64 MX oracle.

A result far below its band means that something ran unquantised, far above that something is broken.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import RouterConfig
from moejax.ops.activation import gated, gated_grad
from moejax.ops.experts_xla import backward, forward
from moejax.ops.moe import moe_ffn, prepare_experts
from moejax.ops.schedule import schedule
from moejax.ops.spec import MoESpec
from tests import mxfp8_oracle as oracle

E, D, F, T, K = 5, 96, 160, 300, 2
UNUSED = 3  # an expert nobody chooses
SPEC = MoESpec(num_experts=E, d_model=D, expert_width=F, router=RouterConfig(top_k=K), recipe="mxfp8", save="gate_up")


def inputs(seed=0):
    """Gaussian operands in the scale of a layer at initialisation; unequal groups, one of them empty."""
    rng = np.random.default_rng(seed)
    order = np.argsort(rng.random((T, E)) + np.array([0, 0.2, 0.3, 9, 0.6]), axis=1)[:, :K]
    values = {
        "x": rng.standard_normal((T, D)),
        "weight": rng.random((T, K)),
        "w_gate_up": rng.standard_normal((E, 2, F, D)) / D**0.5,
        "w_down": rng.standard_normal((E, D, F)) / F**0.5,
        "dy": rng.standard_normal((T, D)),
    }
    return {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}, jnp.asarray(order, jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def layer(spec, values, expert_TxK):
    plan = schedule(expert_TxK, spec)
    experts = prepare_experts(values["w_gate_up"], values["w_down"], spec)
    y, pullback = jax.vjp(lambda x, w, e: moe_ffn(x, w, plan, e, spec), values["x"], values["weight"], experts)
    dx, d_weight, d_experts = pullback(values["dy"])
    return y, dx, d_weight, d_experts.w_gate_up_Ex2xFxD, d_experts.w_down_ExDxF


def relative(got, expected):
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


def used(stack):
    return [np.asarray(stack[e]) for e in range(E) if e != UNUSED]


@pytest.mark.parametrize(
    ("changes", "dw_band"),
    [({}, (0.060, 0.077)), ({"wgrad": "bf16"}, (0.048, 0.067)), ({"mx_mode": "aligned"}, (0.060, 0.077))],
    ids=["mxfp8", "bf16 wgrad", "aligned"],
)
def test_errors_against_fp32_lie_in_the_band_of_the_format_per_expert(changes, dw_band):
    values, ids = inputs()
    exact = layer(dataclasses.replace(SPEC, recipe="fp32", backend="dense"), values, ids)
    y, dx, d_weight, d_gate_up, d_down = layer(dataclasses.replace(SPEC, **changes), values, ids)
    assert 0.058 < relative(y, exact[0]) < 0.074
    assert 0.060 < relative(dx, exact[1]) < 0.076
    assert 0.050 < relative(d_weight, exact[2]) < 0.080
    for got, expected in ((d_gate_up, exact[3]), (d_down, exact[4])):
        assert got.dtype == jnp.float32
        for one, other in zip(used(got), used(expected)):
            assert dw_band[0] < relative(one, other) < dw_band[1]
        assert not np.asarray(got[UNUSED]).any(), "an expert without tokens has a zero gradient"


def coarse(rng, shape, binades=3):
    """Signed numbers of 1 to 8 with the 8 bits of BF16: every sum over their E4M3 products is exact in FP32, in any order."""
    return (
        np.round(rng.uniform(128, 256, shape))
        / 128
        * rng.choice([-1, 1], shape)
        * 2.0 ** rng.integers(0, binades, shape)
    )


def bf16_excess(got, exact):
    """How far a BF16 result is from being the correct rounding of the exact value, in relative norm."""
    got, exact = np.asarray(got.astype(jnp.float32), np.float64), np.asarray(exact)
    half_ulp = np.ldexp(1.0, np.frexp(np.maximum(np.abs(exact), 1e-30))[1] - 9)
    return np.linalg.norm(np.maximum(np.abs(got - exact) - half_ulp, 0)) / np.linalg.norm(exact)


@pytest.mark.parametrize(("wgrad", "save"), [("recipe", "gate_up"), ("bf16", "recompute")])
def test_rows_and_weight_gradients_equal_the_exact_mx_numbers(wgrad, save):
    """Every product against float64 on independently quantised operands; only the activation is shared with the code."""
    spec = dataclasses.replace(SPEC, wgrad=wgrad, save=save)
    rng = np.random.default_rng(1)
    _, ids = inputs()
    plan = schedule(ids, spec)
    slots = np.asarray(plan.slot_M)
    rows = lambda value: np.where(slots[:, None] >= 0, value[np.maximum(slots, 0) // K], 0.0)  # noqa: E731
    x, dy = rows(coarse(rng, (T, D))), rows(coarse(rng, (T, D)))
    weight = np.where(slots >= 0, np.float32(rng.random(T * K))[slots], np.float32(0))
    w_gate_up, w_down = coarse(rng, (E, 2, F, D)) / 64, coarse(rng, (E, D, F)) / 64

    experts = prepare_experts(jnp.asarray(w_gate_up, jnp.float32), jnp.asarray(w_down, jnp.float32), spec)
    bf16 = lambda value: jnp.asarray(value, jnp.bfloat16)  # noqa: E731
    run = jax.jit(
        lambda x, dy, weight: (
            (out := forward(x, plan, experts, spec)),
            backward(x, dy, weight, out[1], plan, experts, spec),
        )
    )
    (y, saved), (dx, d_weight, d_experts) = run(bf16(x), bf16(dy), jnp.asarray(weight))
    act = jax.jit(lambda g, u: gated(g, u, spec.act))
    act_grad = jax.jit(lambda g, u, dh: gated_grad(g, u, dh, spec.act))
    quantised = oracle.round_trip
    wgrad_operand = (lambda value: quantised(value, 0)) if wgrad == "recipe" else (lambda value: value)

    for e in range(E):
        count, start = int(plan.count_E[e]), int(plan.start_E[e])
        if count == 0:
            assert e == UNUSED
            continue
        tile = slice(start, start + -(-count // 128) * 128)
        real = slice(start, start + count)
        gate_up_w, down_w = w_gate_up[e].reshape(2 * F, D), w_down[e]
        gate_up = oracle.to_bf16(quantised(x[tile]) @ quantised(gate_up_w).T)
        if save == "gate_up":
            np.testing.assert_array_equal(np.asarray(saved[real], np.float64), gate_up[:count])
        g, u = np.float32(gate_up[:, :F]), np.float32(gate_up[:, F:])
        h = oracle.to_bf16(act(g, u))
        assert bf16_excess(y[real], (quantised(h) @ quantised(down_w).T)[:count]) < 1e-6

        dh0 = np.float32(quantised(dy[tile]) @ quantised(down_w, 0))
        expected = np.sum(h * dh0, axis=1)[:count]
        assert relative(d_weight[real], expected) < 1e-6
        dh = weight[tile][:, None] * dh0
        da = oracle.to_bf16(np.concatenate(act_grad(g, u, dh), axis=1))
        assert bf16_excess(dx[real], (quantised(da) @ quantised(gate_up_w, 0))[:count]) < 1e-6

        weighted_h = oracle.to_bf16(weight[tile][:, None] * np.float32(h))
        d_down = wgrad_operand(dy[tile]).T @ wgrad_operand(weighted_h)
        d_gate_up = (wgrad_operand(da).T @ wgrad_operand(x[tile])).reshape(2, F, D)
        assert relative(d_experts.w_down_ExDxF[e], d_down) < 1e-6
        assert relative(d_experts.w_gate_up_Ex2xFxD[e], d_gate_up) < 1e-6


def test_save_and_recompute_give_equal_bits():
    values, ids = inputs(2)
    saved = layer(SPEC, values, ids)
    recomputed = layer(dataclasses.replace(SPEC, save="recompute"), values, ids)
    for one, other in zip(saved, recomputed):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_a_poisoned_token_reaches_its_own_output_and_its_experts_gradients_only():
    values, ids = inputs(3)
    values["x"] = values["x"].at[7, 11].set(jnp.inf)
    y, dx, _, d_gate_up, _ = layer(SPEC, values, ids)
    assert np.isnan(np.asarray(y[7])).all() and np.isfinite(np.delete(np.asarray(y), 7, 0)).all()
    touched = set(np.asarray(ids[7]).tolist())
    for e in range(E):
        assert np.isnan(np.asarray(d_gate_up[e])).any() == (e in touched)
    assert np.isfinite(np.delete(np.asarray(dx), 7, 0)).all() and np.isnan(np.asarray(dx[7])).any()


def channel_errors(got, expected, axis):
    """Relative error of each channel along `axis`, in norm over the others."""
    others = tuple(a for a in range(np.ndim(got)) if a != axis)
    difference = np.linalg.norm(
        np.moveaxis(np.asarray(got) - np.asarray(expected), axis, 0).reshape(got.shape[axis], -1), axis=1
    )
    return difference / np.sqrt(np.sum(np.square(np.asarray(expected, np.float64)), axis=others))


def test_tokens_and_channels_of_any_magnitude_keep_their_precision():
    """Channels spread over 24 binades: a block along the wrong axis mixes them and loses the small ones, in any product.

    On data of one magnitude both orientations decode to the same numbers, and a wrong one would pass.
    """
    exact_spec = dataclasses.replace(SPEC, recipe="fp32", backend="dense")
    spread = lambda size: jnp.asarray(2.0 ** -(np.arange(size) % 25), jnp.float32)  # noqa: E731

    values, ids = inputs(4)
    scaled = values | {name: values[name] * spread(T)[:, None] for name in ("x", "dy")}
    got, exact = layer(SPEC, scaled, ids), layer(exact_spec, scaled, ids)
    for name, one, other in zip(("y: x and h", "dx: dy and da"), got[:2], exact[:2]):
        errors = channel_errors(one, other, 0)
        assert 0.02 < errors.min() and errors.max() < 0.15, (name, errors.min(), errors.max())

    scaled = values | {
        "x": values["x"] * spread(D),
        "dy": values["dy"] * spread(D),
        "w_gate_up": values["w_gate_up"] * spread(D),
        "w_down": values["w_down"] * spread(F),
    }
    got, exact = layer(SPEC, scaled, ids), layer(exact_spec, scaled, ids)
    for name, index, axis in (
        ("dx: dgrad of w_gate_up", 1, 1),
        ("dw_gate_up, columns: wgrad of x", 3, 3),
        ("dw_gate_up, rows: dgrad of w_down, wgrad of da", 3, 2),
        ("dw_down, rows: wgrad of dy", 4, 1),
    ):
        errors = channel_errors(got[index], exact[index], axis)
        assert 0.02 < errors.min() and errors.max() < 0.15, (name, errors.min(), errors.max())

    scaled = values | {"w_gate_up": values["w_gate_up"] * spread(F)[:, None]}
    scaled["w_down"] = values["w_down"] * spread(D)[:, None]
    got, exact = layer(SPEC, scaled, ids), layer(exact_spec, scaled, ids)
    for name, index, axis in (
        ("y: fprop of w_down", 0, 1),
        ("dw_down, columns: fprop of w_gate_up, wgrad of h", 4, 2),
    ):
        errors = channel_errors(got[index], exact[index], axis)
        assert 0.02 < errors.min() and errors.max() < 0.15, (name, errors.min(), errors.max())
