"""What the compiled training step does with expert weights: nothing of their size is copied, cut or cast inside its loops.

The whole step as a run compiles it: layers scanned and rematerialised, gradients accumulated over micro-batches.
"""

import dataclasses
import re

import jax
import pytest

from moejax.config import MeshConfig
from moejax.mesh import make_mesh
from moejax.training.state import abstract_state, make_skeleton
from moejax.training.step import make_step, split_batch
from tests.native_support import needs_native
from tests.test_moe_compiled import weight_sized_work
from tests.tiny import tiny_batch, tiny_config

E, D, F, LAYERS = 6, 32, 96, 5
MATRICES = (E * 2 * F * D, E * D * F)


def config_of(recipe, backend, **moe):
    config = tiny_config(
        model={"d_model": D, "num_layers": LAYERS},
        moe={"num_experts": E, "expert_width": F, "backend": backend, **moe},
        training={"micro_batches": 3, "remat": "minimal"},
    )
    return dataclasses.replace(config, recipe=recipe)


def compiled_text(config):
    """Optimised HLO of the step on one device, as `train.py` compiles it."""
    mesh = make_mesh(MeshConfig(data=1), E, jax.devices()[:1], axis_type=jax.sharding.AxisType.Auto)
    with jax.set_mesh(mesh):
        state = abstract_state(config, mesh)
        batch = split_batch(tiny_batch(config, 0), config.training.micro_batches)
        step = jax.jit(make_step(make_skeleton(config), config), donate_argnums=0)
        return step.lower(state, batch).compile({"xla_backend_optimization_level": 0}).as_text()


def sizes(*segments):
    """Elements of one layer, of each segment and of the whole stack, of both matrices."""
    return {layers * matrix for layers in (1, LAYERS, *segments) for matrix in MATRICES}


@needs_native
@pytest.mark.parametrize("backend", ["xla", "native"])
def test_loops_of_the_step_neither_copy_nor_cast_expert_weights(backend):
    text = compiled_text(config_of("bf16", backend))
    assert weight_sized_work(text, sizes()) == []
    entry = text[text.index("\nENTRY ") :]
    for shape in (f"{LAYERS},{E},2,{F},{D}", f"{LAYERS},{E},{D},{F}"):  # cast once per step, before the loops
        casts = re.findall(rf"= bf16\[{shape}\]\S* (?:convert|fusion|call)\(", entry)
        assert len(casts) == 1, (shape, casts)
        copies = re.findall(rf"= f32\[{shape}\]\S* copy\(.*", entry)
        assert copies == [], copies  # masters and moments are donated: the new ones are written over them


@needs_native
@pytest.mark.parametrize(
    ("recipe", "backend", "moe", "segments"),
    [
        ("mxfp8", "native", {"bf16_layers": (-1, -2)}, (LAYERS - 2, 2)),
        pytest.param("fp32", "xla", {"hash": 2}, (2, LAYERS - 2), marks=pytest.mark.slow),
    ],
    ids=["bf16_layers", "hash_layers"],
)
def test_segments_of_unlike_layers_are_not_cut_from_the_stack_in_the_loops(recipe, backend, moe, segments):
    hash_layers = moe.pop("hash", 0)
    config = config_of(recipe, backend, **moe)
    router = dataclasses.replace(config.moe.router, hash_layers=hash_layers)
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, router=router))
    assert weight_sized_work(compiled_text(config), sizes(*segments)) == []
