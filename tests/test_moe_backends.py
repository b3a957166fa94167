"""Which backend runs an expert layer, and what it says when it does not."""

import logging

import pytest

from moejax.config import ActivationConfig
from moejax.ops import backends
from moejax.ops.backends import resolve_backend
from moejax.ops.spec import MoESpec


@pytest.mark.parametrize("backend", ["dense", "xla", None])
@pytest.mark.parametrize(
    ("recipe", "d_model", "width", "message"),
    [
        ("bf16", 12, 16, "d_model is 12; recipe bf16 needs a multiple of 8 in every backend: use 16"),
        ("bf16", 16, 20, "expert_width is 20; recipe bf16 needs a multiple of 8 in every backend: use 24"),
        ("mxfp8", 64, 40, "expert_width is 40; recipe mxfp8 needs a multiple of 32 in every backend: use 64"),
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


def test_the_choice_is_logged_once_with_the_reason(caplog, monkeypatch):
    monkeypatch.setitem(backends._MODULES, "native", "moejax.ops.not_installed")
    monkeypatch.setitem(backends._MODULES, "megakernel", "moejax.ops.not_installed")
    resolve_backend.cache_clear()
    spec = MoESpec(4, 16, 24, backend=None)
    with caplog.at_level(logging.INFO, logger=backends.__name__):
        assert resolve_backend(spec, "cpu") == "xla"
        assert resolve_backend(spec, "cpu") == "xla"
    resolve_backend.cache_clear()
    (record,) = caplog.records
    assert "backend xla" in record.message and "not native: it is not part of this installation" in record.message


@pytest.mark.parametrize("field", ["wgrad", "mx_mode", "save", "drop_policy"])
def test_a_choice_that_does_not_exist_is_refused(field):
    spec = MoESpec(num_experts=4, d_model=8, expert_width=16).replace(**{field: "fast"})
    with pytest.raises(ValueError, match=f"{field} is 'fast'; expected '"):
        resolve_backend(spec)
