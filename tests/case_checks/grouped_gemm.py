"""Checks of `tests/cases/grouped_gemm.yaml`: `grouped_matmul`, and the expert layer where rows come from a schedule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import RouterConfig
from moejax.ops.grouped_matmul import grouped_matmul, grouped_wgrad
from moejax.ops.moe import moe_ffn, prepare_experts
from moejax.ops.schedule import schedule
from moejax.ops.spec import MoESpec
from tests.tracing import equations

ARITHMETIC = ("mul", "add", "sub", "div", "rem", "cumsum")
RECIPES = ("fp32", "bf16", "mxfp8")
K, N = 32, 64  # widths of rows and result; unequal, and multiples of the MXFP8 block


def padded(sizes, groups=6):
    """Sizes with empty groups behind, so that every list runs in one compiled program."""
    return jnp.asarray(sizes + [0] * (groups - len(sizes)), jnp.int32)


def both(x, w, sizes, dy, recipe):
    """y, dx and dw of `grouped_matmul`."""
    y, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, recipe), x, w)
    return y, *pullback(dy)


def zero_token_experts(case):
    expected = case["expect"]["every_element_of_dw_E"]
    rows = max(sum(sizes) for sizes in case["given"]["group_sizes"])
    x, w, dy = jnp.ones((rows, K)), jnp.ones((6, N, K)), jnp.ones((rows, N))
    for recipe in RECIPES:
        run = jax.jit(functools.partial(both, recipe=recipe))
        for sizes, dw_of_group in zip(case["given"]["group_sizes"], expected):
            for _ in range(2):
                dw = np.asarray(run(x, w, padded(sizes), dy)[2])
                assert dw.dtype == np.float32 and np.isfinite(dw).all() and not dw[len(sizes) :].any()
                for group, value in enumerate(dw_of_group):
                    np.testing.assert_array_equal(dw[group], value, err_msg=f"{sizes} {recipe} {group}")
    no_rows = grouped_wgrad(dy[:0], x[:0], padded([0]), "fp32")
    assert no_rows.shape == w.shape and not np.asarray(no_rows).any()


def slack_rows(case):
    given, expect = case["given"], case["expect"]
    sizes, rows = given["group_sizes"], given["rows"]
    used = sum(sizes)
    slack = jnp.where(jnp.arange(rows)[:, None] < used, 1.0, jnp.nan)
    x, dy = jnp.broadcast_to(slack, (rows, 4)), jnp.broadcast_to(slack, (rows, 6))
    run = jax.jit(functools.partial(both, recipe="fp32"))
    for _ in range(2):
        y, dx, dw = run(x, jnp.ones((len(sizes), 6, 4)), jnp.asarray(sizes, jnp.int32), dy)
        np.testing.assert_array_equal(np.asarray(y[:used]), expect["y_rows_0_to_4"])
        np.testing.assert_array_equal(np.asarray(dx[:used]), 6)  # F, the width of dy
        for group, value in enumerate(expect["every_element_of_dw_E"]):
            np.testing.assert_array_equal(np.asarray(dw[group]), value)
        assert all(np.isfinite(np.asarray(leaf)).all() for leaf in (y, dx, dw))
        assert not np.asarray(y[used:]).any() and not np.asarray(dx[used:]).any()


def sizes_must_fit(case):
    rows, sizes = case["given"]["rows"], case["given"]["group_sizes"]
    x, dy, w = jnp.ones((rows, 4)), jnp.ones((rows, 6)), jnp.ones((3, 6, 4))
    with pytest.raises(ValueError, match=rf"sum to {sum(sizes)}\b.*\b{rows} rows"):
        grouped_matmul(x, w, jnp.asarray(sizes, jnp.int32))
    with pytest.raises(ValueError, match=rf"sum to {sum(sizes)}\b.*\b{rows} rows"):
        grouped_wgrad(dy, x, jnp.asarray(sizes, jnp.int32))
    with pytest.raises(ValueError, match=r"-1; expected sizes >= 0"):
        grouped_matmul(x, w, jnp.asarray([5, -1, 2], jnp.int32))
    # Sizes that are only known at run time cannot raise: they poison everything. A sum that wraps int32 does not hide.
    run = jax.jit(lambda sizes: both(x, w, sizes, dy, "fp32"))
    for bad in (sizes, [5, -1, 2], [2**31 - 1, 2**31 - 1, 4]):
        assert all(np.isnan(np.asarray(leaf)).all() for leaf in run(jnp.asarray(bad, jnp.int32)))


def unaligned_groups(case):
    rng = np.random.default_rng(0)
    rows = max(sum(sizes) for sizes in case["given"]["group_sizes"])
    ramp = np.broadcast_to(np.arange(1.0, rows + 1, dtype=np.float32)[:, None], (rows, K))
    x, dy = rng.standard_normal((rows, K)).astype(np.float32), rng.standard_normal((rows, N)).astype(np.float32)
    assert set(case["given"]["recipes"]) <= set(RECIPES)
    for recipe, bound in (("fp32", 1e-5), ("bf16", 1e-2), ("mxfp8", 6e-2)):
        run = jax.jit(functools.partial(grouped_wgrad, recipe=recipe))
        for sizes, expected in zip(case["given"]["group_sizes"], case["expect"]["every_element_of_dw_E"]):
            sizes_E, ends = padded(sizes), np.cumsum(sizes)
            if recipe in case["given"]["recipes"]:
                exact = np.asarray(run(jnp.ones((rows, N)), jnp.asarray(ramp), sizes_E))
                for group, value in enumerate(expected):
                    np.testing.assert_array_equal(exact[group], value, err_msg=f"{sizes} {recipe} {group}")
            dw = np.asarray(run(jnp.asarray(dy), jnp.asarray(x), sizes_E), np.float64)
            for group, (end, size) in enumerate(zip(ends, sizes)):
                reference = dy[end - size : end].T.astype(np.float64) @ x[end - size : end]
                assert np.linalg.norm(dw[group] - reference) <= bound * np.linalg.norm(reference), (
                    sizes,
                    recipe,
                    group,
                )


def index_arithmetic(case):
    given, expect = case["given"], case["expect"]["end_offset_bytes"]
    shapes = [(rows, width, size) for (rows, width), size in zip(given["rows_and_width"], given["element_bytes"])]
    for (rows, width, size), expected in zip(shapes, expect):
        assert rows * width * size == expected
    # JAX code never forms an element offset: nothing it computes in int32 depends on a width. The same program at two widths
    # has the same integer arithmetic, literals included; only XLA, with 64 bits, turns rows into addresses.
    for backend in ("xla", "dense"):
        programs = {integer_arithmetic(rows=4096, width=width, backend=backend) for width in (2048, 7168)}
        assert len(programs) == 1
    # A T that would make the schedule's own integers wrap is refused.
    with pytest.raises(ValueError, match="int32"):
        spec = MoESpec(64, 2048, 64, router=RouterConfig(top_k=8))
        jax.eval_shape(lambda ids: schedule(ids, spec), jax.ShapeDtypeStruct((2**28, 8), jnp.int32))


def integer_arithmetic(rows, width, backend):
    """Text of all integer equations of the layer's forward and backward at this width, traced and never run."""
    spec = MoESpec(4, width, 16, router=RouterConfig(top_k=1, norm_topk=False), backend=backend)

    def layer(x, weight, ids, gate_up, down):
        plan = schedule(ids, spec)
        y, pullback = jax.vjp(
            lambda *a: moe_ffn(a[0], a[1], plan, prepare_experts(*a[2:], spec), spec), x, weight, gate_up, down
        )
        return pullback(y)

    floats = [(rows, width), (rows, 1), (4, 2, 16, width), (4, width, 16)]
    x, weight, gate_up, down = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in floats)
    ids = jax.ShapeDtypeStruct((rows, 1), jnp.int32)
    program = jax.make_jaxpr(layer)(x, weight, ids, gate_up, down)
    lines = []
    for equation in equations(program):
        if equation.outvars[0].aval.dtype == jnp.int32 and equation.primitive.name in ARITHMETIC:
            operands = [str(var.val) if hasattr(var, "val") else str(var.aval) for var in equation.invars]
            lines.append(f"{equation.primitive.name} {operands}")
    assert len(lines) > 20, "the walk has lost the program"
    return "\n".join(lines)


CHECKS = {
    "grouped-zero-token-experts": zero_token_experts,
    "grouped-slack-rows-are-not-read": slack_rows,
    "grouped-sizes-must-fit-the-rows": sizes_must_fit,
    "grouped-unaligned-groups": unaligned_groups,
    "grouped-index-arithmetic-is-64-bit": index_arithmetic,
}
