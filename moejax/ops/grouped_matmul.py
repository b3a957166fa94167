"""`grouped_matmul`: rows in tight groups, each group times its own matrix. A stand-alone operation, in plain JAX.

Groups may have any size, 0 included; they are laid out at multiples of 128 rows here, by gathers, and rows past the last group
are never read. The expert layer has its own dispatch and does not call this; the products are the same (`products.py`).

Letters: M rows, E groups, K width of the rows (contracted), N width of the result.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from moejax.ops import backends
from moejax.ops.products import product, rounded, row_operand, weight_operand
from moejax.ops.row_blocks import block_size, each_block, each_used_group, put_block, take_block
from moejax.ops.spec import TILE, MoESpec, Recipe
from moejax.ops.varying import vary_alike, zeros_like_varying


def grouped_matmul(
    x_MxK: jax.Array, w_ExNxK: jax.Array, group_sizes_E: jax.Array, recipe: Recipe = "fp32"
) -> jax.Array:
    """y[m] = w[e] x[m], where e is the group of row m.

    Differentiable in x and w; the gradient of w is FP32, exactly zero for a group without rows.

    Args:
      x_MxK: FP32 or BF16 rows; group 0 first, groups back to back. Rows past the last group are not read.
      w_ExNxK: FP32 matrices, contraction last.
      group_sizes_E: integer rows of each group; their sum is at most M.
      recipe: precision of the products; sums are FP32.
    Returns:
      y_MxN in the dtype of x, zero in rows past the last group.
    Raises:
      ValueError: a shape does not fit, K or N is not a multiple of the recipe's unit, or sizes are negative or sum to more than M.
        Sizes that are not known while tracing cannot raise: then every element of y and of every gradient is NaN.
    """
    x_MxK, w_ExNxK, group_sizes_E = jnp.asarray(x_MxK), jnp.asarray(w_ExNxK), jnp.asarray(group_sizes_E)
    _check(x_MxK, w_ExNxK, group_sizes_E, recipe)
    return _grouped_matmul(recipe, *vary_alike((x_MxK, w_ExNxK, _as_int32(group_sizes_E))))


def grouped_wgrad(dy_MxN: jax.Array, x_MxK: jax.Array, group_sizes_E: jax.Array, recipe: Recipe = "fp32") -> jax.Array:
    """The gradient of w in `grouped_matmul`: dw[e] = sum over the rows of group e, in order, of dy[m] x[m]^T.

    Args, Raises: as there; dy_MxN is FP32 or BF16.
    Returns:
      FP32 dw_ExNxK.
    """
    dy_MxN, x_MxK, group_sizes_E = jnp.asarray(dy_MxN), jnp.asarray(x_MxK), jnp.asarray(group_sizes_E)
    if dy_MxN.ndim != 2 or x_MxK.ndim != 2 or dy_MxN.shape[0] != x_MxK.shape[0]:
        raise ValueError(f"dy {dy_MxN.shape} and x {x_MxK.shape} do not fit; expected (M, N) and (M, K)")
    _check_rows({"dy": dy_MxN, "x": x_MxK}, group_sizes_E, recipe, {"K": x_MxK.shape[1], "N": dy_MxN.shape[1]})
    return _wgrad(recipe, *vary_alike((dy_MxN, x_MxK, _as_int32(group_sizes_E))))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(recipe, x_MxK, w_ExNxK, group_sizes_E):
    return _times_matrix(x_MxK, w_ExNxK, group_sizes_E, "fprop", 1, _spec(recipe, group_sizes_E))


def _backward(recipe, residuals, dy_MxN):
    x_MxK, w_ExNxK, group_sizes_E = residuals
    dx_MxK = _times_matrix(dy_MxN, w_ExNxK, group_sizes_E, "dgrad", 0, _spec(recipe, group_sizes_E)).astype(x_MxK.dtype)
    return dx_MxK, _wgrad(recipe, dy_MxN, x_MxK, group_sizes_E), None


_grouped_matmul.defvjp(lambda recipe, *operands: (_grouped_matmul(recipe, *operands), operands), _backward)


def _times_matrix(rows_MxC, w_ExNxK, group_sizes_E, kind, axis, spec):
    """Rows times their matrix, contracted over `axis` of the matrix."""
    layout = _Layout(group_sizes_E, rows_MxC.shape[0])
    padded_QxC, size = layout.pad(rows_MxC), block_size(spec.recipe, spec.mx_mode)

    def run_group(group, out_QxA):
        matrix = weight_operand(jax.lax.dynamic_index_in_dim(w_ExNxK, group, keepdims=False), axis, spec)

        def run_block(row, out_QxA):
            operand = row_operand(take_block(padded_QxC, row, size), kind, 1, spec)
            value = product(operand, matrix, 1, axis, f"{kind}.group")
            return put_block(out_QxA, rounded(value, spec), row)

        return each_block(layout.count_E[group], layout.start_E[group], size, run_block, out_QxA)

    width = w_ExNxK.shape[2 - axis]
    out_QxA = zeros_like_varying((padded_QxC.shape[0], width), rows_MxC.dtype, rows_MxC)
    return layout.poison(layout.unpad(each_used_group(layout.count_E, run_group, out_QxA)))


def _wgrad(recipe, dy_MxN, x_MxK, group_sizes_E):
    spec = _spec(recipe, group_sizes_E)
    layout = _Layout(group_sizes_E, x_MxK.shape[0])
    dy_QxN, x_QxK, size = layout.pad(dy_MxN), layout.pad(x_MxK), block_size(spec.recipe, spec.mx_mode)

    def run_group(group, dw_ExNxK):
        def run_block(row, dw_NxK):
            dy, x = (row_operand(take_block(value, row, size), "wgrad", 0, spec) for value in (dy_QxN, x_QxK))
            return dw_NxK + product(dy, x, 0, 0, "wgrad.group")

        dw_NxK = zeros_like_varying(dw_ExNxK.shape[1:], jnp.float32, x_QxK)
        dw_NxK = each_block(layout.count_E[group], layout.start_E[group], size, run_block, dw_NxK)
        return jax.lax.dynamic_update_index_in_dim(dw_ExNxK, dw_NxK, group, 0)

    shape = (group_sizes_E.shape[0], dy_MxN.shape[1], x_MxK.shape[1])
    return layout.poison(each_used_group(layout.count_E, run_group, zeros_like_varying(shape, jnp.float32, x_QxK)))


class _Layout:
    """Where tight rows lie once every group starts at a multiple of 128. Q: padded rows. Both directions are gathers."""

    def __init__(self, group_sizes_E, rows: int):
        # Sizes that do not fit are treated as empty groups, so that no loop leaves its buffer, and `poison` shows them.
        self.fits = jnp.all(group_sizes_E >= 0) & _sum_fits(group_sizes_E, rows)
        self.count_E = jnp.where(self.fits, group_sizes_E, 0)
        padded_E = (self.count_E + TILE - 1) // TILE * TILE
        self.start_E = jnp.cumsum(padded_E) - padded_E
        self.tight_end_E = jnp.cumsum(self.count_E)
        self.rows = rows
        groups = self.count_E.shape[0]
        self.padded_rows = max(TILE, -(-(rows + (TILE - 1) * min(groups, rows)) // TILE) * TILE)

    def pad(self, value_MxC):
        """(M, C) -> (Q, C), zero in padding."""
        if self.rows == 0:
            return zeros_like_varying((self.padded_rows, value_MxC.shape[1]), value_MxC.dtype, value_MxC)
        row_Q = jnp.arange(self.padded_rows, dtype=jnp.int32)
        group_Q = jnp.searchsorted(self.start_E, row_Q, side="right") - 1
        offset_Q = row_Q - self.start_E[group_Q]
        source_Q = self.tight_end_E[group_Q] - self.count_E[group_Q] + offset_Q
        used_Qx1 = (offset_Q < self.count_E[group_Q])[:, None]
        return jnp.where(used_Qx1, value_MxC[source_Q], jnp.zeros((), value_MxC.dtype))

    def unpad(self, value_QxC):
        """(Q, C) -> (M, C), zero past the last group."""
        row_M = jnp.arange(self.rows, dtype=jnp.int32)
        group_M = jnp.searchsorted(self.tight_end_E, row_M, side="right")
        used_Mx1 = (group_M < self.count_E.shape[0])[:, None]
        group_M = jnp.minimum(group_M, self.count_E.shape[0] - 1)
        source_M = self.start_E[group_M] + row_M - (self.tight_end_E[group_M] - self.count_E[group_M])
        return jnp.where(used_Mx1, value_QxC[source_M], jnp.zeros((), value_QxC.dtype))

    def poison(self, value):
        return jnp.where(self.fits, value, jnp.asarray(jnp.nan, value.dtype))


def _sum_fits(group_sizes_E, rows: int):
    """Whether the sizes sum to at most `rows`, without a sum that can wrap: each step is clipped at rows + 1."""
    clipped_E = jnp.clip(group_sizes_E, 0, rows + 1)
    add = lambda total, size: (jnp.minimum(total + size, rows + 1), None)  # noqa: E731
    start = zeros_like_varying((), clipped_E.dtype, clipped_E)
    return jax.lax.scan(add, start, clipped_E)[0] <= rows


def _as_int32(group_sizes_E: jax.Array) -> jax.Array:
    """Sizes of any integer type as int32; one that does not fit stays too large, or negative."""
    if group_sizes_E.dtype.itemsize == 8:  # only under jax_enable_x64; narrowing would wrap 2^32 + 3 to 3
        low = -1 if jnp.issubdtype(group_sizes_E.dtype, jnp.signedinteger) else 0
        group_sizes_E = jnp.clip(group_sizes_E, low, np.iinfo(np.int32).max)
    return group_sizes_E.astype(jnp.int32)


def _spec(recipe: Recipe, group_sizes_E) -> MoESpec:
    return MoESpec(num_experts=group_sizes_E.shape[0], d_model=0, expert_width=0, recipe=recipe)


def _check(x_MxK, w_ExNxK, group_sizes_E, recipe):
    if x_MxK.ndim != 2 or w_ExNxK.ndim != 3 or x_MxK.shape[1] != w_ExNxK.shape[2]:
        raise ValueError(f"x {x_MxK.shape} and w {w_ExNxK.shape} do not fit; expected (M, K) and (E, N, K)")
    if w_ExNxK.dtype != jnp.float32:
        raise TypeError(f"w is {w_ExNxK.dtype}; expected float32, the recipe makes its own operands")
    if group_sizes_E.shape != w_ExNxK.shape[:1]:
        raise ValueError(
            f"group_sizes has shape {group_sizes_E.shape}; expected ({w_ExNxK.shape[0]},), one for each matrix"
        )
    _check_rows({"x": x_MxK}, group_sizes_E, recipe, {"K": w_ExNxK.shape[2], "N": w_ExNxK.shape[1]})


def _check_rows(rows, group_sizes_E, recipe, widths):
    for name, value in rows.items():
        if value.dtype not in (jnp.float32, jnp.bfloat16):
            raise TypeError(f"{name} is {value.dtype}; expected float32 or bfloat16")
    if not jnp.issubdtype(group_sizes_E.dtype, jnp.integer):
        raise TypeError(f"group_sizes is {group_sizes_E.dtype}; expected int32")
    if group_sizes_E.ndim != 1 or group_sizes_E.size == 0:
        raise ValueError(f"group_sizes has shape {group_sizes_E.shape}; expected (E,) with one group or more")
    for letter, width in widths.items():
        backends.check_width(letter, width, recipe)
    if isinstance(group_sizes_E, jax.core.Tracer):
        return
    sizes, M = np.asarray(group_sizes_E).astype(np.int64), rows["x"].shape[0]
    if sizes.min() < 0:
        raise ValueError(f"group_sizes holds {sizes.min()}; expected sizes >= 0")
    if sizes.sum() > M:
        raise ValueError(f"group_sizes sum to {sizes.sum()}, but x has {M} rows: expected a sum of at most {M}")
