"""A model small enough to compile in seconds, with sizes that are unequal and unaligned, and batches for it."""

import dataclasses

import numpy as np

from moejax.config import BalanceConfig, Config, ModelConfig, MoEConfig, OptimizerConfig, RouterConfig, TrainingConfig

VOCAB = 61


def tiny_config(**sections) -> Config:
    """2 MoE layers with 5 experts, 2 chosen; `sections` maps a section to the fields that change in it."""
    config = Config(
        model=ModelConfig(vocab_size=VOCAB, d_model=20, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=12),
        moe=MoEConfig(
            num_experts=5,
            expert_width=28,
            router=RouterConfig(top_k=2, select_bias=True),
            balance=BalanceConfig(aux_coef=0.02, z_coef=1e-3, bias_rate=1e-3),
        ),
        optimizer=OptimizerConfig(warmup_steps=2, schedule="cosine"),
        training=TrainingConfig(steps=10, global_batch=6, micro_batches=1, sequence_length=22, loss_chunk=40),
    )
    for section, changes in sections.items():
        parent, _, child = section.partition("__")
        if child:
            inner = dataclasses.replace(getattr(getattr(config, parent), child), **changes)
            changes = {child: inner}
        config = dataclasses.replace(config, **{parent: dataclasses.replace(getattr(config, parent), **changes)})
    return config


def tiny_batch(config: Config, index: int) -> dict[str, np.ndarray]:
    """Batch number `index`: learnable text, two documents in a row, and rows with different amounts of padding."""
    rng = np.random.default_rng(index)
    rows, length = config.training.global_batch, config.training.sequence_length
    text = rng.integers(0, VOCAB, (rows, length + 1))
    for column in range(1, length + 1):
        text[:, column] = (text[:, column - 1] * 7 + 3) % VOCAB
    segment = np.ones((rows, length), np.int32)
    segment[:, length // 3 :] = 2
    for row in range(rows):
        segment[row, length - 3 * row :] = 0
    position = np.arange(length, dtype=np.int32)[None] - np.where(segment == 2, length // 3, 0)
    ends = np.concatenate([segment[:, 1:] != segment[:, :-1], np.ones((rows, 1), bool)], axis=1)
    target = np.where((segment > 0) & ~ends, text[:, 1:], -1)
    return {
        "token": np.where(segment > 0, text[:, :-1], 0).astype(np.int32),
        "target": target.astype(np.int32),
        "segment": segment,
        "position": np.where(segment > 0, position, 0).astype(np.int32),
    }


class TinyBatches:
    """Endless batches with the state of an iterator, as `moejax.data` gives them."""

    def __init__(self, config: Config):
        self.config, self.next_index = config, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.next_index += 1
        return tiny_batch(self.config, self.next_index - 1)

    def get_state(self):
        return {"next_index": self.next_index}

    def set_state(self, state):
        self.next_index = state["next_index"]
