"""Executes `docs/routing.md`: every row of its table of model families, and the presets against the rows of their family."""

import dataclasses
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from moejax.config import RouterConfig
from moejax.config_load import load
from moejax.ops.routing import route
from moejax.ops.spec import MoESpec

ROOT = pathlib.Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "routing.md").read_text().replace("−", "-")
LOGITS = {"A": [2, 1, 0, -1], "B": [3, -3, 1.5, 1.4, -1, -1.2, 0, -2]}
ROWS = {
    cells[0]: cells[1:]
    for line in TEXT.splitlines()
    if line.startswith("| ") and len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 6
    if cells[1].startswith("`{")
}


def numbers(cell):
    return [float(x) for x in cell.split(",")]


def router_of(cell):
    return RouterConfig(**{"top_k": 2, **yaml.safe_load(cell.strip("`"))})


def test_the_table_of_families_is_there():
    assert len(ROWS) == 12
    for name, logits in LOGITS.items():
        assert f"`{name}` = [{', '.join(map(str, logits))}]" in TEXT


@pytest.mark.parametrize("family", ROWS)
def test_family_routes_as_its_row_says(family):
    fields, which, bias, experts, weights = ROWS[family]
    router = router_of(fields)
    assert router.select_bias == (bias != "–")
    logits = jnp.asarray([[LOGITS[which]]], jnp.float32)
    table, expected = {}, [int(e) for e in numbers(experts)]
    if router.hash_layers:
        assert f"experts {expected[0]}, {expected[1]})" in family
        table = {"token_BxL": jnp.zeros((1, 1), jnp.int32), "hash_table_VxK": jnp.asarray([expected], jnp.int32)}
    bias_E = jnp.asarray(numbers(bias), jnp.float32) if router.select_bias else None
    weight, expert, _ = route(logits, bias_E, MoESpec(logits.shape[-1], 8, 8, router=router), **table)
    assert expert[0, 0].tolist() == expected
    np.testing.assert_allclose(weight[0, 0], numbers(weights), atol=5e-5)


PRESETS = {
    "mixtral-8x7b": "Mixtral, Qwen3-MoE, Qwen3.5",
    "qwen3-30b-a3b": "Mixtral, Qwen3-MoE, Qwen3.5",
    "qwen3-235b-a22b": "Mixtral, Qwen3-MoE, Qwen3.5",
    "olmoe-1b-7b": "OLMoE",
    "glm-4.5": "GLM-4.5, GLM-5.2",
    "glm-4.5-air": "GLM-4.5-Air",
}


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_has_the_router_of_its_family(preset):
    router = load(overrides=[f"preset={preset}"]).moe.router
    assert dataclasses.replace(router, top_k=2) == router_of(ROWS[PRESETS[preset]][0])


def test_group_filter_note_names_what_a_zero_fill_would_choose():
    scores = 1 / (1 + np.exp(-np.array(LOGITS["B"], np.float64))) - 1
    assert re.search(r"Filling dropped groups with 0 instead of -inf would choose 4 and 5", TEXT)
    filled = np.where(np.isin(np.arange(8) // 2, [0, 1]), scores, 0.0)
    assert np.argsort(-filled, kind="stable")[:2].tolist() == [4, 5]
