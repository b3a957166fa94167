"""Checks of `tests/cases/balance.yaml`."""

import functools
import itertools
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.checkpoint import CheckpointError, Checkpoints
from moejax.config import BalanceConfig, RouterConfig
from moejax.ops.balance import balance_loss, balance_metrics, update_select_bias
from moejax.ops.routing import route
from moejax.ops.spec import MoESpec


def spec_of(experts, top_k, scope="sequence", aux=1.0, z=0.0, **router):
    router = RouterConfig(top_k=top_k, norm_topk=top_k > 1, **router)
    return MoESpec(experts, 8, 8, router=router, balance=BalanceConfig(aux_coef=aux, aux_scope=scope, z_coef=z))


@functools.partial(jax.jit, static_argnames="spec")
def loss_of(logits_BxLxE, spec, tokens=None, **routing):
    """Loss of a whole step in one call, and its statistics. Given experts are forced by a table (token t -> row t)."""
    _, expert, stats = route(logits_BxLxE, None, spec, **routing)
    count = stats.count_E if spec.balance.aux_scope == "global" else None
    tokens = stats.tokens if tokens is None else tokens
    return balance_loss(stats, spec, tokens=tokens, count_E=count), (stats, expert)


def forced(expert_TxK, shape_BxL):
    """Arguments of `route` that send token t to the given experts."""
    tokens = np.arange(len(expert_TxK), dtype=np.int32).reshape(shape_BxL)
    return {"token_BxL": tokens, "hash_table_VxK": np.asarray(expert_TxK, np.int32)}


def metric_is_counted_once(case):
    given, rel = case["given"], case["tolerance"]["rel"]
    spec = spec_of(4, given["k"], scope="global")
    kept = {"none": lambda f: f, "moe layer": lambda f: f, "whole block": jax.checkpoint}

    def layer(logits, token, table):
        weight, _, stats = route(logits, None, spec, None, token, table)
        return weight, stats

    def loss(logits, token, table, remat):
        moe = jax.checkpoint(layer) if remat == "moe layer" else layer

        def block(*args):
            weight, stats = moe(*args)
            return jnp.sum(jnp.sin(weight)), stats

        out, stats = kept[remat](block)(logits, token, table)
        aux = balance_loss(stats, spec, tokens=stats.tokens, count_E=stats.count_E)
        return out + aux, (aux, balance_metrics(stats, spec)["load_balance"])

    step = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=3)
    for remat, ranks in itertools.product(given["remat"], given["data_ranks"]):
        mesh = jax.make_mesh((ranks,), ("data",), devices=jax.devices()[:ranks])
        with jax.set_mesh(mesh):
            token = jax.device_put(np.arange(8, dtype=np.int32)[:, None], jax.P("data"))
            for name in ("skewed", "uniform"):
                logits = np.tile(np.log(np.float32(given[name]["prob_E"])), (8, 1, 1))
                table = np.asarray(given[name]["expert_TxK"], np.int32)
                (_, values), _ = step(jax.device_put(logits, jax.P("data")), token, table, remat)
                np.testing.assert_allclose(values, case["expect"][name], rtol=rel, err_msg=f"{remat}, {ranks} ranks")


def gradient_does_not_depend_on_the_split(case):
    given, expect, tolerance = case["given"], case["expect"], case["tolerance"]
    logits = np.asarray(given["logits_TxE"], np.float32).reshape(2, 4, 4)
    lse = np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    specs = [spec_of(4, given["k"], "global"), spec_of(4, given["k"]), spec_of(4, given["k"], aux=0.0, z=1.0)]
    expected = [
        np.array([expect["global_loss"], expect["sequence_loss"], expect["z_loss"]]),
        np.reshape([expect["global_d_logits_TxE"], expect["sequence_d_logits_TxE"]], (2, 2, 4, 4)),
        2 * lse * np.exp(logits - lse) / 8,
    ]

    @jax.jit
    def losses(logits, count_E):
        """The three losses of this part of the step, their gradients, and what was chosen."""

        def three(logits):
            _, expert, stats = route(logits, None, specs[0])
            counts = [count_E, None, None]
            return [balance_loss(stats, s, tokens=8, count_E=c) for s, c in zip(specs, counts, strict=True)], expert

        values, vjp, expert = jax.vjp(three, logits, has_aux=True)
        gradients = [vjp([jnp.float32(i == n) for i in range(3)])[0] for n in range(3)]
        return jnp.stack(values), jnp.stack(gradients), expert

    def check(values, gradients):
        for got, want in zip((values, gradients[:2], gradients[2]), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=tolerance["rel"], atol=tolerance["abs"])

    count = np.asarray(expect["count_E"], np.int32)
    values, gradients, expert = losses(logits, count)
    check(values, np.asarray(gradients))
    np.testing.assert_array_equal(np.reshape(expert, (8, 2)), expect["expert_TxK"])
    np.testing.assert_array_equal(np.bincount(np.ravel(expert)), count)

    # Two micro-batches of one sequence: losses add up, and so do gradients (each part has its own tokens here).
    first, second = (losses(logits[i : i + 1], count) for i in range(2))
    check(first[0] + second[0], np.concatenate([first[1], second[1]], axis=1))
    per_sequence = np.array([first[0][1], second[0][1]]) * 2  # of 8 tokens each had 4
    np.testing.assert_allclose(per_sequence, expect["sequence_losses"], rtol=tolerance["rel"])

    # Two data ranks of one sequence, the sequence cut over `context`, the same on every `tensor` rank.
    for sizes in [(2, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]:
        mesh = jax.make_mesh(sizes, ("data", "context", "tensor"), devices=jax.devices()[: np.prod(sizes)])
        with jax.set_mesh(mesh):
            values, gradients, _ = losses(jax.device_put(logits, jax.P("data", "context")), count)
            check(values, np.asarray(gradients))


def sequence_versus_batch(case):
    given, rel = case["given"], case["tolerance"]["rel"]
    logits = np.log(np.asarray(given["prob_per_sequence_E"], np.float32))[:, None].repeat(
        given["tokens_per_sequence"], 1
    )
    for scope, want in [("sequence", "sequence_mean"), ("global", "batch"), ("micro_batch", "batch")]:
        loss, (stats, expert) = loss_of(logits, spec_of(2, given["k"], scope))
        np.testing.assert_allclose(loss, case["expect"][want], rtol=rel)
        np.testing.assert_array_equal(np.asarray(expert)[:, 0, 0], given["expert_per_sequence"])
    metrics = balance_metrics(stats, spec_of(2, given["k"]))
    np.testing.assert_allclose(metrics["load_balance"], case["expect"]["batch"], rtol=rel)
    np.testing.assert_allclose(metrics["sequence_balance"], case["expect"]["sequence_mean"], rtol=rel)


def coefficient_is_linear(case):
    given, expect = case["given"], case["expect"]
    logits = np.asarray([given["logits_TxE"]], np.float32)
    pairs = list(itertools.product(("sequence", "micro_batch", "global"), given["coefficients"]))

    def all_losses(logits):
        _, expert, stats = route(logits, None, spec_of(4, given["k"]))
        specs = [spec_of(4, given["k"], scope, aux=coefficient) for scope, coefficient in pairs]
        counts = [stats.count_E if scope == "global" else None for scope, _ in pairs]
        return [balance_loss(stats, s, tokens=4, count_E=c) for s, c in zip(specs, counts, strict=True)], expert

    @jax.jit
    def gradients(logits):
        losses, vjp, expert = jax.vjp(all_losses, logits, has_aux=True)
        return losses, [vjp([jnp.float32(i == n) for i in range(len(pairs))])[0][0] for n in range(len(pairs))], expert

    losses, grads, expert = gradients(logits)
    np.testing.assert_array_equal(expert[0], expect["expert_TxK"])
    wanted = [coefficient * expect["loss_before_coefficient"] for _, coefficient in pairs]
    np.testing.assert_allclose(losses, wanted, rtol=case["tolerance"]["rel"])
    grads = {pair: np.asarray(grad) for pair, grad in zip(pairs, grads, strict=True)}
    for scope in ("sequence", "micro_batch", "global"):
        close = {"rtol": case["tolerance"]["rel"], "atol": case["tolerance"]["abs"]}
        np.testing.assert_allclose(grads[scope, 0.01], expect["d_logits_TxE_at_0.01"], **close)
        assert np.all(grads[scope, 0.0] == 0.0)
        np.testing.assert_allclose(grads[scope, 0.02], 2 * grads[scope, 0.01], rtol=1e-6)


def padding_is_excluded(case):
    given, expect = case["given"], case["expect"]
    logits = np.log(np.asarray([given["prob_TxE"]], np.float32))
    mask = np.asarray([given["mask_T"]])
    for scope in ("sequence", "micro_batch", "global"):
        spec = spec_of(2, given["k"], scope)
        loss, (stats, _) = loss_of(logits, spec, mask_BxL=mask, **forced(given["expert_TxK"], (1, 8)))
        np.testing.assert_allclose(loss, expect["loss"], rtol=case["tolerance"]["rel"])
        np.testing.assert_array_equal(stats.count_E, expect["count_E"])
        np.testing.assert_allclose(balance_metrics(stats, spec)["load_balance"], 1.0, rtol=case["tolerance"]["rel"])
    bias = update_select_bias(jnp.zeros(2), stats.count_E, BalanceConfig(bias_rate=0.001))
    np.testing.assert_array_equal(bias, [0.0, 0.0])  # balanced without the padding: nothing to correct


def z_loss_is_a_token_mean(case):
    given, expect, rel = case["given"], case["expect"], case["tolerance"]["rel"]

    def z_of(logits):
        loss, (stats, _) = loss_of(logits, spec_of(logits.shape[-1], 2, aux=0.0, z=1.0))
        return loss, balance_metrics(stats, spec_of(logits.shape[-1], 2))["router_z"]

    ranks = [np.asarray([given[f"rank_{r}_logits"]], np.float32) for r in range(2)]
    for logits, want in [
        (ranks[0], expect["rank_0"]),
        (ranks[1], expect["rank_1"]),
        (np.asarray([given["also_single_token"]], np.float32), expect["also_single_token"]),
    ]:
        np.testing.assert_allclose(z_of(logits), want, rtol=rel)
    with jax.set_mesh(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])):
        both = jax.device_put(np.stack(ranks), jax.P("data"))
        np.testing.assert_allclose(jax.jit(z_of)(both), expect["both_ranks"], rtol=rel)


def bias_moves_once_per_step(case):
    given = case["given"]
    bias, counts = jnp.asarray(given["bias_E"], jnp.float32), np.asarray(given["micro_batch_counts"], np.int32)
    balance = BalanceConfig(bias_rate=given["rate"])
    updated = update_select_bias(bias, jnp.asarray(counts.sum(0)), balance)
    np.testing.assert_allclose(updated, case["expect"]["bias_E"], atol=case["tolerance"]["abs"])

    # The same counts as statistics of two micro-batches: the sum of statistics is that of the step.
    def stats_of(count_E):
        experts = np.repeat(np.arange(4), count_E).astype(np.int32)[:, None]
        spec = spec_of(4, 1)
        return loss_of(np.zeros((1, 8, 4), np.float32), spec, **forced(experts, (1, 8)))[1][0]

    total = stats_of(counts[0]) + stats_of(counts[1])
    assert total.count_E.dtype == jnp.int32 and int(total.tokens) == 16
    np.testing.assert_array_equal(update_select_bias(bias, total.count_E, balance), updated)


def bias_of_every_layer_moves(case):
    given, expect = case["given"], case["expect"]
    balance = BalanceConfig(bias_rate=given["rate"])
    moe = {i: layer for i, layer in enumerate(given["layers"]) if layer["kind"] == "moe"}
    biases = {i: jnp.zeros(4) if layer["bias"] else None for i, layer in moe.items()}
    counts = {i: jnp.asarray(layer["count_E"], jnp.int32) for i, layer in moe.items()}
    updated = {i: update_select_bias(biases[i], counts[i], balance) for i in moe}
    assert updated[1] is None
    for i in (2, 3):
        np.testing.assert_allclose(updated[i], expect[f"bias_of_layer_{i}"], atol=case["tolerance"]["abs"])
    stacked = update_select_bias(jnp.zeros((2, 4)), jnp.stack([counts[2], counts[3]]), balance)
    np.testing.assert_array_equal(stacked, [updated[2], updated[3]])


def bias_stays_fp32(case):
    given, expect = case["given"], case["expect"]
    balance, atol = BalanceConfig(bias_rate=given["rate"]), case["tolerance"]["abs"]
    bias, count = jnp.full(4, given["bias"], jnp.float32), jnp.asarray([0, 5, 5, 2], jnp.int32)
    step = jax.jit(lambda bias: update_select_bias(bias, count, balance))
    for done in range(1, given["steps_always_underloaded"] + 1):
        bias = step(bias)
        if done == 1:
            np.testing.assert_allclose(bias[0], expect["after_1_step"], atol=atol)
    np.testing.assert_allclose(bias[0], expect["after_100_steps"], atol=atol)
    assert bias.dtype == expect["dtype"]
    spec = spec_of(4, 2, select_bias=True)
    for call in (lambda b: step(b), lambda b: route(jnp.zeros((1, 1, 4)), b, spec)):
        with pytest.raises(TypeError, match="select_bias is bfloat16; expected float32"):
            call(bias.astype(jnp.bfloat16))
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(folder, asynchronous=False)
        checkpoints.save(1, {"router_bias": bias}, {"next_index": 0})
        restored, _ = checkpoints.restore({"router_bias": jax.ShapeDtypeStruct((4,), jnp.float32)})
        np.testing.assert_array_equal(restored["router_bias"], bias)
        with pytest.raises(CheckpointError, match="router_bias.*bfloat16"):  # Orbax alone casts in silence
            checkpoints.restore({"router_bias": jax.ShapeDtypeStruct((4,), jnp.bfloat16)})
        checkpoints.close()
    # One step of the rate decides a choice: 0.5 against 0.501 in the bias of two equal scores.
    _, expert, _ = route(jnp.zeros((1, 1, 4)), jnp.asarray([0.5, 0.501, 0.5, 0.5], jnp.float32), spec)
    assert expert[0, 0].tolist() == [1, 0]


def bias_recentring_is_a_choice(case):
    given, expect, atol = case["given"], case["expect"], case["tolerance"]["abs"]
    count = jnp.asarray(given["count_E"], jnp.int32)
    for name, recentre in [("plain", False), ("recentred", True)]:
        balance = BalanceConfig(bias_rate=given["rate"], bias_recentre=recentre)
        bias = update_select_bias(jnp.asarray(given["bias_E"], jnp.float32), count, balance)
        np.testing.assert_allclose(bias, expect[f"{name}_after_1"], atol=1e-9)
        step = lambda bias, _, balance=balance: (update_select_bias(bias, count, balance), None)  # noqa: E731
        bias, _ = jax.lax.scan(step, jnp.asarray(given["bias_E"], jnp.float32), length=given["steps"])
        np.testing.assert_allclose(np.mean(bias), expect[f"{name}_mean_after_1000"], atol=atol)


def counts_follow_the_actual_selection(case):
    given, expect = case["given"], case["expect"]
    spec = spec_of(
        4, given["k"], n_group=given["groups"], topk_group=given["groups_kept"], group_top=given["group_top"]
    )
    loss, (stats, expert) = loss_of(np.asarray([given["logits_TxE"]], np.float32), spec)
    np.testing.assert_array_equal(expert[0], expect["expert_TxK"])
    np.testing.assert_array_equal(stats.count_E, expect["count_E"])
    np.testing.assert_allclose(loss, expect["loss"], rtol=case["tolerance"]["rel"])


CHECKS = {
    "balance-metric-is-counted-once": metric_is_counted_once,
    "balance-gradient-does-not-depend-on-the-split": gradient_does_not_depend_on_the_split,
    "balance-sequence-versus-batch": sequence_versus_batch,
    "balance-coefficient-is-linear": coefficient_is_linear,
    "balance-padding-is-excluded": padding_is_excluded,
    "balance-z-loss-is-a-token-mean": z_loss_is_a_token_mean,
    "balance-bias-moves-once-per-step": bias_moves_once_per_step,
    "balance-bias-of-every-layer-moves": bias_of_every_layer_moves,
    "balance-bias-stays-fp32": bias_stays_fp32,
    "balance-bias-recentring-is-a-choice": bias_recentring_is_a_choice,
    "balance-counts-follow-the-actual-selection": counts_follow_the_actual_selection,
}
