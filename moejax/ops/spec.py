"""`MoESpec`: everything static about an expert layer, frozen and hashable, resolved once from the config and the mesh.

Read `moe.py` next. Letters: D model width, F expert width, E experts, K experts per token, R expert-parallel ranks.
"""

import dataclasses
from typing import Literal

from moejax.config import ActivationConfig, BalanceConfig, RouterConfig

TILE = 128  # groups start at multiples of this many rows, in every recipe (MX scale atoms and wgrad blocks need it)

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
