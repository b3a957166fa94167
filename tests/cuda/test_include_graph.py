"""The kernels of both architectures are one source: what their translation units include differs in the instruction layer
(isa/) and one MMA-role file each. Reads the include lines; needs no compiler."""

import pathlib
import re

import pytest

KERNELS = pathlib.Path(__file__).resolve().parents[2] / "kernels_cuda"
MMA_ROLES = {"hopper": "mma_sm90.h", "blackwell": "mma_sm100.h"}
UNITS = {"hopper": ["gemm_kernels.cu", "mx_gemm_kernels.cu"], "blackwell": ["sm100_kernels.cu"]}

# Tile programs of other shapes over the same parts, which Hopper has besides: rows of tokens read in place, tokens on the N
# side, an operand at rest, FP8 promoted in registers.
PROGRAMS = {
    *("gemm_gather.h", "gemm_tokens_n.h", "gemm_resident.h", "gemm_resident_rows.h"),
    *("tokens_n_shape.h", "tokens_n_load.h", "tokens_n_results.h"),
    *("mx_roles.h", "mx_tokens_n.h", "mx_joint_results.h", "mx_epilogue.h", "mx_resident.h"),
}
# Host side of a launch.
LAUNCH = {
    "gemm_kernels.h",
    "gemm_launch.h",
    "mx_gemm_kernels.h",
    "sm100_kernels.h",
    "sm100_launch.h",
    "kernel_check.h",
    "moe.h",
}
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


# Conversions and packed arithmetic, held equal to their plain form (test_mx_math.py); no other file has inline PTX.
CONVERSIONS = {"quantize_math.h", "quantize_rows.cu", "quantize_tiles.cu", "rows.cu"}


def code_of(path: pathlib.Path) -> str:
    """The text of a file with continued lines joined and without comments."""
    joined = re.sub(r"\\\n", " ", path.read_text())
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", joined, flags=re.S)


def includes(path: pathlib.Path) -> set[pathlib.Path]:
    """Files of kernels_cuda/ that a file includes, however the line is written; others in angle brackets are the toolkit's."""
    found = set()
    for what in re.findall(r"^\s*(?:#|%:)\s*include\b\s*([^\n]*)", code_of(path), re.M):
        line = re.match(r'"([^"]+)"|<([^>]+)>', what)
        assert line, f"{path.name} includes {what}: name the file"
        other = line.group(1) or line.group(2)
        here = [at.resolve() for at in (path.parent / other, KERNELS / other) if at.exists()]
        assert here or line.group(2), f"{path.name} includes {other}, which is not there"
        found.update(here[:1])
    return found


def closure(*names: str) -> set[str]:
    seen, todo = set(), list(names)
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo.extend(str(path.relative_to(KERNELS)) for path in includes(KERNELS / name))
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
        direct = {str(path.relative_to(KERNELS)) for path in includes(KERNELS / name)}
        assert {other for other in direct if other.startswith("isa/")} <= {"isa/portable.h"}, name
        source = code_of(KERNELS / name)
        assert not re.search(r"\b(Sm90|Sm100)\b", source), name
        assert name in CONVERSIONS or "__CUDA_ARCH__" not in source, name


@pytest.mark.parametrize(
    "line",
    [
        '#include "mma_sm90.h"',
        "#include <mma_sm90.h>",
        '# include "mma_sm90.h"',
        '  #include "mma_sm90.h"',
        '#include"mma_sm90.h"',
        '#include "../kernels_cuda/mma_sm90.h"',
        '#\\\n  include "mma_sm90.h"',
        '#/* */include "mma_sm90.h"',
    ],
)
def test_includes_are_found_however_they_are_written(tmp_path, line):
    source = tmp_path / "x.h"
    source.write_text(
        f"#pragma once\n// #include <rows.h>\n#include <cstdint>\n{line.replace('..', str(KERNELS.parent))}\n"
    )
    assert includes(source) == {KERNELS / "mma_sm90.h"}


def test_includes_by_macro_are_refused(tmp_path):
    (tmp_path / "x.h").write_text("#include ROLES\n")
    with pytest.raises(AssertionError, match="name the file"):
        includes(tmp_path / "x.h")


def test_instructions_stay_in_the_instruction_layer():
    """Tile programs must build for the host machine: outside isa/ no inline PTX but conversions, in headers no CUDA built-ins."""
    sources = [path for path in KERNELS.rglob("*") if path.suffix in (".h", ".cuh", ".cu", ".cc")]
    sources = [path for path in sources if KERNELS / "isa" not in path.parents]
    assert len(sources) > 40
    for path in sources:
        code = code_of(path)
        texts = [text.lstrip() for text in re.findall(r"\b(?:asm|__asm__|__asm)\b([^;]*;[^\n]*)", code)]
        if path.name in CONVERSIONS:
            allowed = r'\("(cvt|mov\.b32|mul\.rn\.f16x2|fma\.rn\.bf16x2|max\.NaN\.xorsign\.abs\.bf16x2|lop3\.b32)\b'
            assert all(re.match(allowed, text) for text in texts), (path.name, texts)
        else:
            assert not texts, (path.name, texts)
        if path.suffix in (".h", ".cuh"):
            words = r"\b(?:threadIdx|blockIdx|blockDim|gridDim)\b|__shfl|__sync|__device__|__shared__|__reduce|__cvta|__nanosleep"
            assert not re.findall(words, code), (path.name, re.findall(words, code))
