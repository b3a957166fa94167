"""`MoE` inside your own Flax model, trained by your own loop. Run: python docs/examples/own_model.py"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from moejax.config import BalanceConfig, MoEConfig
from moejax.nn import MoE
from moejax.ops.balance import balance_loss


class OwnModel(nnx.Module):
    def __init__(self, vocab: int, width: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        config = MoEConfig(num_experts=8, expert_width=2 * width, balance=BalanceConfig(aux_coef=0.01))
        self.moe = MoE(width, config, rngs=rngs, recipe="bf16")
        self.head = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, token_BxL, copies=None):
        x_BxLxD = self.embed(token_BxL)
        y_BxLxD, stats = self.moe(x_BxLxD, copies=copies)
        return self.head(x_BxLxD + y_BxLxD), stats


def loss_fn(model, token_BxL, copies):
    """Predict the next token; the balance loss keeps all experts in use."""
    logits, stats = model(token_BxL[:, :-1], copies)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, token_BxL[:, 1:]).mean()
    return nll + balance_loss(stats, model.moe.spec, tokens=stats.tokens), stats


@nnx.jit
def train_step(model, optimizer, token_BxL):
    copies = model.moe.expert_copies()  # what the recipe's products read: once per step, outside of the gradient
    (loss, stats), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, token_BxL, copies)
    optimizer.update(model, grads)
    return loss, stats.count_E


def main(steps: int = 100) -> list[float]:
    model = OwnModel(vocab=32, width=64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    token_BxL = (jnp.arange(17) * 5 + jax.random.randint(jax.random.key(0), (16, 1), 0, 32)) % 32  # counts in fives
    losses = []
    for step in range(steps):
        loss, count_E = train_step(model, optimizer, token_BxL)
        losses.append(float(loss))
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:3}  loss {losses[-1]:.4f}  tokens per expert {count_E.tolist()}")
    return losses


if __name__ == "__main__":
    main()
