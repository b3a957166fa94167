"""MXArrays shard without communication and come back from a checkpoint with their bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from moejax.ops.mxfp8 import dequantize, quantize

COLLECTIVES = ("all-gather", "all-to-all", "all-reduce", "collective-permute", "reduce-scatter")


def leaves_as_bytes(mx):
    return [np.asarray(leaf).view(np.uint8) for leaf in jax.tree.leaves(mx)]


@pytest.mark.parametrize("axis_type", ["Explicit", "Auto"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_sharded_weights_are_quantised_where_they_are(axis_type, axis):
    """Both orientations from shards along experts and along the columns (multiples of 32 a device): equal bits, no collective."""
    w = jax.random.normal(jax.random.key(0), (4, 2, 96, 128))
    kind = getattr(jax.sharding.AxisType, axis_type)
    mesh = jax.make_mesh((2, 4), ("expert", "fsdp"), axis_types=(kind, kind))
    spec = jax.P("expert", None, None, "fsdp")
    with jax.set_mesh(mesh):
        sharded = jax.device_put(w, jax.NamedSharding(mesh, spec))
        compiled = jax.jit(lambda w: quantize(w, axis)).lower(sharded).compile()
        mx = compiled(sharded)
    assert not any(name in compiled.as_text() for name in COLLECTIVES)
    for leaf in jax.tree.leaves(mx):
        assert leaf.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), leaf.ndim), "one spec serves both leaves"
    for got, expected in zip(leaves_as_bytes(mx), leaves_as_bytes(quantize(w, axis))):
        np.testing.assert_array_equal(got, expected)


def test_checkpoint_round_trip_keeps_every_bit(tmp_path):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 40, 64)), jnp.float32).at[0, 3, 5].set(jnp.nan)
    saved = {"rows": quantize(x, 2), "columns": quantize(x, 1, transposed=True)}
    ocp.save(tmp_path / "mx", saved)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), saved)
    restored = ocp.load(tmp_path / "mx", abstract)
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    for name in saved:
        assert restored[name].elements.dtype == jnp.float8_e4m3fn
        for got, expected in zip(leaves_as_bytes(restored[name]), leaves_as_bytes(saved[name])):
            np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(np.asarray(dequantize(restored[name])), np.asarray(dequantize(saved[name])))
