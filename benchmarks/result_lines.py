"""The file of result lines that every benchmark appends to: JSON, one measurement a line, with its date and commit."""

import argparse
import datetime
import functools
import json
import pathlib
import subprocess
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--out` and `--commit`, for `stamp` and `append`."""
    parser.add_argument("--out", type=pathlib.Path, help="append JSON lines here")
    parser.add_argument("--commit", default="", help="commit of the code; asked of git if empty")


@functools.cache
def commit_of_code(folder: pathlib.Path = pathlib.Path(__file__).parent) -> str:
    """Short hash of the checkout that `folder` is in, with "-dirty" where its files are not the commit's; "unknown" outside of one.

    Asked once. Result files do not count: the first line of a run changes one.
    """
    commit = _git(folder, "rev-parse", "--short", "HEAD")
    if commit is None:
        return "unknown"
    changed = _git(
        folder, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)benchmarks/results"
    )
    return f"{commit}-dirty" if changed != "" else commit


def _git(folder: pathlib.Path, *command: str) -> str | None:
    """What git prints, or None if it cannot."""
    try:
        found = subprocess.run(["git", *command], capture_output=True, text=True, check=False, cwd=folder)
    except OSError:  # no git
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def stamp(commit: str = "") -> dict[str, Any]:
    """What every line begins with."""
    return {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": commit or commit_of_code()}


def append(path: pathlib.Path | None, line: dict[str, Any]) -> None:
    """Writes a line at the end of the file, which is made with its folders; without a path, nothing."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
