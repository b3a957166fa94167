"""Attention on a mesh that splits heads (`tensor`) or the sequence (`context`): one `shard_map` around `attention.py`, or, where
a whole step is inside one already (`hand_split.py`), what runs inside it.

Heads need nothing from each other; where there are fewer key/value heads than devices, several devices use one. Of a split
sequence each device has its queries and gathers keys and values of the whole one, in both passes, so that they are never
kept; the gradients of keys and values go back as a sum, in FP32, of each device's share. Each device's queries read all
keys and mask those behind them: the device with the last queries needs nearly all of them anyway, and the others wait.

Letters: B batch, L queries here, S keys of the whole sequence, N query heads, C key/value heads, G = N / C, H head width.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax.mesh import RULES
from moejax.ops.attention import LSE_NAME, OUT_NAME, backward, forward, local_attention
from moejax.ops.hand_split import CONTEXT, TENSOR


def open_mesh() -> jax.sharding.AbstractMesh | None:
    """The mesh that splits heads or sequences, or None: nothing to split, or the caller is inside `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(kind == jax.sharding.AxisType.Manual for kind in mesh.axis_types):
        return None
    return mesh if _size(mesh, CONTEXT) * _size(mesh, TENSOR) > 1 else None


def own_head(leaf_BxLxCxH: jax.Array, heads: int) -> jax.Array:
    """Of all key/value heads the one that the query heads of this device share: (B, L, 1, H). Inside `shard_map`.

    Args:
      heads: query heads of this device.
    """
    group = heads * jax.lax.axis_size(TENSOR) // leaf_BxLxCxH.shape[2]
    return jax.lax.dynamic_slice_in_dim(leaf_BxLxCxH, jax.lax.axis_index(TENSOR) * heads // group, 1, axis=2)


def split_sequence(q_BxLxNxH, k_BxLxCxH, v_BxLxCxH, segment_BxL, block: int, implementation: str) -> jax.Array:
    """`attention.attention` of the queries of this device with the keys of the whole sequence. Inside `shard_map`.

    Raises:
      ValueError: cuDNN was asked for.
    """
    if implementation == "cudnn":
        raise ValueError(f"model.attention is cudnn and mesh axis {CONTEXT!r} splits the sequence: use xla")
    return _split_sequence(block, q_BxLxNxH, k_BxLxCxH, v_BxLxCxH, segment_BxL)


def attention(q_BxLxNxH, k_BxLxCxH, v_BxLxCxH, segment_BxL, mesh, block: int, implementation: str) -> jax.Array:
    """`attention.attention` over `mesh`; arguments as there.

    Raises:
      ValueError: `context` does not divide L, `tensor` not the heads, or cuDNN was asked for a split sequence.
    """
    (batch, length, heads, _), kv_heads = q_BxLxNxH.shape, k_BxLxCxH.shape[2]
    splits = _size(mesh, TENSOR)
    shared = splits % kv_heads == 0 and splits > kv_heads  # several devices use one key/value head
    checks = [(TENSOR, "query heads", heads), (CONTEXT, "positions", length)]
    for axis, what, size in checks + ([] if shared else [(TENSOR, "key/value heads", kv_heads)]):
        if size % _size(mesh, axis):
            raise ValueError(
                f"{size} {what} do not split over {_size(mesh, axis)} devices of mesh axis {axis!r}: use a divisor"
            )
    rows = _batch_axes(batch, mesh)
    # Axes of size 1 are named too: over one that is not, the transpose of `shard_map` would sum.
    context, tensor = (axis if axis in mesh.shape else None for axis in (CONTEXT, TENSOR))
    heads_spec, segment_spec = jax.P(rows, context, tensor), jax.P(rows, context)
    run = local_attention if _size(mesh, CONTEXT) == 1 else split_sequence
    run = functools.partial(run, block=block, implementation=implementation)
    if shared:
        run = functools.partial(_own_head, run, heads // splits)
    kv_spec = jax.P(rows, context, None if shared else tensor)
    inputs = (q_BxLxNxH, k_BxLxCxH, v_BxLxCxH, segment_BxL)
    specs = (heads_spec, kv_spec, kv_spec, segment_spec)
    if jax.sharding.AxisType.Explicit in mesh.axis_types:
        inputs = tuple(jax.reshard(leaf, spec) for leaf, spec in zip(inputs, specs, strict=True))
    return jax.shard_map(run, in_specs=specs, out_specs=heads_spec, check_vma=False)(*inputs)


def _own_head(run, heads: int, q_BxLxNxH, k_BxLxCxH, v_BxLxCxH, segment_BxL):
    """`run` with the one key/value head that the `heads` query heads of this device share, out of all of them."""
    return run(q_BxLxNxH, own_head(k_BxLxCxH, heads), own_head(v_BxLxCxH, heads), segment_BxL)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _split_sequence(block, q_BxLxNxH, k_BxLxCxH, v_BxLxCxH, segment_BxL):
    return _split_forward(block, q_BxLxNxH, k_BxLxCxH, v_BxLxCxH, segment_BxL)[0]


def _split_forward(block, q_BxLxNxH, k_BxLxCxH, v_BxLxCxH, segment_BxL):
    k_BxSxCxH, v_BxSxCxH, segment_BxS = (_whole(leaf) for leaf in (k_BxLxCxH, v_BxLxCxH, segment_BxL))
    first = _first(segment_BxL)
    out_BxLxNH, lse_BxCxGxL = forward(q_BxLxNxH, k_BxSxCxH, v_BxSxCxH, segment_BxL, segment_BxS, first, block=block)
    out_BxLxNH, lse_BxCxGxL = checkpoint_name(out_BxLxNH, OUT_NAME), checkpoint_name(lse_BxCxGxL, LSE_NAME)
    return out_BxLxNH, (q_BxLxNxH, k_BxLxCxH, v_BxLxCxH, segment_BxL, out_BxLxNH, lse_BxCxGxL)


def _split_backward(block, residuals, d_out_BxLxNH):
    q_BxLxNxH, k_BxLxCxH, v_BxLxCxH, segment_BxL, out_BxLxNH, lse_BxCxGxL = residuals
    k_BxSxCxH, v_BxSxCxH, segment_BxS = (_whole(leaf) for leaf in (k_BxLxCxH, v_BxLxCxH, segment_BxL))
    dq_BxLxNxH, dk_BxSxCxH, dv_BxSxCxH = backward(
        q_BxLxNxH, k_BxSxCxH, v_BxSxCxH, segment_BxL, out_BxLxNH, lse_BxCxGxL, d_out_BxLxNH, segment_BxS,
        _first(segment_BxL), block=block,
    )  # fmt: skip
    dk_BxLxCxH, dv_BxLxCxH = (
        jax.lax.psum_scatter(d, CONTEXT, scatter_dimension=1, tiled=True).astype(leaf.dtype)
        for d, leaf in ((dk_BxSxCxH, k_BxLxCxH), (dv_BxSxCxH, v_BxLxCxH))
    )
    return dq_BxLxNxH, dk_BxLxCxH, dv_BxLxCxH, None


_split_sequence.defvjp(_split_forward, _split_backward)


def _whole(leaf_BxLxany: jax.Array) -> jax.Array:
    return jax.lax.all_gather(leaf_BxLxany, CONTEXT, axis=1, tiled=True)


def _first(segment_BxL) -> jax.Array:
    """Position of this device's first query."""
    return jax.lax.axis_index(CONTEXT) * jnp.int32(segment_BxL.shape[1])


def _batch_axes(batch: int, mesh) -> tuple[str, ...] | None:
    """The axes that rows of a batch are split over, as many, in order, as divide this one."""
    axes: list[str] = []
    for name in RULES["batch"] or ():
        if name not in mesh.shape or batch % math.prod(mesh.shape[axis] for axis in [*axes, name]):
            break
        axes.append(name)
    return tuple(axes) or None


def _size(mesh, axis: str) -> int:
    return dict(mesh.shape).get(axis, 1)
