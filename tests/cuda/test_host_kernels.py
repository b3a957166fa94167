"""The Hopper tile programs on the host emulator (kernels_cuda/isa/host): every kind of grouped GEMM on a small layer, with unequal,
unaligned groups, an empty expert, and several interleavings of the threads. Needs a C++ compiler, no GPU. See host_kernels.cc."""

import pathlib
import shutil
import subprocess

import pytest

from tests.cuda.host_build import CXX, KERNELS, ROOT, build, emulator, found_race

KINDS = [
    *("gate_up", "down", "dgrad_down", "dgrad_gate_up", "wgrad_down", "wgrad_gate_up", "wgrad_down_accumulate"),
    "carry",  # the dispatch beside dgrad_gate_up, of wide rows
    "copy_back",  # the second part of a dispatch, beside gate_up
]

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler on PATH")


def build_program(kernels: pathlib.Path = KERNELS) -> pathlib.Path:
    return build(*emulator(ROOT / "tests" / "cuda" / "host_kernels.cc", ["-O2"], kernels))


@pytest.fixture(scope="module")
def program():
    return build_program()


@pytest.mark.parametrize("kind", KINDS)
def test_kind_matches_plain_loops_for_every_interleaving(program, kind):
    done = subprocess.run([str(program), kind, "1", "2"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


# As in test_mx_host_kernels.py.
FAULTS = [
    # Whichever comes first.
    ("wait:full", "dgrad_down", "(write by the copy|read by products)", "(write by the copy|read by products)"),
    ("wait:credit", "down", "read by a bulk store", "write by warp"),
    ("store_wait_read", "down", "read by a bulk store", "write by warp"),
    ("store_wait_read", "copy_back", "read by a bulk store", "write by the copy engine"),
    ("wait:landed", "copy_back", "write by the copy engine", "read by a bulk store"),
    ("fence:wait", "gate_up", "write by gathering", "read by products"),
    ("fence:stmatrix", "gate_up", "write by warp", "read by a bulk store"),
    ("sync:fence", "gate_up", "write by warp", "read by a bulk store"),
    ("sync:ldmatrix", "dgrad_down", "read by warp", "write by warp"),
    ("sync:load", "down", "read by the store warp", "write by warp"),  # rows that go to their tokens
    ("sync:load", "wgrad_down_accumulate", "read by warp", "write by the copy engine"),
    ("wait:written_n", "dgrad_down_tokens_n", "read by a bulk store", "write by the copy engine"),
    ("sync:load", "dgrad_down_tokens_n", "read by warp", "write by warp"),  # gate and up, overwritten in place
    (
        "sync:fence",
        "dgrad_down_tokens_n",
        "write by warp",
        "read by (the store warp|a bulk store)",
    ),  # what d(weight) is made of
    ("sync:ldmatrix.trans", "wgrad_gate_up", "read by warp", "write by the copy engine"),  # rows that go to registers
]


@pytest.mark.parametrize("fault, kind, first, second", FAULTS)
def test_missing_order_is_found(program, fault, kind, first, second):
    found_race(program, kind, fault, first, second)


MUTATIONS = {
    # what is broken: (file, text, replacement, what the emulator must say)
    "wrong phase": ("gemm_ring.h", "phase ^= 1;", "phase ^= 0;", "emulator"),
    "missing bytes": (
        "gemm_load.h",
        "static_cast<uint32_t>(boxes_a) * kPanelBytes +",
        "static_cast<uint32_t>(boxes_a - 1) * kPanelBytes +",
        "",
    ),
    "stage given back before its products are done": (
        "mma_sm90.h",
        "Isa::template mma_wait<1>();  // the previous block's products have read their stage\n"
        "        Ring<Isa, Config>::release(previous_empty);",
        "Ring<Isa, Config>::release(previous_empty);",
        "",
    ),
    "accumulators read before their products are done": (
        "mma_sm90.h",
        "Isa::template mma_wait<0>();",
        "Isa::template mma_wait<1>();",
        "",
    ),
    "gathered rows counted before they landed": (
        "gemm_gather.h",
        "Isa::gather_arrive(ring.full());",
        "Isa::barrier_arrive(ring.full());",
        "",
    ),
    "gathering warp that does not follow the ring": (
        "gemm_gather.h",
        "    Isa::barrier_arrive(ring.full());\n",
        "",
        "emulator",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_emulator_notices(tmp_path, name):
    file, text, replacement, message = MUTATIONS[name]
    kernels = tmp_path / "kernels_cuda"
    shutil.copytree(ROOT / "kernels_cuda", kernels)
    source = (kernels / file).read_text()
    assert text in source, f"{file} has changed: adapt the mutation"
    (kernels / file).write_text(source.replace(text, replacement))
    program = build_program(kernels)
    runs = [
        subprocess.run([str(program), kind, "1", "2", "3"], capture_output=True, text=True, timeout=120)
        for kind in ("gate_up", "dgrad_gate_up")
    ]
    assert any(r.returncode != 0 for r in runs), [r.stdout for r in runs]
    assert any(message in r.stdout + r.stderr for r in runs)
