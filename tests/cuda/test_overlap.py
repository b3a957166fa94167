"""kernels_cuda/overlap.cc on a CUDA runtime that only remembers what comes after what (overlap_host.cc): of random sequences
of steps, which launches end before which start, on streams and in a graph that is being captured. Needs a C++ compiler, no GPU."""

import ctypes

import numpy as np
import pytest

from tests.cuda.host_build import CXX, KERNELS, ROOT, build

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler on PATH")
OTHER_LAYER = 1 << 63
SLOTS = 24  # launches of a layer


@pytest.fixture(scope="module")
def library():
    tests = ROOT / "tests" / "cuda"
    flags = ["-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", f"-I{KERNELS}", f"-I{tests / 'host_cuda'}"]
    sources = [tests / "overlap_host.cc", KERNELS / "overlap.cc"]
    return ctypes.CDLL(str(build(sources, flags, [KERNELS, tests / "host_cuda"])))


def expected(overlaps, kernels):
    """For every launch the set of those that must end before it, as bits, and the set of those that must not be waited for."""
    before, free = [0], [0]
    of_step = []  # bits of each step's launches
    for i, (overlap, count) in enumerate(zip(overlaps, kernels, strict=True)):
        done = 1 | sum(of_step[: max(i - 1, 0)])
        last = of_step[i - 1] if i else 0
        bits = 0
        for _ in range(count):
            before.append(done | bits | (0 if overlap else last))
            free.append(last if overlap else 0)
            bits |= 1 << len(before) - 1
        of_step.append(bits)
    return [*before, (1 << len(before)) - 1], [*free, 0]


STREAMS, GRAPH, IN_ORDER = range(3)


def run(library, mode, overlaps, kernels, fails=-1, apart=False, two_devices=False):
    before = np.zeros((2, SLOTS), np.uint64)
    ints = [np.array(a, np.int32).ctypes.data_as(ctypes.c_void_p) for a in (overlaps, kernels)]
    pointer = before.ctypes.data_as(ctypes.c_void_p)
    streams = library.overlap(mode, len(overlaps), *ints, fails, apart, two_devices, pointer)
    assert streams >= 0
    return streams, [[int(b) for b in layer] for layer in before]


@pytest.mark.parametrize("mode", [STREAMS, GRAPH, IN_ORDER], ids=["streams", "graph", "in_order"])
@pytest.mark.parametrize("seed", range(60))
def test_a_step_waits_for_what_it_says_and_for_nothing_else(library, mode, seed):
    random = np.random.default_rng(seed)
    steps = int(random.integers(0, 10))
    overlaps, kernels = random.integers(0, 2, steps), random.integers(1 - seed % 2, 3, steps)
    _, layers = run(library, mode, overlaps, kernels, apart=seed % 3 == 0, two_devices=seed % 4 == 0)
    wanted, free = expected(overlaps * (mode != IN_ORDER), kernels)
    for before in layers:
        for launch, (least, none) in enumerate(zip(wanted, free, strict=True)):
            assert before[launch] & least == least, (launch, overlaps, kernels)
            assert before[launch] & none == 0, (launch, overlaps, kernels)
            assert not before[launch] & OTHER_LAYER


@pytest.mark.parametrize("capturing", [False, True], ids=["streams", "graph"])
def test_after_an_error_the_stream_waits_for_what_was_launched(library, capturing):
    overlaps, kernels = [0, 1, 1, 1], [1, 2, 1, 2]
    for fails in range(4):
        _, layers = run(library, capturing, overlaps, kernels, fails)
        launches = 1 + sum(kernels[: fails + 1])
        for before in layers:
            assert before[launches] == (1 << launches) - 1


def test_lanes_are_used_again(library):
    ways = [(apart, two) for apart in (False, True) for two in (False, True)]
    counts = [{run(library, False, [0, 1, 1], [1, 1, 1], -1, *way)[0] for way in ways} for _ in range(3)]
    assert counts[1] == counts[2] and len(counts[1]) == 1


@pytest.mark.parametrize("capturing", [False, True], ids=["streams", "graph"])
def test_an_error_of_the_runtime_is_reported_once(library, capturing):
    found = [library.reports_an_error(capturing, call) for call in range(60)]
    calls = found.index(0)
    assert calls > 8 and found == [1] * calls + [0] * (60 - calls)
