"""`moejax.selftest`: it passes what is right, names what is wrong and by how much, and comes before the first use of kernels
that no GPU has run before."""

import dataclasses
import json
import subprocess
import sys

import jax
import numpy as np
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


# --- what raises, hangs or is off by little ---------------------------------------------------------------------------------


def cuda_error():
    return jax.errors.JaxRuntimeError("INTERNAL: CUDA error: an illegal memory access was encountered")


def test_kernel_that_raises_is_a_failed_case_with_pass_and_kernels(untried, monkeypatch, capsys):
    def raises(*args, **kwargs):
        raise cuda_error()

    monkeypatch.setattr(experts_native, "ffn_forward", raises)
    message = (
        r"fp32, top_k 2, swiglu: backend native raised JaxRuntimeError: INTERNAL: CUDA error: an illegal memory access .*"
        r".*in the forward \(.*gate_up, down.*\); restart the process.* Use moe\.backend=xla"
    )
    for _ in range(2):  # the verdict stays, without a second run
        with pytest.raises(selftest.SelfTestError, match=message):
            use_a_layer()
    assert untried == ["fp32, top_k 2, swiglu"] and not selftest.cache_file().exists()
    assert selftest.main([]) == 1
    printed = capsys.readouterr().out
    assert (
        "failed  fp32, top_k 2, swiglu: backend native raised JaxRuntimeError" in printed
        and "use moe.backend=xla" in printed
    )


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_the_pass_that_raised_is_named(monkeypatch, stage):
    small(monkeypatch, "fp32")
    monkeypatch.setattr(selftest, "_REFERENCE", {"xla": "dense"})

    def at_run_time(x):
        def fails(_):
            raise RuntimeError("illegal memory access")

        return jax.pure_callback(fails, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    right = selftest.moe_ffn

    @jax.custom_vjp
    def broken(x):
        return at_run_time(x) if stage == "forward" else x

    broken.defvjp(lambda x: (broken(x), None), lambda _, g: (at_run_time(g) if stage == "backward" else g,))

    def wrapped(x, weight, plan, experts, spec):
        y = right(x, weight, plan, experts, spec)
        return broken(y) if spec.backend == "xla" else y

    monkeypatch.setattr(selftest, "moe_ffn", wrapped)
    (outcome,) = selftest.selftest("xla", raise_on_failure=False)
    assert outcome.state == "failed" and outcome.raised
    assert "backend xla raised" in outcome.detail and "illegal memory access" in outcome.detail
    assert f"in the {stage} ({selftest._STAGES[stage]})" in outcome.detail


def test_after_a_case_that_raised_on_a_gpu_nothing_else_runs(monkeypatch):
    runs = []

    def run_case(case):
        runs.append(case.name)
        return selftest.Outcome(case.name, "failed" if len(runs) == 2 else "ok", "", raised=len(runs) == 2)

    monkeypatch.setattr(selftest, "_run_case", run_case)
    monkeypatch.setattr(selftest.jax, "default_backend", lambda: "gpu")
    seen = []
    outcomes = selftest.selftest(raise_on_failure=False, report=seen.append)
    assert len(runs) == 2 and seen == outcomes
    assert [o.state for o in outcomes] == ["ok", "failed"] + ["skipped"] * (len(outcomes) - 2)
    assert outcomes[-1].detail == f"{runs[1]} has raised"


def test_whatever_else_ends_the_test_is_a_verdict_too(untried, monkeypatch):
    def raises(backend):
        raise cuda_error()

    monkeypatch.setattr(selftest, "cases", raises)
    for _ in range(2):
        with pytest.raises(
            selftest.SelfTestError, match=r"ended with JaxRuntimeError: .*illegal.* Use moe\.backend=xla"
        ):
            selftest.first_use()
    assert not selftest.cache_file().exists()


def test_lines_are_printed_as_cases_end(monkeypatch, capsys):
    printed = []

    def run_case(case):
        printed.append(capsys.readouterr().out)
        return selftest.Outcome(case.name, "ok", "fine")

    monkeypatch.setattr(selftest, "_run_case", run_case)
    assert selftest.main([]) == 0
    names = [case.name for case in selftest.cases("native")]
    assert printed[1:] == [f"ok      {name}: fine\n" for name in names[:-1]]


def test_no_case_that_ran_is_no_success(monkeypatch, capsys):
    monkeypatch.setattr(selftest, "_run_case", lambda case: selftest.Outcome(case.name, "skipped", "a rule"))
    assert selftest.main([]) == 1
    assert "0 ok, 0 failed, 16 skipped" in capsys.readouterr().out


def test_a_case_that_hangs_ends_the_process_by_name():
    program = (
        "import time; from moejax import selftest as s; s.CASE_SECONDS = 0.3;"
        "s._run_case = lambda case: time.sleep(60); s.selftest()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert done.returncode == 3
    assert "fp32, top_k 1, swiglu has not ended after 0.3 s: a kernel hangs. Use moe.backend=xla" in done.stderr


@pytest.fixture(scope="module")
def results():
    """Results of `xla` in BF16 and MXFP8 on the small shape, which the reference for `native` is."""

    def of(recipe):
        (case,) = (c for c in selftest.cases("native") if c.name == f"{recipe}, top_k 2, swiglu")
        spec = case.spec.replace(backend="xla", mx_mode="exact")
        return dataclasses.replace(case, spec=case.spec), selftest._gradients(selftest._problem(case), spec)

    return {recipe: of(recipe) for recipe in ("bf16", "mxfp8 exact")}


def judge(monkeypatch, case, wanted, got):
    monkeypatch.setattr(selftest, "resolve_backend", lambda spec: None)
    monkeypatch.setattr(selftest, "_dirty_memory", lambda: None)
    monkeypatch.setattr(selftest, "_gradients", lambda problem, spec: wanted if spec.backend == "xla" else got)
    return selftest._run_case(case)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8 exact"])
@pytest.mark.parametrize("array", selftest._PRODUCTS)
@pytest.mark.parametrize("change", ["zero", "two swapped", "a row of the next one", "Inf"])
def test_few_wrong_elements_of_any_array_are_noticed(monkeypatch, results, recipe, array, change):
    case, wanted = results[recipe]
    assert judge(monkeypatch, case, wanted, dict(wanted)).state == "ok"
    wrong = wanted[array].copy()
    rows = wrong.reshape(-1, wrong.shape[-1])  # a view
    row = int(np.flatnonzero(np.abs(rows).sum(1))[11])
    few = np.argsort(-np.abs(rows[row]))[
        : rows.shape[1] // 2 or 1
    ]  # typical elements of one row, and none of the others
    if change == "zero":
        rows[row, few[-4:]] = 0
    elif change == "two swapped":
        rows[row, few[:2]] = rows[row, few[:2]][::-1] if len(few) > 1 else -rows[row, few]
        rows[row, few[0]] *= 0.5
    elif change == "Inf":
        rows[row, few[0]] = np.inf
    else:
        rows[row] = rows[row + 1]
    outcome = judge(monkeypatch, case, wanted, {**wanted, array: wrong})
    assert outcome.state == "failed" and outcome.detail.startswith(
        f"{array} (of {selftest._PRODUCTS[array]}) is off"
    ), outcome


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8 exact"])
def test_what_one_expert_gets_wrong_is_noticed(monkeypatch, results, recipe):
    case, wanted = results[recipe]
    for array in ("dw_gate_up", "dw_down"):
        assert not wanted[array][1].any()  # no token
        for expert, wrong in ((1, 1e-30), (3, wanted[array][3] * 1.05), (4, wanted[array][4] * 1.05)):
            got = wanted[array].copy()
            got[expert] = wrong
            outcome = judge(monkeypatch, case, wanted, {**wanted, array: got})
            assert outcome.state == "failed" and f"{array} (of" in outcome.detail


# --- the record of what has passed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a GPU":',
        "[]",
        "\x00\xff",
        *(
            json.dumps({"a GPU; driver 1; build 2": entry})
            for entry in (
                True,
                None,
                {},
                {"date": "2026-11-30"},
                {"date": "2026-11-30", "cases": 0},
                {"date": "2026-11-30", "cases": True},
                {"date": "2026-11-30", "cases": "12"},
                {"date": "soon", "cases": 12},
                {"date": 5, "cases": 12},
                {"date": "2026-11-30", "cases": 12, "failed": 1},
            )
        ),
    ],
    ids=lambda text: text[:40],
)
def test_a_record_that_is_not_ours_is_no_verdict(monkeypatch, tmp_path, caplog, text):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = selftest.cache_file()
    path.parent.mkdir()
    path.write_bytes(text.encode("latin-1"))
    assert selftest._passed() == {} and "ignored" in caplog.text


def test_a_record_keeps_its_other_entries(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert selftest._passed() == {}  # none yet
    good = {"date": "2026-11-30", "cases": 12}
    selftest.cache_file().parent.mkdir()
    selftest.cache_file().write_text(json.dumps({"a": good, "b": 1}))
    assert selftest._passed() == {"a": good}


def test_a_user_without_a_home_has_no_record_and_no_error(monkeypatch, caplog):
    def no_home(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(selftest.pathlib.Path, "expanduser", no_home)
    monkeypatch.setattr(selftest, "selftest", lambda **_: [selftest.Outcome("a", "ok", "")])
    assert selftest._verdict("a GPU") is None
    assert caplog.text.count("no place for a cache") == 2 and "will run again next time" in caplog.text
