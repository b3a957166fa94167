"""Whole expert layers for the host tests of both architectures: random problems, and what their results must be, in FP64.

Letters: T tokens, K experts per token, E experts, D model width, F expert width.
"""

import dataclasses

import ml_dtypes
import numpy as np

from moejax.config import ActivationConfig, RouterConfig
from moejax.ops.spec import MoESpec
from tests import moe_oracle, mxfp8_oracle

NAMES = ("y", "dx", "d_weight", "dw_gate_up", "dw_down")
BIAS_NAMES = ("db_gate_up", "db_down")
# Against FP64 of the same BF16 inputs: gate, up, h, d(gate, up) and slot rows are rounded to BF16 on the way.
BF16_LIMIT = {"y": 4e-3, "dx": 5e-3, "d_weight": 5e-3, "dw_gate_up": 5e-3, "dw_down": 4e-3}
# Against the same operands in FP64: equal bits in y and dx and 2e-7 in the others, unless a BF16 rounding falls across a tie,
# which is then quantised to another element.
MX_LIMIT = {"y": 5e-4, "dx": 5e-4, "d_weight": 5e-5, "dw_gate_up": 5e-5, "dw_down": 5e-5}


@dataclasses.dataclass
class Problem:
    """Expert 1 has no token, expert 3 one, expert 2 more than a tile; some slots are masked. D != F, neither a tile's multiple."""

    spec: MoESpec
    x: np.ndarray
    dy: np.ndarray
    weight: np.ndarray
    expert: np.ndarray
    w_gate_up: np.ndarray
    w_down: np.ndarray


def problem(recipe, d_model, width, tokens=220, top_k=2, seed=3) -> Problem:
    random = np.random.default_rng(seed)
    experts = 5
    expert = np.stack([random.permutation([0, 2, 4])[:top_k] for _ in range(tokens)]).astype(np.int32)
    expert[random.random(tokens) < 0.6, 0] = 2
    expert[:, 1:][expert[:, 1:] == expert[:, :1]] = 4
    expert[:, 1:][expert[:, 1:] == expert[:, :1]] = 0
    expert[17] = (3, -1)[:top_k]
    expert[random.random(tokens) < 0.05] = -1
    spec = MoESpec(experts, d_model, width, act=ActivationConfig(), recipe=recipe, backend="xla")
    bf16 = lambda *shape: random.standard_normal(shape).astype(ml_dtypes.bfloat16)  # noqa: E731
    return Problem(
        spec.replace(router=RouterConfig(top_k=top_k)),
        bf16(tokens, d_model),
        bf16(tokens, d_model),
        random.uniform(0.1, 1.0, expert.shape).astype(np.float32),
        expert,
        (random.standard_normal((experts, 2, width, d_model)) / d_model**0.5).astype(np.float32),
        (random.standard_normal((experts, d_model, width)) / width**0.5).astype(np.float32),
    )


def relative(got, wanted) -> float:
    """NaN where there should be none, and anything where zeros should be, is infinitely far off."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    if not np.isfinite(got).all() or (got.any() and not wanted.any()):
        return np.inf
    return float(np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), 1e-300))


def errors(got, wanted) -> dict[str, float]:
    """Relative norm per tensor, the largest of any expert for gradients of weights and biases. Experts without rows must be
    exactly zero."""
    found = {}
    for name, right in zip((*NAMES, *BIAS_NAMES)[: len(wanted)], wanted, strict=True):
        pairs = zip(got[name], right, strict=True) if name.startswith(("dw_", "db_")) else [(got[name], right)]
        found[name] = max(relative(a, b) for a, b in pairs)
    return found


def bf16_oracle(p: Problem):
    rounded = [np.asarray(w.astype(ml_dtypes.bfloat16), np.float64) for w in (p.w_gate_up, p.w_down)]
    E, D, F = p.w_down.shape
    zeros = np.zeros((E, 2, F)), np.zeros((E, D))
    inputs = p.x.astype(np.float64), p.weight, p.expert, *rounded, *zeros, p.dy.astype(np.float64)
    y, dx, d_weight, dw_gate_up, dw_down, _, _ = moe_oracle.layer(*inputs, p.spec.act)
    return y, dx, d_weight, dw_gate_up, dw_down


def rebased(values, axis=-1, lines=1):
    """A matrix quantised along `axis` and re-based to the largest scale of each 128 along it and `lines` across it."""
    data, codes = mxfp8_oracle.quantize(values, axis)
    across = np.moveaxis(codes, axis, -1)
    padded = np.pad(across, [(0, -n % step) for n, step in zip(across.shape, (lines, 4), strict=True)])
    common = padded.reshape(padded.shape[0] // lines, lines, -1, 4).max((1, 3))
    common = common.repeat(lines, 0).repeat(4, 1)[: across.shape[0], : across.shape[1]]
    scale = mxfp8_oracle.SCALE[common].repeat(32, 1)[:, : np.moveaxis(data, axis, -1).shape[1]]
    elements = mxfp8_oracle.dequantize(data, codes, axis) / np.moveaxis(scale, -1, axis)
    return mxfp8_oracle.dequantize(mxfp8_oracle.element_bytes(elements), np.moveaxis(common, -1, axis), axis)


def mx_oracle(p: Problem, aligned=False, wgrad_bf16=False, biases=None):
    """The layer by its definition: operands of MXFP8 quantised along their contraction, products in FP64, roundings where the
    contract has them. In BF16 operands are what they are; `wgrad_bf16`: those of weight gradients. `aligned`: re-based.
    With `biases` their gradients come last."""
    to_bf16 = mxfp8_oracle.to_bf16
    mx = p.spec.recipe == "mxfp8"
    round_trip = (rebased if aligned else mxfp8_oracle.round_trip) if mx else lambda values, axis=-1: to_bf16(values)
    of_weight = (lambda values, axis=-1: rebased(values, axis, 128)) if aligned else round_trip
    of_column = to_bf16 if wgrad_bf16 else lambda values: round_trip(values, 0)
    activation = lambda gate, up: moe_oracle.activation(gate, up, p.spec.act.name, p.spec.act.limit, p.spec.act.alpha)  # noqa: E731
    x, dy, weight = p.x.astype(np.float64), p.dy.astype(np.float64), p.weight.astype(np.float64)
    y, dx, d_weight = np.zeros_like(x), np.zeros_like(x), np.zeros_like(weight)
    dw_gate_up, dw_down = np.zeros(p.w_gate_up.shape), np.zeros(p.w_down.shape)
    E, D, F = p.w_down.shape
    b_gate_up, b_down = biases or (np.zeros((E, 2, F)), np.zeros((E, D)))
    db_gate_up, db_down = np.zeros((E, 2, F)), np.zeros((E, D))
    rows_y, rows_dx = {}, {}
    for e in range(E):
        slots = np.argwhere(
            p.expert == e
        )  # token by token: the order of rows, in which blocks of 32 rows share a scale
        if not len(slots):
            continue
        token, w = slots[:, 0], weight[slots[:, 0], slots[:, 1]]
        gate, up = (to_bf16(round_trip(x[token]) @ of_weight(p.w_gate_up[e, i]).T + b_gate_up[e, i]) for i in range(2))
        h, slope_gate, slope_up = activation(gate, up)
        h = to_bf16(h)
        out = to_bf16(round_trip(h) @ of_weight(p.w_down[e]).T + b_down[e])
        dh0 = round_trip(dy[token]) @ of_weight(p.w_down[e], 0)
        d_gate, d_up = (to_bf16(w[:, None] * dh0 * slope) for slope in (slope_gate, slope_up))
        d_rows = sum(round_trip(d) @ of_weight(p.w_gate_up[e, i], 0) for i, d in enumerate((d_gate, d_up)))
        x_columns = of_column(x[token])
        dw_gate_up[e] = [of_column(d).T @ x_columns for d in (d_gate, d_up)]
        dw_down[e] = of_column(dy[token]).T @ of_column(to_bf16(w[:, None] * h))
        d_weight[slots[:, 0], slots[:, 1]] = (h * dh0).sum(1) + dy[token] @ b_down[e]
        db_gate_up[e], db_down[e] = (d_gate.sum(0), d_up.sum(0)), w @ dy[token]
        for i, (t, k) in enumerate(slots):
            rows_y[t, k], rows_dx[t, k] = out[i], to_bf16(d_rows[i])
    for (t, k), row in rows_y.items():
        y[t] += weight[t, k] * row
        dx[t] += rows_dx[t, k]
    results = to_bf16(y), to_bf16(dx), d_weight, dw_gate_up, dw_down
    return (*results, db_gate_up, db_down) if biases else results
