"""What a precision recipe does to the operands of the expert products, for backends written in JAX.

Each expert has six products: fprop and dgrad of both matrices read a weight, wgrad of both reads two row operands. A
recipe says what the weights are replaced with (`weight_copies`, once per step), how one expert's are read
(`load_weights`), and how an FP32 value becomes a row operand (`row_operand`). Products then accumulate in FP32 whatever
the operands are. Read `experts_xla.py` next, the loops that use them.

Letters: D model width, F expert width, E experts, G = 2F gate and up rows.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from moejax.ops.experts import ExpertWeights
from moejax.ops.gemms import gemm_scope
from moejax.ops.mxfp8 import MXArray, dequantize, quantize
from moejax.ops.mxfp8_matmul import ALIGNED, align
from moejax.ops.spec import MoESpec

Kind = Literal["fprop", "dgrad", "wgrad"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightOperands:
    """The weight operands of the four products that read a weight; of all experts (leading E) or of one.

    In fp32 and bf16 fprop and dgrad read the same array; in mxfp8 they are blocked along different axes.
    """

    gate_up_fprop_GxD: Any
    down_fprop_DxF: Any
    gate_up_dgrad_GxD: Any
    down_dgrad_DxF: Any


def weight_copies(masters: ExpertWeights, spec: MoESpec) -> Any:
    """`ExpertWeights.copies`: None (fp32), (gate_up, down) in BF16, or `WeightOperands` of MXArrays.

    MX copies come from the FP32 masters, once per contraction. Their gate and up rows stay apart, (E, 2, F, D): F is a
    multiple of 32, so blocks along F are the blocks along 2F.
    """
    gate_up, down = masters.w_gate_up_Ex2xFxD, masters.w_down_ExDxF
    if spec.recipe == "fp32":
        return None
    if spec.recipe == "bf16":
        return gate_up.astype(jnp.bfloat16), down.astype(jnp.bfloat16)
    return WeightOperands(
        gate_up_fprop_GxD=quantize(gate_up, -1),
        down_fprop_DxF=quantize(down, -1),
        gate_up_dgrad_GxD=quantize(gate_up, -2),
        down_dgrad_DxF=quantize(down, -2),
    )


def load_weights(experts: ExpertWeights, index: jax.Array, spec: MoESpec) -> WeightOperands:
    """Operands of expert `index`, read once for all its rows. MX operands come as their exact FP32 values."""
    if spec.recipe == "mxfp8":
        mx = take_expert(experts.copies, index, experts.layer)
        return WeightOperands(
            gate_up_fprop_GxD=_values(_flat_rows(mx.gate_up_fprop_GxD), ALIGNED, spec),
            down_fprop_DxF=_values(mx.down_fprop_DxF, ALIGNED, spec),
            gate_up_dgrad_GxD=_values(_flat_rows(mx.gate_up_dgrad_GxD), ALIGNED, spec),
            down_dgrad_DxF=_values(mx.down_dgrad_DxF, ALIGNED, spec),
        )
    pair = (experts.w_gate_up_Ex2xFxD, experts.w_down_ExDxF) if spec.recipe == "fp32" else experts.copies
    gate_up_2xFxD, down_DxF = take_expert(pair, index, experts.layer)
    gate_up_GxD = gate_up_2xFxD.reshape(-1, gate_up_2xFxD.shape[-1])
    return WeightOperands(gate_up_GxD, down_DxF, gate_up_GxD, down_DxF)


def weight_operand(master: jax.Array, axis: int, spec: MoESpec) -> jax.Array:
    """One FP32 matrix as operand of a product that contracts over `axis`, made where it is used: no copies are kept."""
    if spec.recipe == "mxfp8":
        return _values(quantize(master, axis), ALIGNED, spec)
    return master if spec.recipe == "fp32" else master.astype(jnp.bfloat16)


def row_operand(value: jax.Array, kind: Kind, axis: int, spec: MoESpec) -> jax.Array:
    """An FP32 value as operand of a product that contracts over `axis`.

    It is rounded to BF16 unless the recipe is fp32; mxfp8 quantises the BF16 value along the contraction and returns the
    exact FP32 values of the result, except in weight gradients with `wgrad: bf16`.
    """
    if spec.recipe == "fp32":
        return value
    value = value.astype(jnp.bfloat16)
    if spec.recipe == "bf16" or (kind == "wgrad" and spec.wgrad == "bf16"):
        return value
    return _values(quantize(value, axis), 1, spec)


def product(lhs: jax.Array, rhs: jax.Array, lhs_axis: int, rhs_axis: int, name: str) -> jax.Array:
    """FP32 matrix product over one axis of each side. FP32 operands are multiplied as FP32, on accelerators too.

    `name` is what profiles and `list_gemms` call it: fprop, dgrad, wgrad or recompute, a dot, gate_up or down.
    """
    precision = jax.lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else None
    with gemm_scope(name):
        return jax.lax.dot_general(
            lhs, rhs, (((lhs_axis,), (rhs_axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )


def rounded(value: jax.Array, spec: MoESpec) -> jax.Array:
    """FP32, rounded to the values of the compute dtype.

    `reduce_precision`, because XLA may drop a cast to BF16 that is followed by one back.
    """
    return value if spec.recipe == "fp32" else jax.lax.reduce_precision(value, exponent_bits=8, mantissa_bits=7)


def take_expert(tree: Any, index: jax.Array, layer: jax.Array | None) -> Any:
    """Expert `index` of every leaf; of one layer of a stack, in one step, if `layer` is given."""
    start = (index,) if layer is None else (layer, index)

    def take(leaf):
        rest = leaf.shape[len(start) :]
        block = jax.lax.dynamic_slice(leaf, start + (np.int32(0),) * len(rest), (1,) * len(start) + rest)
        return block.reshape(rest)

    return jax.tree.map(take, tree)


def put_expert(tree: Any, values: Any, index: jax.Array, layer: jax.Array | None) -> Any:
    """The inverse: every leaf with expert `index` replaced."""
    start = (index,) if layer is None else (layer, index)

    def put(leaf, value):
        block = value.reshape((1,) * len(start) + value.shape)
        return jax.lax.dynamic_update_slice(leaf, block, start + (np.int32(0),) * value.ndim)

    return jax.tree.map(put, tree, values)


def _values(mx: MXArray, rows: int, spec: MoESpec) -> jax.Array:
    """What an MX operand stands for, FP32; in `aligned` mode after re-basing its scales per `rows` by 128 elements."""
    return dequantize(align(mx, rows) if spec.mx_mode == "aligned" else mx)


def _flat_rows(mx: MXArray) -> MXArray:
    """(2, F, D) as (2F, D), scales alike."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), mx)
