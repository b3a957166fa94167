"""Shared by the tests of the native backend: problems with given group sizes, and the layer in NumPy at double precision."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import native
from moejax.config import ActivationConfig, RouterConfig
from moejax.ops.experts import ExpertWeights
from moejax.ops.moe import moe_ffn, prepare_experts
from moejax.ops.schedule import schedule
from moejax.ops.spec import MoESpec

HAS_COMPILER = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
# Where a compiler is, a missing module is a broken build and the tests must fail, not skip.
needs_native = pytest.mark.skipif(
    not HAS_COMPILER and native.missing("_cpu") is not None,
    reason="no C++ compiler here, so moejax.native._cpu is not built",
)


@dataclasses.dataclass
class Problem:
    spec: MoESpec
    x_TxD: np.ndarray
    dy_TxD: np.ndarray
    weight_TxK: np.ndarray
    expert_TxK: np.ndarray
    w_gate_up: np.ndarray
    w_down: np.ndarray
    b_gate_up: np.ndarray | None
    b_down: np.ndarray | None

    def masters(self) -> ExpertWeights:
        return ExpertWeights(
            *(None if a is None else jnp.asarray(a) for a in (self.w_gate_up, self.w_down, self.b_gate_up, self.b_down))
        )


def make_problem(sizes, D, F, *, top_k=1, bias=False, seed=0, **spec_fields) -> Problem:
    """Tokens whose first slots give the groups these sizes, shuffled; further slots choose other experts or are masked."""
    rng = np.random.default_rng(seed)
    E = len(sizes)
    expert = np.repeat(np.arange(E), sizes)
    rng.shuffle(expert)
    T = len(expert)
    slots = [expert] + [np.where(rng.random(T) < 0.2, -1, (expert + k) % E) for k in range(1, top_k)]
    spec = MoESpec(
        num_experts=E, d_model=D, expert_width=F, router=RouterConfig(top_k=top_k), expert_bias=bias, backend="native",
        **spec_fields,
    )  # fmt: skip
    normal = lambda *shape, scale=1.0: (rng.normal(size=shape) * scale).astype(np.float32)  # noqa: E731
    return Problem(
        spec=spec,
        x_TxD=normal(T, D),
        dy_TxD=normal(T, D),
        weight_TxK=rng.uniform(0.1, 1.0, size=(T, top_k)).astype(np.float32),
        expert_TxK=np.stack(slots, 1).astype(np.int32),
        w_gate_up=normal(E, 2, F, D, scale=D**-0.5),
        w_down=normal(E, D, F, scale=F**-0.5),
        b_gate_up=normal(E, 2, F, scale=0.3) if bias else None,
        b_down=normal(E, D, scale=0.3) if bias else None,
    )


def run(problem: Problem, backend: str = "native", **changes):
    """(y, dx, d_weight, gradients) of moe_ffn as FP32 NumPy arrays, from one jit."""
    spec = problem.spec.replace(backend=backend, **changes)
    dtype = jnp.float32 if spec.recipe == "fp32" else jnp.bfloat16

    @jax.jit
    def step(x, weight, masters, dy, expert):
        plan = schedule(expert, spec)
        experts = prepare_experts(
            masters.w_gate_up_Ex2xFxD, masters.w_down_ExDxF, spec, masters.b_gate_up_Ex2xF, masters.b_down_ExD
        )

        def layer(x, weight, masters):
            return moe_ffn(x, weight, plan, dataclasses.replace(masters, copies=experts.copies), spec)

        y, pullback = jax.vjp(layer, x, weight, masters)
        return y, *pullback(dy)

    outputs = step(
        jnp.asarray(problem.x_TxD, dtype), problem.weight_TxK, problem.masters(), jnp.asarray(problem.dy_TxD, dtype),
        jnp.asarray(problem.expert_TxK),
    )  # fmt: skip
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), outputs)


def activation(gate, up, act: ActivationConfig):
    if act.name in ("swiglu_clamped", "swiglu_oai"):
        gate, up = np.minimum(gate, act.limit), np.clip(up, -act.limit, act.limit)
    if act.name == "geglu":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    alpha = act.alpha if act.name == "swiglu_oai" else 1.0
    return gate / (1 + np.exp(-alpha * gate)) * (up + 1 if act.name == "swiglu_oai" else up)


def oracle(problem: Problem):
    """The same outputs in float64, expert by expert; derivatives of the activation by central differences."""
    p, spec = problem, problem.spec
    wide = lambda a: None if a is None else a.astype(np.float64)  # noqa: E731
    x, dy, weight, w_gate_up, w_down, b_gate_up, b_down = map(
        wide, (p.x_TxD, p.dy_TxD, p.weight_TxK, p.w_gate_up, p.w_down, p.b_gate_up, p.b_down)
    )
    y, dx, d_weight = np.zeros_like(x), np.zeros_like(x), np.zeros_like(weight)
    grads = [None if a is None else np.zeros_like(a) for a in (w_gate_up, w_down, b_gate_up, b_down)]
    for e in range(spec.num_experts):
        t, k = np.nonzero(p.expert_TxK == e)
        gate, up = x[t] @ w_gate_up[e, 0].T, x[t] @ w_gate_up[e, 1].T
        if spec.expert_bias:
            gate, up = gate + b_gate_up[e, 0], up + b_gate_up[e, 1]
        h = activation(gate, up, spec.act)
        row = h @ w_down[e].T + (b_down[e] if spec.expert_bias else 0)
        scale = weight[t, k][:, None]
        np.add.at(y, t, scale * row)
        d_weight[t, k] = (row * dy[t]).sum(1)
        d_row = scale * dy[t]
        dh, step = d_row @ w_down[e], 1e-6
        d_gate = dh * (activation(gate + step, up, spec.act) - activation(gate - step, up, spec.act)) / (2 * step)
        d_up = dh * (activation(gate, up + step, spec.act) - activation(gate, up - step, spec.act)) / (2 * step)
        np.add.at(dx, t, d_gate @ w_gate_up[e, 0] + d_up @ w_gate_up[e, 1])
        grads[0][e] = np.stack([d_gate.T @ x[t], d_up.T @ x[t]])
        grads[1][e] = d_row.T @ h
        if spec.expert_bias:
            grads[2][e], grads[3][e] = np.stack([d_gate.sum(0), d_up.sum(0)]), d_row.sum(0)
    return y, dx, d_weight, ExpertWeights(*grads)


def relative_norm(got, expected) -> float:
    """||got - expected|| / ||expected||; 0 where both are exactly zero, inf where only one is."""
    error, norm = (
        np.linalg.norm(np.asarray(a, np.float64)) for a in (np.asarray(got, np.float64) - expected, expected)
    )
    return 0.0 if error == 0 else float(error / norm) if norm else float("inf")


def assert_close(got, expected, bound: float):
    """Every output by relative norm, weight gradients for each expert."""
    for name, a, b in zip(("y", "dx", "d_weight"), got, expected):
        assert relative_norm(a, b) < bound, (name, relative_norm(a, b))
    for index, (a, b) in enumerate(zip(jax.tree.leaves(got[3]), jax.tree.leaves(expected[3]))):
        for e in range(len(a)):
            assert relative_norm(a[e], b[e]) < bound, (index, e, relative_norm(a[e], b[e]))


def assert_same_bits(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
