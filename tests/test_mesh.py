"""Meshes from configs, the table of sharding rules, and racks of 72 GPUs."""

import dataclasses
import logging
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType

from moejax.config import Config, MeshConfig, ModelConfig, MoEConfig, TrainingConfig
from moejax.mesh import AXES, RULES, logical_to_spec, make_mesh, named_sharding, resolve_axes
from moejax.mesh_plan import axes_table, check_axes, check_racks, choose_rack_plan, config_mesh, rack_plans
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
        assert experts % p.expert == 0 and p.expert * p.fsdp * p.data + p.spares == 72
        assert p.expert <= expert or p.spares > max_spares
    asked, reason = choose_rack_plan(experts, expert=4)
    assert (asked.expert, asked.fsdp, asked.spares) == (4, 18, 0) and "was asked for" in reason


def test_an_expert_axis_that_fits_no_rack_is_refused():
    with pytest.raises(ValueError, match=r"(?s)expert=48 does not divide 256 experts.*\n  64 +1 +1 +8 +4\n"):
        choose_rack_plan(256, expert=48)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_experts": 0}, "num_experts is 0: expected a positive number"),
        ({"num_experts": -1}, "num_experts is -1: expected a positive number"),
        ({"num_experts": 8, "max_spares": -1}, "max_spares is -1: expected 0 to 71"),
        ({"num_experts": 8, "d_model": 0}, "d_model is 0"),
        ({"num_experts": 8, "expert": 0}, "expert=0 does not divide 8 experts"),
    ],
)
def test_plans_for_nothing_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        choose_rack_plan(**given)


def test_expert_groups_stay_inside_a_rack_that_has_spares():
    """Two racks with 8 spares are 128 GPUs: groups of 32 lie inside them; with 12 spares, 120 GPUs, groups of 24 would not."""
    sizes = dict.fromkeys(AXES, 1)
    check_racks(sizes | {"data": 4, "expert": 32}, spares=8)
    check_racks(sizes | {"fsdp": 5, "expert": 24}, spares=0)  # nothing is known of racks
    with pytest.raises(
        ValueError, match="expert=24 = 24 neighbours do not divide the 60 GPUs that mesh.spares=12 leaves"
    ):
        check_racks(sizes | {"fsdp": 5, "expert": 24}, spares=12)
    with pytest.raises(ValueError, match="expert=16 x tensor=3 = 48 neighbours do not divide the 64 GPUs"):
        check_racks(sizes | {"data": 4, "expert": 16, "tensor": 3}, spares=8)


RACKS = """
import jax
from jax.sharding import AxisType
from moejax.mesh_plan import nvl72_mesh
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
    one, two, refused = done.stdout.replace("71 devices", "NVL72 x 71 devices").split("NVL72 x ")[1:]
    assert one.startswith("1: data=1 fsdp=1 expert=64, 8 spare GPUs in each rack: the largest divisor of 256")
    assert re.search(r"\n  64 +1 +1 +8 +4 +<- chosen\n", one)
    assert two.startswith("2: data=2 fsdp=2 expert=32, 8 spare GPUs in each rack")
    assert re.search(r"\n  8 +9 +1 +0 +20\n", two) and re.search(r"\n  40 +1 +1 +32 +4 +too many spares\n", two)
    assert refused == "71 devices are not whole racks of 72: use make_mesh for other counts\n"


def test_the_rest_of_a_rack_shards_the_width_only_where_it_divides():
    qwen, _ = choose_rack_plan(128, max_spares=0, d_model=2048, unit=32)
    assert (qwen.data, qwen.fsdp, qwen.expert, qwen.spares) == (9, 1, 8, 0)  # 9 does not divide 2048
    wide, reason = choose_rack_plan(128, max_spares=0, d_model=4608, unit=32)
    assert (wide.data, wide.fsdp, wide.expert, wide.spares) == (1, 9, 8, 0)
    assert "D = 4608" in reason
    blocks, _ = choose_rack_plan(128, max_spares=0, d_model=144, unit=32)
    assert blocks.fsdp == 1  # 144 / 9 = 16 is no whole MX block


def config_of(recipe="fp32", **mesh):
    return Config(
        recipe=recipe,
        model=ModelConfig(vocab_size=200, d_model=96, num_heads=6, num_kv_heads=2),
        moe=MoEConfig(num_experts=8),
        training=TrainingConfig(global_batch=24, micro_batches=2, sequence_length=64),
        mesh=MeshConfig(**mesh),
    )


def test_a_mesh_is_explained_by_what_it_splits(capsys):
    mesh = config_mesh(config_of(data=1, fsdp=2, expert=2, tensor=2))
    assert dict(mesh.shape) == {"data": 1, "fsdp": 2, "expert": 2, "context": 1, "tensor": 2}
    printed = capsys.readouterr().out
    assert printed.startswith("mesh data=1 fsdp=2 expert=2 context=1 tensor=2 over 8 devices\n")
    for line in (r"moe.num_experts \(E\) +expert=2 +8 +4", r"model.num_kv_heads \(C\) +tensor=2 +2 +1",
                 r"rows of a micro-batch \(B\) +data=1 x fsdp=2 x expert=2 +12 +3"):  # fmt: skip
        assert re.search(line, printed), line
    assert dict(config_mesh(config_of(), jax.devices()[:1]).shape)["data"] == 1  # one device: nothing to explain
    assert capsys.readouterr().out == ""
    assert len(axes_table(config_of(), mesh.shape).splitlines()) == 9


@pytest.mark.parametrize(
    ("recipe", "mesh", "message"),
    [
        ("fp32", {"data": 2, "tensor": 4},
         r"num_heads \(N\) = 6 does not divide over tensor=4: 1, 2, 3, 6 would fit$"),  # one of 2 key/value heads for 2 each
        ("fp32", {"data": 2, "tensor": 3}, r"num_kv_heads \(C\) = 2 does not divide over tensor=3: 1, 2 would fit; .*\(V\) = 200"),
        ("fp32", {"fsdp": 5, "data": 1}, r"d_model \(D\) = 96 does not divide over fsdp=5: 1, 2, 3, 4, 6, 8 would fit"),
        ("mxfp8", {"fsdp": 4, "data": 1}, r"d_model \(D\) = 96 does not divide into multiples of 32 over fsdp=4: 1, 3 would"),
        ("fp32", {"context": 3, "data": 1}, r"sequence_length \(L\) = 64 does not divide over context=3"),
        ("fp32", {"data": 2, "fsdp": 2, "expert": 2},
         r"rows of a micro-batch \(B\) = 12 does not divide over data=2 x fsdp=2 x expert=2"),
    ],
)  # fmt: skip
def test_axes_that_do_not_divide_what_they_split_are_refused(recipe, mesh, message):
    sizes = dict.fromkeys(AXES, 1) | mesh
    with pytest.raises(ValueError, match=message):
        check_axes(config_of(recipe), sizes)


def test_shared_key_value_heads_must_split_by_their_width():
    """One head of 6 over 4 devices: none of them could hold a quarter."""
    shape = ModelConfig(vocab_size=64, d_model=96, num_heads=4, num_kv_heads=1, head_dim=6)
    sizes = dict.fromkeys(AXES, 1) | {"tensor": 4}
    with pytest.raises(
        ValueError, match=r"num_kv_heads x head_dim \(C H\) = 6 does not divide over tensor=4: 1, 2, 3, 6"
    ):
        check_axes(dataclasses.replace(config_of(), model=shape), sizes)
    check_axes(dataclasses.replace(config_of(), model=dataclasses.replace(shape, head_dim=8)), sizes)


def test_tokens_must_divide_where_a_capacity_counts_them():
    config = config_of()
    training = dataclasses.replace(config.training, global_batch=6, sequence_length=33)
    config = dataclasses.replace(config, training=training)
    sizes = dict.fromkeys(AXES, 1) | {"data": 3, "tensor": 2}
    check_axes(config, sizes)
    limited = dataclasses.replace(config, moe=dataclasses.replace(config.moe, capacity_factor="1.25"))
    with pytest.raises(
        ValueError, match=r"\(B L\), with moe.capacity_factor, = 99 does not divide over data=3 x tensor=2: 1, 3, "
    ):
        check_axes(limited, sizes)
    even = dataclasses.replace(training, sequence_length=34)
    check_axes(dataclasses.replace(limited, training=even), sizes)


def test_spares_need_whole_racks():
    with pytest.raises(ValueError, match="8 devices are not whole racks of 72"):
        config_mesh(config_of(spares=8))


def test_spares_that_leave_a_process_without_a_device_are_refused():
    """A rack of 72 GPUs, four to a process: its last two processes would have no part in the programs of the others."""
    devices = [SimpleNamespace(process_index=number // 4) for number in range(72)]
    with pytest.raises(ValueError, match=r"no device for 2 processes of the job \(16, 17\): start it on the 64 GPUs"):
        config_mesh(config_of(spares=8), devices)
