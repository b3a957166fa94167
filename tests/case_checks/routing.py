"""Checks of `tests/cases/routing.yaml`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import RouterConfig
from moejax.ops.routing import route, router_logits
from moejax.ops.spec import MoESpec

NAMES = {"score": "score_fn", "k": "top_k", "groups": "n_group", "groups_kept": "topk_group"}
FIELDS = ("score", "k", "groups", "groups_kept", "group_top", "norm_topk", "route_scale")


def routed(given, logits_TxE, bias_E=None, **changes):
    """Routes one row of tokens with the router a case describes."""
    fields = {NAMES.get(name, name): given[name] for name in FIELDS if name in given} | changes
    logits = np.asarray(logits_TxE, np.float32)
    router = RouterConfig(**fields, select_bias=bias_E is not None)
    spec = MoESpec(logits.shape[-1], 8, 8, router=router)
    bias = None if bias_E is None else np.asarray(bias_E, np.float32)
    weight, expert, stats = jax.jit(lambda x: route(x[None], bias, spec))(logits)
    return np.asarray(weight)[0], np.asarray(expert)[0], stats


def bias_selects_only(case):
    given, rel = case["given"], case["tolerance"]["rel"]
    for which in ("bias_a", "bias_b"):
        weight, expert, _ = routed(given, given["logits_TxE"], given[f"{which}_E"])
        np.testing.assert_array_equal(expert, case["expect"][which]["expert_TxK"])
        np.testing.assert_allclose(weight, case["expect"][which]["weight_TxK"], rtol=rel)
        np.testing.assert_allclose(weight.sum(-1), case["expect"]["weight_sum_per_token"], rtol=rel)


def tiny_score_survives_bias(case):
    given = case["given"]
    weight, expert, _ = routed(given, given["logits_TxE"], given["bias_E"])
    np.testing.assert_array_equal(expert, case["expect"]["expert_TxK"])
    np.testing.assert_allclose(weight, case["expect"]["weight_TxK"], rtol=case["tolerance"]["rel"])


def group_mask_is_negative_infinity(case):
    given = case["given"]
    weight, expert, _ = routed(given, given["logits_TxE"], given["bias_E"])
    np.testing.assert_array_equal(expert, case["expect"]["expert_TxK"])
    np.testing.assert_allclose(weight, case["expect"]["weight_TxK"], rtol=case["tolerance"]["rel"])


def group_score_top_m(case):
    given, expect = case["given"], case["expect"]
    for i, m in enumerate(given["group_top"]):
        weight, expert, _ = routed({**given, "group_top": m}, given["logits_TxE"])
        # Experts that tie exactly may be listed in any order by the case; the rule here is the lower index first.
        np.testing.assert_array_equal(expert[0], expect["expert_K_for_each_m"][i])
        np.testing.assert_allclose(weight[0], expect["weight_K_for_each_m"][i], rtol=case["tolerance"]["rel"])


def logits_in_fp32(case):
    given, expect = case["given"], case["expect"]
    x = jnp.asarray(given["x_TxD"], jnp.bfloat16)
    logits = jax.jit(router_logits)(x, jnp.asarray(given["w_router_ExD"], jnp.float32))
    np.testing.assert_allclose(logits, expect["logits_TxE"], rtol=case["tolerance"]["rel"])
    weight, expert, _ = routed(given, logits)
    np.testing.assert_array_equal(expert, expect["expert_TxK"])
    np.testing.assert_allclose(weight, expect["weight_TxK"], rtol=case["tolerance"]["rel"])
    with pytest.raises(TypeError, match="router logits are bfloat16; expected float32"):
        route(logits[None].astype(jnp.bfloat16), None, MoESpec(4, 8, 8))


def top1_normalised_is_rejected(case):
    given, expect = case["given"], case["expect"]["norm_topk_false"]
    with pytest.raises(ValueError, match=r"norm_topk with k = 1.*weight is always 1.*router cannot learn"):
        routed(given, given["logits_TxE"], norm_topk=True)
    with pytest.raises(ValueError, match=r"softmax over the chosen logits with k = 1.*router cannot learn"):
        routed(given, given["logits_TxE"], norm_topk=False, score_before_topk=False)
    spec = MoESpec(3, 8, 8, router=RouterConfig(top_k=1, norm_topk=False))
    weights = jax.jit(lambda x: route(x[None], None, spec)[0][0])
    weight, vjp = jax.vjp(weights, jnp.asarray(given["logits_TxE"], jnp.float32))
    np.testing.assert_allclose(weight, expect["weight_TxK"], rtol=case["tolerance"]["rel"])
    (d_logits,) = vjp(jnp.asarray(given["d_weight_TxK"], jnp.float32))
    np.testing.assert_allclose(d_logits, expect["d_logits_TxE"], rtol=case["tolerance"]["rel"])


def nan_logits_are_visible(case):
    given, expect = case["given"], case["expect"]
    for bits in given["nan_bits"]:
        logits = np.asarray(given["logits_TxE"], np.float32)
        logits.view(np.uint32)[np.isnan(logits)] = bits
        weight, expert, stats = routed(given, logits, norm_topk=False)
        assert np.all(np.isnan(weight[0]))
        assert all(np.all(np.isnan(x)) for x in (stats.z_sum, stats.prob_sum_E, stats.sequence_sum, stats.entropy_sum))
        for row in expert:
            assert len(set(row)) == given["k"] and row.min() >= 0 and row.max() < logits.shape[-1]
        np.testing.assert_array_equal(expert[1], expect["token_1_expert_K"])
        np.testing.assert_allclose(weight[1], expect["token_1_weight_K"], rtol=case["tolerance"]["rel"])


CHECKS = {
    "routing-bias-selects-only": bias_selects_only,
    "routing-tiny-score-survives-bias": tiny_score_survives_bias,
    "routing-group-mask-is-negative-infinity": group_mask_is_negative_infinity,
    "routing-group-score-top-m": group_score_top_m,
    "routing-logits-in-fp32": logits_in_fp32,
    "routing-top1-normalised-is-rejected": top1_normalised_is_rejected,
    "routing-nan-logits-are-visible": nan_logits_are_visible,
}
