"""Checks for `tests/cases/checkpoint_data.yaml`."""

import dataclasses
import functools
import io
import pathlib
import signal
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from moejax.checkpoint import CheckpointError, Checkpoints, named_leaves
from moejax.config import BalanceConfig, MeshConfig, OptimizerConfig
from moejax.config_load import config_from_dict
from moejax.data import Dataset, train_iterator
from moejax.data.store import TokenStore
from moejax.data.tokenizer import ByteTokenizer
from moejax.mesh import make_mesh
from moejax.ops.balance import update_select_bias
from moejax.training.loop import TrainingError, fit
from moejax.training.metrics import MetricLog, Progress, read_records
from moejax.training.optimizer import make_optimizer
from moejax.training.state import TrainState, abstract_state, apply_update, create_state, make_skeleton
from moejax.training.step import make_step
from tests.tiny import TinyBatches, tiny_config


def data_order_survives_resume(case):
    given = case["given"]
    # Documents of exactly one sample each, so that a sample's second token says which document it is.
    length, samples = 4, given["samples"]
    tokens = np.stack([np.full(length, document, np.uint16) for document in range(samples)])
    tokens[:, 0] = ByteTokenizer.bos
    store = TokenStore(tokens.reshape(-1), np.arange(samples + 1) * length, num_bytes=samples * (length - 1))
    dataset = Dataset(store, store, ByteTokenizer(), ByteTokenizer.vocab_size, folder=None)
    config = config_from_dict({"training": {"global_batch": given["global_batch"], "sequence_length": length}})

    def ids(readers, restart_after, readers_after):
        """Ids of every global batch, the readers' rows side by side; all readers are replaced after one step."""
        seen, state = [], None
        for count, steps in ((readers, range(restart_after)), (readers_after, range(restart_after, given["steps"]))):
            shares = np.split(np.arange(given["global_batch"]), count)
            iterators = [train_iterator(dataset, config, rows) for rows in shares]
            for iterator in iterators:
                if state is not None:
                    iterator.set_state(state)
            for _ in steps:
                rows = np.concatenate([next(iterator)["token"][:, 1] for iterator in iterators])
                seen.extend(rows.tolist())
            states = [iterator.get_state() for iterator in iterators]
            assert all(each == states[0] for each in states), "the position is one number, the same for every reader"
            state = states[0]
        return seen

    undisturbed = ids(1, given["steps"], 1)
    assert len(undisturbed) == given["global_batch"] * given["steps"]
    epochs = [tuple(undisturbed[i : i + samples]) for i in range(0, len(undisturbed), samples)]
    assert all(sorted(epoch) == list(range(samples)) for epoch in epochs)
    assert len(set(epochs)) == len(epochs)
    for before, after in given["readers_before_and_after"]:
        for restart in given["restart_after_each_of"]:
            assert ids(before, restart, after) == undisturbed, (before, after, restart)


def holds_every_expert(case):
    given, expected = case["given"], case["expect"]
    values = np.array(given["every_element_of_expert"], np.float32)
    shape = (given["experts"], 3, 5)
    w_ExFxD = np.broadcast_to(values[:, None, None], shape)

    def sharding(ranks):
        return jax.NamedSharding(jax.make_mesh((ranks,), ("expert",), devices=jax.devices()[:ranks]), jax.P("expert"))

    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(folder)
        state = {"w": jax.device_put(w_ExFxD, sharding(given["save_with_expert_ranks"]))}
        assert state["w"].addressable_shards[0].data.shape[0] == shape[0] // given["save_with_expert_ranks"]
        checkpoints.save(1, state, {"next_index": 1})
        checkpoints.wait()
        for ranks in given["restore_with_expert_ranks"]:
            abstract = {"w": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding(ranks))}
            restored = checkpoints.restore(abstract)[0]["w"]
            assert restored.shape[0] == expected["global_shape_starts_with"] == expected["experts_in_checkpoint"]
            assert restored.sharding == sharding(ranks)
            np.testing.assert_array_equal(restored, w_ExFxD)
            np.testing.assert_array_equal(restored[:, 0, 0], np.float32(expected["restored_expert_values"]))
        checkpoints.close()


def resume_is_bitwise(case):
    given = case["given"]
    for ranks in given["expert_ranks"]:
        # One rank: no mesh. More: the masters and moments of the experts lie on several devices.
        whole = _train(given["steps"], ranks)
        parts = _train(given["steps"], ranks, stop_after=given["restart_after"])
        assert whole["losses"] == parts["losses"] and len(whole["losses"]) == given["steps"]
        assert whole["leaves"].keys() == parts["leaves"].keys()
        for name, bits in whole["leaves"].items():
            assert bits == parts["leaves"][name], name

    # The master weight: steps far below one unit of BF16, through a checkpoint half way.
    master, optimizer = given["a_master_weight"], make_optimizer(OptimizerConfig(name="sgd"))
    params = {"w_a": jnp.float32(master["start"])}
    state = TrainState(jnp.int32(0), params, optimizer.init(params), {}, jnp.zeros(2, jnp.uint32))
    with tempfile.TemporaryDirectory() as folder:
        for step in range(master["steps"]):
            if step == master["steps"] // 2:
                checkpoints = Checkpoints(folder)
                checkpoints.save(step, state, {"next_index": step})
                checkpoints.wait()
                state, _ = checkpoints.restore(state)
                checkpoints.close()
            rate = jnp.float32(master["update_per_step"])
            params, opt_state = apply_update(state, {"w_a": jnp.float32(1.0)}, rate, optimizer)
            state = dataclasses.replace(state, params=params, opt_state=opt_state)
    assert np.float32(state.params["w_a"]).view(np.uint32) == case["expect"]["master_bits_after_100"]


def router_bias_and_step(case):
    given, expected, limit = case["given"], case["expect"], case["tolerance"]["abs"]
    state = TrainState(
        jnp.int32(given["step"]),
        {},
        (),
        {"moe": {"select_bias": jnp.float32(given["bias_E"])}},
        jnp.zeros(2, jnp.uint32),
    )
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(folder)
        checkpoints.save(given["step"], state, {"next_index": 3})
        checkpoints.wait()
        restored, _ = checkpoints.restore(jax.eval_shape(lambda: state))
        checkpoints.close()
    bias_E = restored.router_bias["moe"]["select_bias"]
    assert bias_E.dtype == expected["dtype"] and int(restored.step) + 1 == expected["step"]
    np.testing.assert_allclose(bias_E, expected["restored_bias_E"], rtol=0, atol=limit)
    after_E = update_select_bias(bias_E, jnp.int32(given["next_count_E"]), BalanceConfig(bias_rate=given["rate"]))
    np.testing.assert_allclose(after_E, expected["bias_after_next_step"], rtol=0, atol=limit)
    # And the state of a real model has them: one leaf of FP32 biases, and the step.
    leaves = named_leaves(abstract_state(tiny_config()))
    assert leaves["router_bias.moe_layers.moe.select_bias"].dtype == jnp.float32 and "step" in leaves


def mismatched_leaf_raises(case):
    saved, expected = (_nest(case["given"][key], jnp.ones((2, 3))) for key in ("saved_leaf", "expected_leaf"))
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(folder)
        checkpoints.save(1, saved, {"next_index": 1})
        checkpoints.wait()
        message = _error(CheckpointError, checkpoints.restore, expected)
        assert f"unexpected: {case['given']['saved_leaf']}" in message
        assert f"missing: {case['given']['expected_leaf']}" in message
        message = _error(CheckpointError, checkpoints.restore, _nest(case["given"]["saved_leaf"], jnp.ones((3, 2))))
        assert f"{case['given']['saved_leaf']} is (2, 3) but must be (3, 2)" in message
        checkpoints.close()


def refuses_non_finite(case):
    given = case["given"]
    bad_step = 2

    def bad_gradient(state, batch, step):
        if int(state.step) + 1 == bad_step:  # a target outside the vocabulary: loss and gradients are NaN
            batch = batch | {"target": batch["target"].at[0, 0, 0].set(10**6)}
        return step(state, batch)

    def bad_parameter(state, batch, step):
        state, metrics = step(state, batch)
        if int(state.step) == bad_step:
            state.params["head"]["w_OxI"] = state.params["head"]["w_OxI"].at[0, 0].set(jnp.nan)
        return state, metrics

    injected = {
        "a gradient at step 2": (bad_gradient, "the gradient of params.embedding.table"),
        "one parameter at step 2": (bad_parameter, "params.head.w_OxI"),
    }
    assert set(injected) == set(given["nan_injected_into"])
    for inject, named in injected.values():
        with tempfile.TemporaryDirectory() as folder:
            run = functools.partial(_fit, folder, given["steps"], every=given["checkpoint_every"], inject=inject)
            message = _error((TrainingError, CheckpointError), run)
            assert f"step {bad_step}" in message and named in message, message
            assert Checkpoints(pathlib.Path(folder) / "checkpoints").steps() == case["expect"]["listed_checkpoints"]


def _train(steps, ranks, stop_after=None):
    """Losses of all steps and the bits of the final state, from one run or from two with a restart between."""
    with tempfile.TemporaryDirectory() as folder:
        if stop_after:
            _fit(folder, steps, ranks, stop_after=stop_after)
        _fit(folder, steps, ranks)
        state, _ = Checkpoints(pathlib.Path(folder) / "checkpoints").restore(abstract_state(_config(steps)))
        losses = [(r["step"], r["loss"], r["grad_norm"]) for r in read_records(pathlib.Path(folder) / "metrics.jsonl")]
    return {"losses": losses, "leaves": {name: np.asarray(x).tobytes() for name, x in named_leaves(state).items()}}


def _config(steps, every=0):
    return tiny_config(
        training={"steps": steps, "micro_batches": 1}, checkpoint={"every_steps": every}, moe={"num_experts": 4}
    )


@functools.cache
def _compiled(ranks):
    """The mesh, the first state and the step (not donating, so that the state serves every run).

    Only the length of the schedule depends on the number of steps: one program serves all cases. Without LLVM's
    optimisations it compiles twice as fast.
    """
    config = _config(10)
    mesh = make_mesh(MeshConfig(data=1, expert=ranks), 4, jax.devices()[:ranks], AxisType.Auto)
    with jax.set_mesh(mesh):
        state = create_state(config, mesh)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        options = {"xla_backend_optimization_level": 0}
        step = jax.jit(
            make_step(make_skeleton(config), config), out_shardings=(shardings, None), compiler_options=options
        )
    return mesh, state, step


def _fit(folder, steps, ranks=1, every=0, stop_after=None, inject=None):
    """Trains from the newest checkpoint of `folder`, or from the beginning; a SIGTERM arrives during step `stop_after`."""
    folder, config = pathlib.Path(folder), _config(steps, every)
    mesh, state, step = _compiled(ranks)
    with jax.set_mesh(mesh):
        checkpoints, batches = Checkpoints(folder / "checkpoints"), TinyBatches(config)
        first = checkpoints.latest() or 0
        if first:
            state, position = checkpoints.restore(abstract_state(config, mesh))
            batches.set_state(position)
        experts = state.params["moe_layers"]["moe"]["experts"]["w_down"]
        assert experts.addressable_shards[0].data.shape[1] == 4 // ranks

        def step_fn(state, batch):
            if int(state.step) + 1 == stop_after:
                signal.raise_signal(signal.SIGTERM)
            return inject(state, batch, step) if inject else step(state, batch)

        log = MetricLog(folder, finished=first, tensorboard=False)
        try:
            progress = Progress(steps, first, 100, io.StringIO())
            done = fit(state, step_fn, batches, checkpoints, log, progress, config, mesh)
        finally:
            log.close()
            checkpoints.close()
    assert (done is None) == bool(stop_after) and log.path.exists()


def _nest(name, leaf):
    for part in reversed(name.split(".")):
        leaf = {part: leaf}
    return leaf


def _error(kinds, function, *arguments):
    """The message of the error that must come."""
    try:
        function(*arguments)
    except kinds as error:
        return str(error)
    raise AssertionError(f"no error from {function}")


CHECKS = {
    "data-order-survives-resume": data_order_survives_resume,
    "checkpoint-holds-every-expert": holds_every_expert,
    "checkpoint-resume-is-bitwise": resume_is_bitwise,
    "checkpoint-router-bias-and-step": router_bias_and_step,
    "checkpoint-mismatched-leaf-raises": mismatched_leaf_raises,
    "checkpoint-refuses-non-finite": refuses_non_finite,
}
