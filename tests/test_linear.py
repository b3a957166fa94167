"""`linear`: FP32 weight gradients that were never rounded, with every way its operands can be sharded."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from moejax.ops.linear import linear

pytestmark = pytest.mark.quick_compile

B, L, I, O = 8, 6, 40, 16


def operands(dtype):
    rng = np.random.default_rng(0)
    x, w, b, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((B, L, I), (O, I), (O,), (B, L, O)))
    return jnp.asarray(x, dtype), jnp.asarray(w), jnp.asarray(b), jnp.asarray(dy, dtype)


@jax.jit
def forward_and_gradients(x, w, b, dy):
    y, pullback = jax.vjp(linear, x, w, b)
    return y, *pullback(dy)


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 1e-6), (jnp.bfloat16, 5e-3)])
def test_equals_float64_and_the_weight_gradient_is_not_rounded(dtype, bound):
    x, w, b, dy = operands(dtype)
    y, dx, dw, db = forward_and_gradients(x, w, b, dy)
    x64, w64, b64, dy64 = (np.asarray(leaf, np.float64) for leaf in (x, w, b, dy))
    assert relative(y, x64 @ w64.T + b64) < bound and y.dtype == dtype
    assert relative(dx, dy64 @ w64) < bound and dx.dtype == dtype
    # products of BF16 numbers are exact in FP32, so this bound holds in both dtypes; a gradient through BF16 is off by 2.4e-3
    assert relative(dw, np.einsum("blo,bli->oi", dy64, x64)) < 1e-6 and dw.dtype == jnp.float32
    assert relative(db, dy64.sum((0, 1))) < 1e-6 and db.dtype == jnp.float32


SHARDINGS = {  # of x, w, b and dy
    "column parallel": (jax.P(("data", "fsdp")), jax.P("tensor", "fsdp"), jax.P("tensor"), jax.P(("data", "fsdp"), None, "tensor")),
    "row parallel": (jax.P(("data", "fsdp"), None, "tensor"), jax.P("fsdp", "tensor"), jax.P("fsdp"), jax.P(("data", "fsdp"))),
    "fsdp on both": (jax.P("data", "fsdp"), jax.P("fsdp"), jax.P("fsdp"), jax.P("data", "fsdp")),
    "replicated": (jax.P(), jax.P(), jax.P(), jax.P()),
}  # fmt: skip


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
@pytest.mark.parametrize("name", SHARDINGS)
def test_sharded_operands_give_the_same_result_and_gradients_lie_where_the_master_does(name, kind):
    values = operands(jnp.bfloat16)
    want = forward_and_gradients(*values)
    with jax.set_mesh(jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(kind,) * 3)):
        placed = [jax.device_put(leaf, spec) for leaf, spec in zip(values, SHARDINGS[name])]
        got = forward_and_gradients(*placed)
    for a, b, bound in zip(got, want, (1e-2, 1e-2, 1e-6, 1e-6)):
        assert relative(a, b) < bound
    if kind == AxisType.Explicit:
        for gradient, operand in ((got[1], placed[0]), (got[2], placed[1]), (got[3], placed[2])):
            assert gradient.sharding.is_equivalent_to(operand.sharding, gradient.ndim)


def test_weight_is_gathered_in_the_compute_dtype():
    """FSDP moves BF16 bytes: no all-gather of FP32."""
    with jax.set_mesh(jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))):
        placed = [
            jax.device_put(leaf, spec) for leaf, spec in zip(operands(jnp.bfloat16), SHARDINGS["column parallel"])
        ]
        program = str(jax.make_jaxpr(lambda x, w: linear(x, w))(*placed[:2]))
    casts, reshards = program.index("convert_element_type"), program.index("reshard")
    assert casts < reshards


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"w": lambda w: w.astype(jnp.bfloat16)}, TypeError, "w is bfloat16; masters are float32"),
        ({"x": lambda x: x.astype(jnp.float16)}, TypeError, "x is float16; expected float32 or bfloat16"),
        ({"w": lambda w: w[:, 1:]}, ValueError, r"w \(16, 39\).*do not fit"),
        ({"b": lambda b: b[1:]}, ValueError, r"b \(15,\).*do not fit"),
        ({"w": lambda w: w[None]}, ValueError, r"w has shape \(1, 16, 40\); expected 2 axes"),
    ],
)
def test_bad_operands_are_refused_by_name(change, error, message):
    values = dict(zip(("x", "w", "b"), operands(jnp.float32)))
    values |= {name: alter(values[name]) for name, alter in change.items()}
    with pytest.raises(error, match=message):
        linear(*values.values())


def test_works_under_vmap_scan_and_remat():
    x, w, b, dy = operands(jnp.float32)
    stack = jnp.stack([w @ w.T, 2 * w @ w.T])
    y = x[..., :O]

    def net(stack):
        body = jax.checkpoint(lambda y, w: (linear(y, w), None))
        return jnp.sum(jax.lax.scan(body, y, stack)[0] * dy)

    plain = lambda stack: jnp.sum(y @ stack[0].T @ stack[1].T * dy)  # noqa: E731
    assert relative(jax.grad(net)(stack), jax.grad(plain)(stack)) < 1e-5
    batched = jax.vmap(functools.partial(linear, x))(jnp.stack([w, -w]))
    np.testing.assert_allclose(batched[0], -batched[1], rtol=1e-6)
