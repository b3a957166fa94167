"""Sequences over `context` and heads over `tensor`, split by hand: for models that run inside the one `shard_map` of a step.

A training step on a mesh computes on each device what that device has, and sums gradients once, at its end
(`training/gradients.py`). Where such a step also splits sequences or heads, the operations that look beyond their device do so
through this file, and only while `splitting` is active:

  attention   keys and values of the whole sequence (`attention_split.py`); its own heads
  embedding   its own rows of the table; head and loss: its own columns of the logits
  experts     the tokens of a device are shared out over `tensor`, which has no part of them otherwise
  balance     counts of a row of the batch, over the pieces of that row

Everything else is the same on all devices of `tensor`. So a value that each of them makes a part of is summed by `leave`, and one
that each of them reads for its part is marked by `enter`, where the parts of its cotangent are summed. (Transposes of plain
sums would sum once more: each device differentiates its own copy of the loss.)
Source of the two: Megatron-LM, arXiv 1909.08053, section 3.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

CONTEXT, TENSOR = "context", "tensor"
_pieces: contextvars.ContextVar[dict[str, int] | None] = contextvars.ContextVar("hand_split", default=None)


@contextlib.contextmanager
def splitting(mesh: jax.sharding.AbstractMesh) -> Iterator[None]:
    """While what is traced in the block runs inside a `shard_map` over all axes of `mesh`, with pieces of sequences and heads."""
    token = _pieces.set({axis: mesh.shape.get(axis, 1) for axis in (CONTEXT, TENSOR)})
    try:
        yield
    finally:
        _pieces.reset(token)


def pieces(axis: str) -> int:
    """Devices that split sequences (`context`) or heads (`tensor`) by hand here; 1: nobody does."""
    return (_pieces.get() or {}).get(axis, 1)


def enter(x: jax.Array) -> jax.Array:
    """x, of which every device of `tensor` reads all for its part: the cotangent is the sum of theirs."""
    return _enter(x) if pieces(TENSOR) > 1 else x


def leave(x: jax.Array) -> jax.Array:
    """The sum of the parts that the devices of `tensor` have made."""
    return _leave(x) if pieces(TENSOR) > 1 else x


def of_row(count_Bxany: jax.Array) -> jax.Array:
    """Integer counts of rows of the batch, from those of the pieces of a row that the devices of `context` have."""
    return jax.lax.psum(count_Bxany, CONTEXT) if pieces(CONTEXT) > 1 else count_Bxany


def share(x_Txany: jax.Array, fill) -> jax.Array:
    """This device's part of tokens that all devices of `tensor` have, filled up to equal parts: (T, …) -> (T / n, …)."""
    missing = -x_Txany.shape[0] % pieces(TENSOR)
    if missing:
        x_Txany = jnp.pad(x_Txany, [(0, missing)] + [(0, 0)] * (x_Txany.ndim - 1), constant_values=fill)
    return _share(x_Txany) if jnp.issubdtype(x_Txany.dtype, jnp.floating) else _part(x_Txany)


def collect(x_Txany: jax.Array, tokens: int) -> jax.Array:
    """The inverse of `share`: all parts, without what was filled up."""
    return _collect(x_Txany)[:tokens]


@jax.custom_vjp
def _enter(x):
    return x


_enter.defvjp(lambda x: (x, None), lambda _, dx: (jax.lax.psum(dx, TENSOR),))


@jax.custom_vjp
def _leave(x):
    return jax.lax.psum(x, TENSOR)


_leave.defvjp(lambda x: (jax.lax.psum(x, TENSOR), None), lambda _, dx: (dx,))


def _part(x_Txany):
    size = x_Txany.shape[0] // jax.lax.axis_size(TENSOR)
    return jax.lax.dynamic_slice_in_dim(x_Txany, jax.lax.axis_index(TENSOR) * size, size)


_gather = functools.partial(jax.lax.all_gather, axis_name=TENSOR, axis=0, tiled=True)


@jax.custom_vjp
def _share(x_Txany):
    return _part(x_Txany)


_share.defvjp(lambda x: (_part(x), None), lambda _, dx: (_gather(dx),))


@jax.custom_vjp
def _collect(x_Txany):
    return _gather(x_Txany)


_collect.defvjp(lambda x: (_gather(x), None), lambda _, dx: (_part(dx),))
