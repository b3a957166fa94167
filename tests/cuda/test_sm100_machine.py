"""The Blackwell tile programs on the host machine (kernels_cuda/isa/host/sm100_machine.h): some fifty configurations of one
and two blocks, all kinds of product, MXFP8 and BF16, against plain loops; and the list of faults that the machine must
notice. Needs a C++ compiler, no GPU. What this can't show: that the hardware does what the machine does
(docs/blackwell.md)."""

import os
import re
import subprocess

import pytest

from tests.cuda.host_build import CXX, ROOT, build_all, emulator

TESTS = ROOT / "tests" / "cuda"
LEAST_CONFIGURATIONS = 50
LEAST_FAULTS = 75

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler on PATH")


def run(program, *arguments, timeout=280):
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=timeout)


def check_parts(parts, schedules):
    """Builds and runs the given quarters of the cases; returns how many cases there were."""
    jobs = [emulator(TESTS / "sm100_programs.cc", ["-O1", f"-DSM100_PART={part}"]) for part in parts]
    cases = 0
    for program in build_all(jobs):
        done = run(program, str(schedules))
        assert done.returncode == 0, done.stdout + done.stderr
        cases += int(re.search(r"(\d+) cases, 0 failed", done.stdout).group(1))
    return cases


def test_weight_gradients_match_plain_loops():
    """The quarter of the programs that compiles without MOEJAX_CUDA=1 too; the others take a minute more."""
    assert check_parts([3], 3) >= 10


@pytest.mark.skipif(os.environ.get("MOEJAX_CUDA") != "1", reason="all programs: run by `make test-cuda-host`")
def test_programs_match_plain_loops():
    assert check_parts(range(4), 3) >= LEAST_CONFIGURATIONS  # units late, at any time, and as early as possible


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_programs_match_under_twenty_schedules():
    assert check_parts(range(4), 20) >= LEAST_CONFIGURATIONS


def test_seeded_faults_are_noticed():
    (program,) = build_all([emulator(TESTS / "sm100_faults.cc", ["-O1"])])
    done = run(program)
    missed = [line for line in done.stdout.splitlines() if line.startswith("MISS")]
    assert done.returncode == 0 and not missed, missed or done.stdout + done.stderr
    assert int(re.search(r"(\d+) faults", done.stdout).group(1)) >= LEAST_FAULTS
