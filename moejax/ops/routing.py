"""Routing: from router logits to the experts of each token and their weights, in FP32 throughout.

Order: logits -> scores -> + selection bias -> group filter -> top-k (ties: lower index) -> weights from the unbiased scores
-> norm -> scale. Behaviour follows from the fields of `RouterConfig`. `balance.py` turns the sums of `RouterStats` into losses
and metrics; `schedule.py` turns the experts into rows.

Letters: B batch, L sequence, D model width, E experts, K experts per token, G groups, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from moejax.config import RouterConfig
from moejax.ops.spec import SCHEDULE_NAME, MoESpec, check_router


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterStats:
    """Sums over real tokens, never means, so that they add over micro-batches, ranks and (stacked) layers.

    Gradients flow through `prob_sum_E`, `z_sum` and `sequence_sum`; counts are constants.

    Attributes:
      count_E: int32 slots of each expert, before capacity.
      prob_sum_E: FP32 sum of the router probabilities (scores normalised to sum 1 over E).
      z_sum: FP32 sum of squared log-sum-exp of the logits.
      entropy_sum: FP32 sum of the entropy of the probabilities, in nats; a metric, no gradient.
      sequence_sum: FP32 sum over rows of the batch of (balance loss of the row) x (its real tokens).
      tokens: int32 real tokens.
      dropped: int32 slots that found no room; `route` leaves it 0, `moe_layer` fills it.
    """

    count_E: jax.Array
    prob_sum_E: jax.Array
    z_sum: jax.Array
    entropy_sum: jax.Array
    sequence_sum: jax.Array
    tokens: jax.Array
    dropped: jax.Array

    def __add__(self, other: "RouterStats") -> "RouterStats":
        return jax.tree.map(jnp.add, self, other)


def router_logits(x_BxLxD: jax.Array, w_router_ExD: jax.Array, router_bias_E: jax.Array | None = None) -> jax.Array:
    """Logits in FP32 with FP32 products, whatever the dtype of x (BF16 logits tie where FP32 ones do not, torchtitan #2389).

    Args:
      x_BxLxD: activations; any leading axes.
      w_router_ExD: FP32 gate weights.
      router_bias_E: FP32 learned bias (`router.router_bias`), or None.
    """
    # HIGHEST: the default precision of a GPU product of FP32 operands is TF32, with 10 bits of mantissa.
    logits_BxLxE = jnp.einsum(
        "...d,ed->...e", x_BxLxD.astype(jnp.float32), w_router_ExD, precision=jax.lax.Precision.HIGHEST
    )
    return logits_BxLxE if router_bias_E is None else logits_BxLxE + router_bias_E


def route(
    logits_BxLxE: jax.Array,
    bias_E: jax.Array | None,
    spec: MoESpec,
    mask_BxL: jax.Array | None = None,
    token_BxL: jax.Array | None = None,
    hash_table_VxK: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, RouterStats]:
    """Chooses K experts per token.

    A token with a non-finite logit (or a NaN anywhere in the bias) is poisoned: its weights, and the sums of the statistics,
    are NaN, while its expert ids stay distinct and in 0..E-1. A masked token gets expert -1 and weight 0, and its logits
    are not read.

    Args:
      logits_BxLxE: FP32 router logits.
      bias_E: FP32 selection bias (`router.select_bias`), or None. Moves the choice only; no gradient.
      spec: reads num_experts, router.
      mask_BxL: true or nonzero for real tokens; None: all are real.
      token_BxL: int32 token ids, for hash routing.
      hash_table_VxK: int32 frozen table token -> K experts. Given: this layer chooses by it, and the logits still give the
        weights. A token outside the table, or an entry that is not K distinct experts, poisons the token.
    Returns:
      FP32 weight_BxLxK, int32 expert_BxLxK, RouterStats.
    Raises:
      TypeError: logits or bias are not FP32.
      ValueError: shapes do not match, or the router fields contradict each other.
    """
    router = spec.router
    check_router(router, spec.num_experts)
    _check_inputs(logits_BxLxE, bias_E, spec, mask_BxL, token_BxL, hash_table_VxK)
    with jax.named_scope("route"):
        mask_BxL = jnp.ones(logits_BxLxE.shape[:-1], bool) if mask_BxL is None else mask_BxL != 0
        # Padding may hold anything, and 0 * NaN is NaN in a gradient: take it out before the first operation.
        logits_BxLxE = jnp.where(mask_BxL[..., None], logits_BxLxE, 0.0)
        broken_BxL = ~jnp.all(jnp.isfinite(logits_BxLxE), axis=-1)

        select_BxLxE = _score(logits_BxLxE, router) if router.score_before_topk else logits_BxLxE
        select_BxLxE = jax.lax.stop_gradient(select_BxLxE)
        if bias_E is not None:
            select_BxLxE = select_BxLxE + jax.lax.stop_gradient(bias_E)
        broken_BxL |= ~jnp.all(jnp.isfinite(select_BxLxE), axis=-1)
        select_BxLxE = jnp.where(broken_BxL[..., None], 0.0, select_BxLxE)
        expert_BxLxK = _choose(select_BxLxE, router)
        if hash_table_VxK is not None:
            expert_BxLxK, unknown_BxL = _look_up(token_BxL, hash_table_VxK, spec)
            broken_BxL |= unknown_BxL & mask_BxL
        if router.forced_balance:
            expert_BxLxK = jnp.broadcast_to(_spread(logits_BxLxE.shape, spec), expert_BxLxK.shape)
        expert_BxLxK = checkpoint_name(jnp.where(mask_BxL[..., None], expert_BxLxK, -1), SCHEDULE_NAME)

        logits_BxLxE = jnp.where(broken_BxL[..., None], jnp.nan, logits_BxLxE)
        weight_BxLxK = _combine_weights(logits_BxLxE, expert_BxLxK, router)
        weight_BxLxK = jnp.where(mask_BxL[..., None], weight_BxLxK, 0.0)
        stats = _statistics(logits_BxLxE, expert_BxLxK, mask_BxL, spec)
    return weight_BxLxK, expert_BxLxK, stats


def _score(logits_BxLxE, router: RouterConfig):
    if router.score_fn == "softmax":
        return jax.nn.softmax(logits_BxLxE, axis=-1)
    if router.score_fn == "sigmoid":
        return jax.nn.sigmoid(logits_BxLxE)
    if router.score_fn == "sqrtsoftplus":
        # Below -17, log(1 + e^x) is e^x to FP32 precision, and e^(x/2) keeps a gradient where sqrt(0) has none.
        usual = jnp.sqrt(jax.nn.softplus(jnp.maximum(logits_BxLxE, -17.0)))
        return jnp.where(logits_BxLxE < -17.0, jnp.exp(0.5 * logits_BxLxE), usual)
    return logits_BxLxE


def _choose(select_BxLxE, router: RouterConfig):
    """Top-k of the selection scores, inside the kept groups."""
    select_BxLxE = jnp.where(select_BxLxE == 0.0, 0.0, select_BxLxE)  # top_k puts -0.0 below 0.0; they must tie
    if router.n_group > 1:
        *lead, num_experts = select_BxLxE.shape
        select_BxLxGxS = select_BxLxE.reshape(*lead, router.n_group, num_experts // router.n_group)
        best_BxLxGxC, _ = jax.lax.top_k(select_BxLxGxS, router.group_top)
        _, group_BxLxC = jax.lax.top_k(jnp.sum(best_BxLxGxC, axis=-1), router.topk_group)
        kept_BxLxG = jnp.any(group_BxLxC[..., None] == jnp.arange(router.n_group, dtype=jnp.int32), axis=-2)
        # -inf, not 0: selection scores may all be negative (DeepSeek-V3 #741).
        select_BxLxE = jnp.where(kept_BxLxG[..., None], select_BxLxGxS, -jnp.inf).reshape(*lead, num_experts)
    return jax.lax.top_k(select_BxLxE, router.top_k)[1].astype(jnp.int32)


def _look_up(token_BxL, hash_table_VxK, spec: MoESpec):
    """Experts from the frozen table, and which tokens have none there (their ids become 0..K-1)."""
    expert_BxLxK = hash_table_VxK.at[token_BxL].get(mode="fill", fill_value=-1)
    unknown_BxL = jnp.any((expert_BxLxK < 0) | (expert_BxLxK >= spec.num_experts), axis=-1)
    unknown_BxL |= token_BxL < 0  # .at[] counts negative indices from the end
    same_BxLxKxK = expert_BxLxK[..., :, None] == expert_BxLxK[..., None, :]
    unknown_BxL |= jnp.sum(same_BxLxKxK, axis=(-2, -1)) > spec.top_k  # a table that was never filled is all zeros
    return jnp.where(unknown_BxL[..., None], jnp.arange(spec.top_k, dtype=jnp.int32), expert_BxLxK), unknown_BxL


def _spread(shape, spec: MoESpec):
    """Experts that share all slots out evenly: counts differ by at most 1, and a token's experts lie far apart."""
    length, experts, top_k = shape[-2], spec.num_experts, spec.top_k
    stride = next(s for s in range(max(1, experts // top_k), 2 * experts + 2) if np.gcd(s, experts) == 1)
    token_BxL = jax.lax.broadcasted_iota(jnp.int32, shape[:-1], len(shape) - 2) % experts
    for axis in range(len(shape) - 2):
        step = int(np.prod(shape[axis + 1 : -1])) % experts
        token_BxL += jax.lax.broadcasted_iota(jnp.int32, shape[:-1], axis) % experts * step
    del length
    slot_BxLxK = token_BxL[..., None] % experts * top_k + jnp.arange(top_k, dtype=jnp.int32)
    return slot_BxLxK % experts * (stride % experts or 1) % experts


def _combine_weights(logits_BxLxE, expert_BxLxK, router: RouterConfig):
    """Weights of the chosen experts, from scores without the bias. Source: DeepSeek-V3, arXiv 2412.19437, eqs. 13-16."""
    if router.score_before_topk:
        weight_BxLxK = _gather(_score(logits_BxLxE, router), expert_BxLxK)
    else:
        weight_BxLxK = jax.nn.softmax(_gather(logits_BxLxE, expert_BxLxK), axis=-1)
    if router.norm_topk:
        weight_BxLxK = weight_BxLxK / (jnp.sum(weight_BxLxK, axis=-1, keepdims=True) + 1e-20)
    return weight_BxLxK * router.route_scale


def _gather(value_BxLxE, expert_BxLxK):
    """value[..., expert] as a masked sum: XLA fuses it, and its transpose needs no scatter. An expert of -1 gives 0."""
    hit_BxLxKxE = expert_BxLxK[..., None] == jnp.arange(value_BxLxE.shape[-1], dtype=jnp.int32)
    return jnp.sum(jnp.where(hit_BxLxKxE, value_BxLxE[..., None, :], 0.0), axis=-1)


def probabilities(logits_BxLxE: jax.Array, router: RouterConfig) -> jax.Array:
    """Router probabilities of the balance losses: the scores divided by their sum over E; softmax where scores can be negative
    (`identity`) or are taken after the choice."""
    if router.score_fn in ("softmax", "identity") or not router.score_before_topk:
        return jax.nn.softmax(logits_BxLxE, axis=-1)
    score_BxLxE = _score(logits_BxLxE, router)
    return score_BxLxE / (jnp.sum(score_BxLxE, axis=-1, keepdims=True) + 1e-20)


def _statistics(logits_BxLxE, expert_BxLxK, mask_BxL, spec: MoESpec) -> RouterStats:
    experts, router = spec.num_experts, spec.router
    tokens_B = jnp.sum(mask_BxL, axis=-1, dtype=jnp.int32)
    hit_BxLxKxE = expert_BxLxK[..., None] == jnp.arange(experts, dtype=jnp.int32)
    count_BxE = jnp.sum(hit_BxLxKxE, axis=(-3, -2), dtype=jnp.int32)
    prob_BxLxE = jnp.where(mask_BxL[..., None], probabilities(logits_BxLxE, router), 0.0)
    prob_sum_BxE = jnp.sum(prob_BxLxE, axis=-2)
    lse_BxL = jnp.where(mask_BxL, jax.nn.logsumexp(logits_BxLxE, axis=-1), 0.0)
    # f of a row, times its real tokens: E count / (K tokens) * tokens. The loss of a row is f . P with P = prob_sum / tokens.
    frequency_BxE = count_BxE * (experts / router.top_k)
    mean_prob_BxE = prob_sum_BxE / jnp.maximum(tokens_B, 1)[..., None]
    fixed_BxLxE = jax.lax.stop_gradient(prob_BxLxE)
    entropy_BxLxE = jnp.where(
        fixed_BxLxE == 0.0, 0.0, -fixed_BxLxE * jnp.log(jnp.where(fixed_BxLxE == 0.0, 1.0, fixed_BxLxE))
    )
    lead = tuple(range(count_BxE.ndim - 1))
    return RouterStats(
        count_E=jnp.sum(count_BxE, axis=lead, dtype=jnp.int32),
        prob_sum_E=jnp.sum(prob_sum_BxE, axis=lead),
        z_sum=jnp.sum(lse_BxL**2),
        entropy_sum=jnp.sum(entropy_BxLxE),
        sequence_sum=jnp.sum(frequency_BxE * mean_prob_BxE),
        tokens=jnp.sum(tokens_B, dtype=jnp.int32),
        dropped=jnp.zeros((), jnp.int32),
    )


def _check_inputs(logits_BxLxE, bias_E, spec, mask_BxL, token_BxL, hash_table_VxK) -> None:
    experts, top_k = spec.num_experts, spec.top_k
    if logits_BxLxE.dtype != jnp.float32:
        raise TypeError(f"router logits are {logits_BxLxE.dtype}; expected float32: compute them with `router_logits`")
    if logits_BxLxE.ndim < 2 or logits_BxLxE.shape[-1] != experts:
        raise ValueError(f"router logits have shape {logits_BxLxE.shape}; expected (batch, sequence, {experts})")
    if (bias_E is not None) != spec.router.select_bias:
        given = "none was given" if bias_E is None else "one was given"
        raise ValueError(
            f"router.select_bias is {spec.router.select_bias} but {given}: pass the bias exactly when it is set"
        )
    if bias_E is not None:
        check_select_bias(bias_E, (experts,))
    lead = logits_BxLxE.shape[:-1]
    for name, array in (("mask", mask_BxL), ("token", token_BxL)):
        if array is not None and array.shape != lead:
            raise ValueError(
                f"{name} has shape {array.shape}; expected {lead}, that of the logits without their last axis"
            )
    if hash_table_VxK is None:
        return
    if token_BxL is None:
        raise ValueError("hash routing needs the token ids: pass token_BxL")
    if hash_table_VxK.ndim != 2 or hash_table_VxK.shape[1] != top_k or hash_table_VxK.dtype != jnp.int32:
        raise ValueError(
            f"hash table is {hash_table_VxK.dtype}{hash_table_VxK.shape}; expected int32 (vocabulary, {top_k})"
        )


def check_select_bias(bias_E, shape: tuple[int, ...]) -> None:
    """Raises unless the bias is FP32 of that shape: in BF16 0.5 + 0.001 is 0.5, so it would freeze (Megatron-LM #1482)."""
    if bias_E.dtype != jnp.float32:
        raise TypeError(
            f"select_bias is {bias_E.dtype}; expected float32, from update to selection and in the checkpoint"
        )
    if bias_E.shape != shape:
        raise ValueError(f"select_bias has shape {bias_E.shape}; expected {shape}")
