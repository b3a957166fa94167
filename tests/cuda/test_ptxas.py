"""What the compiler made of the Hopper kernels: no spills or local memory in the product loops, no serialised products, no library
headers. Needs nvcc 13.0 or later, no GPU; disassembly needs cuobjdump as well."""

import pathlib
import re
import shutil
import subprocess

import pytest

KERNELS = pathlib.Path(__file__).resolve().parents[2] / "kernels_cuda"
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
CUOBJDUMP = shutil.which("cuobjdump") or shutil.which("/usr/local/cuda/bin/cuobjdump")

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not on PATH")
MAX_SPILL_BYTES = (
    16  # a task's fields at the turn of a tile, in the longest epilogue; never in a product loop (tested below)
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The object file of the grouped GEMMs and what ptxas said about it."""
    target = tmp_path_factory.mktemp("cuda") / "gemm_kernels.o"
    command = [NVCC, "-std=c++17", "-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-c"]
    done = subprocess.run(
        [*command, str(KERNELS / "gemm_kernels.cu"), "-o", str(target)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return target, done.stdout + done.stderr


@needs_nvcc
def test_kernels_spill_next_to_nothing(compiled):
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", compiled[1])]
    assert spills, compiled[1]
    assert max(spills) <= MAX_SPILL_BYTES, compiled[1]


@needs_nvcc
def test_products_are_not_serialised(compiled):
    # C7510..C7519: ptxas inserted waits between wgmma instructions, which costs half their rate.
    found = [line for line in compiled[1].splitlines() if re.search(r"C75\d\d", line)]
    assert not found, found


@needs_nvcc
@pytest.mark.skipif(CUOBJDUMP is None, reason="cuobjdump is not on PATH")
def test_product_loops_touch_no_local_memory(compiled):
    sass = subprocess.run([CUOBJDUMP, "-sass", str(compiled[0])], capture_output=True, text=True, check=True).stdout
    functions = sass.split("Function :")[1:]
    assert functions
    for function in functions:
        lines = [line for line in function.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,5}\*/", line)]
        products = [i for i, line in enumerate(lines) if "HGMMA" in line]
        per_loop = 8 if "TokensN" in function.split()[0] else 4  # of K 16 per stage: two blocks of columns, or one
        assert products and len(products) % per_loop == 0, function.split()[0]
        for first in range(0, len(products), per_loop):  # one loop per width of the product
            # From the branch target at or before the first product to the backward branch after the last one.
            last = products[first + per_loop - 1]
            end = next(i for i in range(last, len(lines)) if "BRA" in lines[i])
            loop = lines[products[first] - 20 : end + 20]
            assert not [line for line in loop if re.search(r"\b(LDL|STL)\b", line)], function.split()[0]


def test_kernels_include_no_template_library():
    for path in sorted(KERNELS.rglob("*")):
        if path.suffix in {".h", ".cuh", ".cu", ".cc"}:
            found = re.findall(r"#include\s*[<\"]((?:cute|cutlass|cub|thrust|cuda/)[^>\"]*)", path.read_text())
            assert not found, (path.name, found)


def test_instructions_stay_in_the_instruction_layer():
    """Roles, epilogues and activations must also build for the host twin: no inline PTX and no CUDA built-ins outside isa/."""
    words = r"\basm\b|\bthreadIdx\b|\bblockIdx\b|__shfl|__sync|__device__|__shared__"
    names = [
        "activation.h",
        "task.h",
        "tiling.h",
        "mma_sm90.h",
        *(p.name for p in KERNELS.glob("gemm_*.h") if p.name != "gemm_kernels.h"),
    ]
    assert len(names) > 5
    for name in names:
        found = re.findall(words, (KERNELS / name).read_text())
        assert not found, (name, found)
