"""The loss on text that was held out of training."""

import dataclasses
import math
from collections.abc import Iterable

import jax
import numpy as np

from moejax.config import Config
from moejax.ops.loss import cross_entropy
from moejax.training.state import Skeleton, TrainState


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Loss over all held-out text, in nats.

    Attributes:
      nats: summed over all scored tokens.
      tokens: scored tokens.
      bytes: bytes of the text, whatever the tokenizer.
    """

    nats: float
    tokens: int
    bytes: int

    @property
    def nats_per_byte(self) -> float:
        return self.nats / self.bytes

    @property
    def bits_per_byte(self) -> float:
        return self.nats / self.bytes / math.log(2)


def evaluate(
    skeleton: Skeleton, state: TrainState, batches: Iterable[dict[str, np.ndarray]], num_bytes: int, config: Config
) -> HeldOut:
    """Scores every target of `batches` (all of one shape, padded with target -1) once.

    Args:
      num_bytes: bytes of the held-out text that the targets encode.
    Raises:
      ValueError: there is nothing to score.
    """

    @jax.jit
    def score(params, router_bias, batch):
        model = skeleton.merge(params, router_bias)
        hidden_BxLxD, _ = model(batch["token"], batch["segment"], batch["position"], copies=model.expert_copies())
        return cross_entropy(hidden_BxLxD, model.head_weight(), batch["target"], chunk=config.training.loss_chunk)

    nats, tokens = 0.0, 0
    for batch in batches:
        batch_nats, batch_tokens = score(state.params, state.router_bias, batch)
        nats += float(batch_nats)  # summed in FP64: FP32 would lose digits over millions of tokens
        tokens += int(batch_tokens)
    if not tokens or not num_bytes:
        raise ValueError("the corpus has no held-out text to score: it needs more files, so that some are held out")
    return HeldOut(nats, tokens, num_bytes)
