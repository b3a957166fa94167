"""`python -m moejax.estimate CONFIG --mesh data=..,fsdp=..,expert=..`: what a run needs, and the least time of a step."""

import argparse
import dataclasses
import math
import sys

import jax

from moejax.config import Config, MeshConfig
from moejax.config_load import ConfigError, load
from moejax.data.tokenizer import ByteTokenizer, load_tokenizer
from moejax.estimate.compiling import CompiledStep, compile_step
from moejax.estimate.hardware import GPUS, Gpu
from moejax.estimate.memory import Mesh, StateBytes, StepBytes, abstract_on, skeleton_weights, state_bytes, step_bytes
from moejax.estimate.work import Work, links, parameters, roofline, work
from moejax.mesh import AXES, resolve_axes
from moejax.mesh_plan import RACK, check_axes, check_racks
from moejax.training.errors import one_line_errors
from moejax.training.state import parameter_counts, with_vocabulary


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m moejax.estimate",
        description="Bytes per device, bytes sent, FLOPs and the least time of a training step. Needs no accelerator.",
    )
    parser.add_argument("config", help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", help="section.key=value, as for train.py")
    parser.add_argument(
        "--mesh", help="devices per axis, such as data=9,expert=8 (default: the config's `mesh`, with -1 as 1)"
    )
    parser.add_argument("--gpu", default=",".join(GPUS), help="kinds to estimate for (default: %(default)s)")
    parser.add_argument(
        "--compile", action="store_true", help="also compile the real step for this mesh on fake CPU devices"
    )
    options = parser.parse_intermixed_args(arguments)
    with one_line_errors() as outcome:
        gpus = [_gpu(name) for name in options.gpu.split(",")]
        config = _with_vocabulary(load(options.config, options.overrides))
        sizes = _mesh_sizes(config.mesh, options.mesh)
        config = dataclasses.replace(config, mesh=MeshConfig(**sizes, spares=config.mesh.spares))
        check_axes(config, sizes)
        check_racks(sizes, config.mesh.spares)
        jax.config.update("jax_platforms", "cpu")
        if options.compile:
            jax.config.update("jax_num_cpu_devices", math.prod(sizes.values()))
        mesh = Mesh(tuple(sizes.values()), tuple(sizes), axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))
        state, step = state_bytes(config, mesh), step_bytes(config, mesh)
        todo = work(config, mesh, skeleton_weights(abstract_on(config, mesh), mesh), state, step)
        print("\n".join(report(config, mesh, state, step, todo, gpus)))
        if options.compile:
            print("\n".join(compiled_report(compile_step(config), state, step)))
    return outcome.exit_code


def report(config: Config, mesh: Mesh, state: StateBytes, step: StepBytes, todo: Work, gpus: list[Gpu]) -> list[str]:
    """The estimate as a person reads it, a line per entry."""
    whole = abstract_on(config, mesh)
    total, active = parameter_counts(whole.params, config)
    assert total == parameters(whole)
    training = config.training
    tokens = training.global_batch * training.sequence_length
    used = state.total + step.batch + step.temporaries
    lines = [
        f"{total:,} parameters, {active:,} active per token; recipe {config.recipe}; {tokens:,} tokens per step",
        f"mesh {' '.join(f'{axis}={mesh.shape[axis]}' for axis in AXES)}: {mesh.size} devices{_spare(config, mesh)}",
        "",
        "bytes on each device, between steps (exact)",
        *_table(dataclasses.asdict(state)),
        *_table({"state": state.total}),
        "inside a step (a model of the program XLA makes of backend xla; docs/estimate.md)",
        *_table(dataclasses.asdict(step)),
        *_table({"symmetric heap (no megakernel yet)": 0, "all together": used}),
        "",
        "FLOPs of each device in a step",
        _line("experts", _flops(todo.expert_flops)),
        _line("everything else", _flops(todo.dense_flops)),
        _line("of these the model needs", _flops(todo.model_flops)),
        "bytes each device sends in a step",
        *_table(todo.traffic or {"nothing": 0}),
        "",
    ]
    rows: dict[str, list[str]] = {"": [gpu.name for gpu in gpus]}
    roofs = [roofline(config, mesh, todo, gpu) for gpu in gpus]
    rows["memory used"] = [f"{used / gpu.memory_bytes:.0%}" + ("!" if used > gpu.memory_bytes else "") for gpu in gpus]
    for term in ("products", "HBM", "NVLink", "network"):
        rows[f"{term}, ms"] = [f"{roof.terms.get(term, 0.0) * 1e3:,.2f}" for roof in roofs]
    rows["limited by"] = [roof.limit for roof in roofs]
    rows["step at least, ms"] = [f"{roof.seconds * 1e3:,.2f}" for roof in roofs]
    rows["  with nothing overlapped"] = [f"{roof.without_overlap * 1e3:,.2f}" for roof in roofs]
    rows["tokens/s at most, all devices"] = [f"{tokens / roof.seconds:,.0f}" for roof in roofs]
    lines += [f"{name:32}" + "".join(f"{cell:>14}" for cell in cells) for name, cells in rows.items()]
    for gpu in gpus:
        where = ", ".join(f"{axis} over {link}" for axis, link in links(mesh, gpu, config.mesh.spares).items())
        if where:
            lines.append(f"{gpu.name}: {where}")
    if any(used > gpu.memory_bytes for gpu in gpus):
        lines.append(
            "!: does not fit; more devices on fsdp or expert, more micro-batches, or training.remat=layer need less"
        )
    return lines


def compiled_report(compiled: CompiledStep, state: StateBytes, step: StepBytes) -> list[str]:
    """What the compiler says beside what was estimated."""
    held = state.total + step.batch
    return [
        "",
        f"the step compiled for {compiled.devices} CPU devices in {compiled.seconds:.0f} s (numbers of the CPU program)",
        _line("arguments", f"{_size(compiled.argument_bytes)}, estimated {_size(held)}"),
        _line("temporaries", f"{_size(compiled.temporary_bytes)}, estimated {_size(step.temporaries)}"),
        "  collectives: " + (", ".join(f"{n} {name}" for name, n in compiled.collectives.items()) or "none"),
    ]


def _table(values: dict[str, float]) -> list[str]:
    return [_line(name.replace("_", " "), _size(value)) for name, value in values.items()]


def _line(name: str, text: str) -> str:
    return f"  {name:38}{text}"


def _size(value: float) -> str:
    unit, name = (2**30, "GiB") if value >= 2**30 else (2**20, "MiB") if value >= 2**20 else (2**10, "KiB")
    return f"{value / unit:9,.2f} {name}"


def _flops(value: float) -> str:
    unit, name = (1e12, "T") if value >= 1e12 else (1e9, "G")
    return f"{value / unit:9,.2f} {name}"


def _mesh_sizes(given: MeshConfig, text: str | None) -> dict[str, int]:
    """Devices per axis, from `--mesh` or else the config."""
    if text is None:
        sizes = {axis: 1 if (size := getattr(given, axis)) == -1 else size for axis in AXES}
        return resolve_axes(MeshConfig(**sizes), math.prod(sizes.values()))
    given_sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = part.strip().partition("=")
        if axis not in AXES or not equals or not (size.isascii() and size.isdecimal()) or int(size) < 1:
            raise ConfigError(
                f"--mesh: {part!r} is not axis=devices: expected numbers for some of {', '.join(AXES)}, such as data=9,expert=8"
            )
        if axis in given_sizes:
            raise ConfigError(f"--mesh: {axis} is given twice, as {given_sizes[axis]} and as {size}")
        given_sizes[axis] = int(size)
    return dict.fromkeys(AXES, 1) | given_sizes


def _spare(config: Config, mesh: Mesh) -> str:
    spares = config.mesh.spares
    return f", and {spares} spare in each of {mesh.size // (RACK - spares)} racks of {RACK}" if spares else ""


def _gpu(name: str) -> Gpu:
    if name.strip() not in GPUS:
        raise ConfigError(f"--gpu: {name.strip()!r} is not known: expected some of {', '.join(GPUS)}")
    return GPUS[name.strip()]


def _with_vocabulary(config: Config) -> Config:
    if config.model.vocab_size is not None:
        return config
    if config.data.tokenizer == "byte":
        return with_vocabulary(config, ByteTokenizer.vocab_size)
    if config.data.tokenizer == "bpe":
        return with_vocabulary(config, config.data.vocab_size)
    return with_vocabulary(config, load_tokenizer(config.data.tokenizer).vocab_size)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
