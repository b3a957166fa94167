"""One optimizer step: its loss, its gradients however the batch is cut, its refusals and its bias rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.checkpoint import named_leaves
from moejax.ops.balance import update_select_bias
from moejax.training.state import create_state, make_skeleton
from moejax.training.step import first_bad_gradient, make_step, split_batch
from tests.tiny import VOCAB, tiny_batch, tiny_config

CLIP = 0.05
RATE = 2.0**14  # so large that the FP32 difference of parameters is the gradient to 1e-7


@functools.cache
def compiled(scope, micro_batches, clip=None):
    """A step under plain SGD, so that (params before - params after) / RATE is the (clipped) gradient."""
    config = tiny_config(
        moe__balance={"aux_scope": scope},
        optimizer={"name": "sgd", "learning_rate": RATE, "schedule": "constant", "warmup_steps": 0, "clip_norm": clip},
        training={"micro_batches": micro_batches},
    )
    skeleton = make_skeleton(config)
    # Without LLVM's optimisations it compiles twice as fast, and rounds as it always does.
    step = jax.jit(make_step(skeleton, config), compiler_options={"xla_backend_optimization_level": 0})
    return config, skeleton, step


@functools.cache
def first_state():
    return create_state(compiled("sequence", 1)[0])


def run(scope, micro_batches, clip=None, batch=None, state=None):
    """Gradient by name (FP64), the state after, and the metrics."""
    config, _, step = compiled(scope, micro_batches, clip)
    state = first_state() if state is None else state
    batch = tiny_batch(config, 3) if batch is None else batch
    after, metrics = step(state, split_batch(batch, micro_batches))
    difference = jax.tree.map(lambda a, b: (np.float64(a) - np.float64(b)) / RATE, state.params, after.params)
    return named_leaves(difference), after, jax.device_get(metrics)


def relative_errors(expected, got):
    assert all(np.linalg.norm(leaf) > 0 for leaf in expected.values()), "a leaf without gradient compares nothing"
    return {name: np.linalg.norm(got[name] - leaf) / np.linalg.norm(leaf) for name, leaf in expected.items()}


def assert_same_bits(left, right):
    for name, leaf in named_leaves(left).items():
        assert np.asarray(leaf).tobytes() == np.asarray(named_leaves(right)[name]).tobytes(), name


@pytest.mark.parametrize("scope", ["sequence", pytest.param("global", marks=pytest.mark.slow)])
def test_micro_batches_give_the_gradient_of_the_whole_batch(scope):
    """Rows are padded unequally, so a mean of means over micro-batches would be far off."""
    whole, _, whole_metrics = run(scope, 1)
    parts, _, parts_metrics = run(scope, 3)
    errors = relative_errors(whole, parts)
    assert max(errors.values()) < 1e-6, errors
    for name in ("loss", "balance_loss", "grad_norm"):
        np.testing.assert_allclose(parts_metrics[name], whole_metrics[name], rtol=1e-6)
    for name in ("tokens", "scored", "count_NxE"):
        np.testing.assert_array_equal(parts_metrics[name], whole_metrics[name])


def test_scopes_differ():
    assert max(relative_errors(run("sequence", 1)[0], run("global", 1)[0]).values()) > 1e-4


def test_loss_is_the_mean_over_scored_tokens():
    config, skeleton, _ = compiled("sequence", 1)
    batch, state = tiny_batch(config, 3), first_state()
    _, _, metrics = run("sequence", 3)
    model = skeleton.merge(state.params, state.router_bias)
    hidden, _ = model(batch["token"], batch["segment"], batch["position"])
    logits = np.asarray(hidden, np.float64) @ np.asarray(model.head_weight(), np.float64).T
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    scored = batch["target"] >= 0
    expected = -log_p[scored, batch["target"][scored]].mean()
    assert metrics["loss"] == pytest.approx(expected, rel=1e-6)
    assert metrics["scored"] == scored.sum() and metrics["tokens"] == (batch["segment"] > 0).sum()


def test_router_bias_moves_once_per_step_from_the_counts_of_all_micro_batches():
    _, after, metrics = run("sequence", 3)
    (before,), (moved,) = jax.tree.leaves(first_state().router_bias), jax.tree.leaves(after.router_bias)
    balance = compiled("sequence", 3)[0].moe.balance
    np.testing.assert_array_equal(moved, update_select_bias(before, jnp.asarray(metrics["count_NxE"]), balance))
    assert set(np.round(np.abs(np.asarray(moved - before)).ravel(), 9)) <= {0.0, np.float32(1e-3).round(9)}
    assert np.abs(moved - before).max() > 0
    tokens = int(metrics["tokens"])
    assert metrics["count_NxE"].dtype == np.int32 and (metrics["count_NxE"].sum(1) == 2 * tokens).all()


def test_clipping_scales_all_gradients_by_one_global_norm():
    free, _, metrics = run("sequence", 1)
    clipped, _, clipped_metrics = run("sequence", 1, clip=CLIP)
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in free.values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-6) and norm > CLIP
    assert clipped_metrics["grad_norm"] == pytest.approx(norm, rel=1e-6)  # reported before clipping
    errors = relative_errors({name: leaf * CLIP / norm for name, leaf in free.items()}, clipped)
    assert max(errors.values()) < 1e-6, errors


def test_non_finite_gradients_leave_the_state_as_it_was_and_are_named():
    config, _, _ = compiled("sequence", 1)
    batch = tiny_batch(config, 3)
    batch["target"][0, 0] = VOCAB + 1  # outside the vocabulary: the loss is NaN
    _, after, metrics = run("sequence", 1, batch=batch)
    assert not metrics["finite"]
    assert_same_bits(first_state(), after)
    assert first_bad_gradient(metrics, after.params) == "embedding.table"
    _, after, metrics = run("sequence", 1)
    assert metrics["finite"] and int(after.step) == 1 and first_bad_gradient(metrics, after.params) is None


def test_a_batch_without_scored_tokens_changes_no_parameter_by_nan():
    config, _, _ = compiled("sequence", 1)
    batch = {name: np.zeros_like(x) for name, x in tiny_batch(config, 3).items()}
    batch["target"] -= 1
    gradient, after, metrics = run("sequence", 1, batch=batch)
    assert metrics["finite"] and metrics["loss"] == 0 and int(after.step) == 1
    assert all((leaf == 0).all() for leaf in gradient.values())
