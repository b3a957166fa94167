"""The Blackwell tile programs on the host machine (kernels_cuda/isa/host/sm100_machine.h): some fifty configurations of one
and two blocks, all kinds of product, MXFP8 and BF16, against plain loops; and the list of faults that the machine must
notice. Needs a C++ compiler, no GPU. What this can't show: that the hardware does what the machine does
(docs/blackwell.md)."""

import re
import subprocess

import pytest

from tests.cuda.host_build import CXX, KERNELS, ROOT, build_all

TESTS = ROOT / "tests" / "cuda"
MACHINE = [KERNELS / "isa" / "host" / name for name in ("sm100_machine.cc", "sm100_tensor.cc")]
PARTS = 4
LEAST_CONFIGURATIONS = 40
LEAST_FAULTS = 25

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler on PATH")


@pytest.fixture(scope="module")
def programs():
    """The program of each part, and that of the faults."""
    flags = ["-O2", "-Wno-psabi", f"-I{KERNELS}", f"-I{TESTS}"]
    headers = [KERNELS, TESTS / "sm100_case.h"]
    jobs = [
        ([TESTS / "sm100_programs.cc", *MACHINE], [*flags, f"-DSM100_PART={part}"], headers) for part in range(PARTS)
    ]
    return build_all([*jobs, ([TESTS / "sm100_faults.cc", *MACHINE], flags, headers)])


def run(program, *arguments, timeout=280):
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=timeout)


def check_parts(programs, schedules):
    cases = 0
    for program in programs[:PARTS]:
        done = run(program, str(schedules))
        assert done.returncode == 0, done.stdout + done.stderr
        cases += int(re.search(r"(\d+) cases, 0 failed", done.stdout).group(1))
    assert cases >= LEAST_CONFIGURATIONS


def test_programs_match_plain_loops(programs):
    check_parts(programs, 3)  # units late, at any time, and as early as possible


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_programs_match_under_twenty_schedules(programs):
    check_parts(programs, 20)


def test_seeded_faults_are_noticed(programs):
    done = run(programs[-1])
    missed = [line for line in done.stdout.splitlines() if line.startswith("MISS")]
    assert done.returncode == 0 and not missed, missed or done.stdout + done.stderr
    assert int(re.search(r"(\d+) faults", done.stdout).group(1)) >= LEAST_FAULTS
