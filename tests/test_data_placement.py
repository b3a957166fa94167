"""Which rows a process loads, and that the global batch made of them is the batch."""

import jax
import numpy as np
import pytest

from moejax.config import MeshConfig
from moejax.config_load import config_from_dict
from moejax.data.placement import local_rows, place_batch
from moejax.mesh import make_mesh


def config_for(rows, micro_batches=1, length=6):
    return config_from_dict(
        {"training": {"global_batch": rows, "micro_batches": micro_batches, "sequence_length": length}}
    )


def mesh_for(**sizes):
    return make_mesh(MeshConfig(data=1, **sizes), devices=jax.devices()[: int(np.prod(list(sizes.values())))])


def only_first(mesh, monkeypatch, count):
    """As if this process had the first `count` devices of the mesh only."""
    mine = set(list(mesh.devices.flat)[:count])
    real = jax.NamedSharding.addressable_devices_indices_map

    def addressable(self, shape):
        return {device: index for device, index in real(self, shape).items() if device in mine}

    monkeypatch.setattr(jax.NamedSharding, "addressable_devices_indices_map", addressable)


def test_one_process_loads_all_rows_in_order():
    assert local_rows(config_for(8), None).tolist() == list(range(8))
    assert local_rows(config_for(8, 2), mesh_for(expert=4)).tolist() == list(range(8))


def test_a_process_loads_its_share_of_every_micro_batch(monkeypatch):
    mesh = mesh_for(fsdp=2, expert=2)
    only_first(mesh, monkeypatch, 2)
    assert local_rows(config_for(16, 2), mesh).tolist() == [0, 1, 2, 3, 8, 9, 10, 11]


def test_processes_that_differ_along_context_load_the_same_rows(monkeypatch):
    mesh = mesh_for(expert=2, context=2)
    only_first(mesh, monkeypatch, 1)  # half of the sequence of the first half of the rows
    assert local_rows(config_for(4), mesh).tolist() == [0, 1]


@pytest.mark.parametrize("sizes", [{"expert": 4}, {"fsdp": 2, "context": 3}, {"expert": 2, "tensor": 2}])
def test_the_global_batch_is_the_batch(sizes):
    batch = {"token": np.arange(3 * 8 * 6, dtype=np.int32).reshape(3, 8, 6)}
    placed = place_batch(batch, mesh_for(**sizes), 8)["token"]
    assert np.array_equal(placed, batch["token"])
    assert placed.sharding.spec == jax.P(None, ("data", "fsdp", "expert"), "context")
    whole = place_batch({"token": batch["token"][0]}, mesh_for(**sizes))["token"]
    assert np.array_equal(whole, batch["token"][0])
    assert place_batch(batch, None) is batch


def test_rows_that_do_not_divide_name_the_settings():
    with pytest.raises(
        ValueError, match=r"training\.global_batch / training\.micro_batches.*6.*does not divide over 4"
    ):
        local_rows(config_for(6), mesh_for(expert=4))
    with pytest.raises(ValueError, match="4 rows of a batch of 8 given, but the devices of this process hold 8"):
        place_batch({"token": np.zeros((4, 6), np.int32)}, mesh_for(expert=4), 8)
