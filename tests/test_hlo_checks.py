"""The reader of compiled programs, on a program whose collectives are known, and on texts of other jaxlib versions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.hlo_checks import check_expert_parallel_step, collectives, over, reductions_in_loops

AXES = ("data", "fsdp", "expert")


def program(x):
    def body(carry, _):
        carry = carry + jax.lax.psum(carry, ("data", "expert"))
        swapped = jax.lax.all_to_all(carry.reshape(2, -1, x.shape[1]), "expert", 0, 0)
        inner = jax.lax.fori_loop(0, jnp.int32(carry[0, 0]), lambda _, c: jax.lax.all_to_all(c, "fsdp", 0, 0), swapped)
        return carry + inner.reshape(carry.shape), None

    carry, _ = jax.lax.scan(body, x, length=3)
    whole = jax.lax.all_gather(carry, "fsdp", axis=0, tiled=True)
    return jax.lax.psum_scatter(whole, "fsdp", scatter_dimension=0, tiled=True)


@pytest.fixture(scope="module")
def compiled():
    mesh = jax.make_mesh((2, 2, 2), AXES)
    x = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P(AXES)))
    run = jax.shard_map(program, mesh=mesh, in_specs=jax.P(AXES), out_specs=jax.P(AXES), check_vma=False)
    return jax.jit(run).lower(x).compile().as_text(), mesh


def test_collectives_are_found_with_their_axes_and_loops(compiled):
    found = {(one.kind, one.axes): one for one in collectives(*compiled)}
    assert set(found) == {
        ("all-reduce", frozenset({"data", "expert"})),
        ("all-to-all", frozenset({"expert"})),
        ("all-to-all", frozenset({"fsdp"})),
        ("all-gather", frozenset({"fsdp"})),
        ("reduce-scatter", frozenset({"fsdp"})),
    }
    assert found["all-reduce", frozenset({"data", "expert"})].loops == (3,)
    assert found["all-to-all", frozenset({"expert"})].loops == (3,)
    assert found["all-to-all", frozenset({"fsdp"})].loops == (3, None)  # how often depends on the data
    gather = found["all-gather", frozenset({"fsdp"})]
    assert gather.loops == () and gather.shapes == (("f32", (16, 8)),) and gather.bytes == 4 * 128


def test_what_a_step_must_not_do_is_seen(compiled):
    found = collectives(*compiled)
    assert [one.axes for one in reductions_in_loops(found)] == [{"data", "expert"}]
    assert reductions_in_loops(found, at_least=65) == []
    assert len(over(found, "all-to-all", "expert")) == 1
    with pytest.raises(AssertionError):
        check_expert_parallel_step(*compiled, width=8, copies=0)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", {"expert"}),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", {"data"}),
        ("replica_groups=[4,2]<=[8]", {"expert"}),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", {"fsdp"}),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", {"data", "expert"}),
        ("replica_groups=[1,8]<=[8]", set(AXES)),
        ("replica_groups={}", set(AXES)),
        ("replica_groups=mesh['data'=2,'fsdp'=2,'expert'=2] {'data','fsdp'}", {"data", "fsdp"}),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", {"expert"}),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", {"data"}),
    ],
)
def test_groups_of_devices_are_mesh_axes(groups, axes):
    text = f"ENTRY %main (p: f32[4]) -> f32[4] {{\n  ROOT %r = f32[4]{{0}} all-reduce(%p), {groups}, to_apply=%add\n}}"
    (one,) = collectives(text, jax.sharding.AbstractMesh((2, 2, 2), AXES))
    assert one.axes == axes and one.loops == ()


def test_a_permutation_spans_the_axis_it_moves_along():
    text = (
        "ENTRY %main (p: f32[4]) -> f32[4] {\n  %r = f32[4]{0} collective-permute(%p), channel_id=1, "
        "source_target_pairs={{0,2},{2,0},{1,3},{3,1},{4,6},{6,4},{5,7},{7,5}}\n}"
    )
    (one,) = collectives(text, jax.sharding.AbstractMesh((2, 2, 2), AXES))
    assert one.axes == {"fsdp"} and np.prod(one.shapes[0][1]) == 4


def test_groups_that_are_no_axes_are_refused():
    text = "ENTRY %main (p: f32[]) -> f32[] {\n  %r = f32[] all-reduce(%p), replica_groups={{0,3},{1,2},{4,7},{5,6}}\n}"
    with pytest.raises(ValueError, match="no set of axes"):
        collectives(text, jax.sharding.AbstractMesh((2, 2, 2), AXES))
