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
# Instructions. What is longer is the loop over tiles, around products that stand alone in it (a last K block, gemm_resident.h).
LONGEST_PRODUCT_LOOP = 200
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
        at = {int(line.split("*/")[0].strip()[2:], 16): i for i, line in enumerate(lines)}
        branches = [(i, re.search(r"BRA (?:\S+, )?(?:`\(\S+\)|0x([0-9a-f]+))", line)) for i, line in enumerate(lines)]
        loops = [(at[int(to[1], 16)], i) for i, to in branches if to and to[1] and at.get(int(to[1], 16), i + 1) <= i]
        products = [i for i, line in enumerate(lines) if "HGMMA" in line]
        assert products, function.split()[0]
        for product in products:
            around = [(first, last) for first, last in loops if first <= product <= last]
            assert around, (function.split()[0], "a product outside of any loop")
            first, last = min(around, key=lambda loop: loop[1] - loop[0])
            found = [line for line in lines[first : last + 1] if re.search(r"\b(LDL|STL)\b", line)]
            assert not found or last - first > LONGEST_PRODUCT_LOOP, (function.split()[0], found)


@needs_nvcc
def test_the_copy_of_rows_keeps_everything_in_registers(tmp_path):
    command = [NVCC, "-std=c++17", "-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-c"]
    command += [str(KERNELS / "row_copy.cu"), "-o", str(tmp_path / "row_copy.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", done.stdout + done.stderr)
    assert frames == [("0", "0")], done.stderr


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
        "row_copy.h",
        *(p.name for p in KERNELS.glob("gemm_*.h") if p.name != "gemm_kernels.h"),
    ]
    assert len(names) > 5
    for name in names:
        found = re.findall(words, (KERNELS / name).read_text())
        assert not found, (name, found)
