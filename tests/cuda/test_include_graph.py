"""The kernels of both architectures are one source: what their translation units include differs in the instruction layer
(isa/) and one MMA-role file each. Reads the include lines; needs no compiler."""

import pathlib
import re

KERNELS = pathlib.Path(__file__).resolve().parents[2] / "kernels_cuda"
MMA_ROLES = {"hopper": "mma_sm90.h", "blackwell": "mma_sm100.h"}
UNITS = {"hopper": ["gemm_kernels.cu", "mx_gemm_kernels.cu"], "blackwell": ["sm100_kernels.cu"]}

# Tile programs of other shapes over the same parts, which Hopper has besides: rows of tokens read in place, tokens on the N
# side, an operand at rest, FP8 promoted in registers.
PROGRAMS = {"gemm_gather.h", "gemm_tokens_n.h", "gemm_resident.h", "mx_roles.h", "mx_epilogue.h"}
# Host side of a launch.
LAUNCH = {"gemm_kernels.h", "mx_gemm_kernels.h", "sm100_kernels.h", "sm100_launch.h", "kernel_check.h", "moe.h"}
SHARED = {
    "activation.h",
    "gemm_arguments.h",
    "gemm_load.h",
    "gemm_results.h",
    "gemm_ring.h",
    "quantize_math.h",
    "scheduler.h",
    "task.h",
}


def includes(name: str) -> set[str]:
    """Files of kernels_cuda/ that a file includes, as paths from there."""
    path = KERNELS / name
    found = re.findall(r'^#include "([^"]+)"', path.read_text(), re.M)
    beside = [(path.parent / other).resolve() for other in found]
    paths = [own if own.exists() else (KERNELS / other).resolve() for own, other in zip(beside, found, strict=True)]
    assert all(p.exists() for p in paths), (name, found)
    return {str(p.relative_to(KERNELS)) for p in paths}


def closure(*names: str) -> set[str]:
    seen, todo = set(), list(names)
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo.extend(includes(name))
    return seen


def parts(architecture: str) -> set[str]:
    """What the architecture's kernels are made of, without the instruction layer and the launches."""
    units = UNITS[architecture]
    return {name for name in closure(*units) if not name.startswith("isa/")} - LAUNCH - set(units)


def test_architectures_differ_in_one_file_each():
    hopper, blackwell = parts("hopper"), parts("blackwell")
    assert blackwell - hopper == {MMA_ROLES["blackwell"]}
    assert hopper - blackwell == {MMA_ROLES["hopper"]} | PROGRAMS
    assert hopper & blackwell == SHARED


def test_every_kernel_source_is_counted():
    """A new .cu file with products must be added above."""
    products = {p.name for p in KERNELS.glob("*.cu") if re.search(r"\b(run_roles|sm100_run_block)<", p.read_text())}
    assert products == {name for units in UNITS.values() for name in units}


def test_programs_are_built_on_the_shared_parts():
    for program in PROGRAMS:
        assert closure(program) & SHARED >= {"gemm_ring.h", "task.h"}, program
        assert MMA_ROLES["blackwell"] not in closure(program), program


def test_shared_parts_know_no_instruction_set():
    for name in SHARED:
        assert {other for other in includes(name) if other.startswith("isa/")} <= {"isa/portable.h"}, name
        source = (KERNELS / name).read_text()
        assert not re.search(r"\b(Sm90|Sm100)\b", source), name
        # Conversions have a hardware form here and there, held equal to the plain one (test_mx_math.py).
        assert name == "quantize_math.h" or "__CUDA_ARCH__" not in source, name
