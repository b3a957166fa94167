"""How the grouped products of the Hopper kernels run, by GPU and shape: `moejax/tune.py` measures it, `cuda_calls.py` applies it.

The choice changes speed, never bits. Entries come from the table in this folder (`ways.json`, the benchmark shapes) and from the
user's own in `$XDG_CACHE_HOME/moejax/ways.json` (`~/.cache` if unset), which wins. A shape without an entry takes the defaults of
`kernels_cuda/layer.cc`; entries of equal experts, D and F serve a batch of about the same rows per expert.
"""

import dataclasses
import functools
import json
import os
import pathlib

import jax

from moejax import native

PRODUCTS = (
    "gate_up",
    "down",
    "dgrad_down",
    "dgrad_gate_up",
    "wgrad_down",
    "wgrad_gate_up",
)  # kernels_cuda/task.h: Kind
WAYS = (
    "auto",
    "dispatched",
    "gathered",
    "tokens_n",
    "gathered_n",
    "resident_512",
    "resident_rows",
    "resident_fp8",
    "beside",
)  # kernels_cuda/moe.h: Way

_SIZES = ("tokens", "top_k", "experts", "d_model", "width")
_SHIPPED = pathlib.Path(__file__).with_name("ways.json")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A shape, and the way of each product that does not take the default."""

    tokens: int
    top_k: int
    experts: int
    d_model: int
    width: int
    ways: dict[str, str]

    def sizes(self) -> tuple[int, ...]:
        """T, K, E, D, F."""
        return tuple(getattr(self, name) for name in _SIZES)

    def as_native(self) -> tuple:
        return *self.sizes(), [WAYS.index(self.ways.get(product, "auto")) for product in PRODUCTS]


def cache_file() -> pathlib.Path:
    """Where the user's own measurements lie."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "moejax" / "ways.json"


def read(path: pathlib.Path) -> dict[str, list[Entry]]:
    """Entries by GPU; none if there is no such file.

    Raises:
      ValueError: the file is not such a table; the message names the file and what is wrong.
    """
    try:
        table = path.read_bytes()
    except FileNotFoundError:
        return {}
    try:
        return {gpu: [_entry(values) for values in entries] for gpu, entries in json.loads(table).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a table of ways of this version ({error}): delete it; `python -m moejax.tune` measures again"
        ) from error


def write(path: pathlib.Path, table: dict[str, list[Entry]]) -> None:
    """Replaces the file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = {gpu: [dataclasses.asdict(entry) for entry in entries] for gpu, entries in table.items()}
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(lines, indent=1) + "\n")
    draft.replace(path)


def entries(gpu: str) -> list[Entry]:
    """What is known of a GPU: the shipped table, overridden by the user's own."""
    known = {entry.sizes(): entry for table in (read(_SHIPPED), read(cache_file())) for entry in table.get(gpu, [])}
    return list(known.values())


@functools.cache
def apply() -> None:
    """Gives the entries of this GPU to the compiled module, once per process.

    Raises:
      ValueError: an entry names a way that a product of its shape does not have in this version.
    """
    known = [entry.as_native() for entry in entries(jax.devices()[0].device_kind)]
    try:
        native.module("_cuda").set_ways(known)
    except ValueError as error:
        raise ValueError(f"{error}: delete {cache_file()}; `python -m moejax.tune` measures again") from error


def _entry(values: dict) -> Entry:
    for product, way in values["ways"].items():
        if product not in PRODUCTS or way not in WAYS:
            raise ValueError(f"{product}: {way} is not a product and a way")
    sizes = {name: values[name] for name in _SIZES}
    if not all(type(size) is int and 0 < size < 2**31 for size in sizes.values()):
        raise ValueError(f"sizes are {sizes}; expected positive integers below 2^31")
    return Entry(**sizes, ways=dict(values["ways"]))
