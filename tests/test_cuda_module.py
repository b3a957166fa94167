"""The CUDA module: compiled for both targets wherever nvcc is; its kernel runs where a GPU is."""

import os
import pathlib
import shutil
import subprocess
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import native

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc here, so moejax.native._cuda is not built")
needs_module = pytest.mark.skipif(
    NVCC is None or (os.environ.get("MOEJAX_CUDA") != "1" and native.missing("_cuda") is not None),
    reason="moejax.native._cuda is not built here: `make cuda`, where nvcc is",
)


def cuobjdump() -> str | None:
    """The toolkit's, or the one of the package nvidia-cuda-cuobjdump."""
    packaged = pathlib.Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin")
    return shutil.which("cuobjdump") or shutil.which("cuobjdump", path=f"/usr/local/cuda/bin:{packaged}")


@needs_module
def test_cubins_are_for_hopper_and_the_blackwell_family():
    tool = cuobjdump()
    if tool is None:
        pytest.skip("no cuobjdump: pip install nvidia-cuda-cuobjdump")
    done = subprocess.run(
        [tool, native.module("_cuda").__file__], capture_output=True, text=True, timeout=60, check=True
    )
    targets = {line.split("=")[1].strip() for line in done.stdout.splitlines() if line.startswith("arch =")}
    assert targets >= {"sm_90a", "sm_100f"} and not targets - {"sm_90a", "sm_100f"}
    assert "Fatbin ptx" not in done.stdout  # nothing is left to a compiler at run time


@needs_module
def test_the_cuda_runtime_is_linked_in():
    done = subprocess.run(
        ["ldd", native.module("_cuda").__file__], capture_output=True, text=True, timeout=60, check=True
    )
    assert "libcudart" not in done.stdout and "libcuda.so" not in done.stdout


@needs_module
def test_it_imports_without_a_gpu_and_says_what_it_holds():
    module = native.module("_cuda")
    assert module.cuda_version() >= 13000 and tuple(module.targets()) == ("sm_90a", "sm_100f")
    assert tuple(module.ffi_api_version()) == (0, 4)


@pytest.mark.gpu
def test_the_probe_kernel_runs():
    native.register("_cuda")
    x = jnp.arange(1000, dtype=jnp.int32)
    y = jax.jit(lambda x: jax.ffi.ffi_call("moejax_probe", jax.ShapeDtypeStruct(x.shape, x.dtype))(x))(x)
    arch = {"9": 90, "10": 100}[str(jax.devices()[0].compute_capability).split(".")[0]]
    np.testing.assert_array_equal(y, np.asarray(x) + arch)
