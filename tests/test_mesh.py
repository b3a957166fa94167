"""Meshes from configs, the table of sharding rules, and racks of 72 GPUs."""

import logging
import os
import subprocess
import sys

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType

from moejax.config import MeshConfig
from moejax.mesh import (
    AXES,
    RULES,
    choose_rack_plan,
    logical_to_spec,
    make_mesh,
    named_sharding,
    rack_plans,
    resolve_axes,
)
from moejax.nn.param import LOGICAL_AXES


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, (8, 1, 1, 1, 1)),
        ({"expert": 4}, (2, 1, 4, 1, 1)),
        ({"data": 1, "fsdp": 2, "expert": 2, "tensor": -1}, (1, 2, 2, 1, 2)),
        ({"data": 2, "context": 4}, (2, 1, 1, 4, 1)),
    ],
)
def test_mesh_has_all_axes_and_minus_one_takes_what_is_left(sizes, expected, caplog):
    caplog.set_level(logging.INFO, "moejax.mesh")
    mesh = make_mesh(MeshConfig(**sizes), num_experts=8)
    assert tuple(mesh.shape.items()) == tuple(zip(AXES, expected, strict=True))
    assert set(mesh.axis_types) == {AxisType.Explicit}
    assert mesh.devices.ravel().tolist() == jax.devices()  # neighbours on the last axes
    assert "over 8 devices" in caplog.text
    assert set(make_mesh(MeshConfig(**sizes), axis_type=AxisType.Auto).axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(
    ("sizes", "experts", "message"),
    [
        (
            {"expert": 3},
            9,
            r"8 devices do not divide by 3: mesh is data=-1 .*expert=3.*data=8 expert=1 would fit 8 devices",
        ),
        ({"data": 4, "expert": 4}, 8, r"8 devices are not 16: .*data=2 expert=4, data=1 expert=8 would fit 8 devices"),
        ({"data": 2, "expert": 2}, 8, r"8 devices are not 4: "),
        (
            {"expert": 4},
            6,
            r"expert axis has 4 of 8 devices but num_experts is 6.*data=8 expert=1, data=4 expert=2 would",
        ),
        ({"expert": -1}, 8, r"data and expert are both -1: only one can take what is left of 8"),
        ({"data": 1, "fsdp": 3, "expert": -1}, 8, r"fsdp = 3 must divide 8"),
        ({"fsdp": 0}, 8, r"mesh axis fsdp is 0: expected a positive number, or -1"),
        ({"tensor": -2}, 8, r"mesh axis tensor is -2"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_what_would(sizes, experts, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(MeshConfig(**sizes), experts)


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(
    st.integers(1, 600), st.lists(st.sampled_from([-1, 1, 2, 3, 4, 8]), min_size=5, max_size=5), st.integers(1, 400)
)
def test_resolved_axes_multiply_to_the_devices_and_divide_the_experts_or_raise(devices, sizes, experts):
    config = MeshConfig(**dict(zip(AXES, sizes, strict=True)))
    try:
        resolved = resolve_axes(config, devices, experts)
    except ValueError as error:
        assert str(devices) in str(error)
        fixed = int(np.prod([s for s in sizes if s != -1]))
        left = devices // fixed
        expert = resolved_expert(sizes, left)
        assert sizes.count(-1) > 1 or devices % fixed or (-1 not in sizes and fixed != devices) or experts % expert
    else:
        assert np.prod(list(resolved.values())) == devices and experts % resolved["expert"] == 0
        assert all(got == asked or asked == -1 for got, asked in zip(resolved.values(), sizes, strict=True))


def resolved_expert(sizes, left):
    return left if sizes[2] == -1 else sizes[2]


def test_the_rules_cover_every_declared_axis_and_cannot_be_changed():
    assert set(LOGICAL_AXES) <= set(RULES)
    with pytest.raises(TypeError):
        RULES["embed"] = "tensor"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("layer", "expert", None, "mlp", "embed"), jax.P(None, "expert", None, None, "fsdp")),
        (("expert", "embed", "mlp"), jax.P("expert", "fsdp", None)),
        (("heads", "embed"), jax.P("tensor", "fsdp")),
        (("vocab", "embed"), jax.P("tensor", "fsdp")),
        (("batch", "sequence", None), jax.P(("data", "fsdp", "expert"), "context", None)),
        (("token", None), jax.P(("data", "fsdp", "expert", "context", "tensor"), None)),
    ],
)
def test_logical_axes_become_mesh_axes(names, expected):
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, expert=2, tensor=2), num_experts=4)
    shape = (8,) * len(names)
    assert logical_to_spec(names, "w", shape, mesh) == expected == logical_to_spec(names, "w")
    x = jax.device_put(np.zeros(shape, np.float32), named_sharding(mesh, names, "w", shape))
    assert x.sharding.spec == expected


def test_sharding_requests_that_do_not_fit_are_refused_by_name():
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, expert=2), num_experts=4)
    small = jax.make_mesh((2, 4), ("data", "model"))
    for message, call in [
        (r"w_x: logical axis 'embd' has no sharding rule; known: layer, embed", lambda: logical_to_spec(("embd",), "w_x")),
        (r"w_x: mesh axis 'tensor' is on two of its axes, 'vocab' and 'heads'", lambda: logical_to_spec(("vocab", "heads"), "w_x")),
        (r"'expert' is on two of its axes, 'batch' and 'expert'", lambda: logical_to_spec(("batch", "expert"), "y")),
        (r"the rules put 'embed' on mesh axis 'fsdp', but the mesh has \('data', 'model'\)",
         lambda: logical_to_spec(("embed",), "w_x", (8,), small)),
        (r"w_x: axis 'embed' has size 6, which does not divide over 4 devices of mesh axes fsdp",
         lambda: logical_to_spec(("embed",), "w_x", (6,), mesh)),
        (r"w_x has shape \(6, 2\) but 1 logical axes", lambda: logical_to_spec(("embed",), "w_x", (6, 2), mesh)),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("experts", "max_spares", "expert", "fsdp", "spares"),
    [
        (256, 8, 64, 1, 8),
        (384, 8, 64, 1, 8),
        (160, 8, 32, 2, 8),
        (256, 0, 8, 9, 0),
        (384, 0, 24, 3, 0),
        (8, 8, 8, 9, 0),
        (72, 8, 72, 1, 0),
    ],
)
def test_a_rack_gets_the_largest_expert_axis_within_its_spares(experts, max_spares, expert, fsdp, spares):
    plan, reason = choose_rack_plan(experts, max_spares=max_spares)
    assert (plan.expert, plan.fsdp, plan.spares) == (expert, fsdp, spares)
    assert f"largest divisor of {experts} experts that leaves at most {max_spares} GPUs spare" in reason
    for p in rack_plans(experts):
        assert experts % p.expert == 0 and p.expert * p.fsdp + p.spares == 72
        assert p.expert <= expert or p.spares > max_spares
    asked, reason = choose_rack_plan(experts, expert=4)
    assert (asked.expert, asked.fsdp, asked.spares) == (4, 18, 0) and "was asked for" in reason


def test_an_expert_axis_that_fits_no_rack_is_refused():
    with pytest.raises(ValueError, match=r"expert=48 does not divide 256 experts.*expert=64 fsdp=1 \(8 spare\)"):
        choose_rack_plan(256, expert=48)


RACKS = """
import jax
from jax.sharding import AxisType
from moejax.mesh import nvl72_mesh
one = nvl72_mesh(256, jax.devices()[:72])
assert dict(one.shape) == {"data": 1, "fsdp": 1, "expert": 64, "context": 1, "tensor": 1}, one.shape
two = nvl72_mesh(160, axis_type=AxisType.Auto)
assert dict(two.shape) == {"data": 2, "fsdp": 2, "expert": 32, "context": 1, "tensor": 1}, two.shape
ids = [d.id for d in two.devices.ravel()]
assert ids == [*range(64), *range(72, 136)], "spares are the last GPUs of each rack"
try:
    nvl72_mesh(256, jax.devices()[:71])
except ValueError as error:
    print(error)
"""


def test_racks_of_72_devices_keep_their_spares_and_say_why():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=144", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", RACKS], env={**os.environ, **flags}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(
        "NVL72 x 1: data=1 fsdp=1 expert=64, 8 spare GPUs in each rack: the largest divisor of 256"
    )
    assert (
        lines[1].startswith("NVL72 x 2: data=2 fsdp=2 expert=32, 8 spare GPUs in each rack")
        and "expert=8 fsdp=9" in lines[1]
    )
    assert lines[2] == "71 devices are not whole racks of 72: use make_mesh for other counts"
