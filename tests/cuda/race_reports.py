"""What racecheck says of a library, judged by the code it says it of. A report names a kernel and the offsets of two
instructions; the disassembly (cuobjdump) shows what they are. `column_reuse` is the one kind of pair that is known to be
ordered though the tool reports it (kernels_cuda/NOTES-mx.md, q7); whatever is not exactly that stays an error.
"""

import collections
import dataclasses
import functools
import pathlib
import re
import shutil
import subprocess
import sysconfig

ACCESS = r"(Read|Write) access at (.*)\+0x([0-9a-f]+)"


@dataclasses.dataclass(frozen=True)
class Access:
    kind: str  # Read or Write
    kernel: str  # as the tool writes it
    offset: int


def pairs_of(log: str) -> list[tuple[Access, Access]]:
    """Every pair of accesses in racecheck's output. Raises ValueError when its summary counts more than were understood."""
    pairs, first, blocks = [], None, 0
    for line in log.splitlines():
        if found := re.search(f"Race reported between {ACCESS}", line):
            first, blocks = access(found), blocks + 1
        elif first is not None and (found := re.search(f"and {ACCESS} \\[", line)):
            pairs.append((first, access(found)))
    summary = re.search(r"RACECHECK SUMMARY: (\d+) hazard", log)
    if summary is None or int(summary[1]) not in (blocks, len(pairs)) or log.count("Race reported") != blocks:
        raise ValueError(f"racecheck's output was not understood: {len(pairs)} pairs, {summary and summary[0]}")
    return pairs


def access(found: re.Match) -> Access:
    return Access(found[1], found[2], int(found[3], 16))


class Code:
    """The disassembly of a library for compute capability 9.0."""

    def __init__(self, text: str):
        self._functions: dict[str, dict[int, str]] = {}
        for part in text.split("Function : ")[1:]:
            name, _, body = part.partition("\n")
            lines = re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?)\s*;", body)
            self._functions[name.strip()] = {int(offset, 16): line for offset, line in lines}

    @classmethod
    @functools.lru_cache(maxsize=1)
    def of(cls, library: pathlib.Path) -> "Code":
        """Raises RuntimeError where there is no cuobjdump: on PATH, in the toolkit, or of the package nvidia-cuda-cuobjdump."""
        places = f"/usr/local/cuda/bin:{sysconfig.get_paths()['purelib']}/nvidia/cu13/bin"
        tool = shutil.which("cuobjdump") or shutil.which("cuobjdump", path=places)
        if tool is None:
            raise RuntimeError(
                "racecheck reported something, and no cuobjdump shows what: pip install nvidia-cuda-cuobjdump"
            )
        command = [tool, "-arch", "sm_90a", "-sass", str(library)]
        return cls(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def instructions(self, kernel: str) -> dict[int, str]:
        """By offset, of a kernel `name<moe::Roles<(moe::Kind)K, (bool)B, ...` as the tool writes it; empty if there is none."""
        found = re.search(r"(\w+)<moe::(\w+)<\(moe::Kind\)(\d+), \(bool\)([01]),", kernel)
        mangled = (
            "{}INS_{}{}ILNS_4KindE{}ELb{}E".format(found[1], len(found[2]), *found.groups()[1:]) if found else None
        )
        names = [name for name in self._functions if mangled and mangled in name]
        return self._functions[names[0]] if len(names) == 1 else {}


def column_reuse(first: Access, second: Access, code: Code) -> bool:
    """Whether a pair is the columns of dgrad-down (ColumnStrip in mx_epilogue.h), read by transposing ldmatrix and later
    overwritten: between the two, the code has an arrival on one barrier and the wait for it, and no other barrier."""
    if "mx_grouped_gemm<moe::MxRoles<(moe::Kind)2," not in first.kernel or first.kernel != second.kernel:
        return False
    accesses = {access.kind: access.offset for access in (first, second)}
    if set(accesses) != {"Read", "Write"}:
        return False
    lines = code.instructions(first.kernel)
    if not lines.get(accesses["Read"], "").startswith("LDSM.16.MT88.4") or not lines.get(
        accesses["Write"], ""
    ).startswith("STS.64"):
        return False
    between = [
        line for at, line in sorted(lines.items()) if accesses["Read"] < at < accesses["Write"] and "SYNCS" in line
    ]
    barriers = [re.search(r"\[(\w+\+0x[0-9a-f]+)\]", line) for line in between]
    return (
        len(between) == 2
        and ".ARRIVE." in between[0]
        and ".PHASECHK." in between[1]
        and all(barriers)
        and barriers[0][1] == barriers[1][1]
    )


def judge(log: str, library: pathlib.Path, misread=(column_reuse,)) -> tuple[dict[str, int], list[str]]:
    """How many pairs of a racecheck log are of each known kind, and the others, a line each."""
    counts: collections.Counter = collections.Counter()
    others = []
    for pair in pairs_of(log):
        kind = next((kind.__name__ for kind in misread if kind(*pair, Code.of(library))), None)
        if kind is None:
            others.append("; ".join(f"{each.kind} at {each.kernel}+{each.offset:#x}" for each in pair))
        else:
            counts[kind] += 1
    return dict(counts), others
