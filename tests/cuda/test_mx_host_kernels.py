"""The FP8 tile programs of Hopper on the host emulator (kernels_cuda/isa/host): every kind of grouped GEMM, unequal
groups, short last blocks along every dimension, several interleavings of the threads. Needs a C++ compiler, no GPU.
See mx_host_kernels.cc.
"""

import pathlib
import shutil
import subprocess

import pytest

from tests.cuda.host_build import CXX, KERNELS, ROOT, build, emulator, found_race

KINDS = ["gate_up", "down", "dgrad_down", "dgrad_gate_up", "wgrad_down", "wgrad_gate_up", "wgrad_down_accumulate"]
TOKENS_N = ["gate_up_tokens_n", "down_tokens_n", "dgrad_gate_up_tokens_n"]
STRIPS = ["wgrad_down_strips", "wgrad_gate_up_strips"]
DEEP = ["gate_up_deep", "dgrad_down_deep"]  # a K loop that comes round the ring

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler on PATH")


def build_program(kernels: pathlib.Path = KERNELS) -> pathlib.Path:
    return build(*emulator(ROOT / "tests" / "cuda" / "mx_host_kernels.cc", ["-O2", "-ffp-contract=off"], kernels))


@pytest.fixture(scope="module")
def program():
    return build_program()


@pytest.mark.parametrize("kind", KINDS + TOKENS_N + STRIPS + DEEP)
def test_kind_matches_plain_loops_for_every_interleaving(program, kind):
    done = subprocess.run([str(program), kind, "1", "2"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


# What is left out, in which kind, and who then races: the earlier access, and the later one.
FAULTS = [
    ("wait:shared", "dgrad_down", "write by warp", "read by warp"),  # the other consumer's values and maxima
    ("wait:taken", "dgrad_down", "read by warp", "write by warp"),  # before what it reads is overwritten
    ("wait:staging", "dgrad_down", "read by a bulk store", "write by warp"),
    ("wait:weights", "dgrad_down", "write by", "read by warp"),  # combine weights, fetched by the store warp
    ("store_wait_read", "dgrad_down", "read by a bulk store", "write by"),
    ("fence:wait", "dgrad_down", "write by gathering", "read by products"),
    ("fence:stmatrix", "dgrad_down", "write by warp", "write by the copy engine"),
    ("fence:store", "dgrad_down", "write by warp", "read by a bulk store"),
    ("sync:fence", "dgrad_down", "write by warp", "read by a bulk store"),
    ("sync:ldmatrix.trans", "dgrad_down", "read by warp", "write by warp"),  # reported before all lanes have read
    ("sync:ldmatrix", "dgrad_down", "read by warp", "write by warp"),  # gate and up, overwritten in place
    # A stage given back before its scales are read.
    ("sync:wait", "dgrad_gate_up", "read by warp", "write by the copy engine"),
    ("sync:wait", "gate_up_deep", "read by warp", "write by the copy engine"),
    ("sync:wait", "dgrad_down_deep", "read by warp", "write by the copy engine"),
    ("sync:load", "wgrad_gate_up", "read by warp", "write by the copy engine"),
    ("sync:load", "wgrad_down_accumulate", "read by warp", "write by the copy engine"),
    ("sync:load", "down_tokens_n", "read by warp", "write by the (copy engine|fourth warp)"),  # scales, overwritten
    ("wait:joint", "gate_up_tokens_n", "write by warp", "read by a bulk store"),  # the other consumer's half of a panel
    # h: before the last tile's has left, before the other block's codes are there and before all lanes have sent theirs.
    ("wait:room", "gate_up_tokens_n", "write by the store warp", "write by warp"),
    ("wait:exchanged", "gate_up_tokens_n", r"\w+ by the store warp", r"\w+ by the store warp"),
    ("sync:store", "gate_up_tokens_n", "write by the store warp", "read by the store warp"),
    ("store_wait_read", "dgrad_gate_up_tokens_n", "read by a bulk store", "write by"),
    ("fence:stmatrix", "gate_up_tokens_n", "write by warp", "read by a bulk store"),
    ("sync:fence", "down_tokens_n", "write by warp", "read by a bulk store"),
    (
        "wait:left",
        "wgrad_gate_up_strips",
        "read by a bulk store",
        "write by warp",
    ),  # the last tile's rows, on their way
    ("store_wait_read", "wgrad_down_strips", "read by a bulk store", "write by warp"),
    ("fence:store", "wgrad_down_strips", "write by warp", "read by a bulk store"),
    ("sync:fence", "wgrad_gate_up_strips", "write by warp", "read by a bulk store"),
    ("sync:load", "wgrad_gate_up_strips", "read by warp", "write by the copy engine"),
]


@pytest.mark.parametrize("fault, kind, first, second", FAULTS)
def test_missing_order_is_found(program, fault, kind, first, second):
    found_race(program, kind, fault, first, second)


MUTATIONS = {
    "stage given back before its products are done": (
        "mx_roles.h",
        "Isa::template mma_wait<0>();\n      if (half == 1) {",
        "Isa::template mma_wait<1>();\n      if (half == 1) {",
    ),
    "scales of the block before": (
        "mx_roles.h",
        "const int at = weights.at(kb + 1);",
        "const int at = weights.at(kb);",
    ),
    "half of the tokens added before its products are done": (
        "mx_tokens_n.h",
        "finish_half<1, 0>(first, scales, empty);",
        "finish_half<2, 0>(first, scales, empty);",
    ),
    "scales given back before they are read": (
        "mx_tokens_n.h",
        "finish_half<1, kN / 2>(second, scales, empty);",
        "finish_half<1, kN / 2>(second, Config::scales(base, ring.stage), empty);",
    ),
    "a K block of a strip added before its products are done": (
        "mx_resident.h",
        "Isa::template mma_wait<1>();\n      add_next(even, a, one);",
        "Isa::template mma_wait<2>();\n      add_next(even, a, one);",
    ),
    "columns of a strip given back a tile too early": (
        "mx_resident.h",
        "left + 1 - strip.k_blocks : 0;  // K blocks to be added",
        "left + 1 - 2 * strip.k_blocks : 0;  // K blocks to be added",
    ),
    "gate and up of other columns": (
        "tokens_n_load.h",
        "tile.n0 + 32 * p, tile.expert",
        "tile.n0 + 16 * p, tile.expert",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_emulator_notices(tmp_path, name):
    file, text, replacement = MUTATIONS[name]
    kernels = tmp_path / "kernels_cuda"
    shutil.copytree(ROOT / "kernels_cuda", kernels)
    source = (kernels / file).read_text()
    assert text in source, f"{file} has changed: adapt the mutation"
    (kernels / file).write_text(source.replace(text, replacement, 1))
    program = build_program(kernels)
    runs = [
        subprocess.run([str(program), kind, "1", "2", "3"], capture_output=True, text=True, timeout=240)
        for kind in ("gate_up", "dgrad_down", "dgrad_gate_up", "wgrad_gate_up", *TOKENS_N, *STRIPS)
    ]
    assert any(r.returncode != 0 for r in runs), [r.stdout for r in runs]


def test_eight_columns_in_a_warp_have_the_bits_of_the_definition():
    sources, flags, headers = emulator(ROOT / "tests" / "cuda" / "columns_host.cc", ["-O2", "-ffp-contract=off"])
    program = build([*sources, ROOT / "tests" / "cuda" / "mx_math.cc"], flags, headers)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
