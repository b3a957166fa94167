"""Checks the expert layer's compiled backend on the devices of this machine: `python -m moejax.selftest`, or `selftest()`.

Every case runs forward and backward twice, on memory that held NaN in between, and is compared with the `xla` backend,
which computes the same products exactly in plain JAX; the two runs must agree bit for bit. Sizes are unequal and no
multiples of a tile, one expert has no token and one has a single one. A failure names the case, the array and how far off
it is, and the backend that works instead.

This tests what a layer can be run with. The tile programs for Blackwell are not used by any layer yet and have a test of
their own, `scripts/blackwell_first_run.sh` (see docs/blackwell.md).
"""

import argparse
import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np

from moejax.config import ActivationConfig, RouterConfig
from moejax.ops.backends import resolve_backend
from moejax.ops.moe import moe_ffn, prepare_experts
from moejax.ops.schedule import schedule
from moejax.ops.spec import MoESpec

EXPERTS, TOKENS, D_MODEL, WIDTH = 5, 200, 160, 224

# What a backend is compared with, and the largest relative norm of the difference, per array. BF16 and MXFP8 against `xla`:
# where a value lies on a rounding tie the two sides may round apart, and a BF16 tie that is then quantised moves by an
# E4M3 step; `aligned` adds the short sums of Hopper's FP8 products (tests/cuda/test_mx_layer.py has them by array). `xla`
# itself is compared with `dense`, which quantises nothing: there the limit of mxfp8 is what quantising costs.
_REFERENCE = {"native": "xla", "megakernel": "xla", "xla": "dense"}
_LIMIT = {
    "xla": {"fp32": 2e-5, "bf16": 1.2e-2, "mxfp8": 1.2e-2},
    "dense": {"fp32": 2e-5, "bf16": 1.2e-2, "mxfp8": 1.2e-1},
}
_NAMES = ("y", "dx", "d_weight", "dw_gate_up", "dw_down")


class SelfTestError(RuntimeError):
    """A backend gives wrong results on this machine."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One case: its name, "ok", "skipped" or "failed", and the reason or the largest relative difference."""

    case: str
    state: str
    detail: str


def cases(backend: str) -> list[tuple[str, MoESpec]]:
    """Name and spec of every case."""
    found = []
    for recipe in ("fp32", "bf16", "mxfp8"):
        for mx_mode in ("exact", "aligned") if recipe == "mxfp8" else ("exact",):
            for top_k in (1, 2):
                for act in (ActivationConfig(), ActivationConfig(name="swiglu_oai", limit=7.0)):
                    spec = MoESpec(EXPERTS, D_MODEL, WIDTH, act=act, recipe=recipe, backend=backend, mx_mode=mx_mode)  # type: ignore[arg-type]
                    spec = spec.replace(router=RouterConfig(top_k=top_k))
                    mode = f" {mx_mode}" if recipe == "mxfp8" else ""
                    found.append((f"{recipe}{mode}, top_k {top_k}, {act.name}", spec))
    return found


def selftest(backend: str = "native", *, raise_on_failure: bool = True) -> list[Outcome]:
    """Runs every case that `backend` takes on JAX's default device.

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
    outcomes = [_run_case(name, spec) for name, spec in cases(backend)]
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    if failed and raise_on_failure:
        kind = jax.devices()[0].device_kind
        raise SelfTestError(
            f"backend {backend} is wrong on this machine ({kind}), {len(failed)} of {len(outcomes)} cases: "
            + "; ".join(f"{outcome.case}: {outcome.detail}" for outcome in failed)
            + (". Use moe.backend=xla" if backend != "xla" else "")
        )
    return outcomes


def _run_case(name: str, spec: MoESpec) -> Outcome:
    try:
        resolve_backend(spec)
    except ValueError as error:
        return Outcome(name, "skipped", str(error))
    problem = _problem(spec)
    reference = _REFERENCE[str(spec.backend)]
    wanted = _gradients(problem, spec.replace(backend=reference, mx_mode="exact"))
    first = _gradients(problem, spec)
    _dirty_memory()
    second = _gradients(problem, spec)
    worst, limit = 0.0, _LIMIT[reference][spec.recipe]
    for array, got, again, right in zip(_NAMES, first, second, wanted, strict=True):
        if got.tobytes() != again.tobytes():
            return Outcome(name, "failed", f"{array} differs between two runs of the same call")
        off = _relative(got, right)
        if not off <= limit:
            return Outcome(
                name, "failed", f"{array} is off by {off:.2e} in relative norm, at most {limit:.0e} is allowed"
            )
        worst = max(worst, off)
    return Outcome(name, "ok", f"relative difference up to {worst:.1e}")


def _problem(spec: MoESpec) -> tuple[jax.Array, ...]:
    """Tokens, weights, experts' masters and a cotangent. Expert 1 has no token, expert 3 one."""
    random = np.random.default_rng(5)
    choices = [0, 2, 4]
    expert_TxK = np.stack([random.permutation(choices)[: spec.top_k] for _ in range(TOKENS)]).astype(np.int32)
    expert_TxK[17, 0] = 3
    dtype = jnp.float32 if spec.recipe == "fp32" else jnp.bfloat16
    return (
        jnp.asarray(random.standard_normal((TOKENS, D_MODEL)), dtype),
        jnp.asarray(random.uniform(0.1, 1.0, (TOKENS, spec.top_k)), jnp.float32),
        jnp.asarray(expert_TxK),
        jnp.asarray(random.standard_normal((EXPERTS, 2, WIDTH, D_MODEL)) / D_MODEL**0.5, jnp.float32),
        jnp.asarray(random.standard_normal((EXPERTS, D_MODEL, WIDTH)) / WIDTH**0.5, jnp.float32),
        jnp.asarray(random.standard_normal((TOKENS, D_MODEL)), dtype),
    )


def _gradients(problem, spec: MoESpec) -> list[np.ndarray]:
    """y, dx, d(weight) and both weight gradients, on the host."""
    x, weight, expert, w_gate_up, w_down, dy = problem

    @jax.jit
    def run(x, weight, w_gate_up, w_down):
        experts = prepare_experts(w_gate_up, w_down, spec)
        y, pull = jax.vjp(lambda *a: moe_ffn(a[0], a[1], schedule(expert, spec), a[2], spec), x, weight, experts)
        dx, d_weight, d_experts = pull(dy)
        return y, dx, d_weight, d_experts.w_gate_up_Ex2xFxD, d_experts.w_down_ExDxF

    return [np.asarray(leaf.astype(jnp.float32)) for leaf in run(x, weight, w_gate_up, w_down)]


def _dirty_memory() -> None:
    """Leaves NaN in memory that the next call is likely to get, where padding that is not written would show."""
    blocks = [jnp.full((1 << n,), jnp.nan, jnp.float32) for n in range(10, 22)]
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
    print(f"backend {backend} on {jax.devices()[0].device_kind}")
    outcomes = selftest(backend, raise_on_failure=False)
    for outcome in outcomes:
        print(f"{outcome.state:8}{outcome.case}: {outcome.detail}")
    count = {state: sum(outcome.state == state for outcome in outcomes) for state in ("ok", "skipped", "failed")}
    print(f"{count['ok']} ok, {count['failed']} failed, {count['skipped']} skipped")
    if count["failed"] and backend != "xla":
        print("use moe.backend=xla on this machine")
    return 1 if count["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
