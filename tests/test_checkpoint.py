"""Checkpoints: what is restored is what was saved, and everything else is an error that says what is wrong."""

import os
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moejax.checkpoint import CheckpointError, Checkpoints, NonFiniteError, checksums, first_non_finite, named_leaves

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def small_state(seed=0):
    key = jax.random.key(seed)
    params = {"layers": {"w_up": jax.random.normal(key, (3, 5)), "scale": jnp.ones(5)}, "w_head": jnp.full((7, 3), 0.1)}
    return {
        "step": jnp.int32(seed),
        "params": params,
        "opt_state": optax.adam(1e-3).init(params),
        "rng": jax.random.key_data(key),
    }


def assert_same_bits(left, right):
    left, right = named_leaves(left), named_leaves(right)
    assert list(left) == list(right)
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert np.asarray(left[name]).tobytes() == np.asarray(right[name]).tobytes(), name


def run_python(code, devices=1, **environment):
    """Runs code in a process of its own, with that many CPU devices; returns what it did."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": ROOT, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def saved(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    checkpoints.save(3, small_state(3), {"next_index": 3})
    checkpoints.wait()
    yield checkpoints
    checkpoints.close()


def test_restores_every_bit_and_the_position_in_the_data(tmp_path):
    state, position = small_state(1), {"next_index": 2**40 + 1}
    with_donation = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    expected = jax.tree.map(np.array, state)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state, position)
    with_donation(state)  # the background write must not see this
    checkpoints.close()

    reader = Checkpoints(tmp_path)
    restored, dataset = reader.restore(jax.eval_shape(lambda: small_state(0)))
    reader.close()
    assert_same_bits(expected, restored)
    assert dataset == position


def test_keeps_only_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (0, 1, 5, 7):
        checkpoints.save(step, small_state(step), {"next_index": step})
    checkpoints.wait()
    assert checkpoints.steps() == [5, 7] and checkpoints.latest() == 7
    restored, dataset = checkpoints.restore(jax.eval_shape(lambda: small_state(0)), step=5)
    assert int(restored["step"]) == 5 and dataset == {"next_index": 5}
    with pytest.raises(CheckpointError, match=r"no checkpoint 1 .*found \[5, 7\]"):
        checkpoints.restore(restored, step=1)
    checkpoints.close()


def _rename(state):
    state["params"]["w_out"] = state["params"].pop("w_head")


def _reshape(state):
    state["params"]["layers"]["w_up"] = jax.ShapeDtypeStruct((5, 3), jnp.float32)


def _cast(state):
    state["params"]["layers"]["scale"] = jax.ShapeDtypeStruct((5,), jnp.bfloat16)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_rename, ["missing: params.w_out", "unexpected: params.w_head"]),
        (_reshape, ["params.layers.w_up is (3, 5) but must be (5, 3)"]),
        (_cast, ["params.layers.scale is float32 but must be bfloat16"]),
    ],
)
def test_mismatch_names_the_leaf(saved, change, said):
    expected = jax.eval_shape(lambda: small_state(0))
    change(expected)
    with pytest.raises(CheckpointError) as error:
        saved.restore(expected)
    assert all(part in str(error.value) for part in said), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_leaf_is_named_and_nothing_is_written(saved, value):
    state = small_state(4)
    moments = state["opt_state"][0].nu["layers"]
    moments["w_up"] = moments["w_up"].at[2, 4].set(value)
    with pytest.raises(NonFiniteError, match=r"step 4: opt_state\.0\.nu\.layers\.w_up"):
        saved.save(4, state, {"next_index": 4})
    saved.wait()
    assert saved.steps() == [3]


def test_first_non_finite_leaf_in_tree_order_is_named():
    tree = {"a": jnp.ones(2), "b": jnp.array([1.0, jnp.nan], jnp.bfloat16), "c": jnp.array(jnp.inf), "n": jnp.int32(1)}
    assert first_non_finite(tree) == "b"
    assert first_non_finite({"n": jnp.int32(1), "a": jnp.ones(2)}) is None


def test_half_written_checkpoints_are_not_listed_and_are_removed(saved):
    (saved.folder / "9").mkdir()  # a folder with a number for a name, and nothing Orbax finished
    (saved.folder / "9" / "state").mkdir()
    (saved.folder / "8.orbax-checkpoint-tmp").mkdir()
    assert saved.steps() == [3]
    reopened = Checkpoints(saved.folder)
    assert reopened.latest() == 3
    assert sorted(entry.name for entry in saved.folder.iterdir()) == ["3"]
    reopened.save(9, small_state(9), {"next_index": 9})
    reopened.close()
    assert reopened.steps() == [3, 9]


def test_damaged_checkpoint_is_an_error_of_one_line(saved):
    (saved.folder / "3" / "state" / "_METADATA").unlink()
    with pytest.raises(CheckpointError) as error:
        saved.restore(jax.eval_shape(lambda: small_state(0)))
    assert "\n" not in str(error.value) and "checkpoint 3" in str(error.value)


# Orbax's threads go on reading for a moment after the first error, and then find their event loop closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_checkpoint_without_its_arrays_is_called_damaged_and_says_what_to_delete(saved):
    shutil.rmtree(saved.folder / "3" / "state" / "d")
    with pytest.raises(CheckpointError, match="is damaged: .*Delete ") as caught:
        saved.restore(jax.eval_shape(lambda: small_state(0)))
    assert f"Delete {saved.folder / '3'} " in str(caught.value) and "\n" not in str(caught.value)


def test_failed_write_is_reported_and_leaves_the_last_checkpoint(tmp_path):
    """A file-size limit stands in for a full disk: both fail inside the write call."""
    done = run_python(
        f"""
        import logging, resource, jax
        from moejax.checkpoint import Checkpoints, CheckpointError
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        checkpoints = Checkpoints({str(tmp_path)!r})
        checkpoints.save(0, {{"w": jax.numpy.ones(3)}}, {{"next_index": 0}})
        checkpoints.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            checkpoints.save(1, {{"w": jax.random.normal(jax.random.key(0), (300, 300))}}, {{"next_index": 1}})
            checkpoints.wait()
        except CheckpointError as error:
            print("said:", error)
        print("steps:", Checkpoints({str(tmp_path)!r}).steps())
        """
    )
    assert "said: could not write" in done.stdout and "File too large" in done.stdout, done.stdout + done.stderr
    assert "steps: [0]" in done.stdout


def test_folder_that_cannot_be_created_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/checkpoints"):
        Checkpoints(tmp_path / "file" / "checkpoints")


def test_a_checksum_depends_on_every_bit_and_every_place_and_not_on_sharding():
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    values = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    spread = jax.device_put(values, jax.NamedSharding(mesh, jax.P("x", "y")))
    (expected,) = checksums({"w": jnp.asarray(values)}).values()
    assert checksums({"w": spread})["w"] == expected
    for bit in range(32):
        flipped = values.copy()
        flipped.view(np.uint32)[3, 4] ^= np.uint32(1 << bit)
        assert checksums({"w": jnp.asarray(flipped)})["w"] != expected, bit
    swapped = values.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert checksums({"w": jnp.asarray(swapped)})["w"] != expected
    small = {
        "bf16": jnp.ones(3, jnp.bfloat16),
        "flag": jnp.array([True, False]),
        "n": jnp.int32(7),
        "none": jnp.zeros(0),
    }
    assert len(set(checksums(small).values())) == 4


def test_a_flipped_bit_on_disk_is_an_error_that_names_the_leaf(saved):
    """Files of a whole, valid checkpoint, in which one bit of one number differs from what was saved under these checksums."""
    abstract = jax.eval_shape(lambda: small_state(0))
    expected, _ = saved.restore(abstract)
    saved.close()
    _damage(saved.folder / "3" / "state", abstract)
    with pytest.raises(
        CheckpointError, match=r"is damaged: the values of params\.w_head are not.* Delete .*/3 "
    ) as caught:
        Checkpoints(saved.folder).restore(abstract)
    assert "\n" not in str(caught.value) and "scale" not in str(caught.value)


def _damage(folder, abstract):
    """Writes the state again with one bit changed, and puts its arrays beside the checksums of the first."""
    other = folder.parent.parent / "other"
    state = small_state(3)
    word = np.array(state["params"]["w_head"])
    word.view(np.uint32)[5, 1] ^= np.uint32(1)
    state["params"]["w_head"] = jnp.asarray(word)
    writer = Checkpoints(other)
    writer.save(3, state, {"next_index": 3})
    writer.close()
    shutil.rmtree(folder)
    shutil.copytree(other / "3" / "state", folder)
    shutil.rmtree(other)
