"""moejax: mixture-of-experts language models in JAX at the speed of hand-written kernels."""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`moejax.selftest()`, without importing JAX until somebody asks."""
    if name == "selftest":
        return importlib.import_module("moejax.selftest")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
