"""The backends of the expert layer: what each can run, and the one place that chooses.

A backend is a module with the functions

    refuses(spec, platform) -> str | None          the rule that keeps it from running `spec` there, or None
    prepare(masters, spec) -> copies               what its products read, from the FP32 masters
    forward(x_MxD, plan, experts, spec) -> y_MxD, saved
    backward(x_MxD, dy_MxD, weight_M, saved, plan, experts, spec, accumulator=None) -> dx_MxD, d_weight_M, d_experts

over rows in the order of the plan (`docs/design.md` §2). `forward` returns the rows before the combine weight, in the
compute dtype, and what `spec.save` keeps (None for `recompute`). `backward` takes the token's dY per row, not
multiplied by the weight; its weight gradients are FP32, exactly zero for experts without rows, and start from
`accumulator` if there is one. Rows outside every group are never read.

A backend that does dispatch and combine itself has, instead of or beside the last two,

    ffn_forward(x_TxD, weight_TxK, plan, experts, spec) -> y_TxD, saved
    ffn_backward(x_TxD, weight_TxK, dy_TxD, saved, plan, experts, spec, accumulator=None)
        -> dx_TxD, d_weight_TxK, d_experts

which `moe_ffn` uses where no transport is needed (R = 1). The row-level pair reads `count_E` and `start_E` of the plan
alone, and runs once per window where a transport cuts the rows into windows. Beside it a backend may have

    combine(y_TxKxD, weight_TxK, used_TxK, dtype) -> y_TxD

so that both forms round the sum of slots alike. With `STACKED = True` a backend reads and accumulates one layer of a
stack of experts in place (`ExpertWeights.layer`); others are given a slice.
"""

import functools
import importlib
import importlib.util
import logging
import os
import types
import warnings

import jax
import jax.numpy as jnp

from moejax.ops.activation import check_activation
from moejax.ops.spec import TILE, MoESpec, check_choices

logger = logging.getLogger(__name__)

_MODULES = {
    "megakernel": "moejax.ops.experts_megakernel",
    "native": "moejax.ops.experts_native",
    "xla": "moejax.ops.experts_xla",
    "dense": "moejax.ops.experts_dense",
}
_FASTEST_FIRST = ("megakernel", "native", "xla")  # of those that are there; dense, the oracle, is never chosen

# Smallest unit of D and F: 16-byte rows in BF16, one scale block in MXFP8. The same in every backend, so that a model
# that runs in one runs in all.
WIDTH_UNITS = {"fp32": 1, "bf16": 8, "mxfp8": 32}

# A warning is shown at the first line that is neither ours nor that of a library between the user and us.
_LIBRARIES = tuple(os.path.join(os.path.dirname(os.path.dirname(file)), "") for file in (__file__, jax.__file__))


class SlowerBackendWarning(UserWarning):
    """Experts run on a slower backend than this machine has, because of a setting."""


@functools.cache
def resolve_backend(spec: MoESpec, platform: str | None = None) -> str:
    """The backend to run `spec` with on `platform`. Logs its choice once, and warns once for each reason (`SlowerBackendWarning`)
    where a setting keeps the experts from kernels that are there.

    Args:
      spec: if `spec.backend` is None the fastest that can run it is chosen, else that backend is checked.
      platform: "cpu" or "gpu"; None: JAX's default.
    Raises:
      ValueError: the backend asked for, or every backend, breaks a rule; the message names it.
    """
    name, refused = choose_backend(spec, platform)
    shape = f"E={spec.num_experts} K={spec.top_k} D={spec.d_model} F={spec.expert_width} R={spec.ranks}"
    why = "as asked" if spec.backend else not_chosen(refused) or "fastest"
    logger.info("experts %s %s on %s: backend %s (%s)", shape, spec.recipe, _platform(platform), name, why)
    if "native" in refused and _load("native").unavailable(_platform(platform)) is None:
        _warn_slower(name, refused["native"])
    return name


def choose_backend(spec: MoESpec, platform: str | None = None) -> tuple[str, dict[str, str]]:
    """What `resolve_backend` returns, and the rule that each faster backend of this installation breaks. Says nothing.

    Args, Raises: as `resolve_backend`.
    """
    platform = _platform(platform)
    check_spec(spec)
    if spec.backend is not None and spec.backend not in _MODULES:
        raise ValueError(f"moe.backend is {spec.backend!r}; expected one of {', '.join(_MODULES)}, or none")
    refused: dict[str, str] = {}
    for name in (spec.backend,) if spec.backend else filter(_installed, _FASTEST_FIRST):
        rule = _load(name).refuses(spec, platform) if _installed(name) else "it is not part of this installation"
        if rule is None:
            return name, refused
        refused[name] = rule
    by_rule: dict[str, list[str]] = {}
    for name, rule in refused.items():
        by_rule.setdefault(rule, []).append(name)
    raise ValueError(
        "; ".join(
            f"backend{'s' if names[1:] else ''} {' and '.join(names)} cannot run on {platform}: {rule}"
            for rule, names in by_rule.items()
        )
    )


def not_chosen(refused: dict[str, str]) -> str:
    """The rules of `choose_backend` in words; empty if there are none."""
    return "; ".join(f"not {name}: {rule}" for name, rule in refused.items())


def load(spec: MoESpec) -> types.ModuleType:
    """The module of the backend that runs `spec`."""
    return _load(resolve_backend(spec))


def check_spec(spec: MoESpec) -> None:
    """Checks the rules that hold in every backend.

    Raises:
      ValueError: a width is not a multiple of the recipe's unit, the experts do not divide, a choice is
      no option of its field or belongs to another recipe, an activation field is missing.
    """
    for field, width in (("d_model", spec.d_model), ("expert_width", spec.expert_width)):
        check_width(field, width, spec.recipe)
    check_choices(spec, "wgrad", "mx_mode", "save", "drop_policy", "transport")
    if spec.save == "gate_up_mx" and spec.recipe != "mxfp8":
        raise ValueError(
            f"save is gate_up_mx but recipe is {spec.recipe}; the residual in MXFP8 belongs to mxfp8: use save gate_up, "
            "or recipe mxfp8"
        )
    if spec.num_experts < 1 or spec.ranks < 1 or spec.num_experts % spec.ranks:
        raise ValueError(
            f"num_experts is {spec.num_experts} over {spec.ranks} expert ranks: the ranks must divide the experts"
        )
    if spec.ranks > 1 and spec.axis is None:
        raise ValueError(f"ranks is {spec.ranks} without a mesh axis: set axis to the name of the expert axis")
    rows = spec.minibatch_rows
    if rows is not None and (rows < TILE or rows % TILE):
        raise ValueError(f"minibatch_rows is {rows}; expected a positive multiple of {TILE}, or none")
    check_activation(spec.act)


def check_width(name: str, width: int, recipe: str) -> None:
    """Raises ValueError unless `width` is a positive multiple of the recipe's unit."""
    unit = WIDTH_UNITS.get(recipe)
    if unit is None:
        raise ValueError(f"recipe is {recipe!r}; expected one of {', '.join(WIDTH_UNITS)}")
    if width < 1 or width % unit:
        raise ValueError(
            f"{name} is {width}; recipe {recipe} needs a multiple of {unit} in every backend: use "
            f"{fitting_widths(width, unit)}"
        )


def fitting_widths(width: int, unit: int) -> str:
    """The multiples of `unit` on both sides of a width that is none, in words."""
    below = max(width, 0) // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def compute_dtype(spec: MoESpec) -> jnp.dtype:
    """Dtype of slot rows and of the dispatch payload: FP32 in recipe fp32, else BF16."""
    return jnp.dtype(jnp.float32 if spec.recipe == "fp32" else jnp.bfloat16)


def _installed(name: str) -> bool:
    return importlib.util.find_spec(_MODULES[name]) is not None


def _load(name: str) -> types.ModuleType:
    return importlib.import_module(_MODULES[name])


def _platform(platform: str | None) -> str:
    platform = platform or jax.default_backend()
    return "gpu" if platform in ("cuda", "rocm") else platform


@functools.cache
def _warn_slower(name: str, rule: str) -> None:
    warnings.warn(
        f"moejax: expert layers run on backend {name}, slower here than native, because {rule}. If {name} is meant, ask for it: "
        f"moe.backend={name}",
        SlowerBackendWarning,
        stacklevel=2,
        skip_file_prefixes=_LIBRARIES,
    )
