"""Underflow and saturation as a run logs them: the counts, how they travel as a cotangent, and what reaches the metrics."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moejax.config import MeshConfig
from moejax.mesh import make_mesh
from moejax.ops import mxfp8_rates
from moejax.training.metrics import step_record
from moejax.training.state import abstract_state, create_state, make_skeleton
from moejax.training.step import make_step, split_batch
from tests.tiny import tiny_batch, tiny_config

D = 96


def plain_counts(x, real):
    """[nonzero, underflowed, saturated] in FP64 from the format's definition: a power of two per 32 elements, rounded up."""
    counts = np.zeros(3)
    for row in np.asarray(x, np.float64)[real >= 0]:
        for block in row.reshape(-1, 32):
            largest = np.abs(block).max()
            if not np.isfinite(largest):
                counts[0] += (np.isfinite(block) & (block != 0)).sum()
                continue
            scale = 2.0 ** max(math.ceil(math.log2(largest / 448)), -127) if largest else 1.0
            element = (block / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
            counts += [(block != 0).sum(), ((block != 0) & (element == 0)).sum(), (np.abs(element) == 448).sum()]
    return counts


def wide_rows(rows, seed):
    """BF16 rows in which each block spans many binades, so that elements underflow, and some sit at the top."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, D)) * 2.0 ** rng.integers(-24, 3, (rows, D))
    x[:, ::32] = 448 * 2.0 ** rng.integers(-9, 3, (rows, D // 32))
    x[::3, 5:9] = 0
    return jnp.asarray(x, jnp.bfloat16)


def test_counts_are_those_of_the_definition():
    x, real = wide_rows(40, 0), np.where(np.arange(40) % 5 == 2, -1, 3).astype(np.int32)
    x = x.at[2].set(jnp.nan).at[7, 40].set(jnp.inf)  # a masked row, and a block that is poisoned
    found = jax.jit(mxfp8_rates.loss_counts)(x, jnp.asarray(real))
    expected = plain_counts(x, real)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == jnp.float32 and (expected > 30).all()


def test_counts_travel_as_the_cotangent_of_the_probe_and_change_nothing_else():
    x, dy, real = wide_rows(16, 1), wide_rows(16, 2), jnp.zeros(16, jnp.int32)
    weight = jnp.linspace(0.5, 1.5, D, dtype=jnp.float32)

    def layers(weight, probes):
        def body(y, probe):
            y = (y * weight).astype(jnp.bfloat16)
            return mxfp8_rates.observe(x, y, probe, real), None

        return jax.lax.scan(jax.checkpoint(body), x, probes)[0]

    y, pullback = jax.vjp(layers, weight, mxfp8_rates.new_probe(3))
    d_weight, counts = pullback(dy)
    plain = lambda w: jax.lax.scan(lambda y, _: ((y * w).astype(jnp.bfloat16), None), x, None, length=3)[0]  # noqa: E731
    expected_y, plain_pullback = jax.vjp(plain, weight)
    np.testing.assert_array_equal(y, expected_y)
    np.testing.assert_array_equal(d_weight, plain_pullback(dy)[0])
    assert counts.shape == (3, 2, 3)
    for layer in range(3):
        np.testing.assert_array_equal(counts[layer, 0], plain_counts(x, np.zeros(16)))
    np.testing.assert_array_equal(counts[2, 1], plain_counts(dy, np.zeros(16)))
    np.testing.assert_array_equal(  # layer 1 is given what layer 2 gives back
        counts[1, 1], plain_counts((dy.astype(jnp.float32) * weight).astype(jnp.bfloat16), np.zeros(16))
    )


def metrics_of(recipe="mxfp8", mesh=None, micro_batches=1, remat="minimal", names_only=False, **moe):
    config = tiny_config(
        model={"d_model": 64, "vocab_size": 64},
        moe={"num_experts": 8, "expert_width": 64, "backend": "xla"} | moe,
        training={"micro_batches": micro_batches, "global_batch": 8, "sequence_length": 64, "remat": remat},
    )
    config = dataclasses.replace(config, recipe=recipe)
    mesh = mesh or make_mesh(MeshConfig(data=1), 8, jax.devices()[:1], axis_type=jax.sharding.AxisType.Auto)
    with jax.set_mesh(mesh):
        step = jax.jit(make_step(make_skeleton(config), config), compiler_options={"xla_backend_optimization_level": 0})
        batch = split_batch(tiny_batch(config, 3), micro_batches)
        if names_only:
            return set(jax.eval_shape(step, abstract_state(config, mesh), batch)[1])
        return jax.device_get(step(create_state(config, mesh), batch)[1])


NAMES = ["mx_saturation_dy", "mx_saturation_x", "mx_underflow_dy", "mx_underflow_x"]


def test_rates_of_a_step_do_not_depend_on_how_the_batch_is_cut():
    whole = metrics_of()
    mesh = make_mesh(MeshConfig(data=2, expert=2), 8, jax.devices()[:4], axis_type=jax.sharding.AxisType.Auto)
    for other in (metrics_of(micro_batches=2, remat="layer"), metrics_of(mesh=mesh)):
        for name in NAMES:
            assert whole[name].shape == (2,) and whole[name].dtype == np.float32
            # gradients are rounded elsewhere, so an element may fall to the other side of zero
            np.testing.assert_allclose(other[name], whole[name], rtol=0.05, atol=1e-4, err_msg=name)
    assert (whole["mx_saturation_x"] > 1e-4).all() and (whole["mx_saturation_dy"] > 1e-4).all()
    assert all((whole[name] < 0.1).all() for name in NAMES)


@pytest.mark.quick_compile
def test_only_layers_in_mxfp8_have_rates():
    assert metrics_of(names_only=True) - metrics_of("bf16", names_only=True) == set(NAMES)
    some = metrics_of(bf16_layers=(0,))
    assert some["mx_saturation_x"][0] == some["mx_saturation_dy"][0] == 0.0
    assert some["mx_saturation_x"][1] > 0 and some["mx_saturation_dy"][1] > 0


def test_records_hold_a_number_per_layer():
    metrics = {
        "tokens": 10, "loss": 1.0, "balance_loss": 0.0, "grad_norm": 1.0, "learning_rate": 0.1,
        "count_NxE": np.ones((2, 4)), "entropy_N": np.ones(2), "dropped_N": np.zeros(2), "moved_bytes_N": np.zeros(2),
        "mx_underflow_dy": np.float32([1.23456e-5, 0.0]),
    }  # fmt: skip
    record = step_record(1, metrics, 0.5, with_load=False)
    assert record["mx_underflow_dy"] == [1.235e-05, 0.0]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [40, 1000])
def test_the_gpu_counts_alike(tokens):
    x = wide_rows(tokens, 4).at[3, 33].set(jnp.inf)
    real = np.where(np.arange(tokens) % 7 == 0, -1, 1).astype(np.int32)
    assert mxfp8_rates._native(), "the compiled kernel is not used here"
    found = jax.jit(mxfp8_rates.loss_counts)(x, jnp.asarray(real))
    np.testing.assert_array_equal(found, plain_counts(x, real))
