"""Which expert products a program runs, and in which precision, read from the traced program itself.

A run that calls itself mxfp8 while a filter matched nothing, or while a shape went another way, is a wrong number in a
table. So the list comes from what will be compiled: a product counts as MXFP8 only if both of its operands are computed
from E4M3 data. Scopes only give it a name. A call of our own kernels counts as precise as the weights it is given.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence

import jax
import jax.extend.core
import jax.numpy as jnp

_REGION = re.compile(r"\bmoe_experts(_grad)?\b")
_NAME = re.compile(r"\bgemm\.(\w+)\.(\w+)")
_KERNEL = re.compile(r"^moejax_.*(?:moe|mx)_(?:forward|backward)$")
_PRECISION = {"float8_e4m3fn": "mxfp8", "bfloat16": "bf16", "float32": "fp32"}
_TRANSFORM = re.compile(r"\b\w+\(|\)")
RECOMPUTE = "recompute"

_MIXED = "mixed"


@dataclasses.dataclass(frozen=True, order=True)
class Gemm:
    """One expert product of a program.

    Attributes:
      layer: scopes around the expert layer, "" if there are none.
      kind: fprop, dgrad, wgrad, or recompute: a forward product that is run again for the backward.
      matrix: gate_up or down.
      precision: mxfp8, bf16, fp32, or mixed if the operands differ.
      count: how many expert layers run it (the length of the scans around them).
    """

    layer: str
    kind: str
    matrix: str
    precision: str
    count: int = 1


def gemm_scope(name: str):
    """The scope to run an expert product in, "fprop.down" for example: its name in profiles and in `list_gemms`."""
    return jax.named_scope(f"gemm.{name}")


def list_gemms(program: jax.extend.core.ClosedJaxpr, only: str | None = None) -> list[Gemm]:
    """The expert products of a traced program, in its order.

    Loops over experts and rows are part of a product; scans around the layer multiply its count.

    Args:
      program: `jax.make_jaxpr(step)(…)` or `jax.jit(step).trace(…).jaxpr`.
      only: keep the layers whose scope path matches this pattern, see `match_names`.
    Raises:
      ValueError: `only` matches no layer.
    """
    found: collections.Counter = collections.Counter()
    jaxpr = _opened(program)
    _walk(jaxpr, [False] * len(jaxpr.invars), "", 1, False, found)
    gemms = [dataclasses.replace(gemm, count=count) for gemm, count in found.items()]
    if only is None:
        return gemms
    layers = set(match_names(only, sorted({gemm.layer for gemm in gemms})))
    return [gemm for gemm in gemms if gemm.layer in layers]


def count_gemms(program: jax.extend.core.ClosedJaxpr) -> dict[str, int]:
    """Number of expert products per precision, recomputed ones not counted: {"mxfp8": 12} for two layers of a training
    step.
    """
    counts: collections.Counter = collections.Counter()
    for gemm in list_gemms(program):
        if gemm.kind != RECOMPUTE:
            counts[gemm.precision] += gemm.count
    return dict(counts)


def format_gemms(gemms: Iterable[Gemm]) -> str:
    """A line per product, as a run prints it: `mxfp8  wgrad down  x4  layers`."""
    lines = [f"{g.precision:6} {g.kind} {g.matrix}  x{g.count}" + (f"  {g.layer}" if g.layer else "") for g in gemms]
    return "\n".join(lines)


def match_names(pattern: str, names: Sequence[str]) -> list[str]:
    """The names a pattern matches as a whole. `*` stands for any characters, everything else, the dot included, for
    itself.

    Raises:
      ValueError: nothing matches. A filter that matches nothing is a mistake, never a choice.
    """
    expression = re.compile(".*".join(re.escape(part) for part in pattern.split("*")))
    matched = [name for name in names if expression.fullmatch(name)]
    if not matched:
        raise ValueError(f"pattern {pattern!r} matches none of {', '.join(map(repr, names)) or 'no names'}")
    return matched


def _walk(
    jaxpr, quantised_in: list[bool], path: str, times: int, again: bool, found: collections.Counter
) -> list[bool]:
    """Follows E4M3 data through a jaxpr. Adds its products to `found`; returns which outputs come from E4M3 data."""
    quantised = dict(zip(jaxpr.invars, quantised_in))

    def is_quantised(atom) -> bool:
        return not isinstance(atom, jax.extend.core.Literal) and (quantised.get(atom, False) or _is_e4m3(atom))

    for eqn in jaxpr.eqns:
        operands = [is_quantised(atom) for atom in eqn.invars]
        scope = "/".join(part for part in (path, str(eqn.source_info.name_stack)) if part)
        if eqn.primitive.name == "dot_general":
            _record(eqn, operands, scope, times, again, found)
            results = [False] * len(eqn.outvars)
        elif eqn.primitive.name == "ffi_call" and _KERNEL.search(eqn.params["target_name"]):
            _record_kernel(eqn, scope, times, again, found)
            results = [False] * len(eqn.outvars)
        else:
            inner = _inner(eqn, operands, scope, times, again, found)
            results = [any(operands)] * len(eqn.outvars) if inner is None else inner
        quantised.update(zip(eqn.outvars, results))
    return [is_quantised(atom) for atom in jaxpr.outvars]


def _inner(eqn, operands, scope, times, again, found) -> list[bool] | None:
    """Walks the jaxprs of a call, branch or loop; None if the equation has none."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        if not _REGION.search(scope):
            times = times * params["length"]
        consts, carry = scan_sizes(params)
        body = _opened(params["jaxpr"])
        return _fixpoint(body, operands, consts, consts + carry, carry, scope, times, again, found)
    if name == "while":
        cond_consts, body_consts = params["cond_nconsts"], params["body_nconsts"]
        body = _opened(params["body_jaxpr"])
        inputs = operands[cond_consts:]
        return _fixpoint(body, inputs, body_consts, len(inputs), len(inputs) - body_consts, scope, times, again, found)
    if name == "cond":
        results = [_walk(_opened(b), operands[1:], scope, times, again, found) for b in params["branches"]]
        return [any(column) for column in zip(*results)]
    again = again or (name in ("remat2", "checkpoint") and params.get("differentiated", False))
    for value in params.values():
        inner = _opened(value)
        if isinstance(inner, jax.extend.core.Jaxpr) and len(inner.invars) == len(operands):
            return _walk(inner, operands, scope, times, again, found)
    return None


def _fixpoint(body, operands, carry_start, carry_end, carry, scope, times, again, found) -> list[bool]:
    """A loop body, walked until what its carry holds no longer changes; its products are counted once."""
    operands = list(operands)
    while True:
        trial: collections.Counter = collections.Counter()
        results = _walk(body, operands, scope, times, again, trial)
        merged = [a or b for a, b in zip(operands[carry_start:carry_end], results[:carry])]
        if merged == operands[carry_start:carry_end]:
            found.update(trial)
            return results
        operands[carry_start:carry_end] = merged


def _record(eqn, operands: list[bool], scope: str, times: int, again: bool, found: collections.Counter) -> None:
    region = _REGION.search(scope)
    if region is None:
        return
    name = _NAME.search(scope)
    kind, matrix = name.groups() if name else ("unnamed", "product")
    if all(operands):
        precision = "mxfp8"
    elif any(operands):
        precision = _MIXED
    else:
        dtypes = {str(atom.aval.dtype) for atom in eqn.invars}
        precision = _PRECISION.get(min(dtypes), min(dtypes)) if len(dtypes) == 1 else _MIXED
    kind = RECOMPUTE if again and kind == "fprop" else kind
    found[Gemm(_layer(scope[: region.start()]), kind, matrix, precision)] += times


def _record_kernel(eqn, scope: str, times: int, again: bool, found: collections.Counter) -> None:
    """The products inside a call of our own kernels: as precise as the weights, since the kernel quantises the rows."""
    forward = eqn.params["target_name"].endswith("_forward")
    attributes = dict(eqn.params["attributes"])
    # Weights are the operands of three or more axes; FP32 accumulators beside them are no operands of a product.
    dtypes = [str(atom.aval.dtype) for atom in eqn.invars if atom.aval.ndim >= 3 and atom.aval.dtype != jnp.uint8]
    dtypes = dtypes[:2] if forward else dtypes[:3]
    precision = _PRECISION.get(dtypes[0], dtypes[0]) if len(set(dtypes)) == 1 else _MIXED
    if "_mx_" in eqn.params["target_name"]:
        precision = "mxfp8"  # in mode exact the values of MXFP8 operands are held in BF16
    wgrad = "bf16" if precision == "mxfp8" and attributes.get("wgrad_bf16") else precision
    if forward:
        kinds = [(RECOMPUTE if again else "fprop", precision)]
    else:
        kinds = [("dgrad", precision), ("wgrad", wgrad)]
        saved = eqn.invars[3].aval
        if saved.size == 0:
            found[Gemm(_layer(scope), RECOMPUTE, "gate_up", precision)] += times
    for kind, kind_precision in kinds:
        for matrix in ("gate_up", "down"):
            found[Gemm(_layer(scope), kind, matrix, kind_precision)] += times


def _layer(scope: str) -> str:
    """Scopes without the names of transformations: 'jvp(layers)/0/' is 'layers.0'. A layer run again repeats its
    scopes.
    """
    parts = [part for part in _TRANSFORM.sub("", scope).split("/") if part]
    half = len(parts) // 2
    return ".".join(parts[:half] if half and parts[:half] == parts[half:] else parts)


def scan_sizes(params) -> tuple[int, int]:
    """Numbers of constants and of carried values of a scan: two parameters in jax 0.11, one structure in 0.12."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = map(len, params["ft_in"].unpack())
    return consts, carry


def _opened(value):
    """The jaxpr inside a closed one; anything else as it is."""
    return getattr(value, "jaxpr", value)


def _is_e4m3(atom) -> bool:
    return getattr(atom.aval, "dtype", None) == jnp.float8_e4m3fn
