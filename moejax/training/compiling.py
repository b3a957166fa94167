"""Compiling the step once, and keeping what was compiled for the next start."""

import hashlib
import os
import pathlib
import platform
from collections.abc import Callable
from typing import Any

import jax

from moejax.config import Config
from moejax.ops.gemms import count_gemms


def use_compile_cache(config: Config) -> None:
    """Keeps compiled programs beside the data cache, unless the user chose a place with JAX_COMPILATION_CACHE_DIR.

    The folder is named after the processor: CPU programs use its instructions, and another machine may lack them.
    A job of several CPU processes keeps nothing: four of them, each with its program read from there, waited for each other for
    ever in their first collective (jax 0.12.0.1; the same programs, compiled, ran).
    """
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    folder = pathlib.Path(config.data.cache_dir).parent / "xla" / _processor()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def compile_step(step: Callable, state: Any, batch: Any) -> tuple[Callable, dict[str, int]]:
    """`step(state, batch)` compiled for these shapes and shardings, its state donated; the next state is sharded as this one.

    Calling it with other shapes is an error, so nothing compiles again in the middle of a run.

    Returns:
      The compiled step, and the number of expert products per precision as read from the program itself (`list_gemms`).
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    first = jax.tree.leaves(shardings)[0]
    # Metrics are whole in every process, so that each can read them.
    metrics = jax.NamedSharding(first.mesh, jax.P()) if isinstance(first, jax.NamedSharding) else None
    traced = jax.jit(step, donate_argnums=0, out_shardings=(shardings, metrics)).trace(state, batch)
    return traced.lower().compile(), count_gemms(traced.jaxpr)


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    about = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(about.encode()).hexdigest()[:12]}"
