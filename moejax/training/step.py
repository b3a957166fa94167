"""One optimizer step, as a pure function that is compiled once.

    copies of the expert weights -> [counting pass] -> gradients over micro-batches -> one global norm -> clip
    -> refuse non-finite -> update -> router biases -> metrics

Every loss is a sum over tokens divided by a count of the whole step, taken from the masks before the first micro-batch, so
cutting the batch into micro-batches changes the order of a sum and nothing else. Read `loop.py` next.

Letters: B batch, L sequence, D model width, V vocabulary, E experts, N MoE layers here, m micro-batches.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.checkpoint import named_leaves
from moejax.config import Config
from moejax.mesh import named_sharding
from moejax.ops.balance import balance_loss, update_select_bias
from moejax.ops.loss import cross_entropy
from moejax.ops.spec import MoESpec, moe_spec
from moejax.training.optimizer import learning_rate, make_optimizer
from moejax.training.state import Skeleton, TrainState, apply_update

Batch = Mapping[str, Any]  # arrays, of NumPy on the way in
Metrics = dict[str, jax.Array]


def split_batch(batch: dict[str, np.ndarray], micro_batches: int) -> dict[str, np.ndarray]:
    """(B, L) arrays as (m, B/m, L), rows in order."""
    return {name: x.reshape(micro_batches, x.shape[0] // micro_batches, *x.shape[1:]) for name, x in batch.items()}


def place_batch(batch: dict[str, np.ndarray], mesh: jax.sharding.Mesh | None) -> Batch:
    """This process's (m, B/m, L) rows as global arrays: rows over the axes that split the batch, L over `context`."""
    if mesh is None:
        return batch
    name = "a micro-batch (training.global_batch / training.micro_batches rows)"
    rows = (1, batch["token"].shape[1] * jax.process_count(), batch["token"].shape[2])
    sharding = named_sharding(mesh, (None, "batch", "sequence"), name, rows)
    return {name: jax.make_array_from_process_local_data(sharding, x) for name, x in batch.items()}


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
    distribution over experts), dropped_N (share of slots dropped).
    """
    optimizer = make_optimizer(config.optimizer)
    spec = moe_spec(config)

    def objective(params: Any, state: TrainState, copies: Any, part: Batch, totals: dict, count_NxE: jax.Array | None):
        model = skeleton.merge(params, state.router_bias)
        hidden_BxLxD, stats = model(part["token"], part["segment"], part["position"], copies=copies)
        nats, _ = cross_entropy(hidden_BxLxD, model.head_weight(), part["target"], chunk=config.training.loss_chunk)
        balance = _balance(stats, spec, totals["real"], count_NxE)
        loss = nats / jnp.maximum(totals["scored"], 1).astype(jnp.float32)
        return loss + balance, (loss, balance, stats)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        model = skeleton.merge(state.params, state.router_bias)
        copies = jax.lax.stop_gradient(model.expert_copies())  # once per step, outside the gradient and the loop
        totals = {"scored": jnp.sum(batch["target"] >= 0), "real": jnp.sum(batch["segment"] > 0)}
        count_NxE = None
        if needs_counting_pass(config):
            count_NxE = _count_experts(model, copies, batch)

        def gradients(part: Batch):
            return jax.vjp(
                lambda params: objective(params, state, copies, part, totals, count_NxE), state.params, has_aux=True
            )

        if config.training.micro_batches == 1:
            _, pullback, sums = gradients(jax.tree.map(lambda x: x[0], batch))
            (grads,) = pullback(jnp.float32(1.0))
        else:
            # One FP32 buffer per parameter: each backward adds into it where it makes the gradient, layer by layer.
            buffers = jax.tree.map(lambda p: jax.new_ref(jnp.zeros_like(p)), state.params)

            def accumulate(_, part):
                _, pullback, sums = gradients(part)
                pullback.with_refs(buffers)(jnp.float32(1.0))
                return None, sums

            _, per_part = jax.lax.scan(accumulate, None, batch)
            grads = jax.tree.map(lambda buffer: buffer[...], buffers)
            sums = jax.tree.map(lambda x: x.sum(0, dtype=x.dtype), per_part)
        loss, balance, stats = sums

        squares = jnp.stack([jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)])
        norm = jnp.sqrt(jnp.sum(squares))
        if config.optimizer.clip_norm is not None:
            scale = config.optimizer.clip_norm / jnp.maximum(norm, config.optimizer.clip_norm)
            grads = jax.tree.map(lambda g: g * scale, grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss + balance)

        rate = learning_rate(state.step, config.optimizer, config.training.steps)
        params, opt_state = apply_update(state, grads, rate, optimizer)
        router_bias = _next_bias(state.router_bias, stats, spec)
        updated = TrainState(state.step + 1, params, opt_state, router_bias, state.rng)
        state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state)

        metrics = {
            "loss": loss,
            "balance_loss": balance,
            "grad_norm": norm,
            "grad_squares": squares,
            "learning_rate": rate,
            "tokens": totals["real"],
            "scored": totals["scored"],
            "finite": finite,
        }
        return state, metrics | _router_metrics(stats, spec)

    return step


def needs_counting_pass(config: Config) -> bool:
    """Whether the counts of the whole step must be known before its first micro-batch, at the price of one more forward."""
    balance = config.moe.balance
    return balance.aux_coef > 0 and balance.aux_scope == "global" and config.training.micro_batches > 1


def first_bad_gradient(metrics: dict[str, np.ndarray], params: Any) -> str | None:
    """Name of the first parameter whose gradient was not finite in these (fetched) metrics."""
    bad = ~np.isfinite(metrics["grad_squares"])
    return list(named_leaves(params))[int(np.argmax(bad))] if bad.any() else None


def _count_experts(model: Any, copies: Any, batch: Batch) -> jax.Array:
    """Forward only: how often each expert is chosen in the whole step, int32 count_NxE."""

    def count(_, part):
        _, stats = model(part["token"], part["segment"], part["position"], copies=copies)
        return None, stats.count_E

    _, count_mxNxE = jax.lax.scan(count, None, batch)
    return count_mxNxE.sum(0, dtype=jnp.int32)


def _balance(stats: Any, spec: MoESpec, real_tokens: jax.Array, count_NxE: jax.Array | None) -> jax.Array:
    """Balance and z losses, summed over MoE layers."""
    if stats is None:
        return jnp.float32(0.0)
    if count_NxE is None and spec.balance.aux_coef and spec.balance.aux_scope == "global":
        count_NxE = stats.count_E  # one micro-batch: it is the whole step
    return balance_loss(stats, spec, tokens=real_tokens, count_E=count_NxE)


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
    }
