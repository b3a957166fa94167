"""Optimizer and learning-rate schedule, from the config: optax transformations and one function of the step.

The learning rate is a function of the step in the training state, and is applied by `step.py`, not inside optax: there is one
step counter to save, and a refused step moves neither. Clipping is in `step.py` too, where the norm is a metric.
"""

import jax
import jax.numpy as jnp
import optax

from moejax.config import OptimizerConfig


def is_decayed(name: str) -> bool:
    """Whether weight decay acts on the parameter with this dotted name.

    Matrices only: `w_*`, and the `kernel` of stock Flax layers. Not norm scales, biases or embedding tables. The number of
    dimensions says nothing here: a stack of norm scales over layers has two, and a stack of biases of experts three.
    """
    last = name.rsplit(".", 1)[-1]
    return last.startswith("w_") or last == "kernel"


def decay_mask(params):
    """Pytree of booleans: which parameters `is_decayed` names."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: is_decayed(jax.tree_util.keystr(path, simple=True, separator=".")), params
    )


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """The update direction before the learning rate: new params = params - learning_rate(step) * direction.

    AdamW (Loshchilov & Hutter, arXiv 1711.05101): m / (sqrt(v) + eps), bias-corrected, plus weight_decay * w on matrices.
    SGD is the gradient itself, without momentum or decay. `update` takes `accept`, a bool scalar: False leaves the
    moments as they were.
    """
    if config.name == "sgd":
        return optax.with_extra_args_support(optax.identity())
    return optax.chain(
        _scale_by_adam(config.b1, config.b2, config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
    )


def _scale_by_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam` with FP32 moments, and updates that can be refused.

    The direction is made of the moments that are kept. If they were chosen later, between new and old ones, the old ones
    would be read once for the direction and once for the choice, and XLA's CPU program copies both of them before it
    writes the new ones over them: 8 bytes per parameter.
    """

    def init(params):
        mu, nu = (jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params) for _ in range(2))
        return optax.ScaleByAdamState(jnp.int32(0), mu, nu)

    def update(grads, state, params=None, *, accept=True, **_):
        del params

        def moment(decay, order):
            return lambda old, g: jnp.where(accept, decay * old + (1 - decay) * g**order, old)

        mu = jax.tree.map(moment(b1, 1), state.mu, grads)
        nu = jax.tree.map(moment(b2, 2), state.nu, grads)
        number = optax.safe_increment(state.count)
        unbiased_mu, unbiased_nu = (1 - decay ** number.astype(jnp.float32) for decay in (b1, b2))
        direction = jax.tree.map(lambda m, v: (m / unbiased_mu) / (jnp.sqrt(v / unbiased_nu) + eps), mu, nu)
        return direction, optax.ScaleByAdamState(jnp.where(accept, number, state.count), mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


def learning_rate(step: jax.Array, config: OptimizerConfig, total_steps: int) -> jax.Array:
    """FP32 learning rate of the update that turns `step` finished steps into `step + 1`.

    Warm-up is linear and reaches the peak after `warmup_steps` updates: update number i (from 1) has peak * i / warmup.
    Afterwards `cosine` falls along half a cosine and `wsd` (arXiv 2404.06395) stays, then falls linearly over the last
    `decay_fraction` of all steps; both end at final_fraction * peak on the last update. `constant` stays.

    Args:
      step: int32 scalar, finished steps.
      total_steps: updates in the whole run.
    """
    number = (step + 1).astype(jnp.float32)  # of this update, from 1
    warmup = float(config.warmup_steps)
    ramp = jnp.minimum(1.0, number / warmup) if config.warmup_steps > 0 else jnp.float32(1.0)
    floor = config.final_fraction
    if config.schedule == "cosine":
        progress = jnp.clip((number - warmup) / max(total_steps - warmup, 1.0), 0.0, 1.0)
        shape = floor + (1.0 - floor) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
    elif config.schedule == "wsd":
        length = max(round(total_steps * config.decay_fraction), 1)
        progress = jnp.clip((number - (total_steps - length)) / length, 0.0, 1.0)
        shape = 1.0 - (1.0 - floor) * progress
    else:
        shape = jnp.float32(1.0)
    return (config.learning_rate * ramp * shape).astype(jnp.float32)
