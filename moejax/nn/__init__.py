"""Flax NNX modules around the functions of `moejax.ops`. Start with `moe.py`.

Leaf names: `w_*` matrices (contraction last), `b_*` biases, `scale` of a norm, `table` of an embedding, `select_bias` of a
router. Every variable carries the logical name of each axis (`param.py`).
"""

from moejax.nn.attention import Attention
from moejax.nn.layers import MLP, Embedding, Linear, RMSNorm
from moejax.nn.moe import ExpertParam, Experts, HashTable, MoE, RouterBias

__all__ = [
    "MLP",
    "Attention",
    "Embedding",
    "ExpertParam",
    "Experts",
    "HashTable",
    "Linear",
    "MoE",
    "RMSNorm",
    "RouterBias",
]
