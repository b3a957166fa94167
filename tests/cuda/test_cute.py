"""Blackwell descriptors, layouts and scale offsets against CuTe's, over all supported shapes (cute_check.cc). Needs a C++
compiler, the CUDA headers, and the headers of the nvidia-cutlass wheel: `pip install --no-deps nvidia-cutlass==4.2.0.0`,
or MOEJAX_CUTLASS_INCLUDE=FOLDER. Nothing else in the project uses them."""

import importlib.util
import os
import pathlib
import shutil
import subprocess

import pytest

from tests.cuda.host_build import CXX, KERNELS, ROOT, build


def cutlass_headers() -> pathlib.Path | None:
    named = os.environ.get("MOEJAX_CUTLASS_INCLUDE")
    if named:
        return pathlib.Path(named)
    found = importlib.util.find_spec("cutlass_library")
    return pathlib.Path(found.origin).parent / "source" / "include" if found and found.origin else None


def cuda_headers() -> pathlib.Path | None:
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        return None
    roots = [pathlib.Path(nvcc).resolve().parents[1], *pathlib.Path("/usr/local").glob("cuda-13*")]
    return next((root / "include" for root in roots if (root / "include" / "cuda_runtime_api.h").exists()), None)


CUTLASS, CUDA = cutlass_headers(), cuda_headers()

pytestmark = [
    pytest.mark.skipif(CXX is None, reason="no C++ compiler on PATH"),
    pytest.mark.skipif(CUDA is None, reason="no CUDA 13 headers"),
    pytest.mark.skipif(
        CUTLASS is None, reason="nvidia-cutlass is not installed (pip install --no-deps nvidia-cutlass==4.2.0.0)"
    ),
]


@pytest.mark.timeout(600)
def test_descriptors_and_layouts_equal_cutes():
    flags = ["-O1", "-w", f"-I{KERNELS}", f"-I{CUDA}", f"-I{CUDA / 'cccl'}", f"-I{CUTLASS}"]
    headers = [KERNELS / "isa" / "sm100_layout.h", KERNELS / "isa" / "portable.h", KERNELS / "quantize_math.h"]
    program = build([ROOT / "tests" / "cuda" / "cute_check.cc"], flags, headers)
    done = subprocess.run([str(program)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "0 of" in done.stderr
