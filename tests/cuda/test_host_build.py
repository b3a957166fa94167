"""What the host emulators are built on (host_build.py): the context library is found, or named; and both emulators, with their
fibers, are clean under the address and undefined-behaviour sanitizers."""

import subprocess

import pytest

from tests.cuda import host_build
from tests.cuda.host_build import CXX, ROOT, build_all, emulator

TESTS = ROOT / "tests" / "cuda"

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler on PATH")


def test_missing_context_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(host_build, "CXX", "false")  # a compiler that finds no header
    with pytest.raises(RuntimeError, match="cmeel-boost.*libboost-context-dev"):
        host_build.boost_context(tmp_path)


def test_context_library_of_the_system_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(host_build, "CXX", "true")
    assert host_build.boost_context(tmp_path) == ["-lboost_context"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_emulators_are_clean_under_sanitizers():
    flags = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    hopper, blackwell = build_all(
        [emulator(TESTS / "host_kernels.cc", flags), emulator(TESTS / "sm100_programs.cc", [*flags, "-DSM100_PART=3"])]
    )
    for command in ([hopper, "gate_up", "1", "2"], [hopper, "wgrad_down", "2"], [blackwell, "1"]):
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
