"""What a compiled program sends between devices, read from XLA's own text: every collective, over which mesh axes, in which loops.

`collectives` lists them; the functions below it say which of them a training step must not have. Texts of the oldest and
the newest supported jaxlib are read: they write groups of devices in three ways.
"""

import dataclasses
import itertools
import math
import re

import jax
import numpy as np

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_CALLED = re.compile(r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BYTES = {
    "pred": 1,
    "bf16": 2,
    "f16": 2,
    "u16": 2,
    "s16": 2,
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "f64": 8,
    "s64": 8,
    "u64": 8,
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: "all-to-all", …
      axes: mesh axes whose devices talk to each other; axes of size 1 are never named.
      shapes: (dtype, sizes) of each result.
      loops: trip counts of the loops around it, outermost first; None where the program does not know.
      source: the JAX operation it came from, with its scopes.
    """

    kind: str
    axes: frozenset[str]
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    loops: tuple[int | None, ...]
    source: str

    @property
    def elements(self) -> int:
        """Of the largest result."""
        return max(math.prod(sizes) for _, sizes in self.shapes)

    @property
    def bytes(self) -> int:
        """Of all results: those of one all-to-all are one per device."""
        return sum(math.prod(sizes) * _BYTES.get(dtype, 1) for dtype, sizes in self.shapes)


def collectives(text: str, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> list[Collective]:
    """Every collective of `compiled.as_text()`; devices are numbered in the order of the mesh.

    Raises:
      ValueError: devices are grouped in a way that is no set of mesh axes, or that this file cannot read.
    """
    computations = _computations(text)
    callers = _callers(computations)
    found = []
    for name, lines in computations.items():
        for line in lines:
            if (match := _INSTRUCTION.match(line)) is None:
                continue
            kind = match.group(3).removesuffix("-start")
            if kind not in _KINDS:
                continue
            shapes = tuple(
                (dtype, tuple(int(size) for size in sizes.split(",") if size))
                for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", match.group(2))
            )
            source = re.search(r'op_name="([^"]*)"', line)
            loops = _loops(name, callers)
            found.append(Collective(kind, _axes(line, mesh), shapes, loops, source.group(1) if source else ""))
    return found


def over(found: list[Collective], kind: str, *axes: str) -> list[Collective]:
    """Those of a kind that use at least one of the axes."""
    return [one for one in found if one.kind == kind and one.axes & set(axes)]


def reductions_in_loops(found: list[Collective], at_least: int = 1) -> list[Collective]:
    """Sums over devices inside any loop, of results with at least so many elements."""
    kinds = ("all-reduce", "reduce-scatter")
    return [one for one in found if one.kind in kinds and one.loops and one.elements >= at_least and one.axes]


def check_expert_parallel_step(text: str, mesh, *, width: int, copies: int) -> list[Collective]:
    """Asserts what the compiled training step of an expert-parallel model must hold; returns its collectives.

    1. Rows travel over `expert` by all-to-all, inside the loops over micro-batches and layers.
    2. Expert weights are never gathered over `expert`.
    3. Each copy of expert weights is gathered over `fsdp` once per step, outside all loops.
    4. Nothing is summed over devices inside a loop.

    Args:
      width: F of the experts, a size that their matrices alone have among what is sharded over `expert`.
      copies: gathers of expert weights that the step needs over `fsdp`: arrays of copies, or 0 if that axis is 1.
    """
    found = collectives(text, mesh)
    exchanges = over(found, "all-to-all", "expert")
    assert exchanges and all(one.loops and one.axes == {"expert"} for one in exchanges), exchanges
    gathered = [
        one for one in over(found, "all-gather", "expert") if any(width in sizes[-2:] for _, sizes in one.shapes)
    ]
    assert not gathered, f"gathered over expert: {gathered}"
    experts = [one for one in over(found, "all-gather", "fsdp") if "expert_copies" in one.source]
    assert len(experts) == copies, f"{len(experts)} gathers of expert weights over fsdp, expected {copies}: {experts}"
    assert not any(one.loops for one in experts), experts
    assert not reductions_in_loops(found), reductions_in_loops(found)
    return found


def _computations(text: str) -> dict[str, list[str]]:
    computations: dict[str, list[str]] = {}
    name = None
    for line in text.splitlines():
        if (header := _HEADER.match(line)) is not None:
            name = header.group(2)
            computations[name] = []
        elif name is not None:
            computations[name].append(line.strip())
    return computations


def _callers(computations: dict[str, list[str]]) -> dict[str, tuple[str, int | None, bool]]:
    """Computation -> who calls it, the trip count if that is a loop, whether it is a loop's body or condition."""
    callers = {}
    for name, lines in computations.items():
        for line in lines:
            called = _CALLED.findall(line)
            for group in re.findall(r"branch_computations=\{([^}]*)\}", line):
                called += [part.strip().lstrip("%") for part in group.split(",")]
            is_loop = " while(" in line
            trip = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
            for other in called:
                callers[other] = (name, int(trip.group(1)) if is_loop and trip else None, is_loop)
    return callers


def _loops(name: str, callers) -> tuple[int | None, ...]:
    loops = []
    while name in callers:
        name, trip, is_loop = callers[name]
        if is_loop:
            loops.append(trip)
    return tuple(reversed(loops))


def _axes(line: str, mesh) -> frozenset[str]:
    """The mesh axes a collective's groups of devices span."""
    sizes = dict(mesh.shape)
    named = re.search(r"replica_groups=mesh\[[^\]]*\]\s*\{([^}]*)\}", line)
    if named is not None and set(names := re.findall(r"'(\w+)'", named.group(1))) <= set(sizes):
        return frozenset(axis for axis in names if sizes[axis] > 1)
    groups = _groups(line, math.prod(sizes.values()))
    large = [axis for axis, size in sizes.items() if size > 1]
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    for count in range(len(large) + 1):
        for axes in itertools.combinations(large, count):
            last = [list(sizes).index(axis) for axis in axes]
            first = [i for i in range(len(sizes)) if i not in last]
            rows = ids.transpose(*first, *last).reshape(-1, math.prod(sizes[axis] for axis in axes))
            if {frozenset(row) for row in rows.tolist()} == groups:
                return frozenset(axes)
    raise ValueError(f"no set of axes of {sizes} has these groups: {line}")


def _groups(line: str, devices: int) -> set[frozenset[int]]:
    if (listed := re.search(r"replica_groups=\{(\{[\d,]*\}(?:,\{[\d,]*\})*)\}", line)) is not None:
        return {frozenset(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed.group(1))}
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota is not None:
        shape, dims, order = ([int(n) for n in part.split(",")] if part else None for part in iota.groups())
        ids = np.arange(math.prod(dims)).reshape(dims)
        ids = ids if order is None else ids.transpose(order)
        return {frozenset(row) for row in ids.reshape(shape).tolist()}
    own = re.search(
        r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", line
    )  # the compiler's own axes, over the devices in order
    if own is not None and "(" not in own.group(2):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", own.group(1))}
        last = [list(sizes).index(axis) for axis in re.findall(r"'(\w+)'", own.group(2))]
        ids = np.arange(devices).reshape(tuple(sizes.values()))
        ids = np.moveaxis(ids, last, range(-len(last), 0)).reshape(-1, math.prod(list(sizes.values())[i] for i in last))
        return {frozenset(row) for row in ids.tolist()}
    if "replica_groups={}" in line:
        return {frozenset(range(devices))}
    if (pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", line)) is not None:
        return _connected(re.findall(r"\{(\d+),(\d+)", pairs.group(0)), devices)
    raise ValueError(f"cannot read the groups of {line}")


def _connected(pairs, devices: int) -> set[frozenset[int]]:
    """Devices that exchange, directly or not."""
    group = {device: frozenset({device}) for device in range(devices)}
    for source, target in pairs:
        joined = group[int(source)] | group[int(target)]
        for device in joined:
            group[device] = joined
    return set(group.values())
