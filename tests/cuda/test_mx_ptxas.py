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


@pytest.fixture(scope="module")
def loops(products):
    """By kernel, the instructions of the innermost loop around each product, of every loop once."""
    if CUOBJDUMP is None:
        pytest.skip("cuobjdump is not on PATH")
    sass = subprocess.run([CUOBJDUMP, "-sass", str(products[0])], capture_output=True, text=True, check=True).stdout
    found = {}
    for function in sass.split("Function :")[1:]:
        lines = [line for line in function.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,5}\*/", line)]
        at = {int(line.split("*/")[0].strip()[2:], 16): i for i, line in enumerate(lines)}
        branches = [(i, re.search(r"BRA (?:\S+, )?(?:`\(\S+\)|0x([0-9a-f]+))", line)) for i, line in enumerate(lines)]
        spans = [(at[int(to[1], 16)], i) for i, to in branches if to and to[1] and at.get(int(to[1], 16), i + 1) <= i]
        around = set()
        for product in (i for i, line in enumerate(lines) if "QGMMA" in line):
            inside = [(first, last) for first, last in spans if first <= product <= last]
            assert inside, (function.split()[0], "a product outside of any loop")
            around.add(min(inside, key=lambda span: span[1] - span[0]))
        found[function.split()[0]] = [lines[first : last + 1] for first, last in around]
    return found


# Instructions. What is longer is the loop over tiles, around the last K block with tokens on the N side.
LONGEST_PRODUCT_LOOP = 450


def product_loops(loops, program):
    return {
        name: [loop for loop in found if len(loop) <= LONGEST_PRODUCT_LOOP]
        for name, found in loops.items()
        if program in name
    }


@needs_nvcc
def test_codes_are_read_behind_the_products(loops):
    """Row kinds: between the four products of a half, or before the first, nothing waits for shared memory."""
    for name, (loop,) in product_loops(loops, "7MxRoles").items():
        if not re.search(r"KindE[0-3]E", name):
            continue  # weight gradients read scales ahead
        products = [i for i, line in enumerate(loop) if "QGMMA" in line]
        reads = [i for i, line in enumerate(loop) if "LDS.U8" in line]
        assert len(reads) == 2 and products[3] < min(reads) < max(reads) < products[4], (name, products, reads)


@needs_nvcc
def test_product_loops_touch_no_local_memory(loops):
    on_m, on_n = product_loops(loops, "7MxRoles"), product_loops(loops, "9MxTokensN")
    assert (len(on_m), len(on_n)) == (8, 4)  # six and three kinds, those with an activation in two forms
    for name, found in (on_m | on_n).items():
        assert len(found) == (1 if name in on_m else 7), (name, "a loop for each width of the product")
        for loop in found:
            assert sum("QGMMA" in line for line in loop) == 8, "four products of K 32 for each half of the columns"
            local = [line for line in loop if re.search(r"\b(LDL|STL)\b", line)]
            assert not local, (name, local)


@needs_nvcc
def test_additions_of_row_kinds_read_no_three_registers_of_a_bank(loops):
    """Even and odd registers are the two banks. 26 of the 128 additions with all three in one made dgrad-down 8 % slower."""
    for name, (loop,) in product_loops(loops, "7MxRoles").items():
        if not re.search(r"KindE[0-3]E", name):
            continue  # weight gradients add while they multiply: there it makes no difference
        additions = [re.findall(r"\bR(\d+)", line.split("FFMA")[1])[1:] for line in loop if " FFMA " in line]
        assert len(additions) == 128, name
        assert not [registers for registers in additions if len({int(r) % 2 for r in registers}) == 1], name


@needs_nvcc
def test_one_half_of_the_tokens_is_multiplied_while_the_other_is_added(loops):
    for name, found in product_loops(loops, "9MxTokensN").items():
        for loop in found:
            words = ["product" if "QGMMA" in line else "wait" if "DEPBAR.LE gsb" in line else "" for line in loop]
            assert [word for word in words if word] == (["product"] * 4 + ["wait"]) * 2, name
            assert all("gsb0, 0x1" in line for line in loop if "DEPBAR.LE gsb" in line), (name, "one group goes on")
            first, second = (i for i, word in enumerate(words) if word == "wait")
            for between in (loop[first:second], loop[second:] + loop[:first]):
                assert sum(" FFMA " in line for line in between) >= 8, (name, "additions on either side")


@needs_nvcc
def test_strips_multiply_one_k_block_while_they_add_another(loops):
    strips = {name: found for name, found in loops.items() if "10MxResident" in name}
    assert len(strips) == 2
    for name, found in strips.items():
        loop = min(found, key=len)  # the other one is over strips, around a last K block
        assert len(loop) < 1100 and not [line for line in loop if re.search(r"\b(LDL|STL)\b", line)], name
        words = ["product" if "QGMMA" in line else "wait" if "DEPBAR.LE gsb" in line else "" for line in loop]
        assert [word for word in words if word] == (["product"] * 4 + ["wait"]) * 2, name
        assert all("gsb0, 0x1" in line for line in loop if "DEPBAR.LE gsb" in line), (name, "one group goes on")


@needs_nvcc
@pytest.mark.parametrize("name", ["quantize_gathered", "quantize_rows", "quantize_tiles", "quantize_transposed"])
def test_quantisers_spill_next_to_nothing(name, tmp_path):
    _, log = build(name, tmp_path)
    spills = sorted(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
    assert spills and max(spills[:-1], default=0) <= 32 and spills[-1] <= 128, (
        log
    )  # the largest: both orientations dequantised, of mode exact


def test_instructions_stay_in_the_instruction_layer():
    """Roles and epilogues must also build for the host twin: no inline PTX and no CUDA built-ins outside isa/."""
    words = r"\basm\b|\bthreadIdx\b|\bblockIdx\b|__shfl|__sync|__device__|__shared__"
    for name in ("mx_epilogue.h", "mx_joint_results.h", "mx_roles.h", "mx_tokens_n.h", "mx_resident.h"):
        found = re.findall(words, (KERNELS / name).read_text())
        assert not found, (name, found)
