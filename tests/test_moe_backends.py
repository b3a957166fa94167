"""Which backend runs an expert layer, and what it says when it does not."""

import logging
import warnings

import pytest

from moejax import native
from moejax.config import ActivationConfig
from moejax.ops import backends, experts_native
from moejax.ops.backends import SlowerBackendWarning, resolve_backend
from moejax.ops.spec import MoESpec


@pytest.mark.parametrize("backend", ["dense", "xla", None])
@pytest.mark.parametrize(
    ("recipe", "d_model", "width", "message"),
    [
        ("bf16", 12, 16, "d_model is 12; recipe bf16 needs a multiple of 8 in every backend: use 8 or 16"),
        ("bf16", 16, 20, "expert_width is 20; recipe bf16 needs a multiple of 8 in every backend: use 16 or 24"),
        ("mxfp8", 64, 40, "expert_width is 40; recipe mxfp8 needs a multiple of 32 in every backend: use 32 or 64"),
        ("mxfp8", 24, 64, "d_model is 24; recipe mxfp8 needs a multiple of 32 in every backend: use 32$"),
        ("fp8", 64, 64, "recipe is 'fp8'; expected one of fp32, bf16, mxfp8"),
    ],
)
def test_widths_are_refused_by_name_in_every_backend(backend, recipe, d_model, width, message):
    with pytest.raises(ValueError, match=message):
        resolve_backend(MoESpec(4, d_model, width, recipe=recipe, backend=backend))


def test_fp32_takes_any_width():
    assert resolve_backend(MoESpec(3, 7, 5, backend="xla"), "cpu") == "xla"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "ragged"}, "moe.backend is 'ragged'; expected one of megakernel, native, xla, dense, or none"),
        (
            {"backend": "dense", "axis": "expert", "ranks": 2},
            "dense cannot run on cpu: it has no transport, and ranks is 2",
        ),
        ({"ranks": 3, "axis": "expert"}, "num_experts is 4 over 3 expert ranks"),
        ({"ranks": 2}, "ranks is 2 without a mesh axis"),
        ({"act": ActivationConfig(name="swiglu_oai")}, "act.limit is None; swiglu_oai needs a positive limit"),
        ({"act": ActivationConfig(name="geglu", limit=7.0)}, "act.limit is 7.0, but geglu does not clamp"),
    ],
)
def test_what_cannot_run_says_which_rule_it_breaks(changes, message):
    with pytest.raises(ValueError, match=message):
        resolve_backend(MoESpec(4, 16, 24).replace(**changes), "cpu")


@pytest.fixture
def fresh():
    """No choice remembered, before the test or after it."""

    def forget():
        resolve_backend.cache_clear()
        backends._warn_slower.cache_clear()

    forget()
    yield
    forget()


def test_the_choice_is_logged_once_with_the_reason(caplog, monkeypatch, fresh):
    monkeypatch.setattr(native, "missing", lambda name: "there is no compiler here")
    spec = MoESpec(4, 16, 24, backend=None)
    with caplog.at_level(logging.INFO, logger=backends.__name__):
        assert resolve_backend(spec, "cpu") == "xla"
        assert resolve_backend(spec, "cpu") == "xla"
    (record,) = caplog.records
    assert record.message.endswith(
        "on cpu: backend xla (not native: there is no compiler here)"
    )  # of no absent megakernel


@pytest.fixture
def hopper(monkeypatch, fresh):
    """One GPU of compute capability 9.0 with the compiled module, as far as the choice of a backend can see."""
    monkeypatch.setattr(experts_native, "_capability", lambda: "9.0")
    monkeypatch.setattr(native, "missing", lambda name: None)


SLOWER = {
    "fp32": ({"recipe": "fp32"}, "recipe is fp32; its GPU kernels are for bf16 and mxfp8"),
    "expert axis": (
        {"ranks": 2, "axis": "expert"},
        "ranks is 2; .*: use mesh.expert=1 where a GPU can hold all experts",
    ),
    "biases": ({"recipe": "mxfp8", "expert_bias": True}, "expert_bias is set"),
}


@pytest.mark.parametrize("case", SLOWER)
def test_a_setting_that_keeps_experts_from_the_kernels_of_this_gpu_warns_once(case, hopper):
    changes, reason = SLOWER[case]
    spec = MoESpec(4, 64, 96, recipe="bf16", backend=None).replace(**changes)
    with pytest.warns(SlowerBackendWarning, match=f"backend xla, slower here than native, because {reason}") as found:
        assert resolve_backend(spec, "cuda") == "xla"
        assert resolve_backend(spec.replace(d_model=128), "cuda") == "xla"  # another layer, for the same reason
    assert len(found) == 1 and found[0].filename == __file__  # it shows the user's line


def test_aligned_on_a_cpu_with_kernels_of_its_own_warns(monkeypatch, fresh):
    monkeypatch.setattr(native, "missing", lambda name: None)
    with pytest.warns(SlowerBackendWarning, match="mx_mode is aligned, a way to run on Hopper.*moe.backend=xla"):
        assert resolve_backend(MoESpec(4, 64, 96, recipe="mxfp8", mx_mode="aligned", backend=None), "cpu") == "xla"


@pytest.mark.parametrize(
    "why", ["the kernels run", "xla was asked for", "no kernels for this GPU", "no compiled module"]
)
def test_no_warning_where_no_setting_is_to_blame(why, hopper, monkeypatch):
    spec = MoESpec(4, 64, 96, recipe="bf16" if why == "the kernels run" else "fp32", backend=None)
    if why == "xla was asked for":
        spec = spec.replace(backend="xla")
    if why == "no kernels for this GPU":
        monkeypatch.setattr(experts_native, "_capability", lambda: "8.0")
    if why == "no compiled module":  # says so itself (moejax.native.missing)
        monkeypatch.setattr(native, "missing", lambda name: "it was not built")
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowerBackendWarning)
        assert resolve_backend(spec, "gpu") == ("native" if why == "the kernels run" else "xla")


@pytest.mark.parametrize("field", ["wgrad", "mx_mode", "save", "drop_policy"])
def test_a_choice_that_does_not_exist_is_refused(field):
    spec = MoESpec(num_experts=4, d_model=8, expert_width=16).replace(**{field: "fast"})
    with pytest.raises(ValueError, match=f"{field} is 'fast'; expected '"):
        resolve_backend(spec)
