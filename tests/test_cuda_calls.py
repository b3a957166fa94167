"""FFI calls of the CUDA layer as they are lowered for a GPU, without one: shapes, operands and aliases, with biases and without."""

import re

import jax
import jax.numpy as jnp
import pytest

from moejax import native
from moejax.config import ActivationConfig
from moejax.native import cuda_calls
from moejax.native.calls import Operands, Rows

pytestmark = pytest.mark.skipif(native.missing("_cuda") is not None, reason="moejax.native._cuda is not built here")

T, K, E, M, D, F = 24, 2, 5, 256, 72, 40
BF16, F32, S32 = jnp.bfloat16, jnp.float32, jnp.int32
ACT = ActivationConfig("swiglu")


def abstract(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def inputs(biased: bool) -> dict:
    weights = [abstract(E, 2, F, D), abstract(E, D, F), abstract(E, 2, F), abstract(E, D)]
    return {
        "x": abstract(T, D, dtype=BF16), "dy": abstract(T, D, dtype=BF16), "weight": abstract(T, K),
        "saved": abstract(2, M, F, dtype=BF16), "w": [abstract(*w.shape, dtype=BF16) for w in weights[:2]],
        "plan": [abstract(E, dtype=S32), abstract(E, dtype=S32), abstract(M, dtype=S32), abstract(T, K, dtype=S32)],
        "biases": weights[2:] if biased else [None, None], "starts": weights if biased else [*weights[:2], None, None],
    }  # fmt: skip


def forward(a: dict):
    return cuda_calls.moe_forward(
        a["x"], a["weight"], Rows(*a["plan"]), Operands(*a["w"]), a["biases"], act=ACT, save=True
    )


def backward(a: dict, accumulate: bool):
    starts = a["starts"] if accumulate else None
    rows, operands = Rows(*a["plan"]), Operands(*a["w"])
    return cuda_calls.moe_backward(
        a["x"], a["dy"], a["weight"], a["saved"], rows, operands, a["biases"], starts, act=ACT
    )


def lowered(function, *args) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("biased", [False, True])
def test_results_have_the_shapes_of_their_gradients(biased):
    a = inputs(biased)
    y, saved = jax.eval_shape(forward, a)
    assert (y.shape, y.dtype, saved.shape, saved.dtype) == ((T, D), BF16, (2, M, F), BF16)
    dx, d_weight, *gradients = jax.eval_shape(lambda a: backward(a, False), a)
    assert (dx.shape, dx.dtype, d_weight.shape, d_weight.dtype) == ((T, D), BF16, (T, K), F32)
    assert [None if g is None else (g.shape, g.dtype) for g in gradients] == [
        None if s is None else (s.shape, F32) for s in a["starts"]
    ]


@pytest.mark.parametrize("biased", [False, True])
def test_calls_have_the_operands_of_their_handlers_and_alias_every_accumulator(biased):
    a = inputs(biased)
    text = lowered(forward, a)
    assert "moejax_cuda_moe_forward" in text
    (call,) = re.findall(r"custom_call @moejax_cuda_moe_forward\(([^)]*)\)", text)
    assert len(call.split(",")) == 10  # ffi/cuda/layer.cc, CudaMoeForward
    text = lowered(lambda a: backward(a, True), a)
    (call,) = re.findall(r"custom_call @moejax_cuda_moe_backward\(([^)]*)\)", text)
    assert len(call.split(",")) == 16
    aliases = re.findall(r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)", text)
    assert aliases == [(str(2 + i), str(12 + i)) for i in range(4 if biased else 2)]
