"""The file of result lines that every benchmark appends to: JSON, one measurement a line, with its date and commit."""

import argparse
import datetime
import json
import pathlib
import subprocess
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--out` and `--commit`, for `stamp` and `append`."""
    parser.add_argument("--out", type=pathlib.Path, help="append JSON lines here")
    parser.add_argument("--commit", default="", help="commit of the code; asked of git if empty")


def commit_of_code() -> str:
    """Short hash of the checkout that this file is in, "unknown" outside of one."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=pathlib.Path(__file__).parent)
    except OSError:  # no git
        return "unknown"
    return found.stdout.strip() or "unknown"


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
