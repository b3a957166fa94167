"""What the compiler made of the Blackwell kernels: no spills, the products of a stage in order with their scale ids, nothing
slow in the product loop, tensor memory allocated and freed. Needs nvcc 13.0 or later, no GPU; disassembly needs cuobjdump
and nvdisasm too (pip: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm)."""

import os
import pathlib
import re
import shutil
import subprocess
import sysconfig

import pytest

KERNELS = pathlib.Path(__file__).resolve().parents[2] / "kernels_cuda"
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
BINARIES = [
    pathlib.Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "bin",
    pathlib.Path("/usr/local/cuda/bin"),
]
SEARCH = os.pathsep.join([os.environ.get("PATH", ""), *map(str, BINARIES)])
CUOBJDUMP = shutil.which("cuobjdump", path=SEARCH) if shutil.which("nvdisasm", path=SEARCH) else None

pytestmark = [
    pytest.mark.skipif(NVCC is None, reason="nvcc is not on PATH"),
    pytest.mark.timeout(900),
]
needs_cuobjdump = pytest.mark.skipif(CUOBJDUMP is None, reason="cuobjdump and nvdisasm are not on PATH")

KINDS = ["gate_up", "down", "dgrad_down", "dgrad_gate_up", "wgrad_down", "wgrad_gate_up"]
KERNEL = re.compile(r"KindE(\d)ELb\dENS_11Sm100ConfigILi(\d)ELi(\d+)ELb(\d)ELb\d")
WGRAD, DGRAD = ("wgrad_down", "wgrad_gate_up"), ("dgrad_down", "dgrad_gate_up")
# Registers by kind, a few more than ptxas takes: an epilogue that grows is noticed before it spills.
REGISTERS = {kind: 240 if kind in ("gate_up", "dgrad_down") else 112 for kind in KINDS}


class Kernel:
    """One kernel: its kind and tile, and its instructions (opcode first, operands after) without predicates."""

    def __init__(self, name: str, listing: str):
        kind, blocks, tile_n, mx = map(int, KERNEL.search(name).groups())
        self.kind, self.blocks, self.tile_n, self.mx = KINDS[kind], blocks, tile_n, mx
        found = re.findall(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*);", listing, re.M)
        self.address = [int(at, 16) for at, _ in found]
        self.code = [text.strip() for _, text in found]

    def __repr__(self):
        return f"{self.kind} {'mxfp8' if self.mx else 'bf16'}, {self.blocks} block(s)"

    def positions(self, pattern: str) -> list[int]:
        return [i for i, text in enumerate(self.code) if re.match(pattern, text)]

    @property
    def products(self) -> list[int]:
        return self.positions("UTCQMMA" if self.mx else "UTCHMMA")

    def product_loop(self) -> range:
        """From the wait for a full stage to the branch back."""
        for i in range(self.products[-1], len(self.code)):
            target = re.match(r"BRA (?:U?P\w+, )?`?\(?0x([0-9a-f]+)", self.code[i])
            if target and int(target.group(1), 16) <= self.address[self.products[0]]:
                return range(self.address.index(int(target.group(1), 16)), i + 1)
        raise AssertionError(f"{self}: no loop around the products")

    def product_operands(self) -> list[dict]:
        """What the product loop hands to each product, in order, by following the registers from the top of the loop. A value is
        (unknown, number): the register's value at some earlier point plus a number; None is no unknown. Ored constants count as
        sums: they lie outside what the masked address can hold."""
        values: dict[str, tuple] = {"URZ": (None, 0)}
        unknown = iter(range(10**6))

        def value(name: str) -> tuple:
            if re.fullmatch(r"0x[0-9a-f]+", name):
                return None, int(name, 16)
            return values.setdefault(name, (f"{name} before {next(unknown)}", 0))

        def add(a: tuple, b: tuple) -> tuple:
            if a[0] is not None and b[0] is not None:
                return f"sum {next(unknown)}", 0
            return a[0] or b[0], a[1] + b[1]

        def after(name: str) -> str:
            return name if name == "URZ" else f"UR{int(name[2:]) + 1}"

        found = []
        for text in (self.code[i] for i in self.product_loop()):
            opcode, *operands = re.split(r",? ", text)
            if opcode.startswith(("UTCQMMA", "UTCHMMA")):
                a, b, d, control, *scales = re.findall(r"(?:gdesc|tmem)\[(UR\d+)\]", text)
                instruction = re.search(r"idesc\[(UR\d+)\]", text).group(1)
                assert instruction == after(control), text
                found.append(
                    {
                        "a": (value(a), value(after(a))),
                        "b": (value(b), value(after(b))),
                        "d": value(d),
                        "instruction": value(instruction),
                        "scales": [(value(r), value(after(r))) for r in scales],
                        "accumulates": operands[-1] == "UPT",
                    }
                )
                continue
            if not operands or not re.fullmatch(r"U?R\d+", operands[0]):
                continue
            to = operands[0]
            if opcode == "UMOV" or opcode == "R2UR" and len(operands) == 2:
                values[to] = value(operands[1])
            elif re.match(r"ULOP3\.LUT UR\d+, UR\d+, 0x\w+, URZ, 0xfc", text):  # or
                values[to] = add(value(operands[1]), value(operands[2]))
            elif opcode == "UIADD3.64":
                low, high = operands[3], operands[4]
                sums = add(value(low), value(high)), add(value(after(low)), value(after(high)))
                values[to], values[after(to)] = sums
            else:
                values[to] = f"{to} after {next(unknown)}", 0
                if ".64" in opcode or ".WIDE" in opcode:
                    values[after(to) if to.startswith("U") else f"R{int(to[1:]) + 1}"] = (
                        f"{to} after {next(unknown)}",
                        0,
                    )
        return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The cubin, and what ptxas said about it."""
    target = tmp_path_factory.mktemp("sm100") / "sm100.cubin"
    command = [
        NVCC,
        "-std=c++17",
        "-O3",
        "-gencode",
        "arch=compute_100f,code=sm_100f",
        "-Xptxas",
        "-v",
        f"-I{KERNELS}",
        "-cubin",
    ]
    done = subprocess.run(
        [*command, str(KERNELS / "sm100_kernels.cu"), "-o", str(target)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return target, done.stdout + done.stderr


@pytest.fixture(scope="module")
def kernels(compiled):
    done = subprocess.run(
        [CUOBJDUMP, "-sass", str(compiled[0])],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": SEARCH},
    )
    found = [Kernel(part.split()[0], part) for part in done.stdout.split("Function :")[1:]]
    assert len(found) == 32, [str(kernel) for kernel in found]  # 6 kinds, 4 tiles, 2 activation forms for two kinds
    return found


def test_kernels_do_not_spill(compiled):
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", compiled[1])
    registers = re.findall(r"Compiling entry function '(\w+)'.*?Used (\d+) registers", compiled[1], re.S)
    assert len(registers) == 32 and len(spills) >= 32
    assert set(spills) == {("0", "0", "0")}, compiled[1]
    assert "cumulative stack" not in compiled[1]
    for name, used in registers:
        assert int(used) <= REGISTERS[KINDS[int(KERNEL.search(name).group(1))]], (name, used)
    # ptxas reports no spills for kernels whose bodies it split into functions, hence the next test


@needs_cuobjdump
def test_no_local_memory(kernels):
    assert not [kernel for kernel in kernels if kernel.positions(r"(LDL|STL)\b")]


@needs_cuobjdump
def test_a_stage_is_multiplied_in_order(kernels):
    for kernel in kernels:
        loop = kernel.product_loop()
        assert len(kernel.products) == 4, kernel
        assert all(i in loop for i in kernel.products), kernel
        commits = [i for i in kernel.positions("UTCBAR") if i in loop]
        assert len(commits) == 1 and commits[0] > kernel.products[-1], kernel
        copies = kernel.positions("UTCCP")
        assert len(copies) == (2 if kernel.mx else 0), kernel  # A, and a loop over the atoms of B
        assert all(loop.start < i < kernel.products[0] for i in copies), kernel
        pair = [".2CTA" in kernel.code[i] for i in [*kernel.products, *copies, *kernel.positions("UTCBAR")]]
        assert all(pair) if kernel.blocks == 2 else not any(pair), kernel


@needs_cuobjdump
def test_each_product_gets_the_descriptors_of_its_step(kernels):
    """Instruction descriptors with scale ids 0 to 3 in this order, operands one step of 32 bytes of K further each time, the same
    accumulators and scale columns, and only the first product may start a sum."""
    for kernel in kernels:
        assert kernel.tile_n == 256, kernel  # narrower tiles of gate and up would have two products per step
        m, n = 128 * kernel.blocks, kernel.tile_n
        mn_major_a = kernel.kind in WGRAD
        mn_major_b = kernel.kind in WGRAD + DGRAD
        shape = mn_major_a << 15 | mn_major_b << 16 | n // 8 << 17 | m // 16 << 24
        wanted = [shape | (1 << 23 | i << 29 | i << 4 if kernel.mx else 1 << 4 | 1 << 7 | 1 << 10) for i in range(4)]
        found = kernel.product_operands()
        assert [product["instruction"] for product in found] == [(None, descriptor) for descriptor in wanted], kernel
        for operand, mn_major in (("a", mn_major_a), ("b", mn_major_b)):
            step = (32 if kernel.mx else 16) * 128 // 16 if mn_major else 32 // 16
            (base, start), high = found[0][operand]
            assert base is not None and high == (None, 0x40004040), (
                kernel,
                operand,
                high,
            )  # 128-byte swizzle, version 1, 1024
            assert [product[operand] for product in found] == [((base, start + i * step), high) for i in range(4)], (
                kernel,
                operand,
            )
        assert found[0]["a"][0] != found[0]["b"][0], kernel
        for same in ("d", "scales"):
            assert all(product[same] == found[0][same] for product in found), (kernel, same)
        assert len(found[0]["scales"]) == kernel.mx, kernel
        assert [product["accumulates"] for product in found] == [False, True, True, True], kernel


@needs_cuobjdump
def test_no_packed_fp32_arithmetic(kernels):
    """Hazard "FFMA2 code generation of CUDA 13.0 and 13.1" of docs/blackwell.md: wrong code for pairs of FP32 operations."""
    assert not [kernel for kernel in kernels if kernel.positions(r"(FFMA2|FADD2|FMUL2)\b")]


@needs_cuobjdump
def test_quantising_epilogues_use_the_hardware_conversions(kernels):
    for kernel in kernels:
        quantises = kernel.mx and kernel.kind in ("gate_up", "dgrad_down")
        scales, elements = (
            kernel.positions(r"F2FP\.SATFINITE\.E8\.F32\S*\.RP"),
            kernel.positions(r"F2FP\.SATFINITE\.E4M3"),
        )
        assert bool(scales) == bool(elements) == bool(quantises), kernel


@needs_cuobjdump
def test_product_loop_has_no_fences_of_ordinary_memory(kernels):
    for kernel in kernels:
        loop = [kernel.code[i] for i in kernel.product_loop()]
        slow = [text for text in loop if re.match(r"MEMBAR|CCTL|ERRBAR|LD[GS]?\b|ST[GS]?\b", text)]
        assert not slow, (kernel, slow)


@needs_cuobjdump
def test_tensor_memory_is_allocated_and_freed(kernels):
    for kernel in kernels:
        assert kernel.positions(r"UTCATOMSWS\S*FIND_AND_SET"), kernel
        assert kernel.positions(r"UTCATOMSWS\.AND"), kernel
        assert kernel.positions("LDTM"), kernel
        assert len(kernel.positions("UGETNEXTWORKID")) == 1, kernel


def test_the_program_for_a_first_run_on_hardware_compiles(tmp_path):
    """scripts/blackwell_first_run.sh builds it; here its host half must at least compile against the kernels' interface."""
    source = KERNELS.parent / "tests" / "cuda" / "sm100_device.cc"
    command = [
        NVCC,
        "-std=c++17",
        f"-I{KERNELS}",
        f"-I{source.parent}",
        "-c",
        str(source),
        "-o",
        str(tmp_path / "device.o"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    script = (KERNELS.parent / "scripts" / "blackwell_first_run.sh").read_text()
    quantisers = [path.name for path in KERNELS.glob("quantize_*.cu")]
    assert all(name in script for name in (*quantisers, "sm100_kernels.cu", "sm100_device.cc", "tensor_map.cc"))


def test_every_tcgen05_instruction_names_its_group():
    """A kernel's tcgen05 instructions must all carry one cta_group; remote arrivals must have cluster scope (cutlass #3643)."""
    text = (KERNELS / "isa" / "sm100.cuh").read_text()
    for instruction in re.findall(r"tcgen05\.(?:alloc|dealloc|relinquish_alloc_permit|cp|mma|commit)\.\S+", text):
        assert "cta_group::" in instruction, instruction
    for arrival in re.findall(r"mbarrier\.arrive\S*shared::cluster\S*", text):
        assert ".release.cluster" in arrival, arrival
