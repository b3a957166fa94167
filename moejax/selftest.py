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
import math
import os
import pathlib
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

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

# What a backend is compared with.
_REFERENCE = {"native": "xla", "megakernel": "xla", "xla": "dense"}


@dataclasses.dataclass(frozen=True)
class Limits:
    """The largest differences allowed: of a whole array and of one expert's gradient by relative norm, of a row by the norm of the
    difference over the row's, of an element by the difference over the element or the root mean square of its row. A row that
    is small beside the others counts as a tenth of their root mean square."""

    y: float  # and dx
    d_weight: float
    dw: float
    expert: float
    row: float
    element: float

    def of(self, array: str) -> dict[str, float]:
        whole = {"y": self.y, "dx": self.y, "d_weight": self.d_weight}.get(array, self.dw)
        return {"array": whole, "expert": self.expert, "row": self.row, "element": self.element}


# Against `xla`: several times what correct kernels give on the CPU and on the host machine of tests/cuda/test_sm100_layer.py
# (figures: docs/blackwell.md). Both sides round at the same places, and differ where a value lies so close to a rounding tie
# that the order of a sum decides: by a BF16 step of that element, and in MXFP8 by an E4M3 step where it is quantised next,
# which all elements of a small group may share. `aligned` adds the short sums of Hopper's FP8 (tests/cuda/test_mx_layer.py).
# `xla` itself against `dense`, which rounds elsewhere and quantises nothing: there the limit of mxfp8 is what quantising costs,
# and small rows and elements may be anything.
_LIMITS = {
    "xla": {
        "fp32": Limits(2e-5, 2e-5, 2e-5, 2e-5, 5e-5, 1e-4),
        "bf16": Limits(1e-3, 4e-4, 4e-4, 1e-3, 1.5e-2, 6e-2),
        "mxfp8 exact": Limits(1e-3, 2e-4, 4e-4, 2e-2, 0.15, 0.3),
        "mxfp8 aligned": Limits(1.2e-2, 3e-3, 2e-2, 0.1, 0.3, 0.6),
    },
    "dense": {
        "fp32": Limits(2e-5, 2e-5, 2e-5, 2e-5, 5e-5, 1e-4),
        "bf16": Limits(8e-3, 8e-3, 8e-3, 1.2e-2, 0.2, 0.5),
        "mxfp8 exact": Limits(0.1, 0.1, 0.1, 0.2, math.inf, math.inf),
        "mxfp8 aligned": Limits(0.1, 0.1, 0.1, 0.2, math.inf, math.inf),
    },
}
# In the order in which the products run, so that the first array that is off names the one that is wrong.
_PRODUCTS = {
    "y": "gate_up or down",
    "d_weight": "dgrad_down",
    "dw_down": "wgrad_down",
    "dx": "dgrad_gate_up",
    "dw_gate_up": "wgrad_gate_up",
}


_STAGES = {
    "forward": "prepare the weights, dispatch, gate_up, down, combine",
    "backward": "dgrad_down, wgrad_down, dgrad_gate_up, wgrad_gate_up",
}
CASE_SECONDS = 600  # a case takes a few seconds, compilation included; a kernel that hangs takes for ever


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
    raised: bool = False  # failed by an error, not by a wrong number


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


def selftest(
    backend: str = "native",
    *,
    raise_on_failure: bool = True,
    report: Callable[[Outcome], object] = lambda outcome: None,
) -> list[Outcome]:
    """Runs every case that `backend` takes on JAX's default device. Also spelled `moejax.selftest()`.

    Args:
      backend: "native", "xla" or "megakernel".
      raise_on_failure: False returns failures as outcomes.
      report: called with each outcome as its case ends.
    Returns:
      One Outcome per case; skipped ones say which rule keeps the backend from running them. After a case that raised on a
      GPU the others are skipped, as a CUDA error leaves nothing to run on. A case that does not end within CASE_SECONDS
      ends the process, after its name: there is no way to stop a kernel.
    Raises:
      SelfTestError: at least one case failed.
      ValueError: there is no such backend, or it is the oracle.
    """
    if backend not in _REFERENCE:
        raise ValueError(f"backend is {backend!r}; expected {', '.join(_REFERENCE)} (dense is the oracle)")
    with _running():
        outcomes: list[Outcome] = []
        broken = None
        for case in cases(backend):
            with _time_limit(case.name):
                outcome = _run_case(case) if broken is None else Outcome(case.name, "skipped", f"{broken} has raised")
            if outcome.raised and jax.default_backend() != "cpu":
                broken = case.name
            report(outcome)
            outcomes.append(outcome)
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
      SelfTestError: a kernel is wrong or raised an error; every later call of the process raises as well.
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
    """Where passed self-tests are remembered. OSError if this user has no home and XDG_CACHE_HOME is not set."""
    try:
        folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError as error:
        raise OSError(f"no place for a cache, XDG_CACHE_HOME is not set and {error}") from error
    return folder / "moejax" / "selftest.json"


def _verdict(identity: str) -> str | None:
    """Runs the test; None if it passed, which is then remembered."""
    logger.warning("moejax: first use of the native kernels on this GPU (%s): self-test, about a minute", identity)
    # In a thread of its own: the caller may be tracing, or inside a mesh, and neither must reach the test.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        try:
            outcomes = pool.submit(selftest, report=lambda outcome: logger.info("moejax: %s", _line(outcome))).result()
        except SelfTestError as error:
            return str(error)
        except Exception as error:  # what stands around the cases; no verdict must not pass for a good one
            return f"the self-test ended with {_named(error)}. Use moe.backend=xla"
    passed = [outcome.case for outcome in outcomes if outcome.state == "ok"]
    if not passed:
        return (
            "the self-test could run no case: "
            + "; ".join(f"{o.case}: {o.detail}" for o in outcomes)
            + ". Use moe.backend=xla"
        )
    known = _passed() | {identity: {"date": datetime.date.today().isoformat(), "cases": len(passed)}}
    try:
        path = cache_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps(known, indent=1) + "\n")
        draft.replace(path)
    except OSError as error:
        logger.warning("moejax: the self-test passed, and will run again next time: %s", error)
    return None


def _passed() -> dict[str, dict]:
    """What the cache says has passed. Anything that `_verdict` would not have written counts as no verdict."""
    try:
        known = json.loads(cache_file().read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:  # unreadable, no JSON, nested without end
        logger.warning("moejax: the record of passed self-tests cannot be read and is ignored: %s", _named(error))
        return {}
    if not isinstance(known, dict):
        logger.warning("moejax: %s is no record of passed self-tests and is ignored", cache_file())
        return {}
    valid = {identity: entry for identity, entry in known.items() if _is_verdict(entry)}
    for identity in known.keys() - valid.keys():
        logger.warning("moejax: %s holds no verdict for %r and is ignored there", cache_file(), identity)
    return valid


def _is_verdict(entry: object) -> bool:
    if not isinstance(entry, dict) or entry.keys() != {"date", "cases"}:
        return False
    try:
        datetime.date.fromisoformat(entry["date"])
    except (TypeError, ValueError):
        return False
    return type(entry["cases"]) is int and entry["cases"] > 0


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
    reference = _REFERENCE[str(spec.backend)]
    backend = reference
    try:
        problem = _problem(case)
        wanted = _gradients(problem, spec.replace(backend=reference, mx_mode="exact"))
        backend = str(spec.backend)
        with cuda_sm100_calls.blocks_per_tile(case.blocks):
            first = _gradients(problem, spec)
            _dirty_memory()
            second = _gradients(problem, spec)
    except Exception as error:  # a launcher's message, or CUDA's: an illegal access, a launch that failed
        return Outcome(name, "failed", _raised(backend, error), raised=True)
    worst = 0.0
    limits = _LIMITS[reference][f"mxfp8 {spec.mx_mode}" if spec.recipe == "mxfp8" else spec.recipe]
    for array, product in _PRODUCTS.items():
        if first[array].tobytes() != second[array].tobytes():
            return Outcome(name, "failed", f"{array} (of {product}) differs between two runs of the same call")
        off = _differences(array, first[array], wanted[array])
        for what, limit in limits.of(array).items():
            if not off[what][0] <= limit:
                measure = {"array": "in relative norm"}.get(what, f"in {what} {off[what][1]}")
                detail = (
                    f"{array} (of {product}) is off by {off[what][0]:.2e} {measure}, at most {limit:.1e} is allowed"
                )
                return Outcome(name, "failed", detail)
        worst = max(worst, off["array"][0])
    return Outcome(name, "ok", f"relative difference up to {worst:.1e}")


def _raised(backend: str, error: Exception) -> str:
    """Which backend raised what, in which pass and with which kernels in it."""
    where = "".join(
        f" {note}" for note in getattr(error, "__notes__", ()) if note.startswith("in the ")
    )  # JAX adds its own
    restart = "; restart the process, a CUDA error leaves the GPU unusable for it" if "CUDA" in str(error) else ""
    return f"backend {backend} raised {_named(error)}{where}{restart}"


def _named(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 600 else f'{text[:300]} ... {text[-300:]}'}"


@contextlib.contextmanager
def _time_limit(name: str):
    """Ends the process after CASE_SECONDS: nothing can interrupt a thread that waits for a kernel."""
    timer = threading.Timer(CASE_SECONDS, _give_up, [name])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(name: str) -> None:
    message = f"moejax self-test: {name} has not ended after {CASE_SECONDS} s: a kernel hangs. Use moe.backend=xla"
    print(message, file=sys.stderr, flush=True)
    os._exit(3)


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
    def forward(x, weight, w_gate_up, w_down):
        experts = prepare_experts(w_gate_up, w_down, spec)
        return jax.vjp(lambda *a: moe_ffn(a[0], a[1], schedule(expert, spec), a[2], spec), x, weight, experts)

    @jax.jit
    def backward(pull, dy):
        dx, d_weight, d_experts = pull(dy)
        gradients = {"dw_gate_up": d_experts.w_gate_up_Ex2xFxD, "dw_down": d_experts.w_down_ExDxF}
        return {"dx": dx, "d_weight": d_weight, **gradients}

    stage = "forward"  # each waits for its end, so that an error belongs to the right one
    try:
        y, pull = jax.block_until_ready(forward(x, weight, w_gate_up, w_down))
        stage = "backward"
        found = jax.block_until_ready({"y": y, **backward(pull, dy)})
    except Exception as error:
        error.add_note(f"in the {stage} ({_STAGES[stage]})")
        raise
    return {name: np.asarray(leaf.astype(jnp.float32)) for name, leaf in found.items()}


def _dirty_memory() -> None:
    """Leaves NaN in memory that the next call is likely to get, where padding that is not written would show."""
    largest = (
        22 if jax.default_backend() == "cpu" else 26
    )  # up to 8, 128 MiB: more than the workspace of the largest case
    blocks = [jnp.full((1 << n,), jnp.nan, jnp.float32) for n in range(10, largest)]
    jax.block_until_ready(blocks)


def _differences(array: str, got: np.ndarray, wanted: np.ndarray) -> dict[str, tuple[float, str]]:
    """How far off an array is, as `Limits` counts it, and where. NaN, Inf and anything in place of an expert's zeros count as
    infinitely far off. d(weight), scalars, is one row."""
    shape = (1, 1, -1) if array == "d_weight" else (len(got) if array.startswith("dw_") else 1, -1, got.shape[-1])
    got, wanted = (a.astype(np.float64).reshape(shape) for a in (got, wanted))
    wrong = np.abs(got - wanted)
    wrong[~np.isfinite(wrong)] = np.inf

    def norm(a, axis=None):
        return np.sqrt(np.sum(a * a, axis))

    def ratio(a, b):  # 0 / 0 is right
        return np.where(a == 0, 0.0, a / np.maximum(b, 1e-30))

    def worst(ratios):
        index = np.unravel_index(np.argmax(ratios), ratios.shape)
        return float(ratios[index]), ", ".join(str(int(i)) for i in (index if len(wanted) > 1 else index[1:]))

    row_norm = norm(wanted, 2)
    row_norm = np.maximum(row_norm, 0.1 * np.sqrt(np.mean(row_norm**2, axis=1, keepdims=True)))
    element = np.maximum(np.abs(wanted), row_norm[..., None] / wanted.shape[2] ** 0.5)
    whole = ratio(norm(wrong), norm(wanted))
    return {
        "array": (float(whole), ""),
        "expert": worst(ratio(norm(wrong, (1, 2)), norm(wanted, (1, 2)))) if len(wanted) > 1 else (0.0, ""),
        "row": worst(ratio(norm(wrong, 2), row_norm)),
        "element": worst(ratio(wrong, element)),
    }


def _line(outcome: Outcome) -> str:
    return f"{outcome.state:8}{outcome.case}: {outcome.detail}"


def main(argv: list[str] | None = None) -> int:
    """Prints a line per case as it ends; 1 if any failed or none could run."""
    parser = argparse.ArgumentParser(prog="python -m moejax.selftest", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="native", choices=tuple(_REFERENCE))
    backend = parser.parse_args(argv).backend
    print(f"backend {backend} on {jax.local_devices()[0].device_kind}", flush=True)
    outcomes = selftest(backend, raise_on_failure=False, report=lambda outcome: print(_line(outcome), flush=True))
    count = {state: sum(outcome.state == state for outcome in outcomes) for state in ("ok", "skipped", "failed")}
    print(f"{count['ok']} ok, {count['failed']} failed, {count['skipped']} skipped")
    if count["failed"] and backend != "xla":
        print("use moe.backend=xla on this machine")
    return 1 if count["failed"] or not count["ok"] else 0


class _CallableModule(types.ModuleType):
    """`moejax.selftest` is both the module that `python -m` runs and the function of the public interface."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Outcome]:
        return selftest(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":  # as the module that the library imports, whose state says that a test is running
    sys.exit(importlib.import_module("moejax.selftest").main())
