"""`MoESpec`: everything static about an expert layer, frozen and hashable, resolved once from the config and the mesh.

Read `moe.py` next. Letters: D model width, F expert width, E experts, K experts per token, R expert-parallel ranks.
"""

import dataclasses
import functools
import math
from typing import Literal

from moejax.config import ActivationConfig, BalanceConfig, RouterConfig

TILE = 128  # groups start at multiples of this many rows, in every recipe (MX scale atoms and wgrad blocks need it)

# Names of saved values, for remat policies; a misspelt name saves nothing and raises nothing, so they are spelt once, here.
SCHEDULE_NAME = "moe_schedule"  # expert ids and plan: every policy keeps them, selection is never recomputed
GATE_UP_NAME = "moe_gate_up"  # the declared residual of `save: gate_up`

Recipe = Literal["fp32", "bf16", "mxfp8"]
Backend = Literal["dense", "xla", "native", "megakernel"]


@dataclasses.dataclass(frozen=True)
class MoESpec:
    """Static description of one expert layer.

    Attributes:
      num_experts: E, over all ranks.
      d_model: D.
      expert_width: F.
      router, balance, act: the config sections, as they are.
      expert_bias: whether both expert matrices have biases.
      recipe: precision of the expert GEMMs.
      wgrad: "recipe", or "bf16" to keep weight-gradient GEMMs in BF16 under mxfp8.
      mx_mode: "exact" or "aligned" execution of MX products.
      backend: the resolved backend.
      capacity_factor: None for dropless, else the decimal string the user wrote (read exactly, as a rational).
      drop_policy: which rows go over capacity.
      axis: mesh axis that experts are sharded over, or None.
      ranks: R, the size of that axis.
      save: what the layer keeps for its backward.
    """

    num_experts: int
    d_model: int
    expert_width: int
    router: RouterConfig = RouterConfig()
    balance: BalanceConfig = BalanceConfig()
    act: ActivationConfig = ActivationConfig()
    expert_bias: bool = False
    recipe: Recipe = "fp32"
    wgrad: Literal["recipe", "bf16"] = "recipe"
    mx_mode: Literal["exact", "aligned"] = "exact"
    backend: Backend = "xla"
    capacity_factor: str | None = None
    drop_policy: Literal["position"] = "position"
    axis: str | None = None
    ranks: int = 1
    save: Literal["recompute", "gate_up"] = "recompute"

    @property
    def top_k(self) -> int:
        return self.router.top_k

    @property
    def local_experts(self) -> int:
        """E / R: experts whose weights this rank holds."""
        return self.num_experts // self.ranks

    def replace(self, **changes) -> "MoESpec":
        return dataclasses.replace(self, **changes)


@functools.cache
def check_router(router: RouterConfig, num_experts: int) -> None:
    """Refuses routers that cannot work or cannot learn.

    Raises:
      ValueError: names the fields, what they are and what would do.
    """
    r, top_k = router, router.top_k
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k is {top_k} but there are {num_experts} experts: use 1..{num_experts}")
    if top_k == 1 and r.norm_topk:
        raise ValueError(
            "norm_topk with k = 1: the weight is always 1, so the router cannot learn; set norm_topk to false"
        )
    if top_k == 1 and not r.score_before_topk:
        raise ValueError(
            "softmax over the chosen logits with k = 1: the weight is always 1, so the router cannot learn; "
            "set score_before_topk to true"
        )
    if not r.score_before_topk and r.score_fn != "softmax":
        raise ValueError(
            f"score_fn is {r.score_fn!r} with score_before_topk false, which takes a softmax over the chosen logits: "
            "set score_fn to 'softmax', or score_before_topk to true"
        )
    if r.n_group < 1 or num_experts % r.n_group:
        raise ValueError(f"n_group is {r.n_group} but must divide num_experts = {num_experts}")
    size = num_experts // r.n_group
    if not 1 <= r.topk_group <= r.n_group:
        raise ValueError(f"topk_group is {r.topk_group}; expected 1..n_group = {r.n_group}")
    if r.n_group > 1 and not 1 <= r.group_top <= size:
        raise ValueError(f"group_top is {r.group_top} but a group has {size} experts: use 1..{size}")
    if r.n_group > 1 and top_k > r.topk_group * size:
        raise ValueError(
            f"top_k is {top_k} but the {r.topk_group} kept groups hold {r.topk_group * size} experts "
            f"({num_experts} experts in {r.n_group} groups): raise topk_group or lower top_k"
        )
    if not math.isfinite(r.route_scale) or r.route_scale == 0:
        raise ValueError(f"route_scale is {r.route_scale}; expected a finite number other than 0")
    if r.hash_layers < 0:
        raise ValueError(f"hash_layers is {r.hash_layers}; expected 0 or more")
