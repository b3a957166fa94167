"""Checks of `tests/cases/capacity.yaml`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from moejax import native
from moejax.config import RouterConfig
from moejax.ops.balance import balance_metrics
from moejax.ops.moe import moe_ffn, prepare_experts
from moejax.ops.routing import route
from moejax.ops.schedule import capacity, dropped_rows, schedule
from moejax.ops.spec import MoESpec

BACKENDS = ("dense", "xla", "native")


def spec_of(experts, top_k, factor=None, backend="xla"):
    router = RouterConfig(top_k=top_k, norm_topk=top_k > 1)
    return MoESpec(experts, 16, 24, router=router, capacity_factor=factor, backend=backend)


def runnable():
    """The backends of this installation: `native` only where a compiler built it."""
    return [name for name in BACKENDS if name != "native" or native.missing("_cpu") is None]


def masters(experts):
    rng = np.random.default_rng(0)
    return (
        rng.standard_normal((experts, 2, 24, 16)).astype(np.float32),
        rng.standard_normal((experts, 16, 24)).astype(np.float32),
    )


def layer_and_gradients(spec, expert_TxK):
    """y, plan, and a function d y -> (d x, d masters), for random tokens and weights."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((len(expert_TxK), 16)).astype(np.float32)
    weight = rng.random(np.shape(expert_TxK)).astype(np.float32) + 0.5
    plan = jax.jit(schedule, static_argnums=1)(jnp.asarray(expert_TxK, jnp.int32), spec)

    def layer(x, w_gate_up, w_down):
        return moe_ffn(x, weight, plan, prepare_experts(w_gate_up, w_down, spec), spec)

    y, vjp = jax.vjp(jax.jit(layer), x, *masters(spec.num_experts))
    return np.asarray(y), plan, functools.partial(vjp), (x, weight)


def swiglu_oracle(x_D, expert):
    w_gate_up, w_down = (w[expert].astype(np.float64) for w in masters(4))
    gate, up = w_gate_up @ x_D
    return w_down @ (gate / (1 + np.exp(-gate)) * up)


def exact_arithmetic_and_clamp(case):
    rows = [capacity(t, spec_of(e, k, cf)) for t, e, k, cf in case["given"]["rows_T_E_K_cf"]]
    assert rows == case["expect"]["capacity"]
    assert capacity(10, spec_of(4, 2)) is None


def all_tokens_on_one_expert(case):
    given, expect = case["given"], case["expect"]
    logits = np.asarray([given["logits_TxE"]], np.float32)
    for backend in runnable():
        spec = spec_of(4, given["k"], given["capacity_factor"], backend)
        assert spec.drop_policy == given["drop_policy"]
        _, expert, stats = jax.jit(lambda x, spec=spec: route(x, None, spec))(logits)
        assert capacity(5, spec) == expect["capacity"]
        y, plan, vjp, (x, weight) = layer_and_gradients(spec, expert[0])
        kept = np.flatnonzero(np.asarray(plan.row_TxK)[:, 0] >= 0)
        assert kept.tolist() == expect["kept_tokens_of_expert_0"] == np.asarray(plan.slot_M)[:2].tolist()
        assert np.asarray(plan.count_E).tolist() == [2, 0, 0, 0] and np.asarray(plan.routed_E).tolist() == [5, 0, 0, 0]
        assert int(dropped_rows(plan)) == expect["dropped"]
        stats = dataclasses.replace(stats, dropped=dropped_rows(plan))
        np.testing.assert_allclose(balance_metrics(stats, spec)["dropped"], expect["dropped_fraction"], rtol=1e-7)
        assert np.all(y[2:] == expect["y_of_tokens_2_3_4"])
        for t in kept:
            np.testing.assert_allclose(y[t], weight[t, 0] * swiglu_oracle(x[t], 0), rtol=1e-4, atol=1e-5)
        # A gradient that arrives only at dropped tokens goes nowhere.
        d_y = np.ones_like(y)
        d_y[kept] = 0.0
        assert all(np.all(np.asarray(g) == 0.0) for g in vjp(d_y))
        d_x, d_gate_up, _ = vjp(np.ones_like(y))
        assert np.all(np.asarray(d_x)[2:] == 0.0) and np.any(np.asarray(d_gate_up)[0] != 0.0)
        assert np.all(np.asarray(d_gate_up)[1:] == 0.0)


def masked_slots_are_not_rows(case):
    given, expect = case["given"], case["expect"]
    ids = np.asarray(given["expert_TxK"], np.int32)
    for backend in runnable():
        spec = spec_of(given["experts"], 2, backend=backend)
        y, plan, _, (x, weight) = layer_and_gradients(spec, ids)
        count, start, slot = (np.asarray(a) for a in (plan.count_E, plan.start_E, plan.slot_M))
        assert count.tolist() == expect["count_E"] and count.sum() == expect["rows"] == (slot >= 0).sum()
        assert (np.cumsum(count) - count).tolist() == expect["unpadded_offset_E"]
        rows = [[list(divmod(int(s), 2)) for s in slot[b : b + c]] for b, c in zip(start, count, strict=True)]
        assert rows == expect["rows_per_expert_as_token_slot"]
        assert np.all((np.asarray(plan.row_TxK) >= 0) == (ids >= 0))
        assert np.all(y[4] == expect["y_of_token_4"])
        for t, experts in enumerate(ids):
            want = sum((weight[t, k] * swiglu_oracle(x[t], e) for k, e in enumerate(experts) if e >= 0), np.zeros(16))
            np.testing.assert_allclose(y[t], want, rtol=1e-4, atol=1e-4)


CHECKS = {
    "capacity-exact-arithmetic-and-clamp": exact_arithmetic_and_clamp,
    "capacity-all-tokens-on-one-expert": all_tokens_on_one_expert,
    "capacity-masked-slots-are-not-rows": masked_slots_are_not_rows,
}
