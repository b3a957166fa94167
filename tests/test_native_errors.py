"""Bad arguments never reach a kernel: each is one line naming the argument, and nothing crashes the process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moejax import native
from moejax.config import ActivationConfig
from moejax.native import calls
from tests.native_support import needs_native

pytestmark = needs_native

i32 = lambda *values: jnp.asarray(values, jnp.int32)  # noqa: E731
ONES = jnp.ones((256, 8), jnp.float32)
W = jnp.ones((2, 16, 8), jnp.float32)


# XLA's InvalidArgument; JAX raises it as one or the other, by version and by path
ERRORS = (jax.errors.JaxRuntimeError, ValueError)


def raises(match):
    return pytest.raises(ERRORS, match=match)


def test_group_sizes_must_fit_the_rows():
    with raises(r"INVALID_ARGUMENT.*group sizes sum to 300 and expert 1 would end at row 328, but there are 256 rows"):
        calls.grouped_product(ONES, W, i32(100, 200), i32(0, 128), transposed=True).block_until_ready()


@pytest.mark.parametrize(
    "count, start, match",
    [
        ((-3, 5), (0, 128), "count_E holds -3 for expert 0; group sizes are not negative"),
        ((5, 5), (0, 100), "start_E holds 100 for expert 1; expected a multiple of 128 from 128 up"),
        ((130, 5), (0, 128), "start_E holds 128 for expert 1; expected a multiple of 128 from 256 up"),
        ((5, 5), (-128, 128), "start_E holds -128 for expert 0"),
        ((2147483647, 2147483647), (0, 0), "would end at row|from"),
    ],
)
def test_groups_that_overlap_or_are_not_aligned_are_refused(count, start, match):
    for call in (
        lambda: calls.grouped_product(ONES, W, i32(*count), i32(*start), transposed=True),
        lambda: calls.grouped_wgrad(ONES, ONES, i32(*count), i32(*start)),
    ):
        with raises(match):
            jax.block_until_ready(call())


def test_shapes_and_dtypes_are_named():
    with raises(r"moejax_grouped_product: x is F32\[256,8\]; expected F32 or BF16\[M, K=16\]"):
        jax.block_until_ready(calls.grouped_product(ONES, W, i32(5, 5), i32(0, 128), transposed=False))
    with raises(r"count_E is F32\[2\]; expected S32\[E=2\]"):
        jax.block_until_ready(calls.grouped_product(ONES, W, jnp.ones(2), i32(0, 128), transposed=True))
    with raises(r"w is F32\[16,8\]; expected F32 or BF16\[E, N, K\]"):
        calls._call("moejax_grouped_product", [((256, 16), jnp.float32)], [ONES, W[0], i32(5), i32(0)], transposed=True)
    with raises(r"expert_TxK holds 9 at flat slot 1; expected 0\.\.3, or -1"):
        jax.block_until_ready(calls.schedule(i32(0, 9).reshape(2, 1), 0, 512, 4, 4, None))
    with raises(r"slot_M holds 7 at row 1; expected a slot of 3 tokens, or -1"):
        jax.block_until_ready(calls.dispatch(ONES[:3], i32(0, 7), 2, jnp.float32))
    with raises(r"row_TxK holds 256 at flat slot 0"):
        jax.block_until_ready(calls.combine(ONES, None, i32(256).reshape(1, 1), jnp.float32))


def layer(**changes):
    """moe_forward on three tokens of two experts, D = F = 8, with some arguments replaced."""
    arguments = {
        "x": jnp.ones((3, 8)),
        "weight": jnp.ones((3, 1)),
        "count": i32(2, 1),
        "start": i32(0, 128),
        "slot": jnp.full(256, -1, jnp.int32).at[i32(0, 1, 128)].set(i32(0, 2, 1)),
        "row": i32(0, 128, 1).reshape(3, 1),
        "gate_up": jnp.ones((2, 2, 8, 8)),
        "down": jnp.ones((2, 8, 8)),
        "recipe": "fp32",
        "act": ActivationConfig(),
    } | changes
    a = arguments
    y, _ = calls.moe_forward(
        a["x"], a["weight"], calls.Rows(a["count"], a["start"], a["slot"], a["row"]), calls.Operands(a["gate_up"], a["down"]),
        (None, None), recipe=a["recipe"], act=a["act"], top_k=a["row"].shape[1], save=False,
    )  # fmt: skip
    return jax.block_until_ready(y)


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"slot": jnp.zeros(256, jnp.int32)}, "slot_M holds 0 at row 1 of expert 0; expected the slot in 0..2 whose"),
        ({"row": i32(0, 128, -1).reshape(3, 1)}, "slot_M holds 2 at row 1"),
        ({"count": i32(1, 1)}, "row_TxK has rows for 3 slots, but the groups hold 2 rows"),
        ({"gate_up": jnp.ones((2, 2, 8, 4))}, r"w_gate_up is F32\[2,2,8,4\]; expected F32\[E=2, 2, F=8, D=8\]"),
        ({"gate_up": jnp.ones((3, 2, 8, 8))}, r"w_gate_up is F32\[3,2,8,8\]"),
        ({"recipe": "bf16"}, r"w_gate_up is F32\[2,2,8,8\]; expected BF16"),
        ({"recipe": "mxfp8"}, "positive multiples of 32"),
        ({"x": jnp.ones((3, 8), jnp.int32)}, r"x is S32\[3,8\]"),
        ({"weight": jnp.ones((3, 2))}, r"weight is F32\[3,2\]; expected F32\[T=3, K=1\]"),
        ({"act": ActivationConfig("swiglu_clamped", limit=-1.0)}, "limit is -1.0+; a clamped activation needs a positive limit"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_the_layer_refuses_what_does_not_fit(changes, match):
    assert np.isfinite(layer()).all()
    with raises(match):
        layer(**changes)


def test_an_accumulator_must_be_aliased():
    with raises("accumulator must be aliased to dw"):
        calls._call(
            "moejax_grouped_wgrad", [((2, 8, 8), jnp.float32)],
            [ONES, ONES, i32(5, 5), i32(0, 128), jnp.zeros((2, 8, 8))], accumulate=True,
        )  # fmt: skip


def test_attributes_are_strictly_typed():
    native.register("_cpu")
    call = jax.ffi.ffi_call("moejax_dispatch", jax.ShapeDtypeStruct((2, 8), jnp.float32))
    with raises("expected S64 but got S32"):
        call(ONES, i32(0, 1), top_k=np.int32(1))
    with raises("top_k is 0; expected 1"):
        call(ONES, i32(0, 1), top_k=np.int64(0))
    with raises("INVALID_ARGUMENT"):
        call(ONES, i32(0, 1))


DTYPES = [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8, jnp.float8_e4m3fn]
arrays = st.builds(
    lambda shape, dtype, value: jnp.full(shape, value).astype(dtype),
    st.lists(st.sampled_from([0, 1, 2, 3, 8, 32, 130]), max_size=4).map(tuple),
    st.sampled_from(DTYPES),
    st.sampled_from([-5, -1, 0, 1, 7, 128, 2**31 - 1]),
)
LAYER = {"recipe": np.int32, "activation": np.int32, "limit": np.float32, "alpha": np.float32, "top_k": np.int64}
TARGETS = {
    "moejax_schedule": (2, 5, {"num_experts": np.int64, "capacity": np.int64}),
    "moejax_dispatch": (2, 1, {"top_k": np.int64}),
    "moejax_combine": (3, 1, {}),
    "moejax_grouped_product": (4, 1, {"transposed": bool}),
    "moejax_grouped_wgrad": (5, 1, {"accumulate": bool}),
    "moejax_mx_quantize": (1, 2, {"down": bool}),
    "moejax_mx_dequantize": (2, 1, {"down": bool}),
    "moejax_moe_forward": (12, 3, LAYER),
    "moejax_moe_backward": (20, 8, LAYER | {"wgrad_bf16": bool, "accumulate": bool}),
}  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.sampled_from(sorted(TARGETS)), st.data())
def test_fuzzed_calls_return_or_raise(target, data):
    native.register("_cpu")
    operands, results, attributes = TARGETS[target]
    arguments = [data.draw(arrays) for _ in range(operands)]
    like = [data.draw(arrays) for _ in range(results)]
    values = {name: data.draw(st.sampled_from([-(2**31), -1, 0, 1, 2, 2**31 - 1])) for name in attributes}
    values = {name: kind(values[name]) for name, kind in attributes.items()}
    try:
        jax.block_until_ready(
            jax.ffi.ffi_call(target, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in like])(*arguments, **values)
        )
    except ERRORS as error:
        assert "INVALID_ARGUMENT" in str(error), error


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.data())
def test_a_valid_layer_with_one_wild_argument_returns_or_raises(data):
    name = data.draw(st.sampled_from(["x", "weight", "count", "start", "slot", "gate_up", "down"]))
    wild = data.draw(arrays)
    if name in ("count", "start", "slot") and data.draw(st.booleans()):
        size = {"count": 2, "start": 2, "slot": 256}[name]
        values = st.sampled_from([-(2**31), -129, -1, 0, 1, 127, 128, 255, 256, 2**31 - 1])
        wild = i32(*data.draw(st.lists(values, min_size=size, max_size=size)))
    try:
        layer(**{name: wild})
    except (jax.errors.JaxRuntimeError, ValueError, TypeError, IndexError) as error:
        assert "INTERNAL" not in str(error)
