"""What racecheck says of a library, judged by the code it says it of. A report names a kernel and the offsets of two
instructions; the disassembly (cuobjdump) shows what they are. `column_reuse`, `weights_brought`, `dots_taken`, `codes_taken` and
`codes_exchanged` are the kinds of pairs that are known to be ordered though the tool reports them (kernels_cuda/NOTES-mx.md, q7
and q14): a warp's accesses, its warp_sync, and the arrival of one of its lanes. Whatever is not exactly one of them stays an error.
"""

import collections
import dataclasses
import functools
import itertools
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
        """Raises RuntimeError without the library, or a cuobjdump: on PATH, in the toolkit, or of nvidia-cuda-cuobjdump."""
        places = f"/usr/local/cuda/bin:{sysconfig.get_paths()['purelib']}/nvidia/cu13/bin"
        tool = shutil.which("cuobjdump") or shutil.which("cuobjdump", path=places)
        if tool is None:
            raise RuntimeError(
                "racecheck reported something, and no cuobjdump shows what: pip install nvidia-cuda-cuobjdump"
            )
        if not library.exists():
            raise RuntimeError(f"racecheck reported something, and there is no {library} to show what: make cuda")
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


@dataclasses.dataclass(frozen=True)
class Pair:
    """A read and a write of one kernel, with its instructions in order."""

    read: int
    write: int
    lines: dict[int, str]

    @classmethod
    def of(cls, first: Access, second: Access, code: Code, kernel: str, read: str, write: str) -> "Pair | None":
        """None unless the kernel's name has `kernel` in it and the two instructions begin as said."""
        offsets = {access.kind: access.offset for access in (first, second)}
        if kernel not in first.kernel or first.kernel != second.kernel or set(offsets) != {"Read", "Write"}:
            return None
        pair = cls(offsets["Read"], offsets["Write"], dict(sorted(code.instructions(first.kernel).items())))
        begins = pair.lines.get(pair.read, "").startswith(read) and pair.lines.get(pair.write, "").startswith(write)
        return pair if begins else None

    def barriers(self, after: int, before: int) -> list[str]:
        return [line for at, line in self.lines.items() if after < at < before and "SYNCS" in line]

    def loops(self, barriers: list[str]) -> bool:
        """Whether both instructions are in a loop that has these barriers and no others."""
        for at, line in self.lines.items():
            found = re.search(r"\bBRA 0x([0-9a-f]+)$", line)
            if found and at > self.write and int(found[1], 16) <= self.read:
                return self.barriers(int(found[1], 16) - 1, at) == barriers
        return False

    def next_barrier(self, at: int) -> str:
        return next(iter(self.barriers(at, max(self.lines) + 1)), "")

    def last_barrier(self, at: int) -> str:
        return next(reversed(self.barriers(-1, at)), "")


def offset_in(line: str) -> str | None:
    """Of the shared-memory address in an instruction, past registers."""
    found = re.search(r"\[.*\+(0x[0-9a-f]+)\]", line)
    return found and found[1]


def column_reuse(first: Access, second: Access, code: Code) -> bool:
    """Whether a pair is the columns of dgrad-down (ColumnStrip in mx_epilogue.h), read by transposing ldmatrix and later
    overwritten: between the two, the code has an arrival on one barrier and the wait for it, and no other barrier. Or it has
    the wait alone, for the turn of the loop before; then the arrival comes behind the write, the end of the loop behind that,
    and the next turn's wait and write behind its start.
    """
    kernel = "mx_grouped_gemm<moe::MxRoles<(moe::Kind)2,"
    pair = Pair.of(first, second, code, kernel, "LDSM.16.MT88.4", "STS.64")
    if pair is None:
        return False
    between = pair.barriers(pair.read, pair.write)
    if len(between) == 1:
        between = [pair.next_barrier(pair.write), *between]
        if not pair.loops(between[::-1]):
            return False
    barriers = [re.search(r"\[(\w+\+0x[0-9a-f]+)\]", line) for line in between]
    return (
        len(between) == 2
        and ".ARRIVE." in between[0]
        and ".PHASECHK." in between[1]
        and all(barriers)
        and barriers[0][1] == barriers[1][1]
    )


def weights_brought(first: Access, second: Access, code: Code) -> bool:
    """Whether a pair is the combine weights of dgrad-down (mx_epilogue.h), which the store warp writes and consumers read
    from the same table. Ordered both ways: the store warp arrives on a barrier after the write, and the read follows the wait
    for it; consumers arrive on another one after the read, and the store warp waits for that before the next tile's.
    """
    pair = Pair.of(first, second, code, "mx_grouped_gemm<moe::MxRoles<(moe::Kind)2,", "LDS R", "STS [")
    if pair is None:
        return False
    wait, behind = pair.last_barrier(pair.read), pair.barriers(pair.write, max(pair.lines) + 1)
    arrivals = [offset_in(line) for line in pair.barriers(pair.read, pair.write) if ".ARRIVE." in line]
    return (
        offset_in(pair.lines[pair.read]) == offset_in(pair.lines[pair.write]) is not None
        and ".PHASECHK." in wait
        and len(behind) > 1
        and ".ARRIVE." in behind[0]
        and offset_in(behind[0]) == offset_in(wait) is not None
        and ".PHASECHK." in behind[1]
        and offset_in(behind[1]) in arrivals
        and offset_in(behind[1]) is not None
    )


def dots_taken(first: Access, second: Access, code: Code) -> bool:
    """Whether a pair is what d(weight) is made of (dgrad-down in tokens_n_results.h), read by the store warp from a stage and
    written by consumers, who wait for a full stage before and arrive on a barrier of their own block after the write. The read
    follows a wait; after it the stage is given back to both blocks (two arrivals elsewhere in the cluster)."""
    pair = Pair.of(first, second, code, "::grouped_gemm<moe::TokensN<(moe::Kind)2,", "LDS.128", "STS [")
    if pair is None:
        return False
    arrivals = pair.barriers(pair.read, max(pair.lines) + 1)[:2]
    given_back = len(arrivals) == 2 and all("SYNCS.ARRIVE.TRANS64.RED.ART0" in line for line in arrivals)
    waits = all(".PHASECHK." in pair.last_barrier(at) for at in (pair.read, pair.write))
    return given_back and waits and "SYNCS.ARRIVE.TRANS64.A1T0" in pair.next_barrier(pair.write)


def codes_taken(first: Access, second: Access, code: Code) -> bool:
    """Whether a pair is the scale codes of a tile's rows (RowCodes in mx_roles.h), which consumers of gate/up and dgrad-down
    read from a stage and the kernel's only bulk copy overwrites with those of a later K block. After the wait for a full stage
    comes the read; an instruction that uses what was read, so that nothing of it is under way; the warp's warp_sync; an arrival
    elsewhere in the cluster. The loader waits for that same barrier, counts its bytes on the one of the full stage, and copies.
    """
    kernels = (f"mx_grouped_gemm<moe::MxRoles<(moe::Kind){kind}," for kind in (0, 2))
    pairs = (Pair.of(first, second, code, kernel, "LDS.U8 R", "UBLKCP.S.G [") for kernel in kernels)
    pair = next((pair for pair in pairs if pair), None)
    if pair is None or sum("UBLKCP" in line for line in pair.lines.values()) != 1:
        return False
    behind = [line for at, line in pair.lines.items() if at > pair.read]
    ahead = list(itertools.takewhile(lambda line: "SYNCS.ARRIVE" not in line, behind))
    arrival = re.fullmatch(
        r"@!P\d SYNCS\.ARRIVE\.TRANS64\.RED\.A1T0 RZ, \[(R\d+)\+URZ\], RZ", "".join(behind[len(ahead) :][:1])
    )
    value = re.match(r"LDS\.U8 (R\d+),", pair.lines[pair.read])[1]
    use = next((i for i, line in enumerate(ahead) if re.search(rf"\b{value}\b", line)), None)
    if arrival is None or use is None:
        return False
    used = re.match(rf"[A-Z].*, {value}\b", ahead[use]) and not any("BRA" in line for line in ahead[:use])
    synced = any(line == "NOP" or line.startswith("WARPSYNC") for line in ahead[use:])
    # The arrival's address: of a barrier of this block, moved to the other's.
    address = "\n".join([line for line in ahead if re.search(rf"\b{arrival[1]}\b", line)][-2:])
    empty = re.fullmatch(
        rf"@!P\d (?:VIADD|IADD3) {arrival[1]}, R\d+, (0x[0-9a-f]+)(?:, RZ)?\n@!P\d PRMT {arrival[1]}, R\d+, 0x654, {arrival[1]}",
        address,
    )
    loader = pair.barriers(-1, pair.write)[-2:]
    if not used or not synced or empty is None or len(loader) != 2:
        return False
    full = offset_in(loader[1])
    waits = [pair.last_barrier(pair.read), *(line for line in ahead if "SYNCS" in line)]
    return (
        ".PHASECHK." in loader[0]
        and offset_in(loader[0]) == empty[1]
        and loader[1].startswith("SYNCS.ARRIVE.TRANS64 RZ,")
        and full not in (None, empty[1])
        and all(".PHASECHK." in line and offset_in(line) == full for line in waits)
    )


def codes_exchanged(first: Access, second: Access, code: Code) -> bool:
    """Whether a pair is the codes of h (mx_joint_results.h), which a store warp writes into the other block of its cluster, by
    the kernel's only store to a mapped address, and reads from its own, of the other's. After the write come the warp's
    warp_sync, a fence of the lanes that arrive and their arrival in both blocks on a barrier; the code waits for that one, and
    reads. Two buffers take turns, so a write over what was read stands behind the same arrival and wait of the tile between.
    """
    pair = Pair.of(first, second, code, "mx_grouped_gemm<moe::MxTokensN<(moe::Kind)0,", "LDS R", "")
    mapped = [at for at, line in pair.lines.items() if re.search(r"\bST\.E \[", line)] if pair else []
    if pair is None or mapped != [pair.write]:
        return False
    barriers = pair.barriers(pair.write, pair.read)
    arrival = re.fullmatch(r"@!P\d SYNCS\.ARRIVE\.TRANS64\.RED\.A1T0 RZ, \[(R\d+)\+URZ\], RZ", (barriers or [""])[0])
    if len(barriers) != 2 or arrival is None or ".PHASECHK." not in barriers[1] or offset_in(barriers[1]) is None:
        return False
    behind = [line for at, line in pair.lines.items() if pair.write < at < pair.read]
    ahead = behind[: behind.index(barriers[0])]
    synced = next((i for i, line in enumerate(ahead) if line == "NOP" or line.startswith("WARPSYNC")), len(ahead))
    fenced = any("MEMBAR.ALL.GPU" in line for line in ahead[synced:])
    # The arrival's address: of the barrier that is waited for, moved to one of the blocks.
    arrived = next(at for at, line in pair.lines.items() if at > pair.write and line == barriers[0])
    address = [line for at, line in pair.lines.items() if at < arrived and re.search(rf"\b{arrival[1]}\b", line)][-2:]
    moved = re.fullmatch(
        rf"(?:VIADD|IADD3) {arrival[1]}, R\d+, (0x[0-9a-f]+)(?:, RZ)?\nPRMT {arrival[1]}, R\d+, 0x654, {arrival[1]}",
        "\n".join(address),
    )
    return fenced and moved is not None and moved[1] == offset_in(barriers[1])


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
