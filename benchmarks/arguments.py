"""Command-line arguments of the benchmarks: a name that is not known is refused with those that are, a number by its bound, and a
machine that cannot run them before anything is made."""

import argparse
from collections.abc import Callable, Collection


def names(known: Collection[str], none: bool = False) -> Callable[[str], list[str]]:
    """An argparse type: names of `known`, separated by commas; at least one unless `none`."""

    def parse(text: str) -> list[str]:
        found = [_known(name, known) for name in text.split(",") if name]
        if not found and not none:
            raise argparse.ArgumentTypeError(f"names nothing; expected of {', '.join(known)}")
        return found

    return parse


def pairs(keys: Collection[str], values: Collection[str]) -> Callable[[str], dict[str, str]]:
    """An argparse type: `key=value` of these keys and values, separated by commas."""

    def parse(text: str) -> dict[str, str]:
        found = {}
        for pair in filter(None, text.split(",")):
            key, equals, value = pair.partition("=")
            if not equals:
                raise argparse.ArgumentTypeError(f"{pair!r} is no pair such as {next(iter(keys))}={next(iter(values))}")
            found[_known(key, keys)] = _known(value, values)
        return found

    return parse


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: a number that is no smaller."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no number of at least {least}")
        return int(text)

    return parse


def need_gpu(parser: argparse.ArgumentParser, found: bool, load: Callable[[], object] | None) -> None:
    """Ends the program with a line that says what is missing: a GPU, or the library that `load` loads (None: it needs none)."""
    if not found:
        parser.error("needs an NVIDIA GPU, and torch finds none here (nvidia-smi says what the driver finds)")
    try:
        if load is not None:
            load()
    except FileNotFoundError as error:
        parser.error(str(error))


def _known(name: str, known: Collection[str]) -> str:
    if name not in known:
        raise argparse.ArgumentTypeError(f"{name!r} is not known; expected of {', '.join(known)}")
    return name
