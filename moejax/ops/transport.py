"""How rows travel between the ranks of the expert axis: the transports, and the one place that chooses.

A transport is a module with the functions

    forward(x_TxD, plan, run, spec) -> y_TxKxD, saved
    backward(x_TxD, dy_TxD, weight_TxK, saved, plan, run, buffer, spec) -> dx_TxKxD, d_weight_TxK, buffer
    used_slots(plan, spec) -> bool (T, K)
    moved_bytes(plan, spec) -> FP32 bytes this rank sends to others, forward and backward

that brings the tokens' rows to the ranks of their experts, has the backend compute them (`run`), and brings the result
of each slot home. All give the same bits. They are XLA collectives; with R = 1 nothing travels. Read `moe.py` next.

Letters: T tokens of this rank, K experts per token, D model width, R ranks, E experts of this rank.
"""

import logging
import os
import types

import jax

from moejax.ops import transport_exchange, transport_gather
from moejax.ops.exchange_plan import SLACK
from moejax.ops.spec import MoESpec

logger = logging.getLogger(__name__)

_MODULES: dict[str, types.ModuleType] = {
    "all_gather": transport_gather,
    "all_to_all": transport_exchange,
    "ragged_all_to_all": transport_exchange,
}
# Without one of them the first step fails in XLA. By its message the first is for NVLink domains of several hosts, the other for
# networks.
_RAGGED_FLAGS = (
    "--xla_gpu_experimental_ragged_all_to_all_use_barrier_with_nccl",
    "--xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback",
)
_logged: set[tuple[str, MoESpec]] = set()


def resolve_transport(spec: MoESpec, name: str | None, platform: str | None = None) -> str:
    """The transport to run `spec` with. Logs its choice, once.

    Args:
      spec: reads ranks, top_k, save.
      name: as in `moe.transport`. None: the one that moves fewer bytes when routing is balanced, of all_gather and
        all_to_all; all_gather unless `save` is recompute, as only it can keep rows.
      platform: "cpu" or "gpu"; None: JAX's default.
    Raises:
      ValueError: no such transport, or it can't run the spec there; the message names the rule.
    """
    if name is not None and name not in _MODULES:
        raise ValueError(f"moe.transport is {name!r}; expected one of {', '.join(_MODULES)}, or none")
    if spec.ranks == 1:
        return "all_gather"
    if name is not None:
        if (rule := refuses(name, spec, platform)) is not None:
            raise ValueError(f"moe.transport {name} cannot run here: {rule}")
        chosen, why = name, "as asked"
    elif spec.save != "recompute":
        chosen, why = "all_gather", f"save is {spec.save}"
    else:
        rows = {name: rows_per_token(name, spec) for name in ("all_gather", "all_to_all")}
        chosen = min(rows, key=lambda name: rows[name])
        why = "rows sent per token, there and back: " + ", ".join(f"{name} {count:.3g}" for name, count in rows.items())
    key = chosen, spec
    if key not in _logged:
        _logged.add(key)
        logger.info("expert axis of %d ranks, K=%d: transport %s (%s)", spec.ranks, spec.top_k, chosen, why)
    return chosen


def refuses(name: str, spec: MoESpec, platform: str | None = None) -> str | None:
    """The rule that keeps a transport from running `spec` there, or None."""
    platform = platform or jax.default_backend()
    if name == "all_gather":
        return None
    if spec.save != "recompute":
        return (
            f"it keeps no rows for the backward, and save is {spec.save}: use save recompute, or transport all_gather"
        )
    if name == transport_exchange.RAGGED and platform == "cpu":
        return "XLA has no ragged all-to-all on cpu: use all_to_all"
    if name == transport_exchange.RAGGED and _leaves_process(spec) and not any(map(_xla_flag_is_set, _RAGGED_FLAGS)):
        return (
            f"its {spec.ranks} ranks span processes of {jax.local_device_count()} GPUs, and XLA keeps it within a process unless "
            f"XLA_FLAGS has {'=true or '.join(_RAGGED_FLAGS)}=true: use all_to_all, or set one (neither has been run)"
        )
    return None


def _leaves_process(spec: MoESpec) -> bool:
    return jax.process_count() > 1 and spec.ranks > jax.local_device_count()


def _xla_flag_is_set(flag: str) -> bool:
    """As XLA reads it: the last mention counts, and one without a value means true."""
    words = [word.partition("=") for word in os.environ.get("XLA_FLAGS", "").split()]
    values = [value.lower() for name, _, value in words if name == flag]
    return bool(values) and values[-1] in ("", "1", "true")


def rows_per_token(name: str, spec: MoESpec) -> float:
    """Rows of width D that a rank sends to others per token in a forward, routing balanced."""
    others, top_k = spec.ranks - 1, spec.top_k
    if name == "all_gather":
        return others * (1.0 + top_k)
    filled = SLACK if name == "all_to_all" else 1.0
    return 2.0 * filled * top_k * others / spec.ranks


def load(spec: MoESpec) -> types.ModuleType:
    """The module of the transport that `spec` names."""
    return _MODULES[spec.transport]
