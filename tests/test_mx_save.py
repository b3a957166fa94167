"""`save: gate_up_mx`, the residual in MXFP8: only the Hopper kernels have it, and everything else refuses it by name."""

import pytest

from moejax.config_load import ConfigError, load
from moejax.ops.backends import resolve_backend
from tests.native_support import make_problem, needs_native


@pytest.mark.parametrize("backend", ["xla", "dense", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_backends_without_it_refuse(backend, recipe):
    spec = make_problem([4, 4], 64, 64, recipe=recipe, save="gate_up_mx").spec
    with pytest.raises(ValueError, match="save is gate_up_mx, a residual of the Hopper kernels: use gate_up"):
        resolve_backend(spec.replace(backend=backend), "cpu")


def test_remat_of_whole_layers_does_not_keep_it():
    with pytest.raises(ConfigError, match="moe.save is gate_up_mx, but training.remat=layer does not keep it"):
        load(None, ["recipe=mxfp8", "moe.save=gate_up_mx", "training.remat=layer"])
