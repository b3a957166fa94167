"""Chunked cross-entropy against an FP64 oracle."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.ops.loss import cross_entropy
from tests.tracing import shapes

pytestmark = pytest.mark.quick_compile

B, L, D, V = 3, 11, 16, 37


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def inputs(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(B, L, D)), dtype)
    w = jnp.asarray(rng.normal(size=(V, D)), jnp.float32)
    target = rng.integers(0, V, size=(B, L))
    target[0, :4] = target[2, -1] = target[1, 5] = -1
    return hidden, w, jnp.asarray(target, jnp.int32)


def oracle(hidden, w, target):
    hidden, w, target = np.asarray(hidden, np.float64), np.asarray(w, np.float64), np.asarray(target)
    logits = hidden @ w.T
    logits -= logits.max(-1, keepdims=True)
    p = np.exp(logits)
    p /= p.sum(-1, keepdims=True)
    scored = target >= 0
    nll = -np.log(np.take_along_axis(p, np.maximum(target, 0)[..., None], -1))[..., 0]
    d_logits = (p - np.eye(V)[np.maximum(target, 0)]) * scored[..., None]
    return (nll * scored).sum(), scored.sum(), d_logits @ w, np.einsum("blv,bld->vd", d_logits, hidden)


def loss_and_gradients(hidden, w, target, chunk):
    def mean(hidden, w):
        total, count = cross_entropy(hidden, w, target, chunk=chunk)
        return total / count, (total, count)

    (_, (total, count)), (dh, dw) = jax.value_and_grad(mean, argnums=(0, 1), has_aux=True)(hidden, w)
    return total, count, dh, dw


# One chunk of all; chunks of 3 positions with a rest of 2; chunks of 1; chunks smaller than the batch.
@pytest.mark.parametrize("chunk", [1000, 10, 3, 1])
def test_loss_and_gradients_match_fp64_for_every_chunking(chunk):
    hidden, w, target = inputs()
    total, count, dh, dw = jax.jit(loss_and_gradients, static_argnums=3)(hidden, w, target, chunk)
    want_total, want_count, want_dh, want_dw = oracle(hidden, w, target)
    assert count == want_count and count.dtype == jnp.int32
    assert relative(total, want_total) < 1e-6
    assert relative(dh, want_dh / want_count) < 1e-6
    assert relative(dw, want_dw / want_count) < 1e-6
    assert not np.asarray(dh)[np.asarray(target) == -1].any()


def test_bf16_operands_give_an_fp32_head_gradient():
    hidden, w, target = inputs(jnp.bfloat16)
    total, count, dh, dw = jax.jit(loss_and_gradients, static_argnums=3)(hidden, w, target, 10)
    want_total, want_count, want_dh, want_dw = oracle(hidden, w.astype(jnp.bfloat16), target)
    assert dw.dtype == jnp.float32 and dh.dtype == jnp.bfloat16
    assert relative(total, want_total) < 1e-5  # FP32 softmax of exact products
    assert relative(dh, want_dh / want_count) < 6e-3
    assert relative(dw, want_dw / want_count) < 4e-3  # p - 1 is rounded once to BF16
    rounded = dw.astype(jnp.bfloat16).astype(jnp.float32)
    assert float(jnp.mean(dw != rounded)) > 0.9  # the sum itself was not


def test_logits_of_the_batch_never_exist():
    hidden, w, target = inputs()
    jaxpr = jax.make_jaxpr(lambda h, w: loss_and_gradients(h, w, target, 3))(hidden, w)
    assert (
        max(math.prod(shape) for shape in shapes(jaxpr) if V in shape) == V * D
    )  # the head; a chunk of logits is smaller


def test_a_target_outside_the_vocabulary_is_not_passed_over():
    hidden, w, target = inputs()
    for bad in (V, -2):
        total, _ = cross_entropy(hidden, w, target.at[1, 1].set(bad), chunk=10)
        assert np.isnan(total)


def test_nothing_scored_gives_zero_and_zero_gradients():
    hidden, w, target = inputs()
    value, (dh, dw) = jax.value_and_grad(lambda h, w: cross_entropy(h, w, target * 0 - 1)[0], argnums=(0, 1))(hidden, w)
    assert value == 0 and not dh.any() and not dw.any()


@pytest.mark.parametrize(
    ("change", "message"), [({"chunk": 0}, "loss_chunk is 0"), ({"target": (B, L + 1)}, "expected")]
)
def test_bad_arguments_are_named(change, message):
    hidden, w, target = inputs()
    target = jnp.zeros(change.pop("target"), jnp.int32) if "target" in change else target
    with pytest.raises(ValueError, match=message):
        cross_entropy(hidden, w, target, **change)
