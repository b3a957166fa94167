"""`MoESpec`: everything static about an expert layer, frozen and hashable, resolved once from the config and the mesh.

Read `moe.py` next. Letters: D model width, F expert width, E experts, K experts per token, R expert-parallel ranks.
"""

import dataclasses
import fractions
import functools
import math
import re
import typing
from collections.abc import Iterator
from typing import Any, Literal

import jax

from moejax.config import ActivationConfig, BalanceConfig, Config, MoEConfig, RouterConfig

TILE = 128  # groups start at multiples of this many rows, in every recipe (MX scale atoms and wgrad blocks need it)

# Names of saved values, for remat policies. A misspelt name saves nothing and raises nothing, so here they are, once.
SCHEDULE_NAME = "moe_schedule"  # expert ids and plan: every policy keeps them, selection is never recomputed
GATE_UP_NAME = "moe_gate_up"  # the declared residual of `save: gate_up`

EXPERT_AXIS = "expert"  # the mesh axis experts are sharded over

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
Recipe = Literal["fp32", "bf16", "mxfp8"]
Backend = Literal["dense", "xla", "native", "megakernel"]
Transport = Literal["all_gather", "all_to_all", "ragged_all_to_all"]


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
      backend: the resolved backend; None only while it is being chosen.
      capacity_factor: None for dropless, else the decimal string the user wrote (read exactly, as a rational).
      drop_policy: which rows go over capacity.
      axis: mesh axis that experts are sharded over, or None.
      ranks: R, the size of that axis.
      transport: how rows travel over that axis, see `transport.py`.
      minibatch_rows: rows a rank computes at a time where they travel by all-to-all, a multiple of 128; None: from the
        balanced share. It bounds memory and changes no bits.
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
    backend: Backend | None = "xla"
    capacity_factor: str | None = None
    drop_policy: Literal["position"] = "position"
    axis: str | None = None
    ranks: int = 1
    transport: Transport = "all_gather"
    minibatch_rows: int | None = None
    save: Literal["recompute", "gate_up", "gate_up_mx"] = "recompute"

    @property
    def top_k(self) -> int:
        return self.router.top_k

    @property
    def local_experts(self) -> int:
        """E / R: experts whose weights this rank holds."""
        return self.num_experts // self.ranks

    @property
    def exchanges(self) -> bool:
        """Whether rows travel one by one to the rank of their expert, rather than all tokens to all ranks."""
        return self.ranks > 1 and self.transport != "all_gather"

    def replace(self, **changes) -> "MoESpec":
        return dataclasses.replace(self, **changes)


def moe_spec(config: Config, mesh: Mesh | None = None, layer: int | None = None) -> MoESpec:
    """The spec of one expert layer, checked, with its backend resolved.

    Args:
      config: reads model, moe, recipe and training.remat.
      mesh: the mesh the layer will run on; experts are sharded over its `expert` axis. None: one device.
      layer: index among the MoE layers (leading dense layers not counted); decides whether `bf16_layers` holds it.
        None: the recipe of the run.
    Raises:
      ValueError: a field cannot work, with what it is and what would do.
    """
    moe, d_model = config.moe, config.model.d_model
    moe_layers = config.model.num_layers - config.model.dense_layers
    ranks = 1 if mesh is None else dict(mesh.shape).get(EXPERT_AXIS, 1)
    if moe.num_experts % ranks:
        fits = [r for r in range(1, moe.num_experts + 1) if moe.num_experts % r == 0]
        raise ValueError(f"expert axis has {ranks} ranks but num_experts is {moe.num_experts}: use one of {fits}")
    check_choices(moe, "wgrad", "mx_mode", "save", "drop_policy")
    for problem in recipe_problems(moe, config.recipe):
        raise ValueError(problem)
    check_router(moe.router, moe.num_experts)
    if moe.router.hash_layers > moe_layers:
        raise ValueError(f"hash_layers is {moe.router.hash_layers} but the model has {moe_layers} MoE layers")
    _check_balance(moe.balance, moe.router)
    bf16_layers = _layer_indices("bf16_layers", moe.bf16_layers, moe_layers)
    if layer is not None:
        (layer,) = _layer_indices("layer", (layer,), moe_layers)
    recipe = "bf16" if config.recipe == "mxfp8" and layer in bf16_layers else config.recipe
    save = moe.save
    if save == "auto":
        save = "recompute" if ranks > 1 or config.training.remat != "none" else "gate_up"
    if save in ("gate_up", "gate_up_mx") and config.training.remat == "layer":
        raise ValueError(
            f"moe.save is {save!r} but training.remat 'layer' does not keep {GATE_UP_NAME!r}, so it would be computed "
            "twice: use remat 'minimal' or 'none', or save 'recompute'"
        )
    spec = MoESpec(
        num_experts=moe.num_experts,
        d_model=d_model,
        expert_width=moe.expert_width,
        router=moe.router,
        balance=moe.balance,
        act=moe.act,
        expert_bias=moe.expert_bias,
        recipe=recipe,
        wgrad=moe.wgrad,
        mx_mode=moe.mx_mode,
        backend=moe.backend,
        capacity_factor=moe.capacity_factor,
        drop_policy=moe.drop_policy,
        axis=EXPERT_AXIS if ranks > 1 else None,
        ranks=ranks,
        minibatch_rows=moe.minibatch_rows,
        save=save,
    )
    if moe.capacity_factor is not None:
        parse_capacity_factor(moe.capacity_factor)
    # late: they import this file, and know what each backend and transport can run
    from moejax.ops.backends import resolve_backend
    from moejax.ops.transport import resolve_transport

    spec = spec.replace(transport=resolve_transport(spec, moe.transport))
    return spec.replace(backend=resolve_backend(spec))


def recipe_problems(moe: MoEConfig, recipe: str) -> Iterator[str]:
    """A line for each field of `moe` that has no effect, or no meaning, under the recipe of the run."""
    if recipe == "mxfp8":
        if moe.save == "gate_up_mx" and moe.bf16_layers:
            yield "moe.save is gate_up_mx, a residual in MXFP8, but moe.bf16_layers keeps layers in bf16: use moe.save=gate_up"
        return
    for field, default in (("bf16_layers", ()), ("wgrad", "recipe"), ("mx_mode", "exact")):
        if (value := getattr(moe, field)) != default:
            yield f"moe.{field} has an effect only with recipe=mxfp8, but recipe is {recipe} (moe.{field} is {value})"
    if moe.save == "gate_up_mx":
        yield f"moe.save is gate_up_mx but recipe is {recipe}: use moe.save=gate_up, or recipe=mxfp8"


def check_choices(config: Any, *fields: str) -> None:
    """Raises ValueError for a field whose value is none of the literals its type lists. A dataclass does not look by itself."""
    kinds = typing.get_type_hints(type(config))
    for field in fields:
        if (value := getattr(config, field)) not in (allowed := typing.get_args(kinds[field])):
            raise ValueError(f"{field} is {value!r}; expected {' or '.join(map(repr, allowed))}")


@functools.cache
def check_router(router: RouterConfig, num_experts: int) -> None:
    """Refuses routers that cannot work or cannot learn.

    Raises:
      ValueError: names the fields, what they are and what would do.
    """
    r, top_k = router, router.top_k
    check_choices(router, "score_fn")
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


def _check_balance(balance: BalanceConfig, router: RouterConfig) -> None:
    check_choices(balance, "aux_scope")
    for name in ("aux_coef", "z_coef", "bias_rate"):
        value = getattr(balance, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"balance.{name} is {value}; expected a finite number of at least 0")
    if balance.bias_rate and not router.select_bias:
        raise ValueError(
            f"balance.bias_rate is {balance.bias_rate} but there is no bias to move: set router.select_bias"
        )


def _layer_indices(name: str, layers: tuple[int, ...], moe_layers: int) -> tuple[int, ...]:
    for layer in layers:
        if not -moe_layers <= layer < moe_layers:
            raise ValueError(
                f"{name}: layer {layer} does not exist; the model has {moe_layers} MoE layers, 0..{moe_layers - 1} "
                f"(or -{moe_layers}..-1 from the end)"
            )
    return tuple(layer % moe_layers for layer in layers)


def parse_capacity_factor(text: str) -> fractions.Fraction:
    """The decimal number the user wrote, as a rational: '1.1' is 11/10, which no float is."""
    if not isinstance(text, str) or not re.fullmatch(r"\d+(\.\d+)?", text) or fractions.Fraction(text) == 0:
        raise ValueError(
            f"capacity_factor is {text!r}; expected a positive decimal number in quotes such as '1.25', or none"
        )
    return fractions.Fraction(text)
