"""Attention, RoPE and RMS norm against FP64 NumPy written independently. Sizes are uneven and not multiples of the block."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.ops.attention import _spans, attend, attention
from moejax.ops.norm import rms_norm
from moejax.ops.rope import rope_turns, rotate
from tests.hlo_checks import collectives
from tests.tracing import shapes

pytestmark = pytest.mark.quick_compile

B, L, N, C, H = 2, 45, 6, 3, 8


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def arrays(seed=0, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = [(B, L, N, H), (B, L, C, H), (B, L, C, H), (B, L, N * H)]
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def packed_segments():
    """Documents of uneven length; the second row ends in padding."""
    first = np.repeat([1, 2, 3], [1, 30, 14])
    second = np.repeat([1, 2, 0], [17, 20, 8])
    return jnp.asarray(np.stack([first, second]), jnp.int32)


def oracle(q, k, v, segment, d_out):
    """FP64 output and gradients, one query at a time, by the chain rule of softmax."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    d_out = d_out.reshape(q.shape)
    out, dq, dk, dv = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    scale = 1 / np.sqrt(q.shape[-1])
    for b in range(q.shape[0]):
        for n in range(q.shape[2]):
            c = n // (q.shape[2] // k.shape[2])
            for i in range(q.shape[1]):
                seen = [j for j in range(i + 1) if segment[b, j] == segment[b, i]]
                score = k[b, seen, c] @ q[b, i, n] * scale
                p = np.exp(score - score.max())
                p /= p.sum()
                out[b, i, n] = p @ v[b, seen, c]
                dp = v[b, seen, c] @ d_out[b, i, n]
                ds = p * (dp - p @ dp) * scale
                dq[b, i, n] = ds @ k[b, seen, c]
                dk[b, seen, c] += np.outer(ds, q[b, i, n])
                dv[b, seen, c] += np.outer(p, d_out[b, i, n])
    return out.reshape(*out.shape[:2], -1), dq, dk, dv


def with_gradients(q, k, v, segment, d_out, block):
    out, vjp = jax.vjp(lambda q, k, v: attention(q, k, v, segment, block=block, implementation="xla"), q, k, v)
    return out, *vjp(d_out)


@pytest.mark.parametrize("block", [4, 16, 64])  # spans of several blocks, spans of one with a rest, a single block
def test_attention_and_its_gradients_match_fp64_on_packed_rows(block):
    q, k, v, d_out = arrays()
    segment = packed_segments()
    got = jax.jit(with_gradients, static_argnums=5)(q, k, v, segment, d_out, block)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, oracle(q, k, v, np.asarray(segment), d_out), strict=True):
        assert relative(a, b) < 1e-6, name


def test_a_batch_at_once_on_several_devices_equals_row_by_row_on_one():
    q, k, v, d_out = arrays()
    run = jax.jit(with_gradients, static_argnums=5)
    want = run(q, k, v, packed_segments(), d_out, 16)
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        inputs = (q, k, v, packed_segments(), d_out)
        got = run(*(jax.device_put(x, jax.NamedSharding(mesh, jax.P("data"))) for x in inputs), 16)
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 1e-6


def test_bf16_attention_is_as_good_as_its_inputs():
    q, k, v, d_out = arrays(1, jnp.bfloat16)
    segment = packed_segments()
    got = jax.jit(with_gradients, static_argnums=5)(q, k, v, segment, d_out, 16)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, oracle(q, k, v, np.asarray(segment), d_out), strict=True):
        assert a.dtype == jnp.bfloat16
        assert relative(a, b) < 8e-3, name  # a few roundings of 2^-9


def test_spans_cover_every_query_once_with_few_prefixes():
    for length in (1, 7, 128, 129, 1000, 4096, 33000):
        spans = _spans(length, 128)
        covered = [start + i for start, rows, count, _ in spans for i in range(rows * count)]
        assert covered == list(range(length))
        assert len(spans) <= 9


def test_scores_of_the_whole_sequence_never_exist():
    length, block = 1024, 32
    q = jnp.zeros((1, length, 2, 8))
    gradient = jax.grad(lambda q: attention(q, q, q, jnp.ones((1, length), jnp.int32), block=block).sum())
    largest = max(math.prod(shape) for shape in shapes(jax.make_jaxpr(gradient)(q)))
    assert largest == 2 * block * length  # heads x block x keys


def test_decoding_form_equals_a_row_of_attention():
    q, k, v, _ = arrays(2)
    whole = attention(q, k, v, jnp.ones((B, L), jnp.int32), block=16, implementation="xla")
    last = attend(q[:, -2:], k, v, jnp.arange(L) <= jnp.array([[L - 2], [L - 1]]))
    assert relative(last, whole[:, -2:]) < 1e-6


def test_kv_heads_that_do_not_divide_are_refused():
    q, k, v, _ = arrays()
    with pytest.raises(ValueError, match="5 query heads with 3 key/value heads"):
        attention(q[:, :, :5], k, v, packed_segments())


def test_cudnn_is_refused_where_it_cannot_run():
    q, k, v, _ = arrays()
    with pytest.raises(ValueError, match="model.attention is cudnn, with float32 on"):
        attention(q, k, v, packed_segments(), implementation="cudnn")


def test_rope_turns_pairs_of_halves_by_position_times_frequency():
    x = np.random.default_rng(0).normal(size=(1, 3, 2, 12))
    position = np.array([[0, 5, 4000]])
    got = rotate(jnp.asarray(x, jnp.float32), rope_turns(jnp.asarray(position), 12, theta=1e4, fraction=0.5))
    want = x.copy()
    for i in range(3):  # 6 of 12 dimensions turn: pairs (0, 3), (1, 4), (2, 5)
        angle = (position[0] * 1e4 ** (-2 * i / 6))[:, None]
        a, b = x[0, :, :, i], x[0, :, :, i + 3]
        want[0, :, :, i] = a * np.cos(angle) - b * np.sin(angle)
        want[0, :, :, i + 3] = b * np.cos(angle) + a * np.sin(angle)
    assert relative(got, want) < 1e-4  # the angle 4000 itself has an FP32 spacing of 2.4e-4
    assert relative(got[:, :2], want[:, :2]) < 1e-6
    np.testing.assert_array_equal(got[..., 6:], x[..., 6:].astype(np.float32))


def test_rope_scores_depend_on_the_distance_only():
    q, k = (jax.random.normal(jax.random.key(i), (1, 1, 1, 16)) for i in range(2))
    score = [
        float(jnp.sum(rotate(q, rope_turns(jnp.array([[p + 3]]), 16)) * rotate(k, rope_turns(jnp.array([[p]]), 16))))
        for p in (0, 11, 200)
    ]
    np.testing.assert_allclose(score, score[0], rtol=2e-5)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.5])
def test_rope_fractions_that_rotate_no_whole_pairs_are_refused(fraction):
    with pytest.raises(ValueError, match="rope_fraction"):
        rope_turns(jnp.zeros((1, 1), jnp.int32), 10, fraction=fraction)


@pytest.mark.parametrize(("dtype", "limit"), [(jnp.float32, 1e-6), (jnp.bfloat16, 4e-3)])
def test_rms_norm_and_its_gradients_match_fp64(dtype, limit):
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.normal(size=(3, 5, 24)) * 4, dtype) for _ in range(2))
    scale = jnp.asarray(rng.normal(size=24), jnp.float32)
    y, vjp = jax.vjp(lambda x, scale: rms_norm(x, scale, 0.1), x, scale)
    dx, d_scale = vjp(dy)

    x64, dy64, scale64 = (np.asarray(a, np.float64) for a in (x, dy, scale))
    r = np.sqrt((x64**2).mean(-1, keepdims=True) + 0.1)
    dots = (dy64 * scale64 * x64).sum(-1, keepdims=True)
    assert relative(y, x64 / r * scale64) < limit
    assert relative(dx, dy64 * scale64 / r - x64 * dots / (24 * r**3)) < limit
    assert d_scale.dtype == jnp.float32
    assert relative(d_scale, (dy64 * x64 / r).sum((0, 1))) < 1e-6  # FP32 sum, even from BF16 inputs


@pytest.mark.gpu
def test_cudnn_attention_respects_documents():
    q, k, v, d_out = (jnp.repeat(jnp.repeat(x, 8, axis=-1), 3, axis=1)[:, :128] for x in arrays(3, jnp.bfloat16))
    segment = jnp.repeat(packed_segments(), 3, axis=1)[:, :128]

    def both(implementation):
        out, vjp = jax.vjp(lambda q, k, v: attention(q, k, v, segment, implementation=implementation), q, k, v)
        return out, *vjp(d_out)

    for a, b in zip(both("cudnn"), both("xla"), strict=True):
        assert relative(a, b) < 1e-2


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    ("sizes", "block"),
    [((1, 4, 1), 8), ((2, 1, 3), 16), ((1, 2, 3), 128), ((2, 4, 1), 4), ((1, 1, 6), 16)],
    ids=["context", "tensor", "context tensor", "data context", "two devices to a key head"],
)
def test_split_heads_and_sequences_give_the_attention_of_one_device(sizes, block, kind):
    """The split falls inside documents and inside blocks; oracle in FP64."""
    q, k, v, d_out = arrays()
    segment = packed_segments()
    q, k, v, d_out, segment = (x[:, : x.shape[1] // 4 * 4] for x in (q, k, v, d_out, segment))
    kinds, devices = (jax.sharding.AxisType[kind],) * 3, jax.devices()[: math.prod(sizes)]
    mesh = jax.make_mesh(sizes, ("data", "context", "tensor"), axis_types=kinds, devices=devices)
    with jax.set_mesh(mesh):
        heads = jax.P("data", "context", "tensor")
        kv = heads if C % sizes[2] == 0 else jax.P("data", "context")
        inputs = [jax.device_put(x, place) for x, place in ((q, heads), (k, kv), (v, kv))] + [
            jax.device_put(segment, jax.P("data", "context"))
        ]
        compiled = (
            jax.jit(with_gradients, static_argnums=5).lower(*inputs, jax.device_put(d_out, heads), block).compile()
        )
        got = compiled(*inputs, jax.device_put(d_out, heads))
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, oracle(q, k, v, np.asarray(segment), d_out), strict=True):
        assert relative(a, b) < 1e-6, name
    found = [one for one in collectives(compiled.as_text(), mesh) if one.axes]
    # queries, outputs and heads stay where they are; keys and values are gathered along the sequence, once per pass
    assert all(one.axes == {"context"} for one in found) or sizes[2] > C, found
    if sizes[1] > 1:
        assert {one.kind for one in found} == {"all-gather", "reduce-scatter"}


def test_splits_that_do_not_fit_are_refused():
    q, k, v, _ = arrays()
    segment = packed_segments()
    length = q.shape[1] - q.shape[1] % 4
    q, k, v, segment = (x[:, :length] for x in (q, k, v, segment))
    with jax.set_mesh(jax.make_mesh((8,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))):
        with pytest.raises(ValueError, match="query heads do not split over 8 devices of mesh axis 'tensor'"):
            attention(q, k, v, segment)
    with jax.set_mesh(jax.make_mesh((4, 2), ("context", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        with pytest.raises(ValueError, match="is cudnn and mesh axis 'context' splits the sequence: use xla"):
            attention(q, k, v, segment, implementation="cudnn")
