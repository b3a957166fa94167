"""Loops over groups of rows, in blocks of a fixed size. Static shapes; the work follows the rows that exist.

Groups start at multiples of 128 rows and are padded to that, so a block of 64 or 128 never crosses a group. Each block is the same
small product whatever surrounds it. Nothing here is differentiated by JAX. Used by `experts_xla.py` and `grouped_matmul.py`.

Letters: M rows, P rows of a block, E groups.
"""

import jax
import jax.numpy as jnp

# Divides the 128 rows that groups are aligned to; a multiple of the 32 that MX wgrad blocks need. Measured on 2 cores:
# 16 to 128 rows are equally fast in FP32, and a smaller block computes less padding.
BLOCK = 64
ALIGNED_BLOCK = 128  # aligned MX operands of weight gradients share a scale over this many rows


def block_size(recipe: str, mx_mode: str) -> int:
    """P, from what is static."""
    return ALIGNED_BLOCK if recipe == "mxfp8" and mx_mode == "aligned" else BLOCK


def each_used_group(count_E: jax.Array, run_group, state):
    """Runs `run_group(group, state)` for the groups that have rows, in order; the others cost nothing."""
    groups = count_E.shape[0]
    used_E = jnp.sort(jnp.where(count_E > 0, jnp.arange(groups, dtype=jnp.int32), groups))
    return jax.lax.fori_loop(0, jnp.sum(count_E > 0), lambda i, state: run_group(used_E[i], state), state)


def each_block(count, first, size: int, run_block, state):
    """Runs `run_block(row, state)` for the blocks of one group of `count` rows from `first`, in row order."""
    blocks = (count + size - 1) // size
    return jax.lax.fori_loop(0, blocks, lambda i, state: run_block(first + i * size, state), state)


def take_block(value_Mxany: jax.Array, row, size: int) -> jax.Array:
    """Rows row..row+size as FP32."""
    return jax.lax.dynamic_slice_in_dim(value_Mxany, row, size).astype(jnp.float32)


def put_block(stack_Mxany: jax.Array, value_Pxany: jax.Array, row) -> jax.Array:
    """The stack with these rows replaced, rounded to its dtype."""
    return jax.lax.dynamic_update_slice_in_dim(stack_Mxany, value_Pxany.astype(stack_Mxany.dtype), row, 0)
