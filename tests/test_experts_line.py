"""The line that a run prints about its expert layers."""

import jax
import pytest

from moejax import native
from moejax.config import MeshConfig
from moejax.config_load import load
from moejax.mesh import make_mesh
from moejax.ops import backends, experts_native
from moejax.training.experts_line import experts_line

NO_FP32 = "(not native: recipe is fp32; its GPU kernels are for bf16 and mxfp8: use one of these)"
ONE_GPU = (
    "(not native: ranks is 4; its GPU kernels do the whole layer on one GPU: use mesh.expert=1 where a GPU can hold all "
    "experts)"
)
FAST = "(moe.mx_mode=aligned would use the FP8 tensor cores)"
NOT_HERE = "(not native: mx_mode is aligned, a way to run on Hopper; here MX products are exact: use mx_mode exact)"


@pytest.fixture
def on(monkeypatch):
    """Makes the choice of a backend see this platform, with its compiled module."""

    def pretend(platform):
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        monkeypatch.setattr(experts_native, "_capability", lambda: "9.0")

    monkeypatch.setattr(native, "missing", lambda name: None)
    backends.resolve_backend.cache_clear()
    yield pretend
    backends.resolve_backend.cache_clear()


@pytest.mark.filterwarnings("ignore::moejax.ops.backends.SlowerBackendWarning")
@pytest.mark.parametrize(
    ("platform", "overrides", "line"),
    [
        ("cpu", [], "backend native, recipe fp32"),
        ("cpu", ["moe.backend=xla"], "backend xla, recipe fp32 (as asked)"),
        ("cpu", ["recipe=mxfp8"], "backend native, recipe mxfp8, mode exact"),
        ("cpu", ["recipe=mxfp8", "moe.mx_mode=aligned"], f"backend xla, recipe mxfp8, mode aligned {NOT_HERE}"),
        ("gpu", [], f"backend xla, recipe fp32 {NO_FP32}"),
        ("gpu", ["recipe=bf16"], "backend native, recipe bf16"),
        ("gpu", ["recipe=mxfp8"], f"backend native, recipe mxfp8, mode exact {FAST}"),
        (
            "gpu",
            ["recipe=mxfp8", "moe.mx_mode=aligned", "moe.wgrad=bf16", "moe.bf16_layers=[0,-1]", "model.num_layers=5"],
            "backend native, recipe mxfp8, mode aligned, weight gradients in bf16; MoE layers 0, 4: backend native, recipe bf16",
        ),
        ("gpu", ["recipe=bf16", "mesh.expert=4"], f"backend xla, recipe bf16, all_to_all over mesh.expert=4 {ONE_GPU}"),
        ("cpu", ["model.dense_layers=4", "model.dense_width=8"], "none, every layer is dense"),
    ],
)
def test_backend_recipe_mode_and_why_nothing_faster(platform, overrides, line, on):
    config = load(None, overrides)
    mesh = make_mesh(MeshConfig(expert=config.mesh.expert), config.moe.num_experts)
    on(platform)
    assert experts_line(config, mesh) == f"experts: {line}"
