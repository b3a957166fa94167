"""`moejax.selftest`: it passes what is right, and names what is wrong and by how much."""

import jax
import pytest

from moejax import native, selftest
from moejax.ops import experts_xla


def small(monkeypatch, *recipes):
    """Only the plain case of each recipe: the whole list takes a minute."""
    every = selftest.cases
    monkeypatch.setattr(
        selftest,
        "cases",
        lambda backend: [c for c in every(backend) if c[0] in [f"{r}, top_k 2, swiglu" for r in recipes]],
    )


def test_every_recipe_mode_and_activation_is_a_case():
    names = [name for name, _ in selftest.cases("native")]
    assert len(names) == len(set(names)) == 16
    assert all(
        any(name.startswith(recipe) for name in names) for recipe in ("fp32", "bf16", "mxfp8 exact", "mxfp8 aligned")
    )


def test_native_passes_on_the_cpu(monkeypatch):
    if native.missing("_cpu"):
        pytest.skip(native.missing("_cpu"))
    small(monkeypatch, "fp32", "mxfp8 exact")
    outcomes = selftest.selftest("native")
    assert [outcome.state for outcome in outcomes] == ["ok", "ok"], outcomes


@pytest.mark.slow
def test_xla_passes_on_the_cpu():
    outcomes = selftest.selftest("xla")
    assert {outcome.state for outcome in outcomes} <= {"ok", "skipped"} and outcomes[0].state == "ok", outcomes


@pytest.mark.slow
def test_a_wrong_result_is_refused_by_name(monkeypatch):
    small(monkeypatch, "fp32")
    right = experts_xla.forward

    def wrong(x_MxD, plan, experts, spec):
        y_MxD, saved = right(x_MxD, plan, experts, spec)
        return y_MxD * 1.001, saved

    jax.clear_caches()
    monkeypatch.setattr(experts_xla, "forward", wrong)
    with pytest.raises(
        selftest.SelfTestError, match=r"backend xla is wrong .* fp32, top_k 2, swiglu: y is off by 1\.00e-03"
    ):
        selftest.selftest("xla")
    jax.clear_caches()


def test_two_runs_that_differ_are_refused(monkeypatch):
    small(monkeypatch, "fp32")
    right, calls = selftest._gradients, []

    def drifting(problem, spec):
        calls.append(spec.backend)
        found = right(problem, spec)
        if calls.count("xla") == 2:
            found[4] = found[4] + 1e-7
        return found

    monkeypatch.setattr(selftest, "_gradients", drifting)
    (outcome,) = selftest.selftest("xla", raise_on_failure=False)
    assert outcome.state == "failed" and "dw_down differs between two runs" in outcome.detail


def test_what_a_backend_cannot_run_is_skipped_with_the_rule(monkeypatch):
    every = selftest.cases
    monkeypatch.setattr(
        selftest, "cases", lambda backend: [c for c in every(backend) if "aligned, top_k 1, swiglu" in c[0]][:1]
    )
    if jax.default_backend() != "cpu":
        pytest.skip("the rule is the CPU's")
    (outcome,) = selftest.selftest("native")
    assert outcome.state == "skipped" and "backend native cannot run on cpu" in outcome.detail


def test_the_oracle_is_not_tested_against_itself():
    with pytest.raises(ValueError, match="backend is 'dense'; expected native, megakernel, xla"):
        selftest.selftest("dense")
