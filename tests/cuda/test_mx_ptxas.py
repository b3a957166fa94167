"""What the compiler made of the FP8 products: no local memory in the product loops, no serialised products;
quantisers that spill next to nothing. Needs nvcc 13.0 or later, no GPU; disassembly needs cuobjdump as well.
"""

import pathlib
import re
import shutil
import subprocess

import pytest

KERNELS = pathlib.Path(__file__).resolve().parents[2] / "kernels_cuda"
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
CUOBJDUMP = shutil.which("cuobjdump") or shutil.which("/usr/local/cuda/bin/cuobjdump")

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not on PATH")


def build(name, folder):
    target = folder / f"{name}.o"
    command = [NVCC, "-std=c++17", "-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-c"]
    done = subprocess.run([*command, str(KERNELS / f"{name}.cu"), "-o", str(target)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target, done.stdout + done.stderr


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    return build("mx_gemm_kernels", tmp_path_factory.mktemp("cuda"))


@needs_nvcc
def test_products_are_not_serialised(products):
    found = [line for line in products[1].splitlines() if re.search(r"C75\d\d", line)]
    assert not found, found


@needs_nvcc
@pytest.mark.skipif(CUOBJDUMP is None, reason="cuobjdump is not on PATH")
def test_product_loops_touch_no_local_memory(products):
    sass = subprocess.run([CUOBJDUMP, "-sass", str(products[0])], capture_output=True, text=True, check=True).stdout
    functions = sass.split("Function :")[1:]
    assert len(functions) == 8  # six kinds, two of them with two activation forms
    for function in functions:
        lines = [line for line in function.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,5}\*/", line)]
        at = {int(line.split("*/")[0].strip()[2:], 16): i for i, line in enumerate(lines)}
        found = [i for i, line in enumerate(lines) if "QGMMA" in line]
        assert len(found) == 8, "four products of K 32 for each half of the columns"
        # The loop: from the target of the first backward branch after the last product that lies before the first one.
        for i in range(found[-1], len(lines)):
            target = re.search(r"BRA (?:\S+, )?(?:`\(\S+\)|0x([0-9a-f]+))", lines[i])
            if target and target[1] and at.get(int(target[1], 16), len(lines)) <= found[0]:
                loop = lines[at[int(target[1], 16)] : i + 1]
                break
        else:
            pytest.fail("no loop around the products found")
        local = [line for line in loop if re.search(r"\b(LDL|STL)\b", line)]
        assert not local, (function.split()[0], local)


@needs_nvcc
@pytest.mark.parametrize("name", ["quantize_rows", "quantize_tiles", "quantize_transposed"])
def test_quantisers_spill_next_to_nothing(name, tmp_path):
    _, log = build(name, tmp_path)
    spills = sorted(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
    assert spills and spills[-2] <= 32 and spills[-1] <= 128, (
        log
    )  # the largest: both orientations dequantised, of mode exact


def test_instructions_stay_in_the_instruction_layer():
    """Roles and epilogues must also build for the host twin: no inline PTX and no CUDA built-ins outside isa/."""
    words = r"\basm\b|\bthreadIdx\b|\bblockIdx\b|__shfl|__sync|__device__|__shared__"
    for name in ("mx_epilogue.h", "mx_roles.h"):
        found = re.findall(words, (KERNELS / name).read_text())
        assert not found, (name, found)
