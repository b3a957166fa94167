"""The compiled modules: built, versioned, registered late, missed politely; bits depend on no thread count or ISA."""

import json
import logging
import os
import pathlib
import subprocess
import sys

import jaxlib
import pytest

from moejax import native
from tests.native_support import HAS_COMPILER, needs_native

ROOT = pathlib.Path(__file__).parents[1]


def python(code: str, **environment) -> str:
    """Runs code in a fresh process, from the root of the repository, and returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler here")
def test_the_cpu_module_is_built_where_a_compiler_is():
    assert native.missing("_cpu") is None


@needs_native
def test_the_module_is_compiled_for_the_oldest_ffi_and_the_stable_abi():
    module = native.module("_cpu")
    assert tuple(module.ffi_api_version()) == (0, 4)
    assert native.ffi_api_version() >= (0, 4)
    assert ".abi3." in module.__file__


@needs_native
def test_bits_do_not_depend_on_threads_or_instruction_set():
    code = """
import hashlib, json, os
import jax, numpy as np
from moejax import native
from tests.native_support import make_problem, run
digests = {}
for recipe in ("fp32", "mxfp8"):
    outputs = run(make_problem([1, 131, 0, 300, 64], 64, 96, top_k=2, recipe=recipe, save="gate_up"))
    digests[recipe] = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(outputs))).hexdigest()
print(json.dumps([digests, native.module("_cpu").vector_isa()]))
"""
    # NPROC is the number of threads XLA's pool gets.
    runs = [
        json.loads(python(code, NPROC=threads, MOEJAX_CPU_ISA=isa))
        for threads, isa in (("1", ""), ("2", ""), ("8", "baseline"))
    ]
    assert runs[2][1] == "baseline"
    assert runs[0][0] == runs[1][0] == runs[2][0]


def test_without_the_module_xla_runs_and_one_warning_says_so():
    code = """
import logging, sys
sys.modules["moejax.native._cpu"] = None  # what an installation without a compiler looks like to `import`
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stdout)
import moejax
from moejax.ops.moe import resolve_backend
from moejax.ops.spec import MoESpec
for width in (32, 64):
    print(resolve_backend(MoESpec(4, width, 32, backend=None)))
try:
    resolve_backend(MoESpec(4, 32, 32, backend="native"))
except ValueError as error:
    print(error)
"""
    lines = python(code).splitlines()
    warnings = [line for line in lines if line.startswith("WARNING")]
    assert len(warnings) == 1 and "moejax.native._cpu is not part of this installation" in warnings[0]
    assert lines.count("xla") == 2
    assert "C++ compiler" in lines[-1]


def test_an_old_jaxlib_is_refused_by_name():
    with pytest.raises(native.NativeError, match=r"jaxlib is 0\.10\.2; expected 0\.11\.2 or newer: pip install -U jax"):
        native.check_jaxlib("0.10.2")
    native.check_jaxlib(jaxlib.__version__)


@needs_native
def test_a_module_for_a_newer_ffi_is_refused(monkeypatch):
    monkeypatch.setattr(native, "ffi_api_version", lambda: (0, 3))
    with pytest.raises(native.NativeError, match=r"compiled for XLA FFI 0\.4, jaxlib .* speaks 0\.3: build it against"):
        native._checked_module.__wrapped__("_cpu")


@needs_native
def test_a_module_that_was_not_built_again_is_refused(monkeypatch):
    monkeypatch.setattr(native, "HANDLERS_VERSION", native.HANDLERS_VERSION + 1)
    with pytest.raises(
        native.NativeError, match=r"_cpu.* holds handlers of version \d+, .* calls version \d+: build it again"
    ):
        native._checked_module.__wrapped__("_cpu")


@needs_native
def test_registration_creates_the_backend_first_and_happens_once():
    """A handler that XLA refuses while it creates the backend would take the backend down with it."""
    code = """
import jax
from moejax import native
order = []
devices, register = jax.devices, jax.ffi.register_ffi_target
jax.devices = lambda *a: (order.append("devices"), devices(*a))[1]
jax.ffi.register_ffi_target = lambda name, *a, **k: (order.append(name), register(name, *a, **k))[1]
native.register("_cpu"); native.register("_cpu")
print(order[0], len(order), len(set(order)))
"""
    first, calls, distinct = python(code).split()
    assert first == "devices" and calls == distinct == "10"


@needs_native
def test_an_unknown_instruction_set_is_an_error():
    code = """
from moejax import native
print(native.missing("_cpu"))
"""
    assert "MOEJAX_CPU_ISA is 'avx9'; expected one of" in python(code, MOEJAX_CPU_ISA="avx9")


def test_info_names_versions_modules_devices_and_backends(caplog):
    from moejax.info import describe

    with caplog.at_level(logging.WARNING):
        text = "\n".join(describe())
    for part in (
        "jaxlib " + jaxlib.__version__,
        "moejax.native._cpu",
        "moejax.native._cuda",
        "devices:",
        "fp32:",
        "bf16:",
        "mxfp8:",
        "dense:",
    ):
        assert part in text
    if native.missing("_cpu") is None:
        assert "OpenBLAS" in text and "native: chosen, the fastest that runs on cpu" in text


def test_info_without_the_device_asked_for_is_one_line():
    environment = os.environ | {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "moejax.info"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("moejax.info: no device: JAX_PLATFORMS=cuda") and "Unset JAX_PLATFORMS" in line
