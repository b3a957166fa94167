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
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", compiled[1])]
    assert len(registers) == 32 and len(spills) >= 32
    assert set(spills) == {("0", "0", "0")}, compiled[1]
    assert "cumulative stack" not in compiled[1]
    assert max(registers) <= 255  # 256 threads of 64 Ki registers
    # ptxas reports no spills for kernels whose bodies it split into functions, hence the next test


@needs_cuobjdump
def test_no_local_memory(kernels):
    assert not [kernel for kernel in kernels if kernel.positions(r"(LDL|STL)\b")]


@needs_cuobjdump
def test_a_stage_is_multiplied_in_order(kernels):
    for kernel in kernels:
        loop = kernel.product_loop()
        parts = 2 if kernel.mx and kernel.kind == "gate_up" and kernel.tile_n == 128 else 1
        assert len(kernel.products) == 4 * parts, kernel
        assert all(i in loop for i in kernel.products), kernel
        commits = [i for i in kernel.positions("UTCBAR") if i in loop]
        assert len(commits) == 1 and commits[0] > kernel.products[-1], kernel
        copies = kernel.positions("UTCCP")
        assert len(copies) == (2 if kernel.mx else 0), kernel  # A, and a loop over the atoms of B
        assert all(loop.start < i < kernel.products[0] for i in copies), kernel
        pair = [".2CTA" in kernel.code[i] for i in [*kernel.products, *copies, *kernel.positions("UTCBAR")]]
        assert all(pair) if kernel.blocks == 2 else not any(pair), kernel


@needs_cuobjdump
def test_instruction_descriptors_are_the_ones_expected(kernels):
    for kernel in kernels:
        parts = 2 if kernel.mx and kernel.kind == "gate_up" and kernel.tile_n == 128 else 1
        m, n = 128 * kernel.blocks, kernel.tile_n // parts
        mn_major_a = kernel.kind in WGRAD
        mn_major_b = kernel.kind in WGRAD + DGRAD
        shape = mn_major_a << 15 | mn_major_b << 16 | n // 8 << 17 | m // 16 << 24
        wanted = (
            [shape | 1 << 23 | i << 29 | i << 4 for i in range(4)] if kernel.mx else [shape | 1 << 4 | 1 << 7 | 1 << 10]
        )
        text = "\n".join(kernel.code)
        for descriptor in wanted:  # as an immediate, or rematerialised as its halves
            assert re.search(rf"\b0x0*{descriptor:x}\b", text), (kernel, hex(descriptor))


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
    assert all(name in script for name in ("sm100_kernels.cu", "quantize_tiles.cu", "sm100_device.cc", "tensor_map.cc"))


def test_every_tcgen05_instruction_names_its_group():
    """A kernel's tcgen05 instructions must all carry one cta_group; remote arrivals must have cluster scope (cutlass #3643)."""
    text = (KERNELS / "isa" / "sm100.cuh").read_text()
    for instruction in re.findall(r"tcgen05\.(?:alloc|dealloc|relinquish_alloc_permit|cp|mma|commit)\.\S+", text):
        assert "cta_group::" in instruction, instruction
    for arrival in re.findall(r"mbarrier\.arrive\S*shared::cluster\S*", text):
        assert ".release.cluster" in arrival, arrival


def test_instructions_stay_in_the_instruction_layer():
    """Tile programs must build for the host machine: no inline PTX, no CUDA built-ins."""
    words = r"\basm\b|\bthreadIdx\b|\bblockIdx\b|__shfl|__sync|__device__|__shared__"
    for name in ("gemm_load.h", "gemm_results.h", "gemm_ring.h", "mma_sm100.h", "scheduler.h"):
        found = re.findall(words, (KERNELS / name).read_text())
        assert not found, (name, found)
