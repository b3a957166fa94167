"""Cross-entropy of the next token in chunks: the logits of the whole batch never exist.

A sum has the same gradient up to a factor wherever it goes, so the pass that computes the logits of a chunk makes both
gradients from them at once, and the backward only multiplies by that factor: three products per chunk instead of the
four of computing the logits again (the head of Qwen3-30B-A3B, 16,384 tokens: 10 of 41 TFLOP). Without a gradient, as in evaluation,
there is one product.

Letters: B batch, L sequence, D model width, V vocabulary, C positions per chunk.
Chunks are cut along the sequence and hold every row of the batch, so that a batch sharded over devices stays sharded. Of a
sequence that a `context` axis splits, each piece counts as a row: a chunk holds positions of every device.
"""

from functools import partial

import jax
import jax.numpy as jnp

from moejax.ops import hand_split

UNSCORED = -1  # target of positions that do not count: padding, and the last token of a document


def cross_entropy(
    hidden_BxLxD: jax.Array, w_VxD: jax.Array, target_BxL: jax.Array, *, chunk: int = 1024
) -> tuple[jax.Array, jax.Array]:
    """Sum of -log softmax(hidden W^T)[target] over the scored positions, and their number.

    Both are sums: divide by the global count of the step, taken before the first micro-batch.

    Args:
      hidden_BxLxD: final hidden states. Their dtype is that of the operands of every product (BF16 hidden states: W is cast once
        per call); products, softmax and log-sum-exp are FP32.
      w_VxD: FP32 head. Its gradient is an FP32 sum over chunks, never rounded.
      target_BxL: int32 class of each position; -1 is not scored. Other values outside 0..V-1 give NaN.
      chunk: tokens per chunk, over the whole batch; logits of one chunk (chunk x V FP32 numbers) exist at a time.
    Returns:
      FP32 sum of the negative log-likelihood in nats, int32 number of scored positions.
    Raises:
      ValueError: shapes do not match, or chunk < 1.
    """
    if hidden_BxLxD.shape[:2] != target_BxL.shape or hidden_BxLxD.shape[2] != w_VxD.shape[1]:
        raise ValueError(
            f"hidden {hidden_BxLxD.shape}, head {w_VxD.shape}, target {target_BxL.shape}: expected (B, L, D), (V, D), (B, L)"
        )
    if chunk < 1:
        raise ValueError(f"loss_chunk is {chunk}: expected at least 1 token")
    if (pieces := _sequence_pieces(target_BxL.shape[1])) > 1:
        hidden_BxLxD, target_BxL = (
            x.reshape(-1, x.shape[1] // pieces, *x.shape[2:]) for x in (hidden_BxLxD, target_BxL)
        )
    batch, length = target_BxL.shape
    positions = min(length, max(1, chunk // batch))
    count = jnp.sum(target_BxL != UNSCORED, dtype=jnp.int32)
    return _nll_sum(hand_split.enter(hidden_BxLxD), w_VxD, target_BxL, positions), count


def _sequence_pieces(length: int) -> int:
    """Devices that a sequence is split over, under automatic axes."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(kind != jax.sharding.AxisType.Auto for kind in mesh.axis_types):
        return 1
    pieces = mesh.shape.get("context", 1)
    return pieces if length % pieces == 0 else 1


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _nll_sum(hidden_BxLxD, w_VxD, target_BxL, positions):
    w_cast_VxD = w_VxD.astype(hidden_BxLxD.dtype)

    def chunk_nll(total, hidden_BxCxD, target_BxC):
        logits_BxCxV = _logits(hidden_BxCxD, w_cast_VxD)
        nll_BxC, _ = _nll(logits_BxCxV, target_BxC)
        return total + jnp.sum(nll_BxC), nll_BxC

    with jax.named_scope("head_and_loss"):
        return _over_chunks(chunk_nll, jnp.float32(0.0), (hidden_BxLxD, target_BxL), positions)[0]


def _forward(hidden_BxLxD, w_VxD, target_BxL, positions):
    w_cast_VxD = w_VxD.astype(hidden_BxLxD.dtype)

    def chunk_grads(carry, hidden_BxCxD, target_BxC):
        total, dw_VxD = carry
        logits_BxCxV = _logits(hidden_BxCxD, w_cast_VxD)
        nll_BxC, lse_BxC = _nll(logits_BxCxV, target_BxC)
        p_BxCxV = jnp.exp(logits_BxCxV - lse_BxC[..., None])
        d_logits = jnp.where(_is_target(target_BxC, logits_BxCxV), p_BxCxV - 1.0, p_BxCxV)
        d_logits = jnp.where(_outside(target_BxC, logits_BxCxV)[..., None], jnp.nan, d_logits)
        # The factor multiplies the FP32 products, not this: the relative error of rounding p - 1 does not depend on it.
        d_logits = jnp.where((target_BxC == UNSCORED)[..., None], 0.0, d_logits).astype(hidden_BxCxD.dtype)
        dw_VxD = dw_VxD + _dot("bcv,bcd->vd", d_logits, hidden_BxCxD)
        return (total + jnp.sum(nll_BxC), dw_VxD), _dot("bcv,vd->bcd", d_logits, w_cast_VxD)

    with jax.named_scope("head_and_loss"):
        start = (jnp.float32(0.0), jnp.zeros(w_VxD.shape, jnp.float32))
        (total, dw_VxD), dh_BxLxD = _over_chunks(chunk_grads, start, (hidden_BxLxD, target_BxL), positions)
    # An empty array says what dtype dh has in the end; the products stay FP32 until they are scaled.
    return total, (dh_BxLxD, dw_VxD, jnp.zeros((0,), hidden_BxLxD.dtype))


def _backward(positions, residuals, d_total):
    dh_BxLxD, dw_VxD, like = residuals
    with jax.named_scope("head_and_loss"):
        return (dh_BxLxD * d_total).astype(like.dtype), dw_VxD * d_total, None


_nll_sum.defvjp(_forward, _backward)


def _nll(logits_BxCxV, target_BxC):
    """Negative log-likelihood of each position, 0 where it is not scored, and the log-sum-exp of its logits."""
    # A masked sum, not a gather: XLA fuses it with the pass that reads the logits for the log-sum-exp.
    correct_BxC = jnp.sum(jnp.where(_is_target(target_BxC, logits_BxCxV), logits_BxCxV, 0.0), axis=-1)
    if hand_split.pieces(hand_split.TENSOR) > 1:
        peak_BxC = jax.lax.pmax(jnp.max(logits_BxCxV, axis=-1), hand_split.TENSOR)
        sum_BxC = jnp.sum(jnp.exp(logits_BxCxV - peak_BxC[..., None]), axis=-1)
        sum_BxC, correct_BxC = jax.lax.psum((sum_BxC, correct_BxC), hand_split.TENSOR)
        lse_BxC = peak_BxC + jnp.log(sum_BxC)
    else:
        lse_BxC = jax.nn.logsumexp(logits_BxCxV, axis=-1)
    nll_BxC = jnp.where(_outside(target_BxC, logits_BxCxV), jnp.nan, lse_BxC - correct_BxC)
    return jnp.where(target_BxC == UNSCORED, 0.0, nll_BxC), lse_BxC


def _over_chunks(one_chunk, carry, arrays_BxL, positions):
    """Scans one_chunk over whole chunks of `positions`, then runs it once over the rest; joins its results along L."""
    length = arrays_BxL[0].shape[1]
    chunks, rest = divmod(length, positions)

    def step(carry, index):
        parts = [jax.lax.dynamic_slice_in_dim(x, index * positions, positions, axis=1) for x in arrays_BxL]
        return one_chunk(carry, *parts)

    joined = []
    if chunks == 1:
        carry, out = step(carry, 0)
        joined.append(out)
    elif chunks > 1:
        carry, out = jax.lax.scan(step, carry, jnp.arange(chunks, dtype=jnp.int32))
        out = jnp.moveaxis(out, 0, 1)
        joined.append(out.reshape(out.shape[0], chunks * positions, *out.shape[3:]))
    if rest:
        carry, out = one_chunk(carry, *(x[:, chunks * positions :] for x in arrays_BxL))
        joined.append(out)
    return carry, joined[0] if len(joined) == 1 else jnp.concatenate(joined, axis=1)


def _logits(hidden_BxCxD, w_VxD):
    return _dot("bcd,vd->bcv", hidden_BxCxD, w_VxD)


def _is_target(target_BxC, logits_BxCxV):
    own = jnp.arange(logits_BxCxV.shape[-1], dtype=target_BxC.dtype)
    if hand_split.pieces(hand_split.TENSOR) > 1:  # this device has the columns of its rows of the head
        own += jax.lax.axis_index(hand_split.TENSOR) * logits_BxCxV.shape[-1]
    return target_BxC[..., None] == own


def _outside(target_BxC, logits_BxCxV):
    return (target_BxC < UNSCORED) | (target_BxC >= logits_BxCxV.shape[-1] * hand_split.pieces(hand_split.TENSOR))


def _dot(equation, x, y):
    # HIGHEST: on a GPU the default for FP32 operands is TF32. It changes nothing for BF16 operands.
    return jnp.einsum(equation, x, y, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
