"""The Blackwell layer as it is lowered for a GPU, without one: which handlers the backend calls there, their operands and
aliases, and what it refuses by name."""

import re

import jax
import jax.numpy as jnp
import pytest

from moejax import native, selftest
from moejax.config import RouterConfig
from moejax.native import cuda_sm100_calls
from moejax.ops import experts_native
from moejax.ops.experts import ExpertWeights
from moejax.ops.schedule import schedule
from moejax.ops.spec import MoESpec

pytestmark = pytest.mark.skipif(native.missing("_cuda") is not None, reason="moejax.native._cuda is not built here")

T, E, D, F = 40, 5, 96, 64


@pytest.fixture
def blackwell(monkeypatch):
    """The backend as on a Blackwell GPU that has passed its self-test."""
    if not hasattr(native.module("_cuda"), "sm100_code_bytes"):
        pytest.skip("moejax.native._cuda is older than its source: `make cuda`")
    monkeypatch.setattr(experts_native, "_on_gpu", lambda: True)
    monkeypatch.setattr(experts_native, "_capability", lambda: "10.3")
    monkeypatch.setattr(selftest, "first_use", lambda: None)


def spec_of(recipe, **fields) -> MoESpec:
    return MoESpec(E, D, F, recipe=recipe, backend="native").replace(router=RouterConfig(top_k=2), **fields)


def step(spec, accumulate):
    """Forward and backward through the backend's own functions."""

    def run(x, weight, expert, w_gate_up, w_down, starts):
        masters = ExpertWeights(w_gate_up, w_down)
        experts = ExpertWeights(w_gate_up, w_down, copies=experts_native.prepare(masters, spec))
        plan = schedule(expert, spec)
        y, saved = experts_native.ffn_forward(x, weight, plan, experts, spec)
        accumulator = ExpertWeights(*starts) if accumulate else None
        return experts_native.ffn_backward(x, weight, y, saved, plan, experts, spec, accumulator=accumulator)

    f32, bf16 = jnp.float32, jnp.bfloat16
    shapes = [((T, D), bf16), ((T, 2), f32), ((T, 2), jnp.int32), ((E, 2, F, D), f32), ((E, D, F), f32)]
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    return run, [*args, args[3:]]


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
@pytest.mark.parametrize("save", ["gate_up", "recompute"])
def test_layer_is_lowered_to_the_blackwell_handlers(blackwell, recipe, save):
    spec = spec_of(recipe, save=save)
    assert experts_native.refuses(spec, "gpu") is None
    run, args = step(spec, accumulate=True)
    dx, d_weight, d_experts = jax.eval_shape(run, *args)
    assert (dx.shape, dx.dtype, d_weight.shape) == ((T, D), jnp.bfloat16, (T, 2))
    assert d_experts.w_gate_up_Ex2xFxD.shape == (E, 2, F, D) and d_experts.w_down_ExDxF.dtype == jnp.float32
    text = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert set(re.findall(r"custom_call @(moejax\w+)", text)) == {
        "moejax_cuda_sm100_forward",
        "moejax_cuda_sm100_backward",
    } | ({"moejax_cuda_sm100_prepare"} if recipe == "mxfp8" else set())
    (forward,) = re.findall(r"custom_call @moejax_cuda_sm100_forward\(([^)]*)\)", text)
    (backward,) = re.findall(r"custom_call @moejax_cuda_sm100_backward\(([^)]*)\)", text)
    assert len(forward.split(",")) == 10 and len(backward.split(",")) == 18  # ffi/cuda/sm100_layer.cc
    assert re.findall(r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)", text) == [("2", "16"), ("3", "17")]
    if recipe == "mxfp8":  # E4M3 in the masters' layout, a table of 512-byte atoms per matrix
        assert f"tensor<{E}x2x{F}x{D}xf8E4M3FN>" in text and f"tensor<{E}x2x512xui8>" in text


REFUSED = {
    "expert_bias is set; its Blackwell kernels have no biases": spec_of("bf16", expert_bias=True),
    "on Blackwell MX products are exact: use mx_mode exact": spec_of("mxfp8", mx_mode="aligned"),
    "its Blackwell kernels have weight gradients of mxfp8 in mxfp8": spec_of("mxfp8", wgrad="bf16"),
    "recipe is fp32": spec_of("fp32"),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_what_the_kernels_cannot_run_is_refused_by_name(blackwell, rule):
    assert rule in str(experts_native.refuses(REFUSED[rule], "gpu"))


def test_other_gpus_are_refused(blackwell, monkeypatch):
    monkeypatch.setattr(experts_native, "_capability", lambda: "12.0")
    assert "compute capability 12.0" in str(experts_native.refuses(spec_of("bf16"), "gpu"))


@pytest.mark.parametrize(
    "version, refused", [("12.6.4.1", False), ("12.9.1.4", True), ("13.1.0.3", True), ("13.2.0.9", False)]
)
def test_cublas_that_frees_tensor_memory_twice_is_refused(blackwell, monkeypatch, version, refused):
    def installed(package):
        if package == "nvidia-cublas":
            return version
        raise cuda_sm100_calls.importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(cuda_sm100_calls.importlib.metadata, "version", installed)
    rule = experts_native.refuses(spec_of("bf16"), "gpu")
    assert (rule is not None and f"nvidia-cublas is {version}" in rule and "nvidia-cublas>=13.2" in rule) == refused
