"""One optimizer step, as a pure function that is compiled once.

    gradients over micro-batches (`gradients.py`) -> one global norm -> clip -> refuse non-finite -> update
    -> router biases -> metrics

Every loss is a sum over tokens divided by a count of the whole step, taken from the masks before the first micro-batch, so
cutting the batch into micro-batches changes the order of a sum and nothing else. Read `loop.py` next.

Letters: B batch, L sequence, D model width, V vocabulary, E experts, N MoE layers here, m micro-batches.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.checkpoint import named_leaves
from moejax.config import Config
from moejax.ops import mxfp8_rates
from moejax.ops.balance import update_select_bias
from moejax.ops.spec import MoESpec, moe_spec
from moejax.training.gradients import Batch, make_gradients
from moejax.training.gradients import (
    needs_counting_pass as needs_counting_pass,
)  # part of what a training script asks of a step
from moejax.training.optimizer import learning_rate, make_optimizer
from moejax.training.state import Skeleton, TrainState, apply_update

Metrics = dict[str, jax.Array]


def split_batch(batch: dict[str, np.ndarray], micro_batches: int) -> dict[str, np.ndarray]:
    """(B, L) arrays as (m, B/m, L), rows in order."""
    return {name: x.reshape(micro_batches, x.shape[0] // micro_batches, *x.shape[1:]) for name, x in batch.items()}


def make_step(skeleton: Skeleton, config: Config) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step for this model and config; pass it to `jax.jit(…, donate_argnums=0)`.

    The step takes a state and a batch of int32 (m, B/m, L) arrays (`split_batch`), and returns the next state and:
      loss: cross-entropy, nats per scored token.
      balance_loss: what the balance and z losses add, coefficients included.
      grad_norm: over all parameters, before clipping.
      grad_squares: squared norm of each gradient leaf, in the order of `named_leaves(params)`.
      learning_rate: of this update.
      tokens: int32, real tokens in the batch; scored: those with a target.
      finite: False if loss or grad_norm is NaN or infinite; the state is then returned as it was, the step too.
    With MoE layers also, per layer: count_NxE (int32, slots asked of each expert), entropy_N (nats, mean of the router's
    distribution over experts), dropped_N (share of slots dropped),
    moved_bytes_N (bytes that expert parallelism sent between devices). In recipe mxfp8 also those of `mxfp8_rates.rates`.
    """
    optimizer = make_optimizer(config.optimizer)
    spec = moe_spec(config)
    gradients = make_gradients(skeleton, config)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        grads, (loss, balance, stats, mx_counts), totals = gradients(state.params, state.router_bias, batch)

        with jax.named_scope("optimizer"):
            squares = jnp.stack([jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)])
            norm = jnp.sqrt(jnp.sum(squares))
            if config.optimizer.clip_norm is not None:
                scale = config.optimizer.clip_norm / jnp.maximum(norm, config.optimizer.clip_norm)
                grads = jax.tree.map(lambda g: g * scale, grads)
            finite = jnp.isfinite(norm) & jnp.isfinite(loss + balance)

            rate = learning_rate(state.step, config.optimizer, config.training.steps)
            params, opt_state = apply_update(state, grads, rate, optimizer, accept=finite)
            bias = _next_bias(state.router_bias, stats, spec)
            number, router_bias = jax.tree.map(
                lambda new, old: jnp.where(finite, new, old), (state.step + 1, bias), (state.step, state.router_bias)
            )
            state = TrainState(number, params, opt_state, router_bias, state.rng)

        metrics = {
            "loss": loss,
            "balance_loss": balance,
            "grad_norm": norm,
            "grad_squares": squares,
            "learning_rate": rate,
            "tokens": totals.real,
            "scored": totals.scored,
            "finite": finite,
        }
        losses = {} if mx_counts is None else mxfp8_rates.rates(mx_counts)
        return state, metrics | _router_metrics(stats, spec) | losses

    return step


def first_bad_gradient(metrics: dict[str, np.ndarray], params: Any) -> str | None:
    """Name of the first parameter whose gradient was not finite in these (fetched) metrics."""
    bad = ~np.isfinite(metrics["grad_squares"])
    return list(named_leaves(params))[int(np.argmax(bad))] if bad.any() else None


def _next_bias(router_bias: Any, stats: Any, spec: MoESpec) -> Any:
    """Selection biases after this step's counts. They are the FP32 leaves, stacks of layers in layer order; hash tables stay."""
    if stats is None or not spec.balance.bias_rate:
        return router_bias
    leaves, structure = jax.tree.flatten(router_bias)
    count_NxE = stats.count_E
    done, updated = 0, []
    for leaf in leaves:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            layers = leaf.size // leaf.shape[-1]
            leaf = update_select_bias(leaf, count_NxE[done : done + layers].reshape(leaf.shape), spec.balance)
            done += layers
        updated.append(leaf)
    if done != count_NxE.shape[0]:
        raise ValueError(
            f"the model has {done} selection biases, but its stats describe {count_NxE.shape[0]} MoE layers"
        )
    return jax.tree.unflatten(structure, updated)


def _router_metrics(stats: Any, spec: MoESpec) -> Metrics:
    if stats is None:
        return {}
    tokens_N = jnp.maximum(stats.tokens, 1).astype(jnp.float32)
    return {
        "count_NxE": stats.count_E,
        "entropy_N": stats.entropy_sum / tokens_N,
        "dropped_N": stats.dropped.astype(jnp.float32) / (tokens_N * spec.top_k),
        "moved_bytes_N": stats.moved_bytes,
    }
