"""`python -m moejax.info`: what is installed here, what was compiled, and which backend each recipe would use and why."""

import importlib.metadata
import os
import platform
import sys

import jax
import jaxlib

import moejax
from moejax import native
from moejax.ops import backends
from moejax.ops.spec import MoESpec, Recipe

_PACKAGES = ("flax", "optax", "orbax-checkpoint", "grain", "numpy", "ml_dtypes")
_RECIPES: tuple[Recipe, ...] = ("fp32", "bf16", "mxfp8")
_BACKENDS = ("megakernel", "native", "xla", "dense")


def describe() -> list[str]:
    """The report, a line per entry."""
    return [*_versions(), "", *_modules(), "", *_devices(), "", *_backends()]


def _versions() -> list[str]:
    packages = ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    return [
        f"moejax {moejax.__version__} in {os.path.dirname(moejax.__file__)}",
        f"python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores",
        f"jax {jax.__version__}, jaxlib {jaxlib.__version__} (XLA FFI {'.'.join(map(str, native.ffi_api_version()))})",
        packages,
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _modules() -> list[str]:
    lines = []
    for name in ("_cpu", "_cuda"):
        try:
            module = native.module(name)
        except native.NativeError as error:
            lines.append(f"moejax.native.{name}: no. {error}")
            continue
        compiled = f"compiled for XLA FFI {'.'.join(map(str, module.ffi_api_version()))}"
        lines.append(f"moejax.native.{name}: {module.__file__}, {compiled}")
        if name == "_cpu":
            lines.append(f"  products: {module.gemm()}")
            lines.append(f"  elementwise loops: {module.vector_isa()} (of {', '.join(module.vector_isas())})")
        else:
            major, minor = divmod(module.cuda_version(), 1000)
            targets = ", ".join(module.targets())
            lines.append(f"  CUDA runtime {major}.{minor // 10}, compiled for {targets}")
    return lines


def _devices() -> list[str]:
    devices = jax.devices()
    kinds = sorted({device.device_kind for device in devices})
    return [f"devices: {len(devices)} {devices[0].platform} ({', '.join(kinds)}), {jax.process_count()} process(es)"]


def _backends() -> list[str]:
    lines = ["backends of an expert layer (E 8, D 256, F 512, one device):"]
    for recipe in _RECIPES:
        spec = MoESpec(num_experts=8, d_model=256, expert_width=512, recipe=recipe, backend=None)
        chosen, _ = backends.choose_backend(spec)
        lines.append(f"  {recipe}: {chosen}")
        for name in _BACKENDS:
            lines.append(f"    {name}: {_reason(name, chosen, spec.replace(backend=name))}")
    return lines


def _reason(name: str, chosen: str, spec: MoESpec) -> str:
    try:
        backends.choose_backend(spec)
    except ValueError as error:
        return "no, " + str(error).removeprefix(f"backend {name} cannot run on ")
    if name == chosen:
        return f"chosen, the fastest that runs on {jax.default_backend()}"
    return "the oracle; never chosen by itself" if name == "dense" else "runs here, slower"


def main() -> int:
    """Prints the report. Returns the exit code: 1, with one line on stderr, where JAX finds no device."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # what JAX raises depends on which of its plugins are installed
        wanted = jax.config.jax_platforms
        asked = f"JAX_PLATFORMS={wanted} asks for what" if wanted else "none of the platforms JAX knows is what"
        detail = " ".join(str(error).split())
        print(
            f"moejax.info: no device: {asked} this machine or this installation of JAX does not have{detail and f' ({detail})'}. "
            "Unset JAX_PLATFORMS, or set it to cpu; for a GPU install jax[cuda13] and check nvidia-smi",
            file=sys.stderr,
        )
        return 1
    print("\n".join(describe()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
