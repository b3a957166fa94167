"""Builds C++ test programs with the system's compiler, once per content: a program is kept in build/host-tests under a hash of its
sources, so that a second run of the tests does not compile again."""

import concurrent.futures
import hashlib
import os
import pathlib
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels_cuda"
CXX = shutil.which("g++") or shutil.which("clang++")


def build(sources: list[pathlib.Path], flags: list[str], headers: list[pathlib.Path]) -> pathlib.Path:
    """Path of the program made of `sources`; `headers` are files and folders whose contents it depends on. Compiles if need be."""
    digest = hashlib.sha256(" ".join([CXX or "", *flags]).encode())
    for path in [*sources, *headers]:
        for file in sorted(p for p in path.rglob("*") if p.suffix in {".h", ".cuh"}) if path.is_dir() else [path]:
            digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    folder = ROOT / "build" / "host-tests"
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / f"{sources[0].stem}-{digest.hexdigest()[:20]}"
    if not program.exists():
        unfinished = program.with_suffix(f".{os.getpid()}")
        command = [CXX, "-std=c++17", *flags, *map(str, sources), "-pthread", "-o", str(unfinished)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        unfinished.rename(program)  # another process may have made the same one
    return program


def build_all(programs: list[tuple[list[pathlib.Path], list[str], list[pathlib.Path]]]) -> list[pathlib.Path]:
    """Several at once, two at a time."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda arguments: build(*arguments), programs))
