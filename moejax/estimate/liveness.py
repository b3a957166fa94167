"""How much memory a traced program needs at once, without compiling it.

The program is walked in its order, and the buffers that are alive are added up. What a compiler fuses needs no buffer:
the result of an elementwise operation exists only where something that reads whole arrays (a product, a gather, a loop, a
collective) wants it. A buffer whose operand dies is written over it. Loops keep their carry in place.

    buffers(t) = sum of bytes of all buffers made before t and read after it;   peak = max over t

This is a model of XLA, not XLA: it knows neither its scheduling nor its fusion limits. `tests/test_estimate.py` holds it to
25 % of `compiled.memory_analysis()` of small FP32 steps on the CPU.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.extend.core

from moejax.ops.gemms import scan_sizes

# One value per element of the inputs, or a view of them: no buffer of their own unless somebody needs one.
_FUSED = {
    *("abs", "add", "add_any", "and", "atan2", "bitcast_convert_type", "broadcast_in_dim", "cbrt", "ceil", "clamp"),
    *(
        "convert_element_type",
        "copy",
        "cos",
        "div",
        "eq",
        "erf",
        "erf_inv",
        "exp",
        "exp2",
        "expand_dims",
        "expm1",
        "floor",
    ),
    *(
        "ge",
        "gt",
        "integer_pow",
        "iota",
        "is_finite",
        "le",
        "log",
        "log1p",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "name",
    ),
    *("ne", "neg", "nextafter", "not", "or", "pad", "pcast", "pow", "population_count", "random_bits", "random_wrap"),
    *(
        "random_unwrap",
        "rem",
        "reduce_precision",
        "reshape",
        "rev",
        "round",
        "rsqrt",
        "select_n",
        "sharding_constraint",
    ),
    *(
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "sin",
        "slice",
        "sqrt",
        "square",
        "squeeze",
    ),
    *(
        "stop_gradient",
        "sub",
        "tan",
        "tanh",
        "transpose",
        "xor",
        "optimization_barrier",
        "pvary",
        "reshard",
        "mesh_cast",
    ),
    *("dynamic_slice", "reduced_vary_cast", "copy_p"),
}
# They read their operands element by element, so that these may be fused into them.
_REDUCERS = {f"reduce_{name}" for name in ("sum", "max", "min", "and", "or", "xor", "prod")} | {"argmax", "argmin"}
_READERS = _FUSED | _REDUCERS | {"dynamic_update_slice", "concatenate", "get", "swap", "addupdate"}
_CALLS = {
    *("pjit", "jit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"),
    *("custom_vjp_call_jaxpr", "shard_map", "custom_lin", "run_state", "remat_opt"),
}

_LOOPS = ("scan", "while")
_EFFECTS = ("swap", "addupdate")
# The same bytes under another shape or name.
_VIEWS = {
    *(
        "copy",
        "expand_dims",
        "mesh_cast",
        "name",
        "pcast",
        "pvary",
        "reshape",
        "reshard",
        "sharding_constraint",
        "squeeze",
    ),
    *("stop_gradient", "transpose"),
}


@dataclasses.dataclass
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
    owned = {opened.inputs[i] for i in donated}
    peak = _walk(opened, owned)
    return peak - sum(opened.size[value] for value in owned)


def _open(jaxpr, input_bytes: Sequence[int]) -> _Program:
    """Opens calls, so that what they hold can be fused with what is around them; follows sizes through `shard_map`."""
    program = _Program([], [], [], {})
    counter = iter(range(1 << 60))

    def fresh(size: int) -> int:
        value = next(counter)
        program.size[value] = size
        return value

    def run(jaxpr, values: list[int], consts: Sequence[Any] = ()) -> list[int]:
        known: dict[Any, int] = dict(zip(jaxpr.invars, values))
        for var in jaxpr.constvars:
            known[var] = fresh(0)

        def read(atom):
            return fresh(0) if isinstance(atom, jax.extend.core.Literal) else known[atom]

        for eqn in jaxpr.eqns:
            reads = [read(atom) for atom in eqn.invars]
            name = eqn.primitive.name
            inner = _called(eqn) if name in _CALLS else None
            if inner is not None and len(inner.invars) == len(reads):
                if name == "shard_map":
                    reads = [_resized(program, value, var, fresh) for value, var in zip(reads, inner.invars)]
                makes = run(inner, reads)
            else:
                makes = [fresh(_made_bytes(var, eqn, reads, program)) for var in eqn.outvars]
                if name in _REDUCERS and program.size[makes[0]] == program.size[reads[0]]:
                    name = "reshape"  # over an axis of length 1
                program.steps.append(_Step(name, reads, makes, eqn.params))
            known.update(zip(eqn.outvars, makes))
        return [read(atom) for atom in jaxpr.outvars]

    program.inputs = [fresh(size) for size in input_bytes]
    program.outputs = run(jaxpr, list(program.inputs))
    _prune(program)
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


def _unread(step: _Step) -> frozenset[int]:
    """Numbers of the operands that the body of a loop takes, but does not read."""
    skipped = 0 if step.name == "scan" else step.params["cond_nconsts"]
    body = step.params["jaxpr" if step.name == "scan" else "body_jaxpr"].jaxpr
    opened = _open(body, [1] * len(body.invars))
    read = {value for inner in opened.steps for value in inner.looks_at} | set(opened.outputs)
    return frozenset(skipped + number for number, value in enumerate(opened.inputs) if value not in read)


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


def _walk(program: _Program, owned: set[int]) -> int:
    """Peak of the bytes alive, `owned` inputs included (they may be written over), other inputs not."""
    size, steps = program.size, program.steps
    wanted = _materialised(program)
    made_from = _sources(program, wanted)

    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        for value in step.looks_at:
            for source in made_from[value]:
                last[source] = number
    for value in program.outputs:
        for source in made_from[value]:
            last[source] = len(steps)

    mine = set(owned)
    alive = sum(size[value] for value in owned)
    peak = alive
    for number, step in enumerate(steps):
        sources = {source for value in step.looks_at for source in made_from[value]}
        dying = {source for source in sources if source in mine and last[source] == number}
        made = [value for value in step.makes if value in wanted and value not in mine]
        inner, reused = _inside(step, program, dying, made)
        peak = max(peak, alive + inner)
        alive += sum(size[value] for value in made) - reused
        mine.update(made)
        freed = sum(size[value] for value in dying) - reused
        alive -= freed
        mine -= dying
        for value in made:  # never read
            if value not in last:
                alive -= size[value]
                mine.discard(value)
        peak = max(peak, alive)
    return peak


def _inside(step: _Step, program: _Program, dying: set[int], made: list[int]) -> tuple[int, int]:
    """Extra bytes while `step` runs (what it makes included), and how many bytes of dying operands it writes over."""
    size = program.size
    out = sum(size[value] for value in made)
    if step.name in _LOOPS:
        extra, carry = _loop(step, program)
        reused = min(carry, sum(size[value] for value in dying & set(_carried(step))))
        return max(out, out - carry + extra) - reused, reused
    if step.name == "cond":
        return out + max((_branch(branch, step, program) for branch in step.params["branches"]), default=0), 0
    if step.name in _FUSED or step.name in ("dynamic_update_slice", "swap", "addupdate", "scatter", "scatter-add"):
        reused, free = 0, sorted((size[value] for value in dying), reverse=True)
        for value in sorted(made, key=lambda value: -size[value]):
            if free and free[0] >= size[value]:
                free.pop(0)
                reused += size[value]
        return out - reused, reused
    return out, 0


def _carried(step: _Step) -> list[int]:
    if step.name == "scan":
        first, count = scan_sizes(step.params)
        return step.reads[first : first + count]
    return step.reads[step.params["cond_nconsts"] + step.params["body_nconsts"] :]


def _loop(step: _Step, program: _Program) -> tuple[int, int]:
    """Peak inside one turn, its carry included, and the bytes of the carry."""
    if step.name == "scan":
        body, (consts, count) = step.params["jaxpr"], scan_sizes(step.params)
        reads = step.reads
    else:
        body, consts = step.params["body_jaxpr"], step.params["body_nconsts"]
        reads = step.reads[step.params["cond_nconsts"] :]
        count = len(reads) - consts
    sizes = []
    for number, var in enumerate(body.jaxpr.invars):
        known = program.size[reads[number]] if number < consts + count else 0
        whole = _aval_bytes(var.aval)
        sizes.append(min(known, whole) if known else whole)
    opened = _open(body.jaxpr, sizes)
    carry = set(opened.inputs[consts : consts + count])
    # A carry that comes back unchanged, or updated in place, is one buffer.
    return _walk(opened, carry), sum(opened.size[value] for value in carry)


def _branch(branch, step: _Step, program: _Program) -> int:
    sizes = [program.size[value] or _aval_bytes(var.aval) for value, var in zip(step.reads[1:], branch.jaxpr.invars)]
    opened = _open(branch.jaxpr, sizes)
    return max(_walk(opened, set()) - sum(opened.size[value] for value in set(opened.outputs)), 0)


def _materialised(program: _Program) -> set[int]:
    """Values that have a buffer: results of operations that are not fused, and what such operations read; outputs."""
    maker = {value: step for step in program.steps for value in step.makes}
    wanted = {value for step in program.steps if step.name not in _FUSED for value in step.makes}
    for step in program.steps:
        if step.name in _READERS:
            continue
        carried = set(_carried(step)) if step.name in _LOOPS else set(step.reads)
        for value in step.looks_at:
            # A loop computes a constant itself, rather than keep it outside.
            if value in carried or not _is_constant(value, maker, program):
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


def _is_constant(value: int, maker: dict[int, _Step], program: _Program) -> bool:
    """Whether a value is one number, or an iota, spread over a shape."""
    step = maker.get(value)
    while step is not None and step.name in _VIEWS:
        step = maker.get(step.reads[0])
    return step is not None and (
        step.name == "iota" or step.name == "broadcast_in_dim" and all(program.size[read] <= 8 for read in step.reads)
    )


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
