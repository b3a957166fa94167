"""`linear`: the dense projection of attention, MLPs and head, with FP32 master weights and FP32 weight gradients.

Casting a master to BF16 inside a loss makes autodiff round its gradient to BF16 (relative error 2.4e-3 instead of 1.6e-7); here
the cast is inside a `custom_vjp`, and the gradient never passes through it. Under explicit axes the function also
says where everything lives, so that an fsdp-sharded master works with fsdp-sharded tokens: the weight is gathered in the compute
dtype, per use, over the axes that the tokens are split over, and its gradient comes back in the master's own sharding.

Letters: I width contracted over, O width of the output.
"""

import jax
import jax.numpy as jnp

from moejax.ops.varying import vary_alike


def linear(x: jax.Array, w_OxI: jax.Array, b_O: jax.Array | None = None) -> jax.Array:
    """x W^T + b.

    Args:
      x: (..., I) in the compute dtype, FP32 or BF16; products accumulate in FP32.
      w_OxI: FP32 master; contraction last, as in Hugging Face files.
      b_O: FP32 bias, added before the one rounding of the result.
    Returns:
      (..., O) in the dtype of x. Weight and bias gradients are FP32 sums of products, never rounded to BF16.
    Raises:
      TypeError: a dtype is not as above. ValueError: the shapes do not fit.
    """
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"x is {x.dtype}; expected float32 or bfloat16")
    for name, leaf, ndim in (("w", w_OxI, 2), ("b", b_O, 1)):
        if leaf is not None and leaf.dtype != jnp.float32:
            raise TypeError(f"{name} is {leaf.dtype}; masters are float32, linear casts them itself")
        if leaf is not None and leaf.ndim != ndim:
            raise ValueError(f"{name} has shape {leaf.shape}; expected {ndim} axes: w is (O, I), b is (O,)")
    if x.ndim < 1 or x.shape[-1] != w_OxI.shape[1] or (b_O is not None and b_O.shape[0] != w_OxI.shape[0]):
        shapes = f"x {x.shape}, w {w_OxI.shape}, b {None if b_O is None else b_O.shape}"
        raise ValueError(f"{shapes} do not fit; expected x (..., I), w (O, I), b (O,) or None")
    return _linear(*vary_alike((x, w_OxI, b_O)))


@jax.custom_vjp
def _linear(x, w_OxI, b_O):
    y = _product(x, _local_weight(x, w_OxI), ((x.ndim - 1,), (1,)), _out_spec(x, w_OxI))
    return (y if b_O is None else y + _reshard(b_O, _out_spec(x, w_OxI)[-1:])).astype(x.dtype)


def _backward(residuals, dy):
    x, w_OxI, b_O = residuals
    rows = tuple(range(x.ndim - 1))
    dx = _product(dy, _local_weight(x, w_OxI), ((x.ndim - 1,), (0,)), _spec(x)).astype(x.dtype)
    dw_OxI = _product(dy, x, (rows, rows), _spec(w_OxI))
    db_O = None if b_O is None else _reshard(jnp.sum(dy.astype(jnp.float32), axis=rows), _spec(b_O))
    return dx, dw_OxI, db_O


_linear.defvjp(lambda x, w_OxI, b_O: (_linear(x, w_OxI, b_O), (x, w_OxI, b_O)), _backward)


def _product(lhs, rhs, contract, spec):
    """FP32 result; FP32 operands are multiplied as FP32 on accelerators too."""
    precision = jax.lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else None
    out_sharding = None if not _explicit(lhs) else jax.P(*spec)
    return jax.lax.dot_general(
        lhs, rhs, (contract, ((), ())),
        precision=precision, preferred_element_type=jnp.float32, out_sharding=out_sharding,
    )  # fmt: skip


def _local_weight(x, w_OxI):
    """The weight in the compute dtype, gathered over the axes of x; its contracted axis lies as x's does."""
    return _reshard(w_OxI.astype(x.dtype), (_out_spec(x, w_OxI)[-1], _spec(x)[-1]))


def _out_spec(x, w_OxI) -> tuple:
    """Rows as in x; columns over the axes of O that x does not use (tensor parallelism)."""
    used = {axis for entry in _spec(x) for axis in _names(entry)}
    kept = tuple(axis for axis in _names(_spec(w_OxI)[0]) if axis not in used)
    return (*_spec(x)[:-1], kept or None)


def _spec(leaf) -> tuple:
    spec = tuple(jax.typeof(leaf).sharding.spec)
    return spec + (None,) * (leaf.ndim - len(spec))


def _names(entry) -> tuple:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _explicit(leaf) -> bool:
    """Whether types carry a sharding: under explicit axes, not under automatic or manual ones, nor without a mesh."""
    mesh = jax.typeof(leaf).sharding.mesh
    return jax.sharding.AxisType.Explicit in mesh.axis_types


def _reshard(leaf, spec):
    return jax.reshard(leaf, jax.P(*spec)) if _explicit(leaf) else leaf
