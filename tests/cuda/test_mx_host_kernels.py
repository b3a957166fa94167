"""The FP8 tile programs of Hopper on the host emulator (kernels_cuda/isa/host): every kind of grouped GEMM, unequal
groups, short last blocks along every dimension, several interleavings of the threads. Needs a C++ compiler, no GPU.
See mx_host_kernels.cc.
"""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CXX = shutil.which("g++") or shutil.which("clang++")
KINDS = ["gate_up", "down", "dgrad_down", "dgrad_gate_up", "wgrad_down", "wgrad_gate_up", "wgrad_down_accumulate"]

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler on PATH")


def build(kernels: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    program = target / "mx_host_kernels"
    sources = [ROOT / "tests" / "cuda" / "mx_host_kernels.cc", kernels / "isa" / "host" / "engine.cc"]
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-pthread", f"-I{kernels}"]
    done = subprocess.run([CXX, *flags, *map(str, sources), "-o", str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build(ROOT / "kernels_cuda", tmp_path_factory.mktemp("mx_host"))


@pytest.mark.parametrize("kind", KINDS)
def test_kind_matches_plain_loops_for_every_interleaving(program, kind):
    done = subprocess.run([str(program), kind, "1", "2"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


MUTATIONS = {
    "stage given back before its products are done": (
        "Isa::template mma_wait<0>();\n}",
        "Isa::template mma_wait<1>();\n}",
    ),
    "scales of the block before": (
        "if (kb + 1 < blocks) scales.template fetch<Isa>(kb + 1, codes);",
        "if (kb + 1 < blocks) scales.template fetch<Isa>(kb, codes);",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_emulator_notices(tmp_path, name):
    text, replacement = MUTATIONS[name]
    kernels = tmp_path / "kernels_cuda"
    shutil.copytree(ROOT / "kernels_cuda", kernels)
    source = (kernels / "mx_roles.h").read_text()
    assert text in source, "mx_roles.h has changed: adapt the mutation"
    (kernels / "mx_roles.h").write_text(source.replace(text, replacement, 1))
    program = build(kernels, tmp_path)
    runs = [
        subprocess.run([str(program), kind, "1", "2", "3"], capture_output=True, text=True, timeout=240)
        for kind in ("gate_up", "dgrad_gate_up", "wgrad_gate_up")
    ]
    assert any(r.returncode != 0 for r in runs), [r.stdout for r in runs]
