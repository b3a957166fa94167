"""The compiled modules: whether they are here, why not, and their registration with XLA. Read `calls.py` next.

`_cpu` holds the CPU kernels; it is built when moejax is installed with a C++ compiler at hand. Without it everything
works on the `xla` backend, and a warning says so once.
"""

import functools
import importlib
import logging
import os
import pathlib
import re
import threading
import types

import jax
import jaxlib

logger = logging.getLogger(__name__)

OLDEST_JAXLIB = (0, 11, 2)  # the modules are compiled against its FFI headers, which every later jaxlib accepts
HANDLERS_VERSION = 3  # of operands, results and attributes; the twin of kHandlersVersion in ffi/xla/check.h

_lock = threading.Lock()
_registered: set[str] = set()


class NativeError(RuntimeError):
    """A compiled module is there and cannot be used, or was asked for and is not there."""


@functools.cache
def missing(name: str) -> str | None:
    """Why a compiled module cannot be used, or None. Warns the first time it is asked about one that is missing.

    Args:
      name: "_cpu" or "_cuda".
    """
    try:
        _checked_module(name)
    except NativeError as error:
        logger.warning("moejax: %s; expert layers run on the xla backend here", error)
        return str(error)
    return None


def module(name: str) -> types.ModuleType:
    """A compiled module.

    Raises:
      NativeError: it was not built, does not load, or does not fit this jaxlib; the message says what to do.
    """
    return _checked_module(name)


def register(name: str) -> None:
    """Makes the handlers of a module known to XLA, once per process.

    JAX's backend is created first: a handler XLA refuses while it creates the backend takes the whole backend down
    with it, and later it is only an error here.

    Raises:
      NativeError: see `module`; or XLA refused a handler.
    """
    if name in _registered:
        return
    with _lock:
        if name in _registered:
            return
        handlers = _checked_module(name).handlers()
        jax.devices()
        platform = {"_cpu": "cpu", "_cuda": "CUDA"}[name]
        for target, handler in handlers.items():
            try:
                jax.ffi.register_ffi_target(target, handler, platform=platform, api_version=1)
            except Exception as error:
                raise NativeError(
                    f"jaxlib {jaxlib.__version__} refused the FFI handler {target} of moejax.native.{name} "
                    f"(compiled for FFI {_version_text(_checked_module(name).ffi_api_version())}): {error}"
                ) from error
        _registered.add(name)


def ffi_api_version() -> tuple[int, int]:
    """Version of the XLA FFI that the installed jaxlib speaks, from the header it ships."""
    text = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    numbers = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    if None in numbers:
        raise NativeError(f"the FFI header of jaxlib {jaxlib.__version__} in {jax.ffi.include_dir()} names no version")
    major, minor = (int(number.group(1)) for number in numbers if number)
    return major, minor


@functools.cache
def _checked_module(name: str) -> types.ModuleType:
    check_jaxlib(jaxlib.__version__)
    try:
        loaded = importlib.import_module(f"moejax.native.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"moejax.native.{name}":
            raise
        how = {
            "_cpu": "install moejax again where a C++ compiler is (pip install .)",
            "_cuda": "run `make cuda`, or install with MOEJAX_CUDA=1, where nvcc 13.0 or newer is",
        }[name]
        raise NativeError(
            f"the compiled module moejax.native.{name} is not part of this installation: {how}"
        ) from error
    except ImportError as error:
        raise NativeError(f"the compiled module moejax.native.{name} does not load: {error}") from error
    built = loaded.handlers_version() if hasattr(loaded, "handlers_version") else 1
    if built != HANDLERS_VERSION:
        raise NativeError(
            f"{loaded.__file__} holds handlers of version {built}, this source tree calls version {HANDLERS_VERSION}: build it "
            f"again ({'make cuda' if name == '_cuda' else 'make setup, or pip install .'})"
        )
    wanted = os.environ.get("MOEJAX_CPU_ISA")
    if name == "_cpu" and wanted and wanted not in loaded.vector_isas():
        raise NativeError(
            f"MOEJAX_CPU_ISA is {wanted!r}; expected one of {', '.join(loaded.vector_isas())}, or nothing"
        )
    compiled, running = tuple(loaded.ffi_api_version()), ffi_api_version()
    if compiled > running:
        raise NativeError(
            f"moejax.native.{name} was compiled for XLA FFI {_version_text(compiled)}, jaxlib {jaxlib.__version__} speaks "
            f"{_version_text(running)}: build it against the headers of jaxlib {_version_text(OLDEST_JAXLIB)}"
        )
    return loaded


def check_jaxlib(version: str) -> None:
    """Raises NativeError for a jaxlib older than the oldest supported one."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers < OLDEST_JAXLIB:
        raise NativeError(f"jaxlib is {version}; expected {_version_text(OLDEST_JAXLIB)} or newer: pip install -U jax")


def _version_text(version: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in version)
