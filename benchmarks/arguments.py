"""Command-line arguments of the benchmarks that name things: a name that is not known is refused with those that are."""

import argparse
from collections.abc import Callable, Collection


def names(known: Collection[str]) -> Callable[[str], list[str]]:
    """An argparse type: names of `known`, separated by commas."""

    def parse(text: str) -> list[str]:
        return [_known(name, known) for name in text.split(",") if name]

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


def _known(name: str, known: Collection[str]) -> str:
    if name not in known:
        raise argparse.ArgumentTypeError(f"{name!r} is not known; expected of {', '.join(known)}")
    return name
