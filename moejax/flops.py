"""Floating-point operations by hand count, for reported rates and utilisation. A multiply-add counts as two.

Only what the model needs is counted: no padding of groups, no recomputation, no router of the expert layer.
Letters: D model width, F expert width, K experts per token, N heads, H head width, L sequence length, V vocabulary.
"""

from moejax.config import Config


def moe_layer_flops_per_token(top_k: int, d_model: int, expert_width: int, shared_width: int = 0) -> int:
    """Forward FLOPs of one expert layer per token: three matrices of D x F for each of the K experts.

    Args:
      top_k: K.
      d_model: D.
      expert_width: F.
      shared_width: added widths of the shared experts, which every token passes through; 0: none.
    """
    return 6 * d_model * (top_k * expert_width + shared_width)


def model_flops_per_token(config: Config, vocab_size: int) -> int:
    """Forward FLOPs of the decoder per token, output head included. The backward costs twice as much.

    Attention scores are counted for a causal sequence of `training.sequence_length`, where a token sees (L + 1) / 2
    positions on average; document borders inside a sequence, which make it fewer, are not.

    Args:
      config: reads model, moe and training.sequence_length.
      vocab_size: V.
    """
    model, moe = config.model, config.moe
    projections = 2 * model.d_model * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    # q k and p v: 2 * N * H each, for every position that is seen
    scores = 2 * model.num_heads * model.head_dim * (config.training.sequence_length + 1)
    shared = moe.shared_experts * (moe.shared_width or moe.expert_width)
    experts = moe_layer_flops_per_token(moe.router.top_k, model.d_model, moe.expert_width, shared)
    dense = 6 * model.d_model * (model.dense_width or 0)
    layers = model.num_layers * (projections + scores)
    layers += (model.num_layers - model.dense_layers) * experts + model.dense_layers * dense
    return layers + 2 * model.d_model * vocab_size


def training_flops_per_token(config: Config, vocab_size: int) -> int:
    """FLOPs of a training step per token: one forward and a backward of twice that."""
    return 3 * model_flops_per_token(config, vocab_size)
