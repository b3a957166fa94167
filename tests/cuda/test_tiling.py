"""Task lists, the same for both architectures: every output tile has one task, and no list is longer than its bound. See
tiling.cc. Needs a C++ compiler, no GPU."""

import subprocess

import pytest

from tests.cuda.host_build import CXX, KERNELS, ROOT, build


@pytest.mark.skipif(CXX is None, reason="no C++ compiler on PATH")
def test_every_output_tile_has_one_task():
    tests = ROOT / "tests" / "cuda"
    program = build(
        [tests / "tiling.cc"],
        ["-O2", f"-I{KERNELS}"],
        [
            KERNELS / "tiling.h",
            *(KERNELS / name for name in ("task.h", "row_copy.h", "task_list.h", "moe.h")),
            tests / "host_tasks.h",
        ],
    )
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "4000 lists\n"
