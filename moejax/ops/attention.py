"""Causal grouped-query attention over packed documents.

Letters: B batch, L queries, S keys, N query heads, C key/value heads, G = N / C, H head width.
Query i of a row sees key j if j <= i and both are of the same segment. Softmax and its statistics are FP32.

On a mesh with a `tensor` axis each device has its own heads; with a `context` axis its own queries, and keys and values of
the whole sequence for the time of the call, gathered again in the backward (`attention_split.py`).

Memory is bounded: scores exist for one block of queries at a time, forward and backward, and the keys of a block end where
causality ends. The residuals are q, k, v, the output and one FP32 log-sum-exp per query and head.
Source of the backward: FlashAttention-2, arXiv 2307.08691, section 3.1.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax.ops import hand_split

OUT_NAME, LSE_NAME = (
    "attention_out",
    "attention_lse",
)  # residuals that a remat policy may keep; with both, nothing runs twice
MASKED = -1.0e30  # finite: exp(MASKED - lse) is exactly 0, and a row is never all masked because a query sees itself
MAX_PREFIXES = 8  # static key lengths per call; more saves little (1/16 of the products) and costs compile time


def attention(
    q_BxLxNxH: jax.Array,
    k_BxLxCxH: jax.Array,
    v_BxLxCxH: jax.Array,
    segment_BxL: jax.Array,
    *,
    block: int = 128,
    implementation: Literal["xla", "cudnn"] = "xla",
) -> jax.Array:
    """Self-attention inside each document, with scale 1 / sqrt(H).

    Args:
      q_BxLxNxH, k_BxLxCxH, v_BxLxCxH: queries, keys, values, rotated already; C divides N, head n reads kv head n // G.
      segment_BxL: int32 document numbers; padding (0) sees padding only.
      block: queries per block of scores ("xla" only).
      implementation: "xla" is the blocked form below, on every platform, with the same bits every time. "cudnn" is
        NVIDIA's fused kernel through `jax.nn.dot_product_attention`, for 16-bit inputs on a GPU. Its backward adds with atomics:
        gradients of two equal calls differ in their last bits. On an H200, forward and backward took 8.7 ms against 18.2 ms
        (batch 4, 4096 positions, 32 heads of 128, 4 key/value heads, BF16, packed documents; jax 0.11.2).
    Returns:
      out_BxLxNH in the dtype of q, heads joined as the output projection reads them.
    Raises:
      ValueError: the number of key/value heads does not divide the number of query heads, a mesh axis does not divide what it
        splits, or "cudnn" can't run the inputs.
    """
    heads, kv_heads = q_BxLxNxH.shape[2], k_BxLxCxH.shape[2]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads with {kv_heads} key/value heads: the second must divide the first")
    from moejax.ops import attention_split  # late: it imports this file

    if hand_split.pieces(hand_split.CONTEXT) > 1:
        return attention_split.split_sequence(q_BxLxNxH, k_BxLxCxH, v_BxLxCxH, segment_BxL, block, implementation)
    if (mesh := attention_split.open_mesh()) is not None:
        return attention_split.attention(q_BxLxNxH, k_BxLxCxH, v_BxLxCxH, segment_BxL, mesh, block, implementation)
    return local_attention(q_BxLxNxH, k_BxLxCxH, v_BxLxCxH, segment_BxL, block, implementation)


def local_attention(q_BxLxNxH, k_BxLxCxH, v_BxLxCxH, segment_BxL, block: int, implementation: str) -> jax.Array:
    """`attention` of the heads and sequences that are here, whole; arguments as there."""
    if implementation == "cudnn":
        if q_BxLxNxH.dtype not in (jnp.bfloat16, jnp.float16) or jax.default_backend() != "gpu":
            raise ValueError(
                f"model.attention is cudnn, with {q_BxLxNxH.dtype} on {jax.default_backend()}: it needs recipe bf16 or mxfp8 and a "
                "GPU; use xla"
            )
        same_BxLxL = segment_BxL[:, :, None] == segment_BxL[:, None, :]
        out_BxLxNxH = jax.nn.dot_product_attention(
            q_BxLxNxH, k_BxLxCxH, v_BxLxCxH, mask=same_BxLxL[:, None], is_causal=True, implementation="cudnn"
        )
        return out_BxLxNxH.reshape(*out_BxLxNxH.shape[:2], -1)
    return _blocked(q_BxLxNxH, k_BxLxCxH, v_BxLxCxH, segment_BxL, block)


def attend(q_BxLxNxH: jax.Array, k_BxSxCxH: jax.Array, v_BxSxCxH: jax.Array, seen_LxS: jax.Array) -> jax.Array:
    """Attention of a few queries to a cache of keys, for decoding: `seen_LxS` says which keys a query sees. Returns (B, L, N H)."""
    batch, length, heads, head_dim = q_BxLxNxH.shape
    q = q_BxLxNxH.reshape(batch, length, k_BxSxCxH.shape[2], -1, head_dim)
    score = jnp.einsum("blcgh,bsch->bcgls", q, k_BxSxCxH, preferred_element_type=jnp.float32) * head_dim**-0.5
    p = jax.nn.softmax(jnp.where(seen_LxS, score, MASKED), axis=-1).astype(v_BxSxCxH.dtype)
    out = jnp.einsum("bcgls,bsch->blcgh", p, v_BxSxCxH, preferred_element_type=jnp.float32)
    return out.reshape(batch, length, -1).astype(q_BxLxNxH.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blocked(q_BxLxNxH, k_BxLxCxH, v_BxLxCxH, segment_BxL, block):
    return _blocked_forward(q_BxLxNxH, k_BxLxCxH, v_BxLxCxH, segment_BxL, block)[0]


def _blocked_forward(q_BxLxNxH, k_BxLxCxH, v_BxLxCxH, segment_BxL, block):
    inputs = (q_BxLxNxH, k_BxLxCxH, v_BxLxCxH, segment_BxL)
    # Kept as the caller gets it, so that this residual and the input of the output projection are one array.
    out_BxLxNH, lse_BxCxGxL = _by_rows(partial(forward, block=block), *inputs)
    out_BxLxNH, lse_BxCxGxL = checkpoint_name(out_BxLxNH, OUT_NAME), checkpoint_name(lse_BxCxGxL, LSE_NAME)
    return out_BxLxNH, (*inputs, out_BxLxNH, lse_BxCxGxL)


def _blocked_backward(block, residuals, d_out_BxLxNH):
    k_BxLxCxH, v_BxLxCxH = residuals[1:3]
    dq, dk, dv = _by_rows(partial(backward, block=block), *residuals, d_out_BxLxNH)
    return dq, dk.astype(k_BxLxCxH.dtype), dv.astype(v_BxLxCxH.dtype), None


_blocked.defvjp(_blocked_forward, _blocked_backward)


def _by_rows(function, *arrays):
    """function(*arrays), on one device with a CPU one row of the batch at a time.

    The scores of a row fit its cache; those of a batch do not, and every pass over them waits for memory (forward and
    backward took twice as long: batch 16, 256 positions, 6 heads of 32). Over several devices a loop would run the batch in turn.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if jax.default_backend() != "cpu" or arrays[0].shape[0] == 1 or not (mesh.empty or mesh.size == 1):
        return function(*arrays)

    def one_row(row):
        return [out[0] for out in function(*(x[None] for x in row))]

    return jax.lax.map(one_row, arrays)


def forward(q_BxLxNxH, k_BxSxCxH, v_BxSxCxH, segment_BxL, segment_BxS=None, first=None, *, block):
    """Output (B, L, N H) of the queries of L positions, over the keys of S, and log-sum-exp (B, C, G, L).

    Args:
      segment_BxS: documents of the keys. None: keys and queries are of the same positions.
      first: position of the first query among the keys, where they are not.
    """
    q_BxCxGxLxH, k_BxCxSxH, v_BxCxSxH = _heads_first(q_BxLxNxH, k_BxSxCxH, v_BxSxCxH)
    segments = segment_BxL, segment_BxL if segment_BxS is None else segment_BxS

    def one_block(start, rows, keys):
        q = jax.lax.dynamic_slice_in_dim(q_BxCxGxLxH, start, rows, axis=3)
        score = _scores(q, k_BxCxSxH[:, :, :keys], *segments, start, first)
        top = jnp.max(score, axis=-1, keepdims=True)
        p = jnp.exp(score - top)
        total = jnp.sum(p, axis=-1, keepdims=True)
        out = _dot("bcgls,bcsh->bcglh", p.astype(q.dtype), v_BxCxSxH[:, :, :keys]) / total
        return out.astype(q.dtype), (top + jnp.log(total))[..., 0]

    outs = [_over_blocks(one_block, *span) for span in _spans(q_BxLxNxH.shape[1], block, _keys(k_BxSxCxH, first))]
    out_BxCxGxLxH, lse_BxCxGxL = (jnp.concatenate(parts, axis=3) for parts in zip(*outs, strict=True))
    return _heads_last(out_BxCxGxLxH), lse_BxCxGxL


def backward(
    q_BxLxNxH,
    k_BxSxCxH,
    v_BxSxCxH,
    segment_BxL,
    out_BxLxNH,
    lse_BxCxGxL,
    d_out_BxLxNH,
    segment_BxS=None,
    first=None,
    *,
    block,
):
    """dq in the dtype of q; dk and dv in FP32, over all keys, of these queries alone. Arguments as in `forward`."""
    q_BxCxGxLxH, k_BxCxSxH, v_BxCxSxH = _heads_first(q_BxLxNxH, k_BxSxCxH, v_BxSxCxH)
    batch, length, _, head_dim = q_BxLxNxH.shape
    segments = segment_BxL, segment_BxL if segment_BxS is None else segment_BxS
    d_out_BxCxGxLxH, out_BxCxGxLxH = (
        x.reshape(batch, length, *q_BxCxGxLxH.shape[1:3], head_dim).transpose(0, 2, 3, 1, 4)
        for x in (d_out_BxLxNH, out_BxLxNH)
    )
    delta_BxCxGxL = jnp.sum(d_out_BxCxGxLxH.astype(jnp.float32) * out_BxCxGxLxH.astype(jnp.float32), axis=-1)
    dtype = q_BxLxNxH.dtype

    def one_block(start, rows, keys):
        q, d_out, lse, delta = (
            jax.lax.dynamic_slice_in_dim(x, start, rows, axis=3)
            for x in (q_BxCxGxLxH, d_out_BxCxGxLxH, lse_BxCxGxL, delta_BxCxGxL)
        )
        k, v = k_BxCxSxH[:, :, :keys], v_BxCxSxH[:, :, :keys]
        p = jnp.exp(_scores(q, k, *segments, start, first) - lse[..., None])
        dv = _dot("bcgls,bcglh->bcsh", p.astype(dtype), d_out)
        dp = _dot("bcglh,bcsh->bcgls", d_out, v)
        ds = (p * (dp - delta[..., None]) * head_dim**-0.5).astype(dtype)
        return _dot("bcgls,bcsh->bcglh", ds, k).astype(dtype), _dot("bcgls,bcglh->bcsh", ds, q), dv

    dq: list[jax.Array] = []
    dk: Any = 0.0
    dv: Any = 0.0
    for start, rows, count, keys in _spans(length, block, _keys(k_BxSxCxH, first)):
        dq_part, dk_part, dv_part = _over_blocks(one_block, start, rows, count, keys, summed=(1, 2))
        dq.append(dq_part)
        grow = [(0, 0), (0, 0), (0, k_BxSxCxH.shape[1] - keys), (0, 0)]
        dk, dv = dk + jnp.pad(dk_part, grow), dv + jnp.pad(dv_part, grow)
    dq_BxLxNxH = _heads_last(jnp.concatenate(dq, axis=3)).reshape(q_BxLxNxH.shape)
    return dq_BxLxNxH, dk.transpose(0, 2, 1, 3), dv.transpose(0, 2, 1, 3)


def _keys(k_BxSxCxH, first) -> int | None:
    """The keys a block reads where that can't follow from its place: all."""
    return None if first is None else k_BxSxCxH.shape[1]


def _spans(length: int, block: int, keys: int | None = None) -> list[tuple[int, int, int, int]]:
    """Cuts the queries into at most MAX_PREFIXES + 1 spans (start, rows per block, blocks, keys) with one static key prefix each.

    Args:
      keys: if given, all spans read so many; else as far as causality needs.
    """
    blocks, rest = divmod(length, block)
    per_span = max(1, -(-blocks // MAX_PREFIXES))
    spans = [(i * block, block, min(per_span, blocks - i)) for i in range(0, blocks, per_span)]
    spans += [(blocks * block, rest, 1)] if rest else []
    return [(start, rows, count, keys or start + rows * count) for start, rows, count in spans]


def _over_blocks(one_block, start, rows, count, keys, summed=()):
    """Runs one_block over the blocks of a span and joins the results along the query axis (3), or sums those named."""
    if count == 1:
        return one_block(start, rows, keys)
    shapes = jax.eval_shape(lambda: one_block(start, rows, keys))
    zeros = [jnp.zeros(shapes[i].shape, shapes[i].dtype) for i in summed]

    def step(totals, index):
        parts = one_block(start + index * rows, rows, keys)
        totals = [total + parts[i] for total, i in zip(totals, summed, strict=True)]
        return totals, [part for i, part in enumerate(parts) if i not in summed]

    totals, joined = jax.lax.scan(step, zeros, jnp.arange(count, dtype=jnp.int32))
    whole = iter([jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], -1, *x.shape[5:]) for x in joined])
    total = iter(totals)
    return tuple(next(total) if i in summed else next(whole) for i in range(len(shapes)))


def _scores(q_BxCxGxLxH, k_BxCxSxH, segment_BxL, segment_BxS, start, first):
    rows, keys = q_BxCxGxLxH.shape[3], k_BxCxSxH.shape[2]
    row_segment = jax.lax.dynamic_slice_in_dim(segment_BxL, start, rows, axis=1)
    position_L = start + jnp.arange(rows) if first is None else first + start + jnp.arange(rows)
    before = jnp.arange(keys) <= position_L[:, None]
    seen_BxLxS = before & (row_segment[:, :, None] == segment_BxS[:, None, :keys])
    score = _dot("bcglh,bcsh->bcgls", q_BxCxGxLxH, k_BxCxSxH) * q_BxCxGxLxH.shape[-1] ** -0.5
    return jnp.where(seen_BxLxS[:, None, None], score, MASKED)


def _dot(equation, x, y):
    # HIGHEST: on a GPU the default for FP32 operands is TF32. It changes nothing for BF16 operands.
    return jnp.einsum(equation, x, y, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _heads_first(q_BxLxNxH, k_BxLxCxH, v_BxLxCxH):
    batch, length, _, head_dim = q_BxLxNxH.shape
    q = q_BxLxNxH.reshape(batch, length, k_BxLxCxH.shape[2], -1, head_dim).transpose(0, 2, 3, 1, 4)
    return q, k_BxLxCxH.transpose(0, 2, 1, 3), v_BxLxCxH.transpose(0, 2, 1, 3)


def _heads_last(x_BxCxGxLxH):
    batch, kv_heads, group, length, head_dim = x_BxCxGxLxH.shape
    return x_BxCxGxLxH.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * group * head_dim)
