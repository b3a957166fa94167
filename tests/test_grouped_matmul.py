"""`grouped_matmul` as a stand-alone operation. Its numeric cases are in `tests/cases/grouped_gemm.yaml`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.ops.grouped_matmul import grouped_matmul, grouped_wgrad

SIZES = [3, 0, 130, 1, 64]
SLACK, K, N = 7, 40, 24  # rows past the last group; widths that differ


def operands(dtype=jnp.float32):
    """x, w, sizes, dy; what lies in the slack is NaN."""
    rng = np.random.default_rng(0)
    rows = sum(SIZES) + SLACK
    x, w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, K), (len(SIZES), N, K), (rows, N)))
    x[-SLACK:], dy[-SLACK:] = np.nan, np.nan
    return jnp.asarray(x, dtype), jnp.asarray(w), jnp.asarray(SIZES, jnp.int32), jnp.asarray(dy, dtype)


@functools.partial(jax.jit, static_argnums=0)
def result_and_gradients(recipe, x, w, sizes, dy):
    y, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, recipe), x, w)
    return y, *pullback(dy)


def check(got, x, w, dy, bound):
    """Each group of each result against float64, by relative norm; zero in the slack."""
    y, dx, dw = (np.asarray(leaf, np.float64) for leaf in got)
    x, w, dy = (np.asarray(leaf, np.float64) for leaf in (x, w, dy))
    start = 0
    for group, size in enumerate(SIZES):
        rows = slice(start, start + size)
        for name, value, want in (
            ("y", y[rows], x[rows] @ w[group].T),
            ("dx", dx[rows], dy[rows] @ w[group]),
            ("dw", dw[group], dy[rows].T @ x[rows]),
        ):
            assert np.linalg.norm(value - want) <= bound * np.linalg.norm(want), (name, group)
        start += size
    assert not y[start:].any() and not dx[start:].any()


@pytest.mark.parametrize(("recipe", "dtype", "bound"), [("fp32", jnp.float32, 1e-6), ("bf16", jnp.bfloat16, 1e-2)])
def test_equals_float64_per_group(recipe, dtype, bound):
    x, w, sizes, dy = operands(dtype)
    got = result_and_gradients(recipe, x, w, sizes, dy)
    check(got, x, w, dy, bound)
    assert [leaf.dtype for leaf in got] == [dtype, dtype, jnp.float32]


def test_a_groups_result_does_not_depend_on_the_others():
    x, w, sizes, dy = operands()
    y, dx, dw = result_and_gradients("fp32", x, w, sizes, dy)
    alone = jnp.asarray([0, 0, 130, 0, 0], jnp.int32)
    rows = slice(3, 133)
    moved = [jnp.concatenate([leaf[rows], leaf[-SLACK:], leaf[: leaf.shape[0] - 130 - SLACK]]) for leaf in (x, dy)]
    y_alone, dx_alone, dw_alone = result_and_gradients("fp32", moved[0], w, alone, moved[1])
    for a, b in ((y[rows], y_alone[:130]), (dx[rows], dx_alone[:130]), (dw[2], dw_alone[2])):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_runs_inside_shard_map_and_sums_the_weight_gradient_over_replicas():
    x, w, sizes, dy = operands()
    want = result_and_gradients("fp32", x, w, sizes, dy)[2]
    mesh = jax.make_mesh((2,), ("data",))
    with jax.set_mesh(mesh):
        twice = [jax.device_put(jnp.stack([leaf, leaf]), jax.P("data")) for leaf in (x, sizes, dy)]

        @jax.jit
        def gradient(w, x, sizes, dy):
            specs = (jax.P(), jax.P("data"), jax.P("data"))
            local = lambda w, x, sizes: grouped_matmul(x[0], w, sizes[0])[None]  # noqa: E731
            run = jax.shard_map(local, in_specs=specs, out_specs=jax.P("data"))
            return jax.vjp(lambda w: run(w, x, sizes), w)[1](dy)[0]

        got = gradient(w, *twice)
    np.testing.assert_array_equal(got, 2 * np.asarray(want))


def test_bad_operands_are_refused_by_name():
    x, w, sizes, dy = operands()
    refused = [
        (ValueError, r"x \(205, 39\) and w .* do not fit", lambda: grouped_matmul(x[:, 1:], w, sizes)),
        (TypeError, "w is bfloat16", lambda: grouped_matmul(x, w.astype(jnp.bfloat16), sizes)),
        (ValueError, r"group_sizes has shape \(4,\); expected \(5,\)", lambda: grouped_matmul(x, w, sizes[1:])),
        (TypeError, "group_sizes is float32", lambda: grouped_matmul(x, w, sizes.astype(jnp.float32))),
        (ValueError, "K is 40; recipe mxfp8 needs a multiple of 32", lambda: grouped_matmul(x, w, sizes, "mxfp8")),
        (ValueError, "N is 23; recipe bf16 needs a multiple of 8", lambda: grouped_wgrad(dy[:, 1:], x, sizes, "bf16")),
        (ValueError, r"dy \(204, 24\) and x \(205, 40\) do not fit", lambda: grouped_wgrad(dy[1:], x, sizes)),
        (ValueError, r"dy \(205, 24\) and x \(40,\) do not fit", lambda: grouped_wgrad(dy, x[0], sizes)),
        (TypeError, "dy is float16", lambda: grouped_wgrad(dy.astype(jnp.float16), x, sizes)),
        (ValueError, r"group_sizes has shape \(1, 5\)", lambda: grouped_wgrad(dy, x, sizes[None])),
        (ValueError, r"group_sizes has shape \(0,\)", lambda: grouped_matmul(x, w[:0], sizes[:0])),
    ]
    for error, message, attempt in refused:
        with pytest.raises(error, match=message):
            attempt()


@pytest.mark.parametrize("dtype", [np.int16, np.uint16, np.uint32, np.int64])
def test_sizes_of_any_integer_type_and_numpy_operands(dtype):
    """33000 rows and their sum pass the range of int16."""
    sizes = np.array([20_000, 0, 13_000], dtype)
    x, w = np.ones((33_000 + SLACK, 2), np.float32), np.arange(6, dtype=np.float32).reshape(3, 1, 2)
    for run in (grouped_matmul, jax.jit(grouped_matmul)):
        y = np.asarray(run(x, w, sizes))[:, 0]
        np.testing.assert_array_equal(y, np.repeat([1.0, 9.0, 0.0], [20_000, 13_000, SLACK]))


def test_sizes_that_do_not_fit_are_nan_everywhere_under_jit():
    x, w, _, dy = operands()
    for bad in ([-1, 0, 5, 5, 5], [200, 0, 6, 0, 0], [2**31 - 1, 2**31 - 1, 2, 0, 0]):
        for leaf in result_and_gradients("fp32", x, w, jnp.asarray(bad, jnp.int32), dy):
            assert np.isnan(leaf).all()
    huge = jnp.asarray([2**32 - 1, 0, 5, 5, 5], jnp.uint32)
    assert np.isnan(jax.jit(grouped_matmul)(x, w, huge)).all()
