"""`moejax.selftest`: it passes what is right, names what is wrong and by how much, and comes before the first use of kernels
that no GPU has run before."""

import dataclasses
import json

import jax
import pytest

import moejax
from moejax import native, selftest
from moejax.config import RouterConfig
from moejax.ops import backends, experts_native, experts_xla
from moejax.ops.spec import MoESpec


def small(monkeypatch, *recipes):
    """Only the plain case of each recipe: the whole list takes a minute."""
    every = selftest.cases
    monkeypatch.setattr(
        selftest,
        "cases",
        lambda backend: [c for c in every(backend) if c.name in [f"{r}, top_k 2, swiglu" for r in recipes]],
    )


def test_every_recipe_mode_and_activation_is_a_case():
    names = [case.name for case in selftest.cases("native")]
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
        selftest.SelfTestError,
        match=r"backend xla is wrong .* fp32, top_k 2, swiglu: y \(of gate_up or down\) is off by 1\.00e-03",
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
            found["dw_down"] = found["dw_down"] + 1e-7
        return found

    monkeypatch.setattr(selftest, "_gradients", drifting)
    (outcome,) = selftest.selftest("xla", raise_on_failure=False)
    assert outcome.state == "failed" and "dw_down (of wgrad_down) differs between two runs" in outcome.detail


def test_what_a_backend_cannot_run_is_skipped_with_the_rule(monkeypatch):
    every = selftest.cases
    monkeypatch.setattr(
        selftest, "cases", lambda backend: [c for c in every(backend) if "aligned, top_k 1, swiglu" in c.name][:1]
    )
    if jax.default_backend() != "cpu":
        pytest.skip("the rule is the CPU's")
    (outcome,) = selftest.selftest("native")
    assert outcome.state == "skipped" and "backend native cannot run on cpu" in outcome.detail


def test_the_oracle_is_not_tested_against_itself():
    with pytest.raises(ValueError, match="backend is 'dense'; expected native, megakernel, xla"):
        selftest.selftest("dense")


# --- before the first use: a Blackwell GPU is played by the CPU -------------------------------------------------------------


@pytest.fixture
def untried(monkeypatch, tmp_path):
    """The CPU counts as a device whose kernels have not been tried; returns how often the self-test has run."""
    if native.missing("_cpu"):
        pytest.skip(native.missing("_cpu"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small(monkeypatch, "fp32")
    plain = selftest.cases
    monkeypatch.setattr(selftest, "untried", lambda device: True)
    monkeypatch.setattr(selftest, "cases", lambda backend: [dataclasses.replace(c, blocks=0) for c in plain(backend)])
    monkeypatch.setattr(selftest, "identify", lambda device: "a GPU; driver 1; build 2")
    monkeypatch.setattr(selftest, "_verdicts", {})
    runs, run_case = [], selftest._run_case
    monkeypatch.setattr(selftest, "_run_case", lambda case: (runs.append(case.name), run_case(case))[1])
    refuses = experts_native.refuses

    def refuses_untried(spec, platform):  # what `_refuses_blackwell` ends with
        selftest.first_use()
        return refuses(spec, platform)

    monkeypatch.setattr(experts_native, "refuses", refuses_untried)
    backends.resolve_backend.cache_clear()
    jax.clear_caches()
    yield runs
    backends.resolve_backend.cache_clear()
    jax.clear_caches()


def use_a_layer(backend="native"):
    """A layer under jit, as a training step would trace it."""
    spec = MoESpec(5, 96, 64, recipe="fp32", backend=backend).replace(router=RouterConfig(top_k=2))
    case = selftest.Case("", spec, (50, 96, 64))
    return selftest._gradients(selftest._problem(case), case.spec)["y"]


def test_first_use_tests_once_and_remembers_what_passed(untried, monkeypatch):
    assert use_a_layer().any() and use_a_layer().any()
    assert untried == ["fp32, top_k 2, swiglu"]
    known = json.loads(selftest.cache_file().read_text())
    assert known["a GPU; driver 1; build 2"]["cases"] == 1
    monkeypatch.setattr(selftest, "_verdicts", {})  # another process
    selftest.first_use()
    assert len(untried) == 1
    monkeypatch.setattr(selftest, "identify", lambda device: "a GPU; driver 2; build 2")
    selftest.first_use()
    assert len(untried) == 2
    selftest.cache_file().write_text("damaged")
    monkeypatch.setattr(selftest, "_verdicts", {})
    selftest.first_use()
    assert len(untried) == 3


def test_failing_kernel_is_refused_with_its_name_and_error(untried, monkeypatch):
    right = experts_native.ffn_backward

    def wrong(*args, **kwargs):
        dx, d_weight, d_experts = right(*args, **kwargs)
        return dx, d_weight, dataclasses.replace(d_experts, w_down_ExDxF=d_experts.w_down_ExDxF * 1.01)

    monkeypatch.setattr(experts_native, "ffn_backward", wrong)
    where = r"backend native is wrong .* fp32, top_k 2, swiglu: dw_down \(of wgrad_down\)"
    message = where + r" is off by 1\.00e-02 .*Use moe\.backend=xla"
    for backend in ("native", None):  # nobody gets another backend without having asked for it
        with pytest.raises(selftest.SelfTestError, match=message):
            use_a_layer(backend)
    assert len(untried) == 1
    assert not selftest.cache_file().exists()
    assert use_a_layer("xla").any()


def test_every_tile_configuration_of_blackwell_is_a_case(monkeypatch):
    monkeypatch.setattr(selftest, "untried", lambda device: True)
    found = {(c.spec.recipe, c.blocks, c.sizes == selftest.LARGE) for c in selftest.cases("native")}
    assert found >= {
        (recipe, blocks, large) for recipe in ("bf16", "mxfp8") for blocks in (1, 2) for large in (False, True)
    }
    names = [c.name for c in selftest.cases("native")]
    assert len(names) == len(set(names))


def test_only_blackwell_is_untried():
    class Device:
        def __init__(self, capability):
            self.compute_capability = capability

    assert [selftest.untried(Device(c)) for c in ("9.0", "10.0", "10.3", "12.0")] == [False, True, True, False]
    assert not selftest.untried(jax.devices("cpu")[0])


def test_it_is_a_public_callable():
    with pytest.raises(ValueError, match="dense is the oracle"):
        moejax.selftest("dense")
