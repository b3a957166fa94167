"""The conversions of sm_100 that the host emulates, to E4M3 and UE8M0, against the host forms in CUDA's own header; and scale
codes by conversion against those in integers (sm100_conversions.cc). Needs a C++ compiler and the CUDA headers, no GPU."""

import subprocess

import pytest

from tests.cuda.host_build import CXX, KERNELS, ROOT, build
from tests.cuda.test_cute import CUDA

pytestmark = [
    pytest.mark.skipif(CXX is None, reason="no C++ compiler on PATH"),
    pytest.mark.skipif(CUDA is None, reason="no CUDA 13 headers"),
]


def differences(*arguments: str) -> str:
    flags = ["-O2", "-ffp-contract=off", f"-I{KERNELS}", f"-I{CUDA}", f"-I{CUDA / 'cccl'}"]
    headers = [KERNELS / "quantize_math.h", KERNELS / "isa" / "portable.h"]
    program = build([ROOT / "tests" / "cuda" / "sm100_conversions.cc"], flags, headers)
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, check=False).stdout


def test_emulated_conversions_have_the_bits_of_cudas():
    assert differences("97").startswith("0 of")  # 44 million patterns, and all around every step


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_emulated_conversions_have_the_bits_of_cudas_for_every_input():
    assert differences("1") == f"0 of {4 * 2**32} differ\n"
