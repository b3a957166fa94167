"""How much memory a traced program needs at once, without compiling it.

The program is walked and each buffer gets the time from which and until which it is needed; then the buffers are packed.

  fusion      what a compiler fuses needs no buffer: the result of an elementwise operation exists only where something that
              reads whole arrays (a product, a gather, a loop, a collective) wants it
  in place    a buffer whose operand dies is written over it; loops keep their carry in place
  transposes  what is read in two orders of its axes, once by a product, is there twice
  order       an operation runs as soon as its operands are there: what is recomputed for a backward is there early
  packing     one after the other, the largest first, into the gaps that are left

This is a model of XLA on the CPU, not XLA: it does not know its fusion limits. `tests/test_estimate.py` holds it to 25 % of
`compiled.memory_analysis()` of small FP32 steps.
"""

import bisect
import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.extend.core

from moejax.ops.gemms import scan_sizes

# One value per element of the inputs, or a view of them: no buffer of their own unless somebody needs one.
_FUSED = set(
    """
    abs add add_any and atan2 bitcast_convert_type broadcast_in_dim cbrt ceil clamp convert_element_type copy
    copy_p cos div dynamic_slice eq erf erf_inv exp exp2 expand_dims expm1 floor ge gt integer_pow iota
    is_finite le log log1p logistic lt max mesh_cast min mul name ne neg nextafter not optimization_barrier or
    pad pcast population_count pow pvary random_bits random_unwrap random_wrap reduce_precision
    reduced_vary_cast rem reshape reshard rev round rsqrt select_n sharding_constraint shift_left
    shift_right_arithmetic shift_right_logical sign sin slice sqrt square squeeze stop_gradient sub tan tanh
    transpose xor
    """.split()
)
# They read their operands element by element, so that these may be fused into them.
_REDUCERS = {f"reduce_{name}" for name in ("sum", "max", "min", "and", "or", "xor", "prod")} | {"argmax", "argmin"}
_READERS = _FUSED | _REDUCERS | {"dynamic_update_slice", "concatenate", "get", "swap", "addupdate"}
_CALLS = set(
    """
    checkpoint closed_call core_call custom_jvp_call custom_lin custom_vjp_call custom_vjp_call_jaxpr jit pjit
    remat remat2 remat_opt run_state shard_map
    """.split()
)

_LOOPS = ("scan", "while")
_SUMS = ("psum", "psum_invariant")
_EFFECTS = ("swap", "addupdate")
_IN_PLACE = {"dynamic_update_slice", "swap", "addupdate", "scatter", "scatter-add"}
# The same bytes under another shape or name.
_VIEWS = set(
    """
    copy expand_dims mesh_cast name pcast pvary reshape reshard sharding_constraint squeeze stop_gradient
    transpose
    """.split()
)


class Heap:
    """Buffers with the time from which and until which each is needed, and the room they take as XLA packs them."""

    def __init__(self) -> None:
        self.now = 0
        self._size: list[int] = []
        self._from: list[int] = []
        self._until: list[int] = []

    def add(self, size: int) -> int:
        """A buffer from now on; returns its number."""
        self._size.append(size)
        self._from.append(self.now)
        self._until.append(self.now + 1)
        return len(self._size) - 1

    def hold(self, buffer: int) -> None:
        """The buffer is needed until now."""
        self._until[buffer] = max(self._until[buffer], self.now)

    def packed(self) -> int:
        """Bytes in all: buffers placed one by one, the largest first or the longest-lived first, whichever takes less.

        Each goes to the smallest gap between those that are needed at the same time, or behind them. So a buffer that is
        placed early leaves holes that later ones do not fill: the bytes needed at once would be less.
        """
        life = [until - since for since, until in zip(self._from, self._until)]
        real = [number for number, size in enumerate(self._size) if size]
        return min(
            self._pack(sorted(real, key=lambda n: (-self._size[n], -life[n]))),
            self._pack(sorted(real, key=lambda n: (-life[n], -self._size[n]))),
        )

    def _pack(self, order: list[int]) -> int:
        placed: list[tuple[int, int, int, int]] = []  # first byte, byte behind the last, since, until; by first byte
        end = 0
        for number in order:
            size, since, until = self._size[number], self._from[number], self._until[number]
            low, best, gap = 0, None, 0
            for first, behind, from_, to in placed:
                if from_ >= until or to <= since:
                    continue
                if first - low >= size and (best is None or first - low < gap):
                    best, gap = low, first - low
                low = max(low, behind)
            first = low if best is None else best
            bisect.insort(placed, (first, first + size, since, until))
            end = max(end, first + size)
        return end


@dataclasses.dataclass(eq=False)
class _Step:
    """One operation after calls were opened: what it reads, what it makes."""

    name: str
    reads: list[Any]
    makes: list[Any]
    params: dict[str, Any]
    unread: frozenset[int] = frozenset()  # numbers of operands that are never looked at

    @property
    def looks_at(self) -> list[Any]:
        return [value for number, value in enumerate(self.reads) if number not in self.unread]


@dataclasses.dataclass
class _Loop:
    """What a scan or while takes: operands of a condition, constants of the body, what it carries, and slices of the rest."""

    body: Any
    reads: list[int]  # operands of the body
    skipped: int  # operands of the loop before these
    consts: int
    count: int  # of carried values

    @classmethod
    def of(cls, step: _Step) -> "_Loop":
        if step.name == "scan":
            return cls(step.params["jaxpr"].jaxpr, step.reads, 0, *scan_sizes(step.params))
        skipped, consts = step.params["cond_nconsts"], step.params["body_nconsts"]
        reads = step.reads[skipped:]
        return cls(step.params["body_jaxpr"].jaxpr, reads, skipped, consts, len(reads) - consts)

    @property
    def unchanged(self) -> dict[int, int]:
        """Carried values, by number, that every turn hands on as they are, with the operand that they stay."""
        found = _passed_on(self.body)
        return {n: self.reads[n + self.consts] for n in range(self.count) if found.get(n) == n + self.consts}

    @property
    def changing(self) -> list[int]:
        """Numbers of the operands of the body that are carried and change."""
        unchanged = self.unchanged
        return [n + self.consts for n in range(self.count) if n not in unchanged]


@dataclasses.dataclass
class _Program:
    """A jaxpr with its calls opened. Values are numbers; `size` says how many bytes each has on one device."""

    inputs: list[int]
    outputs: list[int]
    steps: list[_Step]
    size: dict[int, int]


def peak_bytes(program: jax.extend.core.ClosedJaxpr, input_bytes: Sequence[int], donated: Iterable[int] = ()) -> int:
    """Most bytes that temporaries take at once, without inputs and without outputs that are written over a donated input.

    Args:
      program: of `jax.make_jaxpr`.
      input_bytes: bytes of each input on one device (of its shard, where it is sharded).
      donated: numbers of the inputs that may be written over.
    """
    opened = _open(program.jaxpr, [int(size) for size in input_bytes])
    heap = Heap()
    homes = {opened.inputs[number]: heap.add(0) for number in donated}
    _walk(opened, heap, homes, {number: opened.inputs[number] for number in donated})
    return heap.packed()


def _open(jaxpr, input_bytes: Sequence[int]) -> _Program:
    """Opens calls, so that what they hold can be fused with what is around them; follows sizes through `shard_map`."""
    program = _Program([], [], [], {})
    counter = iter(range(1 << 60))

    def fresh(size: int) -> int:
        value = next(counter)
        program.size[value] = size
        return value

    def view(value: int) -> int:
        program.steps.append(_Step("reshape", [value], [made := fresh(program.size[value])], {}))
        return made

    def run(jaxpr, values: list[int]) -> list[int]:
        known: dict[Any, int] = dict(zip(jaxpr.invars, values))
        for var in jaxpr.constvars:
            known[var] = fresh(0)

        def read(atom):
            return fresh(0) if isinstance(atom, jax.extend.core.Literal) else known[atom]

        for eqn in jaxpr.eqns:
            reads = [read(atom) for atom in eqn.invars]
            name = eqn.primitive.name
            once = name == "scan" and eqn.params["length"] == 1  # no loop: XLA unrolls it
            inner = _called(eqn) if name in _CALLS or once else None
            if inner is not None and len(inner.invars) == len(reads):
                if once:
                    consts, count = scan_sizes(eqn.params)
                    reads = [*reads[: consts + count], *map(view, reads[consts + count :])]
                    makes = run(inner, reads)
                    known.update(zip(eqn.outvars, [*makes[:count], *map(view, makes[count:])]))
                    continue
                if name == "shard_map":
                    reads = [_resized(program, value, var, fresh) for value, var in zip(reads, inner.invars)]
                makes = run(inner, reads)
            else:
                makes = [fresh(_made_bytes(var, eqn, reads, program)) for var in eqn.outvars]
                if name in _REDUCERS and program.size[makes[0]] == program.size[reads[0]] or _adds_axes_only(eqn):
                    name = "reshape"  # over or to an axis of length 1
                params = eqn.params
                if name == "dot_general":
                    params = params | {"ndims": [atom.aval.ndim for atom in eqn.invars]}
                step = _Step(name, reads, list(makes), params)
                if name in _LOOPS:
                    unchanged = _Loop.of(step).unchanged
                    step.makes = [value for number, value in enumerate(makes) if number not in unchanged]
                    for number, operand in unchanged.items():
                        makes[number] = operand
                program.steps.append(step)
            known.update(zip(eqn.outvars, makes))
        return [read(atom) for atom in jaxpr.outvars]

    program.inputs = [fresh(size) for size in input_bytes]
    program.outputs = run(jaxpr, list(program.inputs))
    _prune(program)
    _join_sums(program)
    _copy_transposed(program, fresh)
    return program


def _prune(program: _Program) -> None:
    """Leaves out what nothing is made of, as a compiler does."""
    needed, kept = set(program.outputs), []
    for step in reversed(program.steps):
        if needed.isdisjoint(step.makes) and step.name not in _EFFECTS:
            continue
        if step.name in _LOOPS:
            step.unread = _unread(step)
        needed.update(step.looks_at)
        kept.append(step)
    program.steps = kept[::-1]


def _join_sums(program: _Program) -> None:
    """Makes one operation of sums over the same devices, as XLA does: all that they read and make is there at once."""
    waiting: dict[Any, _Step] = {}
    steps: list[_Step] = []
    for step in program.steps:
        read = set(step.looks_at)
        waiting = {key: one for key, one in waiting.items() if read.isdisjoint(one.makes)}
        if step.name in _SUMS:
            key = (step.name, str(step.params.get("axes")), str(step.params.get("axis_index_groups")))
            if (earlier := waiting.get(key)) is not None:
                steps.remove(earlier)
                step = dataclasses.replace(step, reads=earlier.reads + step.reads, makes=earlier.makes + step.makes)
            waiting[key] = step
        steps.append(step)
    program.steps = steps


def _copy_transposed(program: _Program, fresh) -> None:
    """A second buffer for what products read in two orders of its axes: the CPU multiplies matrices that lie row by row."""
    maker = {value: step for step in program.steps for value in step.makes}
    as_it_lies = {value for value, step in maker.items() if step.name not in _FUSED}
    for step in program.steps:
        if step.name != "dot_general" and step.name not in _VIEWS:
            as_it_lies.update(_as_laid(value, (), maker)[0] for value in step.reads)
    copies: dict[int, dict[Any, int]] = {}
    behind: dict[int, list[_Step]] = {}
    for step in program.steps:
        if step.name != "dot_general":
            continue
        for number, (contracted, batch) in enumerate(zip(*step.params["dimension_numbers"])):
            free = [axis for axis in range(step.params["ndims"][number]) if axis not in (*contracted, *batch)]
            order = (*batch, *free, *contracted) if number == 0 else (*batch, *contracted, *free)
            base, form = _as_laid(step.reads[number], order, maker)
            if base not in maker:
                continue
            forms = copies.setdefault(base, {None: base} if base in as_it_lies else {})
            if form not in forms:  # the first is how the buffer is made
                forms[form] = fresh(program.size[base]) if forms else base
                if forms[form] != base:
                    behind.setdefault(id(maker[base]), []).append(_Step("transposed", [base], [forms[form]], {}))
            if forms[form] != base:
                step.reads[number] = forms[form]
    program.steps = [one for step in program.steps for one in (step, *behind.get(id(step), ()))]


def _as_laid(value: int, order: tuple[int, ...], maker: dict[int, _Step]) -> tuple[int, Any]:
    """The buffer that an operand is a view of, and how a product reads its axes: None if as they lie."""
    form: Any = _moved(order)
    while (step := maker.get(value)) is not None and step.name in _VIEWS:
        if step.name == "transpose" and not isinstance(form, str):
            permutation = step.params["permutation"]
            form = _moved(permutation if form is None else [permutation[axis] for axis in form])
        elif step.name in ("reshape", "expand_dims", "squeeze") and form is not None:
            form = f"{form} of {value}"  # not followed further
        value = step.reads[0]
    return value, form


def _moved(order: Sequence[int]) -> tuple[int, ...] | None:
    return tuple(order) if list(order) != sorted(order) else None


def _unread(step: _Step) -> frozenset[int]:
    """Numbers of the operands that the body of a loop takes, but does not read."""
    loop = _Loop.of(step)
    opened = _open(loop.body, [1] * len(loop.body.invars))
    read = {value for inner in opened.steps for value in inner.looks_at} | set(opened.outputs)
    return frozenset(loop.skipped + number for number, value in enumerate(opened.inputs) if value not in read)


def _passed_on(jaxpr) -> dict[int, int]:
    """Numbers of the outputs that are inputs, with the number of that input."""
    origin = {var: number for number, var in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        inner = _called(eqn) if eqn.primitive.name in _CALLS else None
        first = eqn.invars[0] if eqn.invars and not isinstance(eqn.invars[0], jax.extend.core.Literal) else None
        if first in origin and (eqn.primitive.name in _VIEWS - {"transpose"} or _adds_axes_only(eqn)):
            origin[eqn.outvars[0]] = origin[first]
        elif inner is not None and len(inner.invars) == len(eqn.invars):
            for made, read in _passed_on(inner).items():
                if not isinstance(atom := eqn.invars[read], jax.extend.core.Literal) and atom in origin:
                    origin[eqn.outvars[made]] = origin[atom]
    outputs = enumerate(jaxpr.outvars)
    return {n: origin[var] for n, var in outputs if not isinstance(var, jax.extend.core.Literal) and var in origin}


def _adds_axes_only(eqn) -> bool:
    """Whether a broadcast repeats nothing."""
    return eqn.primitive.name == "broadcast_in_dim" and eqn.invars[0].aval.size == eqn.outvars[0].aval.size > 1


def _resized(program: _Program, value: int, var, fresh) -> int:
    """A value as `shard_map` hands it in: if its shard there has another size (gathered), a buffer of its own."""
    size = _aval_bytes(var.aval)
    if size <= program.size[value] or program.size[value] == 0:
        program.size[value] = min(size, program.size[value]) if program.size[value] else size
        return value
    gathered = fresh(size)
    program.steps.append(_Step("all_gather", [value], [gathered], {}))
    return gathered


def _made_bytes(var, eqn, reads: list[int], program: _Program) -> int:
    """Bytes of a result on one device: those of its shape, or of an operand of that shape, which may be sharded."""
    size = _aval_bytes(var.aval)
    for atom, value in zip(eqn.invars, reads):
        aval = atom.aval
        if getattr(aval, "shape", None) == getattr(var.aval, "shape", ()) and getattr(aval, "shape", None):
            whole = _aval_bytes(aval)
            if whole and program.size[value] and program.size[value] < whole:
                return size * program.size[value] // whole
    return size


def _walk(
    program: _Program, heap: Heap, homes: dict[int, int], returns: dict[int, int], written: range = range(0)
) -> None:
    """Puts the buffers of a program on the heap, step by step.

    Args:
      homes: inputs whose buffer is on the heap already and may be written over when they die; other inputs have none here.
      returns: outputs, by number, that end up in the buffer of such an input.
      written: numbers of outputs that are written elsewhere at once, and needn't stay.
    """
    size, wanted = program.size, _materialised(program)
    made_from = _sources(program, wanted)
    steps = _as_scheduled([step for step in program.steps if not wanted.isdisjoint(step.makes)], made_from)

    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        for value in step.looks_at:
            for source in made_from[value]:
                last[source] = number
    back: dict[int, int] = {}  # a buffer that becomes an output, and the input whose place it goes to
    for number, value in enumerate(program.outputs):
        if number in written:
            continue
        for source in made_from[value]:
            last[source] = len(steps)
        if number in returns and len(made_from[value]) == 1:
            back[next(iter(made_from[value]))] = returns[number]

    place = dict(homes)
    for number, step in enumerate(steps):
        sources = {source for value in step.looks_at for source in made_from[value]}
        dying = {source for source in sources if source in place and last[source] == number}
        made = sorted((value for value in step.makes if value in wanted and value not in place), key=lambda v: -size[v])
        free = sorted(_overwritable(step, dying, made_from), key=lambda v: -size[v])
        for value in made:
            home = back.get(value)
            if free and size[free[0]] >= size[value]:
                place[value] = place[free.pop(0)]
            elif home is not None and last.get(home, -1) < number and size[home] == size[value]:
                place[value] = homes[home]
            else:
                place[value] = heap.add(size[value])
        if step.name in _LOOPS:
            _loop(step, program, heap, place)
        elif step.name == "cond":
            for branch in step.params["branches"]:
                _branch(branch, step, program, heap, [place[value] for value in step.makes])
        heap.now += 1
        for value in (*dying, *(value for value in made if value not in last)):
            heap.hold(place.pop(value))
    for buffer in place.values():
        heap.hold(buffer)


def _as_scheduled(steps: list[_Step], made_from: dict[int, frozenset[int]]) -> list[_Step]:
    """The order of XLA on the CPU: a step runs as soon as its operands are there, first come, first served.

    So what is recomputed for a backward, and needs nothing of what comes back, is there long before.
    """
    maker = {value: number for number, step in enumerate(steps) for value in step.makes}
    readers: list[list[int]] = [[] for _ in steps]
    missing = []
    for number, step in enumerate(steps):
        needs = {maker[source] for value in step.looks_at for source in made_from[value] if source in maker} - {number}
        missing.append(len(needs))
        for other in needs:
            readers[other].append(number)
    ready = collections.deque(number for number, count in enumerate(missing) if not count)
    order = []
    while ready:
        order.append(number := ready.popleft())
        for reader in readers[number]:
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    return [steps[number] for number in order]


def _overwritable(step: _Step, dying: set[int], made_from: dict[int, frozenset[int]]) -> set[int]:
    """Those of the dying operands that a step writes its results over: a loop, those that it carries."""
    if step.name in _LOOPS:
        loop = _Loop.of(step)
        return dying & {source for number in loop.changing for source in made_from[loop.reads[number]]}
    return dying if step.name in _FUSED | _IN_PLACE else set()


def _loop(step: _Step, program: _Program, heap: Heap, place: dict[int, int]) -> None:
    """One turn of a loop. What is carried and updated in place is one buffer, that of the result."""
    loop = _Loop.of(step)
    sizes = []
    for number, var in enumerate(loop.body.invars):
        known = program.size[loop.reads[number]] if number < loop.consts + loop.count else 0
        whole = _aval_bytes(var.aval)
        sizes.append(min(known, whole) if known else whole)
    opened = _open(loop.body, sizes)
    homes = {opened.inputs[number]: place[value] for number, value in zip(loop.changing, step.makes)}
    returns = {number - loop.consts: opened.inputs[number] for number in loop.changing}
    _walk(opened, heap, homes, returns, range(loop.count, len(opened.outputs)))


def _branch(branch, step: _Step, program: _Program, heap: Heap, results: list[int]) -> None:
    """One branch of a condition; it makes its outputs where the results of the condition are."""
    sizes = [program.size[value] or _aval_bytes(var.aval) for value, var in zip(step.reads[1:], branch.jaxpr.invars)]
    opened = _open(branch.jaxpr, sizes)
    _walk(opened, heap, dict(zip(opened.outputs, results)), {})


def _materialised(program: _Program) -> set[int]:
    """Values that have a buffer: results of operations that are not fused, and what such operations read; outputs."""
    maker = {value: step for step in program.steps for value in step.makes}
    wanted = {value for step in program.steps if step.name not in _FUSED for value in step.makes}
    for step in program.steps:
        if step.name in _READERS:
            continue
        for value in step.looks_at:
            wanted.update(_buffer_of(value, maker))
    for value in program.outputs:
        wanted.update(_buffer_of(value, maker))
    return wanted


def _buffer_of(value: int, maker: dict[int, _Step]) -> list[int]:
    """What must be a buffer so that `value` is one: views and transposes of a buffer are read where it lies."""
    step = maker.get(value)
    while step is not None and step.name in _VIEWS:
        value = step.reads[0]
        step = maker.get(value)
    return [value] if step is not None else []


def _sources(program: _Program, wanted: set[int]) -> dict[int, frozenset[int]]:
    """The buffers each value is computed from, itself if it has one."""
    found: dict[int, frozenset[int]] = {}
    for value in program.inputs:
        found[value] = frozenset([value])
    for step in program.steps:
        joined = (
            frozenset().union(*(found.get(value, frozenset()) for value in step.reads)) if step.reads else frozenset()
        )
        for value in step.makes:
            found[value] = frozenset([value]) if value in wanted else joined
    for step in program.steps:
        for value in step.reads:
            found.setdefault(value, frozenset())
    for value in program.outputs:
        found.setdefault(value, frozenset())
    return found


def _called(eqn) -> Any:
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if (inner := eqn.params.get(name)) is not None:
            return getattr(inner, "jaxpr", inner)
    return None


def _aval_bytes(aval: Any) -> int:
    inner = getattr(aval, "inner_aval", aval)  # a reference is as large as what it refers to
    shape, dtype = getattr(inner, "shape", None), getattr(inner, "dtype", None)
    if shape is None or dtype is None:
        return 0
    return math.prod(shape) * (dtype.itemsize if hasattr(dtype, "itemsize") else 0)
