"""Routing: from router logits to the experts of each token and their weights, in FP32 throughout.

Order: logits -> scores -> + selection bias -> group filter -> top-k (ties: lower index) -> weights from the unbiased
scores -> norm -> scale. Behaviour follows from the fields of `RouterConfig`, never from a model's name. `balance.py`
makes losses and metrics of the statistics; `schedule.py` makes rows of the experts.

Letters: B batch, L sequence, D model width, E experts, K experts per token, G groups, S experts per group, V
  vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from moejax.config import RouterConfig
from moejax.mesh import RULES
from moejax.ops.balance import RouterStats, check_select_bias, router_stats
from moejax.ops.spec import SCHEDULE_NAME, MoESpec, check_router

NORM_EPSILON = 1e-20  # keeps a token whose scores all underflow at weight 0 (DeepSeek-V3's modelling code)


def router_logits(x_BxLxD: jax.Array, w_router_ExD: jax.Array, router_bias_E: jax.Array | None = None) -> jax.Array:
    """Logits by FP32 products, whatever the dtype of x: BF16 logits tie where FP32 ones do not (torchtitan #2389).

    Args:
      x_BxLxD: activations; any leading axes.
      w_router_ExD: FP32 gate weights.
      router_bias_E: FP32 learned bias (`router.router_bias`), or None.
    Raises:
      TypeError: weights or bias are not FP32.
      ValueError: a shape does not fit the others.
    """
    for name, array in (("w_router_ExD", w_router_ExD), ("router_bias_E", router_bias_E)):
        if array is not None and array.dtype != jnp.float32:
            raise TypeError(f"{name} is {array.dtype}; expected float32: the router runs in FP32 in every recipe")
    if w_router_ExD.ndim != 2 or w_router_ExD.shape[1] != x_BxLxD.shape[-1]:
        raise ValueError(
            f"w_router_ExD has shape {w_router_ExD.shape}; expected (E, {x_BxLxD.shape[-1]}), the width of x"
        )
    if router_bias_E is not None and router_bias_E.shape != w_router_ExD.shape[:1]:
        raise ValueError(
            f"router_bias_E has shape {router_bias_E.shape}; expected {w_router_ExD.shape[:1]}, one entry per expert"
        )
    w_router_ExD = _whole(w_router_ExD)
    x_BxLxD = x_BxLxD.astype(jnp.float32)
    # HIGHEST: by default a GPU multiplies FP32 operands in TF32, with 10 bits of mantissa.
    logits_BxLxE = jnp.einsum("...d,ed->...e", x_BxLxD, w_router_ExD, precision=jax.lax.Precision.HIGHEST)
    return logits_BxLxE if router_bias_E is None else logits_BxLxE + _whole(router_bias_E)


def route(
    logits_BxLxE: jax.Array,
    bias_E: jax.Array | None,
    spec: MoESpec,
    mask_BxL: jax.Array | None = None,
    token_BxL: jax.Array | None = None,
    hash_table_VxK: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, RouterStats]:
    """Chooses K experts per token.

    A token with a non-finite logit or selection score (of either sign) is poisoned: its weights are NaN, and so are the
    sums in the statistics, while its expert ids stay distinct and in 0..E-1. A masked token gets expert -1 and weight
    0; its logits are not read.

    Args:
      logits_BxLxE: FP32 router logits.
      bias_E: FP32 selection bias, given exactly if `router.select_bias`. It moves the choice only and has no gradient.
      spec: reads num_experts, router.
      mask_BxL: true or nonzero for real tokens; None: all are real.
      token_BxL: int32 token ids, for hash routing.
      hash_table_VxK: int32 frozen table token -> K experts. If given, this layer chooses by it, and the logits still
        give the weights. A token outside the table, or an entry that is not K distinct experts, poisons the token.
    Returns:
      FP32 weight_BxLxK, int32 expert_BxLxK, RouterStats.
    Raises:
      TypeError: logits or bias are not FP32.
      ValueError: shapes do not match, or the router's fields contradict each other.
    """
    router = spec.router
    check_router(router, spec.num_experts)
    _check_inputs(logits_BxLxE, bias_E, spec, mask_BxL, token_BxL, hash_table_VxK)
    with jax.named_scope("route"):
        mask_BxL = jnp.ones(logits_BxLxE.shape[:-1], bool) if mask_BxL is None else mask_BxL != 0
        # Padding may hold anything, and 0 * NaN in a gradient is NaN, so it is taken out before the first operation.
        logits_BxLxE = jnp.where(mask_BxL[..., None], logits_BxLxE, 0.0)
        broken_BxL = ~jnp.all(jnp.isfinite(logits_BxLxE), axis=-1)

        if hash_table_VxK is not None:
            chosen_BxLxK, unknown_BxL = _look_up(token_BxL, hash_table_VxK, spec)
            broken_BxL |= unknown_BxL & mask_BxL
        else:
            select_BxLxE = _score(logits_BxLxE, router) if router.score_before_topk else logits_BxLxE
            select_BxLxE = jax.lax.stop_gradient(select_BxLxE)
            if bias_E is not None:
                select_BxLxE += _whole(jax.lax.stop_gradient(bias_E))
            broken_BxL |= ~jnp.all(jnp.isfinite(select_BxLxE), axis=-1) & mask_BxL
            # Any finite stand-in gives distinct ids: top_k of a row with a NaN depends on the NaN's sign.
            chosen_BxLxK = _choose(jnp.where(broken_BxL[..., None], 0.0, select_BxLxE), router)
        if router.forced_balance:
            first, whole = _place_in_batch(chosen_BxLxK.shape[:-1])
            chosen_BxLxK = jnp.zeros_like(chosen_BxLxK) + _spread(chosen_BxLxK.shape, spec.num_experts, first, whole)
        # Saved under remat: recomputed scores may differ in a last bit from the ones that chose. The barrier keeps XLA's
        # CPU backend from fusing the end of top_k into the counts, which redoes it per expert: 56 ms instead of 9.
        chosen_BxLxK = jax.lax.optimization_barrier(checkpoint_name(chosen_BxLxK, SCHEDULE_NAME))
        expert_BxLxK = jnp.where(mask_BxL[..., None], chosen_BxLxK, -1)

        # Poison by a factor: XLA's CPU exp turns a NaN into a number, so one in the logits need not come out again.
        poison_BxL = jnp.where(broken_BxL, jnp.nan, 1.0)
        logits_BxLxE = jnp.where(broken_BxL[..., None], 0.0, logits_BxLxE)
        weight_BxLxK = _combine_weights(logits_BxLxE, chosen_BxLxK, router) * poison_BxL[..., None]
        weight_BxLxK = jnp.where(mask_BxL[..., None], weight_BxLxK, 0.0)
        prob_BxLxE = probabilities(logits_BxLxE, router) * poison_BxL[..., None]
        lse_BxL = jax.nn.logsumexp(logits_BxLxE, axis=-1) * poison_BxL
        stats = router_stats(prob_BxLxE, lse_BxL, expert_BxLxK, mask_BxL, spec)
    return weight_BxLxK, expert_BxLxK, stats


def probabilities(logits_BxLxE: jax.Array, router: RouterConfig) -> jax.Array:
    """What the balance loss calls P: the scores divided by their sum over E, FP32.

    Softmax of the logits where scores can be negative (`identity`) or are taken after the choice.
    """
    if router.score_fn in ("softmax", "identity") or not router.score_before_topk:
        return jax.nn.softmax(logits_BxLxE, axis=-1)
    return _shares(_score(logits_BxLxE, router))


def make_hash_table(vocab_size: int, spec: MoESpec, seed: int = 0) -> np.ndarray:
    """A frozen table token -> K distinct experts for hash layers, int32 (V, K), balanced over the vocabulary.

    It is state: keep it in the checkpoint, or every token goes where another table says. Source: Hash Layers, arXiv
    2106.04426, with a permutation in place of a hash, so that experts hold equal numbers of tokens.

    Raises:
      ValueError: the vocabulary is empty.
    """
    if vocab_size < 1:
        raise ValueError(f"vocab_size is {vocab_size}; expected at least 1")
    spread_VxK = np.asarray(_spread((vocab_size, spec.top_k), spec.num_experts))
    return spread_VxK[np.random.default_rng(seed).permutation(vocab_size)]


def _score(logits_BxLxE, router: RouterConfig):
    if router.score_fn == "softmax":
        return jax.nn.softmax(logits_BxLxE, axis=-1)
    if router.score_fn == "sigmoid":
        return jax.nn.sigmoid(logits_BxLxE)
    if router.score_fn == "sqrtsoftplus":
        # Below -17, log(1 + e^x) is e^x to FP32 precision, and e^(x/2) has a gradient where sqrt(0) has none. Each form
        # reads -17 where the other is selected: e^(x/2) of a large logit would be Inf, and 0 * Inf in its gradient NaN.
        low_BxLxE = logits_BxLxE < -17.0
        small_BxLxE = jnp.exp(0.5 * jnp.where(low_BxLxE, logits_BxLxE, -17.0))
        return jnp.where(low_BxLxE, small_BxLxE, jnp.sqrt(jax.nn.softplus(jnp.where(low_BxLxE, -17.0, logits_BxLxE))))
    return logits_BxLxE


def _choose(select_BxLxE, router: RouterConfig):
    """Top-k of the selection scores, inside the kept groups; ties go to the lower index."""
    select_BxLxE = jnp.where(select_BxLxE == 0.0, 0.0, select_BxLxE)  # top_k puts -0.0 below 0.0; they must tie
    if router.n_group > 1:
        lead = select_BxLxE.shape[:-1]
        select_BxLxGxS = select_BxLxE.reshape(*lead, router.n_group, -1)
        best_BxLxGxC, _ = jax.lax.top_k(select_BxLxGxS, router.group_top)
        _, group_BxLxC = jax.lax.top_k(jnp.sum(best_BxLxGxC, axis=-1), router.topk_group)
        kept_BxLxG = jnp.any(group_BxLxC[..., None] == jnp.arange(router.n_group, dtype=jnp.int32), axis=-2)
        # -inf, not 0: selection scores may all be negative (DeepSeek-V3 #741).
        select_BxLxE = jnp.where(kept_BxLxG[..., None], select_BxLxGxS, -jnp.inf).reshape(select_BxLxE.shape)
    return jax.lax.top_k(select_BxLxE, router.top_k)[1].astype(jnp.int32)


def _look_up(token_BxL, hash_table_VxK, spec: MoESpec):
    """Experts from the frozen table, and which tokens have none there (their ids become 0..K-1)."""
    # With explicitly sharded tokens JAX asks how the gathered rows lie: as the tokens do.
    spec_BxL = jax.typeof(token_BxL).sharding.spec
    chosen_BxLxK = (
        _whole(jnp.asarray(hash_table_VxK))
        .at[token_BxL]
        .get(mode="fill", fill_value=-1, out_sharding=jax.P(*spec_BxL, None) if any(spec_BxL) else None)
    )
    valid_BxLxK = (chosen_BxLxK >= 0) & (chosen_BxLxK < spec.num_experts)
    same_BxLxKxK = chosen_BxLxK[..., :, None] == chosen_BxLxK[..., None, :]
    distinct_BxL = jnp.sum(same_BxLxKxK, axis=(-2, -1)) == spec.top_k  # a table never restored is all zeros
    fine_BxL = jnp.all(valid_BxLxK, axis=-1) & distinct_BxL & (token_BxL >= 0)  # .at[] counts -1 from the end
    return jnp.where(fine_BxL[..., None], chosen_BxLxK, jnp.arange(spec.top_k, dtype=jnp.int32)), ~fine_BxL


def _place_in_batch(shape_BxL: tuple[int, ...]) -> tuple[Sequence[Any], Sequence[int]]:
    """Where this device's piece of the batch begins, and the shape of the batch: inside a `shard_map` that splits it, else all."""
    mesh = jax.sharding.get_abstract_mesh()
    first, whole = [], []
    for size, name in zip(shape_BxL, ("batch", "sequence")):
        rule = RULES[name]
        axes = tuple(axis for axis in ((rule,) if isinstance(rule, str) else rule or ()) if axis in mesh.manual_axes)
        first.append(size * jax.lax.axis_index(axes) if axes else 0)
        whole.append(size * math.prod(mesh.shape[axis] for axis in axes))
    return first, whole


def _spread(shape_BxLxK, experts: int, first: Sequence[Any] | None = None, whole: Sequence[int] | None = None):
    """Experts that share all slots out evenly: counts differ by at most 1, and the experts of a token lie far apart.

    Args:
      first, whole: place of these tokens in an array of tokens that is shared out as a whole, and its shape.
    """
    *lead, top_k = shape_BxLxK
    first, whole = first or [0] * len(lead), whole or lead
    token_BxL = jnp.zeros(lead, jnp.int32)
    for axis in range(len(lead)):  # token index modulo E: the flat index itself could pass 2^31
        step = math.prod(whole[axis + 1 :]) % experts
        index_BxL = first[axis] + jax.lax.broadcasted_iota(jnp.int32, lead, axis)
        token_BxL += index_BxL % experts * step
    slot_BxLxK = token_BxL[..., None] % experts * top_k + jnp.arange(top_k, dtype=jnp.int32)
    # Consecutive slots are a permutation of the experts, `stride` apart: coprime to E, near E / K.
    stride = next(s for s in range(experts // top_k, experts + 2) if math.gcd(s, experts) == 1)
    return slot_BxLxK % experts * stride % experts


def _combine_weights(logits_BxLxE, chosen_BxLxK, router: RouterConfig):
    """Weights of the chosen experts, from scores without the bias. Source: arXiv 2412.19437, eqs. 13-16."""
    if router.score_before_topk:
        weight_BxLxK = _take(_score(logits_BxLxE, router), chosen_BxLxK)
    else:
        weight_BxLxK = jax.nn.softmax(_take(logits_BxLxE, chosen_BxLxK), axis=-1)
    if router.norm_topk:
        # The K best of a softmax sum to K / E or more, so there the gradient of a plain division is sound.
        if router.score_fn == "softmax":
            weight_BxLxK = weight_BxLxK / (jnp.sum(weight_BxLxK, axis=-1, keepdims=True) + NORM_EPSILON)
        else:
            weight_BxLxK = _shares(weight_BxLxK)
    return weight_BxLxK * router.route_scale


@jax.custom_jvp
def _shares(score_BxLxC):
    """Scores over their sum, with a derivative that never squares the sum: below 1e-19 the square is 0 in FP32."""
    return score_BxLxC / (jnp.sum(score_BxLxC, axis=-1, keepdims=True) + NORM_EPSILON)


@_shares.defjvp
def _shares_jvp(primals, tangents):
    (score_BxLxC,), (d_score_BxLxC,) = primals, tangents
    share_BxLxC = _shares(score_BxLxC)
    total_BxLx1 = jnp.sum(score_BxLxC, axis=-1, keepdims=True) + NORM_EPSILON
    return share_BxLxC, (d_score_BxLxC - share_BxLxC * jnp.sum(d_score_BxLxC, axis=-1, keepdims=True)) / total_BxLx1


def _whole(array: jax.Array) -> jax.Array:
    """Gathers a small sharded array, such as gate weights over `fsdp`: every token reads all of it."""
    if any(jax.typeof(array).sharding.spec):
        return jax.reshard(array, jax.P())
    kinds = set(jax.sharding.get_abstract_mesh().axis_types)
    if kinds == {
        jax.sharding.AxisType.Auto
    }:  # or the partitioner computes logits sharded over experts, and moves those
        return jax.lax.with_sharding_constraint(array, jax.P())
    return array


def _take(value_BxLxE, chosen_BxLxK):
    """value[..., chosen]. The experts of a token are distinct, so the transposed scatter adds once to a place."""

    def take(value_E, chosen_K):
        return value_E.at[chosen_K].get(mode="promise_in_bounds", unique_indices=True)

    for _ in range(value_BxLxE.ndim - 1):
        take = jax.vmap(take)
    return take(value_BxLxE, chosen_BxLxK)


def _check_inputs(logits_BxLxE, bias_E, spec, mask_BxL, token_BxL, hash_table_VxK) -> None:
    experts, top_k = spec.num_experts, spec.top_k
    if logits_BxLxE.dtype != jnp.float32:
        raise TypeError(f"router logits are {logits_BxLxE.dtype}; expected float32: compute them with router_logits")
    if logits_BxLxE.ndim < 2 or logits_BxLxE.shape[-1] != experts:
        raise ValueError(f"router logits have shape {logits_BxLxE.shape}; expected (batch, sequence, {experts})")
    if (bias_E is not None) != spec.router.select_bias:
        given = "none was given" if bias_E is None else "one was given"
        raise ValueError(f"router.select_bias is {spec.router.select_bias} but {given}: pass it exactly if it is set")
    if bias_E is not None:
        check_select_bias(bias_E, (experts,))
    lead = logits_BxLxE.shape[:-1]
    for name, array in (("mask_BxL", mask_BxL), ("token_BxL", token_BxL)):
        if array is not None and array.shape != lead:
            raise ValueError(f"{name} has shape {array.shape}; expected {lead}, as in the logits")
    if hash_table_VxK is None:
        return
    if token_BxL is None:
        raise ValueError("a hash table without token ids: pass token_BxL")
    if token_BxL.dtype != jnp.int32:
        raise TypeError(f"token_BxL is {token_BxL.dtype}; expected int32 token ids")
    vocabulary, *rest = hash_table_VxK.shape or (0,)
    if vocabulary == 0 or rest != [top_k] or hash_table_VxK.dtype != jnp.int32:
        raise ValueError(
            f"hash table is {hash_table_VxK.dtype} {hash_table_VxK.shape}; expected int32 (vocabulary, {top_k})"
        )
