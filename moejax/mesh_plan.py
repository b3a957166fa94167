"""Which mesh for which model and machine: every axis checked against what it splits, and the choice in a printed table.

  one GPU, one node, any number of devices   `config_mesh`: the sizes of `mesh` in the config, one of them -1
  NVL72 racks                                `nvl72_mesh`: the expert axis inside a rack; spares, or other axes, fill it

Letters: E experts, D model width, N query heads, C key/value heads, H width of a head, V vocabulary, L sequence, B rows of a
micro-batch.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType

from moejax.config import Config, MeshConfig
from moejax.mesh import AXES, make_mesh, resolve_axes

RACK = 72  # GPUs of one NVLink domain in a GB200/GB300 NVL72
_MX_BLOCK = 32  # MX copies are made from a device's own shard of D, in blocks of 32


@dataclasses.dataclass(frozen=True)
class Split:
    """One size of the model or batch, and the mesh axes that split it."""

    field: str
    size: int
    axes: tuple[str, ...]
    unit: int = 1  # what each share must be a multiple of
    shared: bool = False  # whether several devices may use one, if it divides them

    def shares(self, sizes: Mapping[str, int]) -> int:
        return math.prod(sizes[axis] for axis in self.axes)


def splits(config: Config) -> list[Split]:
    """Everything the axes split; sizes that the config leaves open (a vocabulary) are left out."""
    model, training, moe = config.model, config.training, config.moe
    unit = _MX_BLOCK if config.recipe == "mxfp8" else 1
    rows = training.global_batch // training.micro_batches
    found = [
        Split("moe.num_experts (E)", moe.num_experts, ("expert",)),
        Split("model.d_model (D)", model.d_model, ("fsdp",), unit),
        Split("model.num_heads (N)", model.num_heads, ("tensor",)),
        Split("model.num_kv_heads (C)", model.num_kv_heads, ("tensor",), shared=True),
        # Devices that share a head still hold equal parts of its weights.
        Split("num_kv_heads x head_dim (C H)", model.num_kv_heads * model.head_dim, ("tensor",)),
        Split("training.sequence_length (L)", training.sequence_length, ("context",)),
        Split("rows of a micro-batch (B)", rows, ("data", "fsdp", "expert")),
    ]
    if model.vocab_size is not None:
        found.insert(5, Split("model.vocab_size (V)", model.vocab_size, ("tensor",)))
    if moe.capacity_factor is not None:  # tokens that fill up a share would change what is dropped
        tokens = rows * training.sequence_length
        found.append(Split("tokens of a micro-batch (B L), with moe.capacity_factor,", tokens, AXES))
    return found


def check_axes(config: Config, sizes: Mapping[str, int]) -> None:
    """Checks every size an axis splits.

    Args:
      sizes: devices per axis, as `resolve_axes` gives them.
    Raises:
      ValueError: lists each size that does not divide, by how much, and what would.
    """
    wrong = []
    for split in splits(config):
        shares = split.shares(sizes)
        if shares == 1 or split.size % (shares * split.unit) == 0 or (split.shared and shares % split.size == 0):
            continue
        over = " x ".join(f"{axis}={sizes[axis]}" for axis in split.axes if sizes[axis] > 1)
        shares_of = f" into multiples of {split.unit}" if split.unit > 1 else ""
        most = min(split.size // split.unit, 2 * shares)
        fits = [n for n in range(1, most + 1) if split.size % (n * split.unit) == 0]
        near = ", ".join(map(str, fits[-6:]))
        wrong.append(f"{split.field} = {split.size} does not divide{shares_of} over {over}: {near} would fit")
    if wrong:
        text = " ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"mesh {text}: {'; '.join(wrong)}")


def axes_table(config: Config, sizes: Mapping[str, int]) -> str:
    """A line per thing that is split: what, over which axes, the whole and the share of a device."""
    header = ("split", "over", "whole", "each")
    lines = [header]
    for split in splits(config):
        over = " x ".join(f"{axis}={sizes[axis]}" for axis in split.axes)
        lines.append((split.field, over, str(split.size), str(max(1, split.size // split.shares(sizes)))))
    return _table(lines)


def config_mesh(
    config: Config, devices: Sequence[jax.Device] | None = None, axis_type: AxisType = AxisType.Auto
) -> jax.sharding.Mesh:
    """The mesh a config asks for, checked against its model and batch; the first process prints what it splits.

    Args:
      devices: default: all devices of all processes. With `mesh.spares` the last ones of every 72 stay idle.
    Raises:
      ValueError: as `make_mesh`, `check_axes` and `check_racks`; or spares without whole racks, or that leave a process
        without a device.
    """
    devices = everything = list(jax.devices() if devices is None else devices)
    if config.mesh.spares:
        devices = without_spares(everything, config.mesh.spares)
        _check_processes(everything, devices, config.mesh.spares)
    sizes = resolve_axes(config.mesh, len(devices), config.moe.num_experts)
    check_axes(config, sizes)
    check_racks(sizes, config.mesh.spares)
    if len(devices) > 1 and jax.process_index() == 0:
        print(f"mesh {' '.join(f'{name}={size}' for name, size in sizes.items())} over {len(devices)} devices")
        print(axes_table(config, sizes))
    return make_mesh(config.mesh, config.moe.num_experts, devices, axis_type)


def check_racks(sizes: Mapping[str, int], spares: int) -> None:
    """Checks a mesh over racks with spare GPUs: `expert` and the axes inside it stay in a rack, where NVLink is.

    Args:
      sizes: devices per axis, as `resolve_axes` gives them.
      spares: idle GPUs of each rack; 0: nothing is known of racks.
    Raises:
      ValueError: the devices are not those of whole racks, or groups of the expert axis would lie in two racks.
    """
    if not spares:
        return
    used, devices = RACK - spares, math.prod(sizes.values())
    if devices % used:
        raise ValueError(
            f"mesh.spares={spares} leaves {used} of the {RACK} GPUs of each rack, but the mesh has {devices} devices: "
            f"expected a multiple of {used}"
        )
    inner = [axis for axis in ("expert", "context", "tensor") if sizes[axis] > 1]
    span = math.prod(sizes[axis] for axis in inner)
    if used % span:
        names = " x ".join(f"{axis}={sizes[axis]}" for axis in inner)
        raise ValueError(
            f"{names} = {span} neighbours do not divide the {used} GPUs that mesh.spares={spares} leaves of a rack: some "
            f"would exchange rows with another rack. Use a divisor of {used}, or other spares"
        )


def without_spares(devices: Sequence[jax.Device], spares: int) -> list[jax.Device]:
    """The devices of whole racks, without the last `spares` of each.

    Raises:
      ValueError: the device count is not a multiple of 72, or nothing would be left of a rack.
    """
    if not 0 <= spares < RACK:
        raise ValueError(f"{spares} spares of a rack: expected 0 to {RACK - 1}")
    racks, rest = divmod(len(devices), RACK)
    if rest or not racks:
        raise ValueError(f"{len(devices)} devices are not whole racks of {RACK}: use make_mesh for other counts")
    return [devices[rack * RACK + i] for rack in range(racks) for i in range(RACK - spares)]


def _check_processes(everything: Sequence[jax.Device], kept: Sequence[jax.Device], spares: int) -> None:
    """Raises ValueError if a process has spare devices only: it would have no part in the programs the others run."""
    idle = sorted({device.process_index for device in everything} - {device.process_index for device in kept})
    if idle:
        shown = ", ".join(map(str, idle[:8])) + (", …" if len(idle) > 8 else "")
        raise ValueError(
            f"mesh.spares is {spares}, which leaves no device for {len(idle)} processes of the job ({shown}): start it on the "
            f"{len(kept)} GPUs it will use, with mesh.spares=0"
        )


@dataclasses.dataclass(frozen=True)
class RackPlan:
    """How the GPUs of a rack are used: `data` x `fsdp` x `expert` of them, the rest spare."""

    data: int
    fsdp: int
    expert: int
    spares: int


def rack_plans(num_experts: int, d_model: int | None = None, unit: int = 1, gpus: int = RACK) -> list[RackPlan]:
    """One plan for every expert axis that divides E and fits a rack, largest first.

    What is left beside the expert axis becomes `fsdp` as far as that divides D, and `data`: with the fewest spares,
    and of those with the most `fsdp`, which holds the least state per GPU.

    Args:
      d_model: D; None: any `fsdp` fits.
      unit: what a share of D must be a multiple of: 32 in recipe mxfp8.
    Raises:
      ValueError: a number that must be positive is not.
    """
    for name, value in (("num_experts", num_experts), ("d_model", d_model), ("unit", unit), ("gpus", gpus)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}: expected a positive number")
    plans = []
    for expert in (size for size in range(gpus, 0, -1) if num_experts % size == 0):
        fits = [f for f in range(1, gpus // expert + 1) if d_model is None or d_model % (f * unit) == 0 or f == 1]
        whole = [RackPlan(gpus // (expert * f), f, expert, gpus - gpus // (expert * f) * expert * f) for f in fits]
        plans.append(min(whole, key=lambda plan: (plan.spares, -plan.fsdp)))
    return plans


def choose_rack_plan(
    num_experts: int,
    expert: int | None = None,
    max_spares: int = 8,
    d_model: int | None = None,
    unit: int = 1,
) -> tuple[RackPlan, str]:
    """The plan `nvl72_mesh` uses, and why: a sentence and a table of all plans.

    Raises:
      ValueError: a number that must be positive is not; `expert` does not divide E or exceeds a rack, or every plan leaves
        more spares than allowed.
    """
    plans = rack_plans(num_experts, d_model, unit)
    if max_spares < 0:
        raise ValueError(f"max_spares is {max_spares}: expected 0 to {RACK - 1}")
    chosen = None
    if expert is not None:
        chosen = next((plan for plan in plans if plan.expert == expert), None)
        why = f"expert={expert} was asked for"
        problem = f"expert={expert} does not divide {num_experts} experts, or exceeds a rack"
    else:
        chosen = next((plan for plan in plans if plan.spares <= max_spares), None)
        why = f"the largest divisor of {num_experts} experts that leaves at most {max_spares} GPUs spare"
        problem = f"no expert axis leaves at most {max_spares} GPUs spare"
    width = "" if d_model is None else f", D = {d_model}"
    title = f"plans for {num_experts} experts{width} on {RACK} GPUs:"
    lines: list[tuple[str, ...]] = [("expert", "fsdp", "data", "spare", "experts per GPU", "")]
    for plan in plans:
        mark = (
            "<- chosen" if plan == chosen else "too many spares" if expert is None and plan.spares > max_spares else ""
        )
        numbers = (plan.expert, plan.fsdp, plan.data, plan.spares, num_experts // plan.expert)
        lines.append((*map(str, numbers), mark))
    if chosen is None:
        raise ValueError(f"{problem}; {title}\n{_table(lines)}")
    return chosen, f"{why}; {title}\n{_table(lines)}"


def nvl72_mesh(
    num_experts: int,
    devices: Sequence[jax.Device] | None = None,
    expert: int | None = None,
    max_spares: int = 8,
    axis_type: AxisType = AxisType.Explicit,
    d_model: int | None = None,
    unit: int = 1,
) -> jax.sharding.Mesh:
    """A mesh over one or more NVL72 racks; prints what it chose and why.

    The expert axis stays inside a rack, where every pair of GPUs has NVLink; racks are replicas (`data`). 72 = 8 x 9 is
    rarely a multiple of what E divides by, so either GPUs stay spare, or `fsdp` and `data` fill the rack.

    Args:
      num_experts: E.
      devices: all GPUs, rack by rack, a multiple of 72; default: `jax.devices()`.
      expert: size of the expert axis; None: the largest divisor of E that leaves at most `max_spares` GPUs of a rack
        idle.
      max_spares: 8 keeps an expert axis of 64 with a tray's worth of spares; 0 uses every GPU.
      d_model, unit: as in `rack_plans`.
    Raises:
      ValueError: the device count is not a multiple of 72, or no plan fits; the message lists the plans there are.
    """
    devices = list(jax.devices() if devices is None else devices)
    plan, reason = choose_rack_plan(num_experts, expert, max_spares, d_model, unit)
    kept = without_spares(devices, plan.spares)
    racks = len(devices) // RACK
    chosen = f"data={racks * plan.data} fsdp={plan.fsdp} expert={plan.expert}, {plan.spares} spare GPUs in each rack"
    print(f"NVL72 x {racks}: {chosen}: {reason}")
    config = MeshConfig(data=racks * plan.data, fsdp=plan.fsdp, expert=plan.expert)
    return make_mesh(config, num_experts, kept, axis_type)


def _table(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines
    )
