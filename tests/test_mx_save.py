"""`save: gate_up_mx`, the residual in MXFP8: only the Hopper kernels have it, and everything else refuses it by name."""

import pytest

from moejax.config_load import ConfigError, load
from moejax.ops.backends import resolve_backend
from moejax.ops.spec import MoESpec
from tests.native_support import make_problem, needs_native


@pytest.mark.parametrize("backend", ["xla", "dense", pytest.param("native", marks=needs_native)])
def test_backends_without_it_refuse(backend):
    spec = make_problem([4, 4], 64, 64, recipe="mxfp8", save="gate_up_mx").spec
    with pytest.raises(ValueError, match="save is gate_up_mx, a residual of the Hopper kernels: use gate_up"):
        resolve_backend(spec.replace(backend=backend), "cpu")


@needs_native
def test_one_rule_that_all_backends_break_is_said_once():
    spec = make_problem([4, 4], 64, 64, recipe="mxfp8", save="gate_up_mx").spec.replace(backend=None)
    with pytest.raises(ValueError, match="^backends native and xla cannot run on cpu: save is [^;]*: use gate_up$"):
        resolve_backend(spec, "cpu")


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_another_recipe_is_named_before_any_backend(recipe, platform):
    spec = MoESpec(4, 64, 64, recipe=recipe, save="gate_up_mx", backend=None)
    with pytest.raises(
        ValueError, match=f"^save is gate_up_mx but recipe is {recipe}.*: use save gate_up, or recipe mxfp8$"
    ):
        resolve_backend(spec, platform)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["recipe=bf16"], "moe.save is gate_up_mx but recipe is bf16: use moe.save=gate_up, or recipe=mxfp8"),
        (
            ["recipe=mxfp8", "moe.bf16_layers=[1]"],
            "moe.save is gate_up_mx, a residual in MXFP8, but moe.bf16_layers keeps",
        ),
    ],
)
def test_a_config_without_mxfp8_layers_alone_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(None, ["moe.save=gate_up_mx", *overrides])


def test_remat_of_whole_layers_does_not_keep_it():
    with pytest.raises(ConfigError, match="moe.save is gate_up_mx, but training.remat=layer does not keep it"):
        load(None, ["recipe=mxfp8", "moe.save=gate_up_mx", "training.remat=layer"])
