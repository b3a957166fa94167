"""Builds C++ test programs with the system's compiler, once per content: a program is kept in build/host-tests under a hash of its
sources, so that a second run of the tests does not compile again.

The host emulators need Boost.Context, headers and library: from the Python package cmeel-boost, which
`make test-cuda-host` installs, or from the system (Debian: libboost-context-dev)."""

import concurrent.futures
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sysconfig

ROOT = pathlib.Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels_cuda"
CXX = shutil.which("g++") or shutil.which("clang++")

HOST = KERNELS / "isa" / "host"
HOPPER_EMULATOR = [HOST / "engine.cc", HOST / "fibers.cc", HOST / "races.cc"]
BLACKWELL_EMULATOR = [HOST / "sm100_machine.cc", HOST / "sm100_tensor.cc", HOST / "fibers.cc"]


def boost_context(packages: pathlib.Path | None = None) -> list[str]:
    """Compiler flags for Boost.Context. `packages`: where Python packages are, by default this interpreter's."""
    prefix = (packages or pathlib.Path(sysconfig.get_paths()["purelib"])) / "cmeel.prefix"
    if (prefix / "include" / "boost" / "context" / "fiber.hpp").exists():
        return [f"-isystem{prefix}/include", f"-L{prefix}/lib", f"-Wl,-rpath,{prefix}/lib", "-lboost_context"]
    program = ["-x", "c++", "-", "-fsyntax-only"]
    probe = subprocess.run(
        [CXX or "c++", *program], input="#include <boost/context/fiber.hpp>", capture_output=True, text=True
    )
    if probe.returncode == 0:
        return ["-lboost_context"]
    raise RuntimeError(
        "the host emulators need Boost.Context: `make test-cuda-host` installs it; or pip install --no-deps cmeel-boost==1.90.0, "
        "or, on Debian, apt install libboost-context-dev"
    )


def emulator(program: pathlib.Path, flags: list[str], kernels: pathlib.Path = KERNELS) -> tuple[list, list, list]:
    """Arguments of `build` for a program that runs kernels on a host emulator; the tree of `kernels` may be a changed copy."""
    sources = BLACKWELL_EMULATOR if program.name.startswith("sm100") else HOPPER_EMULATOR
    sources = [kernels / path.relative_to(KERNELS) for path in sources]
    # -Wno-psabi: a note about an ABI of GCC 4.6, for tasks, which are aligned to 32 bytes
    flags = ["-Wno-psabi", f"-I{kernels}", f"-I{program.parent}", *flags]
    return [program, *sources], [*flags, *boost_context()], [kernels, *program.parent.glob("*.h")]


def build(sources: list[pathlib.Path], flags: list[str], headers: list[pathlib.Path]) -> pathlib.Path:
    """Path of the program made of `sources`; `headers` are files and folders whose contents it depends on. Compiles if need be."""
    digest = hashlib.sha256(" ".join([CXX or "", *(flag for flag in flags if not flag.startswith("-I"))]).encode())
    for path in [*sources, *headers]:
        for file in sorted(p for p in path.rglob("*") if p.suffix in {".h", ".cuh"}) if path.is_dir() else [path]:
            digest.update(file.name.encode() + file.read_bytes())
    folder = ROOT / "build" / "host-tests"
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / f"{sources[0].stem}-{digest.hexdigest()[:20]}"
    if not program.exists():
        unfinished = program.with_suffix(f".{os.getpid()}")
        command = [CXX, "-std=c++17", *map(str, sources), *flags, "-o", str(unfinished)]  # libraries last
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        unfinished.rename(program)  # another process may have made the same one
    return program


def found_race(program: pathlib.Path, kind: str, fault: str, first: str, second: str) -> None:
    """Asserts that the race detector stops `kind` without one of its orders (host_faults.h) and names both accesses,
    whether copies come late (even seeds) or at any time."""
    for seed in ("1", "2"):
        done = subprocess.run(
            [str(program), kind, seed, f"--without={fault}"], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 1, done.stdout
        assert re.search(
            f"race on shared address .* the {first}.* is not (ordered|fenced) before the {second}", done.stderr
        ), done.stderr


def build_all(programs: list[tuple[list[pathlib.Path], list[str], list[pathlib.Path]]]) -> list[pathlib.Path]:
    """Several at once, two at a time."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda arguments: build(*arguments), programs))
