"""Balance: the sums a router reports, the losses and metrics made of them, and the rule that moves the selection bias.

`RouterStats` holds sums over real tokens, so it adds over micro-batches, ranks and layers; only `balance_loss`
divides, by the token count of the whole optimizer step that it is given. So the gradient does not depend on how a
batch is split. `routing.py` calls `router_stats`; read it first.

Per layer, f_e = E rows_e / (K tokens) is constant in the gradient, P_e is the mean router probability, and the loss is
sum_e f_e P_e, for any K: 1.0 at perfect balance. Source: Switch Transformer, arXiv 2101.03961, eqs. 4-6, with the rows
  counted
over all K choices; z-loss: ST-MoE, arXiv 2202.08906, eq. 5; bias rule: arXiv 2408.15664, algorithm 1.

Letters: B batch, L sequence, E experts, K experts per token. `...` is a stack of layers.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from moejax.config import BalanceConfig
from moejax.ops import hand_split
from moejax.ops.spec import MoESpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterStats:
    """Sums over real tokens, never means. Gradients flow through `prob_sum_E`, `z_sum` and `sequence_sum`.

    Attributes:
      count_E: int32 slots of each expert, before capacity.
      prob_sum_E: FP32 sum of the router probabilities (scores normalised to sum 1 over E).
      z_sum: FP32 sum of squared log-sum-exp of the logits.
      entropy_sum: FP32 sum of the entropy of the probabilities, in nats; a metric, no gradient.
      sequence_sum: FP32 sum over rows of the batch of (balance loss of the row) x (its real tokens).
      tokens: int32 real tokens.
      dropped: int32 slots that found no room; `route` leaves it 0, `moe_layer` fills it.
      moved_bytes: FP32 bytes sent over the expert axis by all devices, forward and backward; filled like `dropped`.
    """

    count_E: jax.Array
    prob_sum_E: jax.Array
    z_sum: jax.Array
    entropy_sum: jax.Array
    sequence_sum: jax.Array
    tokens: jax.Array
    dropped: jax.Array
    moved_bytes: jax.Array

    def __add__(self, other: "RouterStats") -> "RouterStats":
        return jax.tree.map(jnp.add, self, other)


def router_stats(
    prob_BxLxE: jax.Array, lse_BxL: jax.Array, expert_BxLxK: jax.Array, mask_BxL: jax.Array, spec: MoESpec
) -> RouterStats:
    """Sums over the real tokens of a batch, from the experts that were really chosen (never from a second top-k).

    Args:
      prob_BxLxE: FP32 router probabilities, sum 1 over E.
      lse_BxL: FP32 log-sum-exp of the logits.
      expert_BxLxK: int32 chosen experts, -1 for masked tokens.
      mask_BxL: bool, true for real tokens.
      spec: reads num_experts, top_k.
    """
    experts, top_k = spec.num_experts, spec.top_k
    expert_ids = jnp.arange(experts, dtype=jnp.int32)
    # A sum over slots written out: XLA vectorises it over E (0.4 ms for T 8192, K 8, E 128; one reduction over K: 13
    # ms).
    hit_BxLxE = sum((expert_BxLxK[..., s, None] == expert_ids).astype(jnp.int32) for s in range(top_k))
    count_BxE = jnp.sum(hit_BxLxE, axis=-2, dtype=jnp.int32)  # int64 otherwise where x64 is enabled
    tokens_B = jnp.sum(mask_BxL, axis=-1, dtype=jnp.int32)
    prob_BxLxE = jnp.where(mask_BxL[..., None], prob_BxLxE, 0.0)
    prob_sum_BxE = jnp.sum(prob_BxLxE, axis=-2)
    lse_BxL = jnp.where(mask_BxL, lse_BxL, 0.0)
    # The loss of a row is f . P with f = E count / (K tokens) and P = prob_sum / tokens; times its tokens, one of them
    # cancels.
    # Linear in P: of a row that several devices have pieces of, each adds its own part.
    whole_BxE, whole_B = hand_split.of_row(count_BxE), hand_split.of_row(tokens_B)
    row_loss_BxE = whole_BxE * (experts / top_k) * prob_sum_BxE / jnp.maximum(whole_B, 1)[..., None]
    fixed_BxLxE = jax.lax.stop_gradient(prob_BxLxE)
    safe_BxLxE = jnp.where(fixed_BxLxE == 0.0, 1.0, fixed_BxLxE)  # p log p is 0 at 0
    rows = tuple(range(count_BxE.ndim - 1))
    return RouterStats(
        count_E=jnp.sum(count_BxE, axis=rows, dtype=jnp.int32),
        prob_sum_E=jnp.sum(prob_sum_BxE, axis=rows),
        z_sum=jnp.sum(lse_BxL**2),
        entropy_sum=-jnp.sum(safe_BxLxE * jnp.log(safe_BxLxE)),
        sequence_sum=jnp.sum(row_loss_BxE),
        tokens=jnp.sum(tokens_B, dtype=jnp.int32),
        dropped=jnp.zeros((), jnp.int32),
        moved_bytes=jnp.zeros((), jnp.float32),
    )


def balance_loss(
    stats: RouterStats, spec: MoESpec, *, tokens: jax.Array | int, count_E: jax.Array | None = None
) -> jax.Array:
    """This call's share of the balance loss and the z-loss of a step, times their coefficients; shares add up.

    Args:
      stats: of one micro-batch; layers may be stacked in front, their losses add.
      spec: reads balance.
      tokens: real tokens of the whole optimizer step, over all ranks and micro-batches.
      count_E: scope `global` only: int32 rows per expert (and layer) of the whole step. It is `stats.count_E` if this
        call sees the whole step, else the sum over a forward-only counting pass.
    Returns:
      FP32 scalar. Its gradient is that of the whole step for the scopes `sequence` and `global`, however the step is
      split; scope `micro_batch` takes f over this call's tokens alone, so it does depend on the split.
    Raises:
      ValueError: scope `global` without `count_E`, or another scope with it.
    """
    balance = spec.balance
    if balance.aux_coef and (balance.aux_scope == "global") != (count_E is not None):
        raise ValueError(
            f"aux_scope is {balance.aux_scope!r} and count_E {'was' if count_E is not None else 'was not'} given: "
            "scope 'global' needs the counts of the whole step (stats.count_E if this call sees it all), others take none"
        )
    tokens = jnp.maximum(jnp.asarray(tokens, jnp.float32), 1.0)
    loss = jnp.zeros((), jnp.float32)
    if balance.aux_coef:  # a term that is off leaves no operation behind, so its gradient is exactly zero
        if balance.aux_scope == "sequence":
            aux = jnp.sum(stats.sequence_sum) / tokens
        else:
            aux = jnp.sum(frequency(stats.count_E if count_E is None else count_E) * stats.prob_sum_E) / tokens
        loss += balance.aux_coef * aux
    if balance.z_coef:
        loss += balance.z_coef * jnp.sum(stats.z_sum) / tokens
    return loss


def frequency(count_E: jax.Array) -> jax.Array:
    """f_E = E rows_e / (K tokens), FP32 (..., E): 1.0 for an expert with its even share. The rows sum to K tokens."""
    total = jnp.maximum(jnp.sum(count_E, axis=-1, keepdims=True), 1)
    return count_E.astype(jnp.float32) * count_E.shape[-1] / total.astype(jnp.float32)


def balance_metrics(stats: RouterStats, spec: MoESpec) -> dict[str, jax.Array]:
    """What to log about routing, FP32, per layer if layers are stacked.

    Returns:
      load_balance: sum_e f_e P_e over all tokens in `stats`; 1.0 is perfect.
      sequence_balance: the same per row of the batch, averaged over tokens; 1.0 is perfect.
      max_load: rows of the busiest expert over its even share; 1.0 is perfect.
      router_entropy: mean entropy of the router probabilities over ln E; 1.0 is uniform.
      router_z: mean squared log-sum-exp of the logits.
      dropped: share of the slots that found no room.
    """
    tokens = jnp.maximum(stats.tokens, 1).astype(jnp.float32)
    slots = jnp.maximum(jnp.sum(stats.count_E, axis=-1), 1).astype(jnp.float32)
    frequency_E = frequency(stats.count_E)
    return {
        "load_balance": jnp.sum(frequency_E * stats.prob_sum_E, axis=-1) / tokens,
        "sequence_balance": stats.sequence_sum / tokens,
        "max_load": jnp.max(frequency_E, axis=-1),
        "router_entropy": stats.entropy_sum / tokens / math.log(max(spec.num_experts, 2)),
        "router_z": stats.z_sum / tokens,
        "dropped": stats.dropped.astype(jnp.float32) / slots,
    }


def update_select_bias(bias_E: jax.Array | None, count_E: jax.Array, balance: BalanceConfig) -> jax.Array | None:
    """Moves the selection bias by one step: up where an expert had fewer rows than the mean, down where it had more.

    Called once per optimizer step, in training only, with the counts of the whole step over all ranks and
    micro-batches.

    Args:
      bias_E: FP32 (..., E), or None for a layer without a bias, which stays None.
      count_E: int32 (..., E).
      balance: reads bias_rate, and bias_recentre: subtract the mean of the update, so that the mean of the bias stays
        put.
    Raises:
      TypeError: the bias is not FP32 or the counts are not int32.
      ValueError: their shapes differ.
    """
    if bias_E is None:
        return None
    check_select_bias(bias_E, count_E.shape)
    if count_E.dtype != jnp.int32:
        raise TypeError(f"expert counts are {count_E.dtype}; expected int32, summed exactly over the whole step")
    experts = count_E.shape[-1]
    total = jnp.sum(count_E, axis=-1, keepdims=True)
    # sign(total / E - count) from quotient and remainder: exact, and E count is never formed, which could pass 2^31.
    mean, rest = total // experts, total % experts
    direction_E = jnp.sign(mean - count_E)
    direction_E = jnp.where((direction_E == 0) & (rest > 0), 1, direction_E).astype(jnp.float32)
    if balance.bias_recentre:
        direction_E -= jnp.mean(direction_E, axis=-1, keepdims=True)
    return bias_E + balance.bias_rate * direction_E


def check_select_bias(bias_E: jax.Array, shape: tuple[int, ...]) -> None:
    """Raises unless the bias is FP32 of that shape: in BF16 0.5 + 0.001 is 0.5, so it freezes (Megatron-LM #1482)."""
    if bias_E.dtype != jnp.float32:
        raise TypeError(f"select_bias is {bias_E.dtype}; expected float32 from update to selection and in checkpoints")
    if bias_E.shape != shape:
        raise ValueError(f"select_bias has shape {bias_E.shape}; expected {shape}")
