"""Writes the tables of docs/benchmarks.md from the result lines under benchmarks/results.

    python benchmarks/tables.py             # rewrites what stands between the markers of docs/benchmarks.md
    python benchmarks/tables.py --check     # exits 1 if that would change the file

A table is asked for by a pair of lines in the page, `<!-- results: h200/moe_peers.jsonl -->` and `<!-- end -->`. A row is a shape
and a recipe, a column an implementation, a cell its forward and backward rate, and that of both together where a file has it; in a
file of training steps a row is an implementation, and the columns are its speed, memory and parts. The last line of a file about
the same thing counts.
"""

import argparse
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
MARKED = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end -->)", re.S)
PASSES = ("forward", "backward", "step")


class ResultError(ValueError):
    """A result file or a page that cannot be used; the message says which line and what is expected."""


def read_lines(path: pathlib.Path) -> list[dict]:
    """The measurements of a file, one JSON object a line.

    Raises:
      ResultError: no such file, a line that is not JSON, or one without the fields that a table needs.
    """
    if not path.exists():
        raise ResultError(f"{path}: no such result file; there are {', '.join(map(str, sorted(known_results())))}")
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise ResultError(f"{path}:{number}: not JSON ({error})") from None
        missing = {"shape", "recipe", "impl", "pass", "tflops", "commit", "date"} - line.keys()
        if missing:
            raise ResultError(f"{path}:{number}: lacks {', '.join(sorted(missing))}")
        lines.append(line)
    return lines


def known_results() -> list[pathlib.Path]:
    return [path.relative_to(RESULTS) for path in RESULTS.glob("*/*.jsonl")]


def table(lines: list[dict], source: str) -> str:
    """A Markdown table of rates by pass, or of training steps, and a line that says where they come from."""
    if all("tokens_per_second" in line for line in lines):
        return step_table(lines, source)
    passes = [name for name in PASSES if name != "step" or any(line["pass"] == name for line in lines)]
    newest = {
        (line["shape"], line["recipe"], line["impl"], line["pass"]): line for line in lines if line["pass"] in passes
    }
    rows = list(dict.fromkeys(key[:2] for key in newest))
    columns = list(dict.fromkeys(key[2] for key in newest))
    used = list(newest.values())
    unit, scale = ("TFLOP/s", 1.0) if max(line["tflops"] for line in used) >= 1 else ("GFLOP/s", 1000.0)

    def cell(row, column) -> str:
        found = [newest.get((*row, column, name)) for name in passes]
        return (
            " / ".join("–" if line is None else f"{line['tflops'] * scale:.0f}" for line in found)
            if any(found)
            else "–"
        )

    def several(name) -> str:
        return ", ".join(sorted({str(line[name])[:10] for line in used}))

    out = [
        f"| {unit}, {' / '.join(passes)} | recipe | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 2) + "|",
    ]
    out += [f"| {row[0]} | {row[1]} | " + " | ".join(cell(row, column) for column in columns) + " |" for row in rows]
    return "\n".join(
        [*out, "", f"From `benchmarks/results/{source}`: {several('date')}, commit {several('commit')}.", ""]
    )


def step_table(lines: list[dict], source: str) -> str:
    """A Markdown table of training steps: tokens per second, milliseconds, peak memory, and milliseconds of each part."""
    newest = {(line["shape"], line["recipe"], line["impl"]): line for line in lines}
    parts = list(dict.fromkeys(part for line in newest.values() for part in line.get("split_ms", {})))
    names = ["step", "recipe", "experts run by", "tokens/s", "ms", "peak GiB", *parts]
    out = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for (shape, recipe, impl), line in newest.items():
        split = line.get("split_ms", {})
        numbers = [f"{line['tokens_per_second']:,}", f"{line['ms']:.1f}", f"{line['peak_bytes'] / 2**30:.1f}"]
        cells = [shape, recipe, impl, *numbers, *(f"{split[part]:.1f}" if part in split else "–" for part in parts)]
        out.append("| " + " | ".join(cells) + " |")
    dates, commits = ({str(line[name])[:10] for line in newest.values()} for name in ("date", "commit"))
    where = f"From `benchmarks/results/{source}`: {', '.join(sorted(dates))}, commit {', '.join(sorted(commits))}."
    return "\n".join([*out, "", where, ""])


def rewritten(page: str) -> str:
    """The page with every marked table made anew."""
    if page.count("<!-- results:") != len(MARKED.findall(page)):
        raise ResultError(f"{PAGE}: a table needs two lines, <!-- results: MACHINE/FILE.jsonl --> and <!-- end -->")
    return MARKED.sub(lambda m: m[1] + table(read_lines(RESULTS / m[2]), m[2]) + m[3], page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the page is out of date")
    args = parser.parse_args()
    try:
        old = PAGE.read_text(encoding="utf-8")
        new = rewritten(old)
    except (ResultError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.check:
        if new != old:
            print(f"error: {PAGE} is out of date: run python benchmarks/tables.py", file=sys.stderr)
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
