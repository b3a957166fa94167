"""Builds a `Config` from a preset, a YAML file and dotted overrides, and refuses what it does not understand.

Later sources win: defaults of `moejax.config`, then the preset, the YAML file, the overrides. OmegaConf reads and merges,
pydantic checks every value's type (strictly: nothing is converted in silence), `config_check` the rules between fields.
Read `moejax/config.py` for the fields.
"""

import dataclasses
import difflib
import functools
import importlib.util
import json
import math
import pathlib
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import omegaconf
import pydantic
import yaml

from moejax.config import Config
from moejax.config_check import problems

_INT32_MAX = 2**31 - 1

# What the docs name and people therefore look for among the fields.
_NO_FIELD = {
    "ways": "the ways of a product are no setting; `python -m moejax.tune` measures and keeps the fastest (docs/native.md)"
}


class ConfigError(ValueError):
    """A config that cannot be used. The message has one line for each problem, and each names its key."""


def load(path: str | pathlib.Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The config of a run.

    Args:
      path: a YAML file, or None for the defaults alone.
      overrides: `section.key=value` texts, as they stand on a command line.
    Returns:
      A checked config; `run_dir` is `runs/<file name>` unless it was given.
    Raises:
      ConfigError: no such file or preset, text that is not YAML, an unknown key, a wrong type, a value out of bounds, or
        fields that contradict each other.
    """
    from_file = {} if path is None else _read_yaml(pathlib.Path(path), "config")
    from_line = _parse_overrides(overrides)
    from_user = _merge(from_file, from_line)
    preset = _read_preset(from_user)
    if from_user.get("preset") != from_file.get("preset"):
        _refuse_hidden_preset(_merge(preset, from_line), from_user, path)
    values = _merge(preset, from_user)
    if values.get("run_dir") is None:
        values["run_dir"] = f"runs/{pathlib.Path(path).stem if path is not None else 'default'}"
    return config_from_dict(values)


def config_from_dict(values: Mapping[str, Any]) -> Config:
    """The checked config with these nested values; what is absent takes its default. Inverse of `config_to_dict`.

    Raises:
      ConfigError: as `load`.
    """
    found: list[str] = []
    config = _build(Config, values, "", found)
    # Rules between fields are only meaningful once each field is what it should be.
    found = found or problems(config)
    if found:
        raise ConfigError("\n".join(found))
    return config


def config_to_dict(config: Config) -> dict[str, Any]:
    """Nested dict of plain values (tuples become lists), ready for JSON or YAML."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def numerics_diff(old: Config | Mapping[str, Any], new: Config) -> list[str]:
    """Keys in which two configs differ and that change the numbers of a run, each as `key: old -> new`.

    Where a run logs, what it is called, when it writes checkpoints and which devices it uses may change when it resumes.
    So may the length of a run whose learning rate is constant, and `moe.save`, but to or from gate_up_mx, which rounds.

    Args:
      old: the config of a checkpoint, or the dict `config_to_dict` made of it. A key it lacks had the default.
      new: the config to resume with.
    """
    ignored = {key for key, _, numerics in _fields(Config) if not numerics}
    if new.optimizer.schedule == "constant":
        ignored.add("training.steps")

    def counts(line: str) -> bool:
        key = line.partition(":")[0]
        return key not in ignored or (key == "moe.save" and '"gate_up_mx"' in line)

    return [line for line in config_diff(old, new) if counts(line)]


def config_diff(old: Config | Mapping[str, Any], new: Config, ignored: Collection[str] = ()) -> list[str]:
    """Keys in which two configs differ, but those in `ignored`, each as `key: old -> new`; `old` as in `numerics_diff`."""
    old_values = _flatten(config_to_dict(old) if isinstance(old, Config) else old)
    new_values = _flatten(config_to_dict(new))
    defaults = _flatten(config_to_dict(Config()))
    return [
        f"{key}: {json.dumps(before)} -> {json.dumps(after)}"
        for key in sorted((old_values.keys() | new_values.keys()) - set(ignored))
        if (before := old_values.get(key, defaults.get(key))) != (after := new_values.get(key))
    ]


def help_text() -> str:
    """Every field with its type, default and meaning, for `--help`."""
    lines = ["A config is a YAML file; any field can also be given as section.key=value, which wins over the file.", ""]
    section = ""
    for key, field, _ in _fields(Config):
        if (head := key.rpartition(".")[0]) != section:
            section = head
            lines += ["", f"{section}:  {_section_help(section)}"]
        default = "none" if field.default is None else json.dumps(field.default).strip('"') or '""'
        lines += [f"  {key} = {default}", f"      {_type_name(_type_of(key))}: {field.metadata['help']}"]
    return "\n".join(lines)


def _read_yaml(path: pathlib.Path, what: str) -> dict[str, Any]:
    try:
        values = omegaconf.OmegaConf.load(path)
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
        raise ConfigError(
            f"{path}: no such {what} file" + (f"; did you mean {path.parent / near[0]}?" if near else "")
        ) from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder, expected a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError, omegaconf.errors.OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not isinstance(values, omegaconf.DictConfig):
        raise ConfigError(
            f"{path}: expected keys with values, found a {type(values).__name__.removesuffix('Config').lower()}"
        )
    return _plain(values)


def _parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"{item}: expected section.key=value, such as training.steps=200")
        try:
            value = _plain(omegaconf.OmegaConf.from_dotlist([f"value={text}"]))["value"]
        except (yaml.YAMLError, omegaconf.errors.OmegaConfBaseException) as error:
            raise ConfigError(f"{key}: cannot read the value {text!r} ({' '.join(str(error).split())})") from None
        # A command line has no quotes to tell 1.25 from "1.25": what a text field is given stays text.
        if str in _alternatives(_type_of(key)) and value is not None and not isinstance(value, (str, dict, list)):
            value = text
        for name in reversed(key.split(".")):
            value = {name: value}
        merged = _merge(merged, value)
    return merged


def _read_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the preset that `values` names, from `presets/` beside the module of its model."""
    name = values.get("preset")
    if name is None:
        return {}
    model = values.get("model")
    module = (model.get("module") if isinstance(model, Mapping) else None) or Config().model.module
    package = str(module).partition(":")[0].rpartition(".")[0]
    try:
        spec = importlib.util.find_spec(package) if package else None
    except ImportError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"preset: {name!r} is looked up beside model.module={module}, but package {package or module!r} "
            "cannot be found from here"
        )
    folders = [pathlib.Path(place) / "presets" for place in spec.submodule_search_locations]
    known = sorted(path.stem for folder in folders for path in folder.glob("*.yaml"))
    if name not in known:
        raise ConfigError(
            f"preset: there is no {name!r}{_did_you_mean(str(name), known)}; there are {', '.join(known) or 'none'}"
        )
    preset = _read_yaml(
        next(folder / f"{name}.yaml" for folder in folders if (folder / f"{name}.yaml").exists()), "preset"
    )
    if extra := preset.keys() - {"model", "moe"}:
        raise ConfigError(f"preset {name}: holds {', '.join(sorted(extra))}; a preset may only set model and moe")
    return preset


def _refuse_hidden_preset(asked: Mapping[str, Any], values: Mapping[str, Any], path: str | pathlib.Path | None) -> None:
    """A file wins over a preset. Where the file does not name it, that would leave a run with neither's sizes."""
    wanted, own = _flatten(asked), _flatten(values)
    hidden = [key for key in sorted(wanted.keys() & own.keys()) if wanted[key] != own[key]]
    if hidden:
        shown = ", ".join(f"{key} {json.dumps(own[key])} for {json.dumps(wanted[key])}" for key in hidden[:3])
        raise ConfigError(
            f"preset: {values['preset']} was asked for, but {path} has {len(hidden)} of its values itself, and a file wins "
            f"over a preset ({shown}{', ...' if len(hidden) > 3 else ''}); take them out of the file, or name the preset there if "
            "the mixture is meant"
        )


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`, key by key. An empty section, such as one whose keys are all commented out, changes nothing. A
    value never merges with a section: the one above replaces it and is checked.
    """
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if not isinstance(old, Mapping):
            merged[key] = value
        elif value is not None:
            merged[key] = _merge(old, value) if isinstance(value, Mapping) else value
    return merged


def _plain(values: Any) -> dict[str, Any]:
    return typing.cast(dict[str, Any], omegaconf.OmegaConf.to_container(values, resolve=True, throw_on_missing=True))


def _build(cls: type, values: Any, prefix: str, found: list[str]) -> Any:
    """An instance of the dataclass `cls` from nested values; adds a line to `found` for whatever does not fit."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if values is None:  # a section whose keys are all commented out
        values = {}
    if not isinstance(values, Mapping):
        found.append(f"{prefix.rstrip('.')}: is a section with the keys {', '.join(fields)}, not {_shown(values)}")
        return cls()
    accepted = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in fields:
            found.append(f"{key}: unknown key{_nearest_key(key)}")
        elif dataclasses.is_dataclass(section := _hints(cls)[name]):
            accepted[name] = _build(typing.cast(type, section), value, f"{key}.", found)
        else:
            try:
                # JSON mode: a list may become a tuple, and apart from that types are strict.
                accepted[name] = _adapter(section).validate_json(json.dumps(value), strict=True)
            except (pydantic.ValidationError, TypeError):
                found.append(f"{key}: expected {_type_name(section)}, got {_shown(value)}{_hint(value, section)}")
                continue
            if wrong := _out_of_bounds(accepted[name], fields[name].metadata):
                found.append(f"{key}: expected {wrong}, got {_shown(value)}")
    return cls(**accepted)


def _out_of_bounds(value: Any, bounds: Mapping[str, Any]) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ""
    low, above, high, below = (bounds.get(name) for name in ("low", "above", "high", "below"))
    if high is None and isinstance(value, int) and value > _INT32_MAX:
        high = _INT32_MAX  # a size or a number of steps; programs count in int32
    fits = (
        math.isfinite(value)
        and (low is None or value >= low)
        and (above is None or value > above)
        and (high is None or value <= high)
        and (below is None or value < below)
    )
    limits = ((low, "at least"), (above, "more than"), (high, "at most"), (below, "less than"))
    words = [f"{word} {limit}" for limit, word in limits if limit is not None]
    return "" if fits else "a finite number" + (f" of {' and '.join(words)}" if words else "")


def _hint(value: Any, expected: Any) -> str:
    kinds = _alternatives(expected)
    if isinstance(value, str) and (int in kinds or float in kinds or bool in kinds) and str not in kinds:
        try:
            number = float(value)
        except ValueError:
            return ""
        return ": remove the quotes" if math.isfinite(number) else ": it must be finite"
    if isinstance(value, (int, float)) and str in kinds:
        return ": put it in quotes"
    texts = [choice for kind in kinds for choice in typing.get_args(kind)] if not isinstance(value, bool) else []
    return _did_you_mean(value, texts) if isinstance(value, str) else ""


def _nearest_key(key: str) -> str:
    """Suggests the valid key, section or field, that looks most like this one: in its own section first, then anywhere."""
    keys = [name for name, _, _ in _fields(Config)]
    sections = sorted({name.rpartition(".")[0] for name in keys} - {""})
    head, _, name = key.rpartition(".")
    if name in _NO_FIELD:
        return f"; {_NO_FIELD[name]}"
    siblings = [k for k in keys + sections if k.rpartition(".")[0] == head]
    near = difflib.get_close_matches(name, [k.rpartition(".")[2] for k in siblings], n=1, cutoff=0.7)
    if near:
        return f"; did you mean {head + '.' if head else ''}{near[0]}?"
    same_name = [k for k in keys if k.rpartition(".")[2] == name]
    return f"; did you mean {same_name[0]}?" if same_name else _did_you_mean(key, keys + sections, cutoff=0.3)


def _did_you_mean(given: str, choices: Sequence[str], cutoff: float = 0.5) -> str:
    near = difflib.get_close_matches(given, choices, n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    kinds = {bool: "", str: "the text ", int: "the number ", float: "the number ", list: "the list "}
    text = f"{kinds.get(type(value), '')}{json.dumps(value, default=str)}"
    return text if len(text) < 80 else text[:77] + "..."


def _type_name(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "none"}
    parts = []
    for one in _alternatives(kind):
        if typing.get_origin(one) is typing.Literal:
            choices = typing.get_args(one)
            parts.append(choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}")
        elif typing.get_origin(one) is tuple:
            parts.append("a list of whole numbers")
        else:
            parts.append(names[one])
    return " or ".join(parts)


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _fields(cls: type, prefix: str = "", numerics: bool = True) -> Iterator[tuple[str, dataclasses.Field, bool]]:
    """Every leaf field below `cls`: dotted key, field, and whether it changes numbers. Leaves before sections."""
    sections = []
    for field in dataclasses.fields(cls):
        changes = numerics and field.metadata["numerics"]
        kind = _hints(cls)[field.name]
        if dataclasses.is_dataclass(kind):
            sections.append((kind, f"{prefix}{field.name}.", changes))
        else:
            yield f"{prefix}{field.name}", field, changes
    for kind, inner, changes in sections:
        yield from _fields(typing.cast(type, kind), inner, changes)


def _type_of(key: str) -> Any:
    """The annotation of a dotted key, or None if there is no such field."""
    kind: Any = Config
    for name in key.split("."):
        kind = _hints(typing.cast(type, kind)).get(name) if dataclasses.is_dataclass(kind) else None
    return kind


def _section_help(key: str) -> str:
    kind = _type_of(key)
    return (kind.__doc__ or "").strip().splitlines()[0]


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@functools.cache
def _adapter(kind: Any) -> pydantic.TypeAdapter:
    return pydantic.TypeAdapter(kind)
