"""Checks the expert layer's compiled backend on the devices of this machine: `python -m moejax.selftest`, or `moejax.selftest()`.

Every case runs forward and backward twice, on memory that held NaN in between, and is compared with the `xla` backend,
which computes the same products exactly in plain JAX; the two runs must agree bit for bit. Sizes are unequal and no
multiples of a tile, one expert has no token and one has a single one. A failure names the case, the array, the product
that makes it and how far off it is, and the backend that works instead.

On a Blackwell GPU, whose kernels no GPU has run before, this comes by itself before their first use (`first_use`), for
every tile configuration: in BF16 and MXFP8, by one block and by pairs, on a small shape and on one with several tiles per
cluster. What has passed is remembered for this GPU, driver and build, in `$XDG_CACHE_HOME/moejax/selftest.json` (`~/.cache`
if unset).
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime
import hashlib
import importlib
import json
import logging
import os
import pathlib
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np

import moejax
from moejax import native
from moejax.config import ActivationConfig, RouterConfig
from moejax.native import cuda_sm100_calls
from moejax.ops.backends import resolve_backend
from moejax.ops.moe import moe_ffn, prepare_experts
from moejax.ops.schedule import schedule
from moejax.ops.spec import MoESpec

logger = logging.getLogger(__name__)

EXPERTS = 5
SMALL = (200, 160, 224)  # tokens, D, F
LARGE = (3000, 544, 608)  # several tiles for every cluster of a GPU

# What a backend is compared with, and the largest relative norm of the difference, per array. BF16 and MXFP8 against `xla`:
# where a value lies on a rounding tie the two sides may round apart, and a BF16 tie that is then quantised moves by an
# E4M3 step; `aligned` adds the short sums of Hopper's FP8 products (tests/cuda/test_mx_layer.py has them by array). `xla`
# itself is compared with `dense`, which quantises nothing: there the limit of mxfp8 is what quantising costs.
_REFERENCE = {"native": "xla", "megakernel": "xla", "xla": "dense"}
_LIMIT = {
    "xla": {"fp32": 2e-5, "bf16": 1.2e-2, "mxfp8": 1.2e-2},
    "dense": {"fp32": 2e-5, "bf16": 1.2e-2, "mxfp8": 1.2e-1},
}
# In the order in which the products run, so that the first array that is off names the one that is wrong.
_PRODUCTS = {
    "y": "gate_up or down",
    "d_weight": "dgrad_down",
    "dw_down": "wgrad_down",
    "dx": "dgrad_gate_up",
    "dw_gate_up": "wgrad_gate_up",
}


class SelfTestError(ValueError):
    """A backend gives wrong results on this machine, and is refused."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration: `sizes` are tokens, D and F; `blocks` that compute a tile together on Blackwell, 0 elsewhere."""

    name: str
    spec: MoESpec
    sizes: tuple[int, int, int] = SMALL
    blocks: int = 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One case: its name, "ok", "skipped" or "failed", and the reason or the largest relative difference."""

    case: str
    state: str
    detail: str


def cases(backend: str, device: jax.Device | None = None) -> list[Case]:
    """Every case of a backend on a device, by default JAX's first."""
    found = []
    tiles = cuda_sm100_calls.BLOCKS if backend == "native" and untried(device or jax.local_devices()[0]) else (0,)
    for recipe in ("fp32", "bf16", "mxfp8"):
        for mx_mode in ("exact", "aligned") if recipe == "mxfp8" else ("exact",):
            for blocks in tiles if recipe != "fp32" else (0,):
                mode = (f" {mx_mode}" if recipe == "mxfp8" else "") + (f", {blocks} block(s)" if blocks else "")
                for top_k in (1, 2):
                    for act in (ActivationConfig(), ActivationConfig(name="swiglu_oai", limit=7.0)):
                        spec = MoESpec(EXPERTS, *SMALL[1:], act=act, recipe=recipe, backend=backend, mx_mode=mx_mode)  # type: ignore[arg-type]
                        spec = spec.replace(router=RouterConfig(top_k=top_k))
                        found.append(Case(f"{recipe}{mode}, top_k {top_k}, {act.name}", spec, SMALL, blocks))
                if blocks:
                    spec = found[-2].spec.replace(d_model=LARGE[1], expert_width=LARGE[2])  # top_k 2, swiglu
                    found.append(Case(f"{recipe}{mode}, top_k 2, swiglu, {LARGE[0]} tokens", spec, LARGE, blocks))
    return found


def selftest(backend: str = "native", *, raise_on_failure: bool = True) -> list[Outcome]:
    """Runs every case that `backend` takes on JAX's default device. Also spelled `moejax.selftest()`.

    Args:
      backend: "native", "xla" or "megakernel".
      raise_on_failure: False returns failures as outcomes.
    Returns:
      One Outcome per case; skipped ones say which rule keeps the backend from running them.
    Raises:
      SelfTestError: at least one case failed.
      ValueError: there is no such backend, or it is the oracle.
    """
    if backend not in _REFERENCE:
        raise ValueError(f"backend is {backend!r}; expected {', '.join(_REFERENCE)} (dense is the oracle)")
    with _running():
        outcomes = [_run_case(case) for case in cases(backend)]
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    if failed and raise_on_failure:
        kind = jax.local_devices()[0].device_kind
        raise SelfTestError(
            f"backend {backend} is wrong on this machine ({kind}), {len(failed)} of {len(outcomes)} cases: "
            + "; ".join(f"{outcome.case}: {outcome.detail}" for outcome in failed)
            + (". Use moe.backend=xla" if backend != "xla" else "")
        )
    return outcomes


# --- before the first use ------------------------------------------------------------------------------------------------

_state = threading.local()  # .running: in a thread that runs the self-test, which must be able to use what it tests
_lock = threading.Lock()
_verdicts: dict[str, str | None] = {}  # by identity: None, or what failed


def untried(device: jax.Device) -> bool:
    """Whether this is a device whose kernels must pass before a layer may use them: a Blackwell GPU."""
    return str(getattr(device, "compute_capability", "")).startswith("10.")


def first_use() -> None:
    """Runs the self-test of `native` if this process is about to use it on a device that is `untried`, and nobody has
    passed it with this GPU, driver and build. Takes about a minute, once.

    Raises:
      SelfTestError: a kernel is wrong; every later call raises as well.
    """
    device = jax.local_devices()[0]
    if not untried(device) or getattr(_state, "running", False):
        return
    identity = identify(device)
    with _lock:
        if identity not in _verdicts:
            _verdicts[identity] = None if identity in _passed() else _verdict(identity)
    if _verdicts[identity] is not None:
        raise SelfTestError(_verdicts[identity])


def identify(device: jax.Device) -> str:
    """What a result holds for: the GPU, its driver, moejax and the very build of its kernels, jaxlib."""
    module = native.module("_cuda")
    build = hashlib.sha256(pathlib.Path(module.__file__ or "").read_bytes()).hexdigest()[:16]
    try:  # the exact driver; CUDA itself only says which version it speaks
        driver = pathlib.Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        driver = "unknown"
    return "; ".join(
        [
            device.device_kind,
            f"driver {driver}, CUDA {module.driver_version()}",
            f"moejax {moejax.__version__}, {build}",
            jax.lib.__version__,
        ]
    )


def cache_file() -> pathlib.Path:
    """Where passed self-tests are remembered."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "moejax" / "selftest.json"


def _verdict(identity: str) -> str | None:
    """Runs the test; None if it passed, which is then remembered."""
    logger.warning("moejax: first use of the native kernels on this GPU (%s): self-test, about a minute", identity)
    # In a thread of its own: the caller may be tracing, or inside a mesh, and neither must reach the test.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        try:
            outcomes = pool.submit(selftest).result()
        except SelfTestError as error:
            return str(error)
    passed = [outcome.case for outcome in outcomes if outcome.state == "ok"]
    if not passed:
        return (
            "the self-test could run no case: "
            + "; ".join(f"{o.case}: {o.detail}" for o in outcomes)
            + ". Use moe.backend=xla"
        )
    known = _passed() | {identity: {"date": datetime.date.today().isoformat(), "cases": len(passed)}}
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps(known, indent=1) + "\n")
        draft.replace(path)
    except OSError as error:
        logger.warning("moejax: the self-test passed, and will run again next time: %s", error)
    return None


def _passed() -> dict:
    try:
        known = json.loads(cache_file().read_text())
    except (OSError, ValueError):  # none yet, or damaged: the test runs again and replaces it
        return {}
    return known if isinstance(known, dict) else {}


@contextlib.contextmanager
def _running():
    before = getattr(_state, "running", False)
    _state.running = True
    try:
        yield
    finally:
        _state.running = before


# --- one case ------------------------------------------------------------------------------------------------------------


def _run_case(case: Case) -> Outcome:
    name, spec = case.name, case.spec
    try:
        resolve_backend(spec)
    except ValueError as error:
        return Outcome(name, "skipped", str(error))
    problem = _problem(case)
    reference = _REFERENCE[str(spec.backend)]
    wanted = _gradients(problem, spec.replace(backend=reference, mx_mode="exact"))
    with cuda_sm100_calls.blocks_per_tile(case.blocks):
        first = _gradients(problem, spec)
        _dirty_memory()
        second = _gradients(problem, spec)
    worst, limit = 0.0, _LIMIT[reference][spec.recipe]
    for array, product in _PRODUCTS.items():
        if first[array].tobytes() != second[array].tobytes():
            return Outcome(name, "failed", f"{array} (of {product}) differs between two runs of the same call")
        off = _relative(first[array], wanted[array])
        if not off <= limit:
            detail = f"{array} (of {product}) is off by {off:.2e} in relative norm, at most {limit:.0e} is allowed"
            return Outcome(name, "failed", detail)
        worst = max(worst, off)
    return Outcome(name, "ok", f"relative difference up to {worst:.1e}")


def _problem(case: Case) -> tuple[jax.Array, ...]:
    """Tokens, weights, experts' masters and a cotangent. Expert 1 has no token, expert 3 one."""
    random = np.random.default_rng(5)
    (tokens, D, F), top_k = case.sizes, case.spec.top_k
    choices = [0, 2, 4]
    expert_TxK = np.stack([random.permutation(choices)[:top_k] for _ in range(tokens)]).astype(np.int32)
    expert_TxK[17, 0] = 3
    dtype = jnp.float32 if case.spec.recipe == "fp32" else jnp.bfloat16
    return (
        jnp.asarray(random.standard_normal((tokens, D)), dtype),
        jnp.asarray(random.uniform(0.1, 1.0, (tokens, top_k)), jnp.float32),
        jnp.asarray(expert_TxK),
        jnp.asarray(random.standard_normal((EXPERTS, 2, F, D)) / D**0.5, jnp.float32),
        jnp.asarray(random.standard_normal((EXPERTS, D, F)) / F**0.5, jnp.float32),
        jnp.asarray(random.standard_normal((tokens, D)), dtype),
    )


def _gradients(problem, spec: MoESpec) -> dict[str, np.ndarray]:
    """y, dx, d(weight) and both weight gradients, on the host."""
    x, weight, expert, w_gate_up, w_down, dy = problem

    @jax.jit
    def run(x, weight, w_gate_up, w_down):
        experts = prepare_experts(w_gate_up, w_down, spec)
        y, pull = jax.vjp(lambda *a: moe_ffn(a[0], a[1], schedule(expert, spec), a[2], spec), x, weight, experts)
        dx, d_weight, d_experts = pull(dy)
        gradients = {"dw_gate_up": d_experts.w_gate_up_Ex2xFxD, "dw_down": d_experts.w_down_ExDxF}
        return {"y": y, "dx": dx, "d_weight": d_weight, **gradients}

    return {name: np.asarray(leaf.astype(jnp.float32)) for name, leaf in run(x, weight, w_gate_up, w_down).items()}


def _dirty_memory() -> None:
    """Leaves NaN in memory that the next call is likely to get, where padding that is not written would show."""
    largest = (
        22 if jax.default_backend() == "cpu" else 26
    )  # up to 8, 128 MiB: more than the workspace of the largest case
    blocks = [jnp.full((1 << n,), jnp.nan, jnp.float32) for n in range(10, largest)]
    jax.block_until_ready(blocks)


def _relative(got: np.ndarray, wanted: np.ndarray) -> float:
    """NaN and Inf count as infinitely far off."""
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.linalg.norm((got - wanted).ravel()) / max(np.linalg.norm(wanted.ravel()), 1e-30))


def main(argv: list[str] | None = None) -> int:
    """Prints a line per case; 1 if any failed."""
    parser = argparse.ArgumentParser(prog="python -m moejax.selftest", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="native", choices=tuple(_REFERENCE))
    backend = parser.parse_args(argv).backend
    print(f"backend {backend} on {jax.local_devices()[0].device_kind}")
    outcomes = selftest(backend, raise_on_failure=False)
    for outcome in outcomes:
        print(f"{outcome.state:8}{outcome.case}: {outcome.detail}")
    count = {state: sum(outcome.state == state for outcome in outcomes) for state in ("ok", "skipped", "failed")}
    print(f"{count['ok']} ok, {count['failed']} failed, {count['skipped']} skipped")
    if count["failed"] and backend != "xla":
        print("use moe.backend=xla on this machine")
    return 1 if count["failed"] else 0


class _CallableModule(types.ModuleType):
    """`moejax.selftest` is both the module that `python -m` runs and the function of the public interface."""

    def __call__(self, backend: str = "native", *, raise_on_failure: bool = True) -> list[Outcome]:
        return selftest(backend, raise_on_failure=raise_on_failure)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":  # as the module that the library imports, whose state says that a test is running
    sys.exit(importlib.import_module("moejax.selftest").main())
