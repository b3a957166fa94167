"""The training step over meshes of fake devices: the numbers of one device, and reductions once per step."""

import contextlib
import dataclasses
import functools
import math
import re

import jax
import numpy as np
import pytest
from flax import nnx

from models.decoder import Decoder
from moejax.checkpoint import named_leaves
from moejax.config import Config, MeshConfig
from moejax.mesh import make_mesh
from moejax.training.gradients import splits_by_hand
from moejax.training.state import abstract_state, create_state, make_init, make_skeleton
from moejax.training.step import make_step, split_batch
from tests.hlo_checks import collectives, over, reductions_in_loops
from tests.test_moe_transport import ragged_reference
from tests.tiny import tiny_batch, tiny_config

E, D, F, LAYERS = 8, 32, 64, 2
RATE = 2.0**14  # SGD: parameters before minus after, over RATE, are the gradient to 1e-7
QUICK = {"xla_backend_optimization_level": 0}


def config_of(optimizer="sgd", micro_batches=2, recipe="fp32", **training) -> Config:
    settings = {"learning_rate": RATE, "schedule": "constant", "warmup_steps": 0, "clip_norm": None}
    if optimizer == "adamw":
        # eps as large as a typical gradient: Adam turns rounding of the smallest ones into whole steps otherwise
        settings = {"learning_rate": 1e-3, "schedule": "constant", "warmup_steps": 0, "clip_norm": 0.05, "eps": 1e-4}
    config = tiny_config(
        model={"d_model": D, "vocab_size": 64},
        moe={"num_experts": E, "expert_width": F, "backend": "xla"},
        optimizer={"name": optimizer, **settings},
        training={"micro_batches": micro_batches, "global_batch": 16, "remat": "minimal"} | training,
    )
    return dataclasses.replace(config, recipe=recipe)


def mesh_of(**axes):
    axes = {"data": 1} | axes
    devices = jax.devices()[: math.prod(axes.values())]
    return make_mesh(MeshConfig(**axes), E, devices, axis_type=jax.sharding.AxisType.Auto)


def lowered(config, mesh):
    state = abstract_state(config, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = jax.jit(make_step(make_skeleton(config), config), out_shardings=(shardings, None))
    return step.lower(state, batch_of(config, 0))


def batch_of(config, index):
    return split_batch(tiny_batch(config, index), config.training.micro_batches)


@functools.cache
def made(config, mesh):
    """The first state and the step, not donating: tests of the same config and mesh share one program."""
    state = create_state(config, mesh)
    if mesh is None:
        return state, jax.jit(make_step(make_skeleton(config), config), compiler_options=QUICK)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh))
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    step = make_step(make_skeleton(config), config)
    return state, jax.jit(step, out_shardings=(shardings, None), compiler_options=QUICK)


def run(config, mesh=None, steps=1):
    """Parameters before and after, by name (FP64), and the metrics of the last step."""
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        state, step = made(config, mesh)
        before = state.params
        for index in range(steps):
            state, metrics = step(state, batch_of(config, index))
        as_fp64 = lambda tree: {k: np.asarray(v, np.float64) for k, v in named_leaves(jax.device_get(tree)).items()}  # noqa: E731
        return as_fp64(before), as_fp64(state.params), jax.device_get(metrics)


@functools.cache
def on_one_device(optimizer, micro_batches, steps):
    return run(config_of(optimizer, micro_batches), steps=steps)


def relative(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


SLOW = pytest.mark.slow  # each of these compiles for half a minute on a slow machine
MESHES = [
    {"data": 2, "fsdp": 2, "expert": 2},
    pytest.param({"expert": 8}, marks=SLOW),
    pytest.param({"expert": 2}, marks=SLOW),
    pytest.param({"expert": 4}, marks=SLOW),
    pytest.param({"data": 8}, marks=SLOW),
    pytest.param({"fsdp": 4}, marks=SLOW),
    pytest.param({"data": 4, "expert": 2}, marks=SLOW),
    pytest.param({"fsdp": 2, "context": 2, "tensor": 2}, marks=SLOW),  # one key/value head, which two devices share
    pytest.param({"data": 2, "expert": 2, "context": 2}, marks=SLOW),
]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_every_gradient_leaf_is_that_of_one_device(axes):
    """Under SGD, which hides no factor: a gradient counted twice, or divided by the devices, is off by that factor."""
    before, after, metrics = run(config_of(), mesh_of(**axes))
    want_before, want_after, want = on_one_device("sgd", 2, 1)
    for name in want_before:
        gradient, expected = before[name] - after[name], want_before[name] - want_after[name]
        assert np.linalg.norm(expected) > 0, name
        assert relative(gradient, expected) < 1e-6, name
        np.testing.assert_array_equal(before[name], want_before[name])  # the same initial values on every mesh
    squares = sum(np.sum((want_before[name] - want_after[name]) ** 2) for name in want_before) / RATE**2
    assert metrics["grad_norm"] == pytest.approx(np.sqrt(squares), rel=1e-6)
    for name in ("loss", "balance_loss", "grad_norm", "grad_squares", "entropy_N"):
        np.testing.assert_allclose(metrics[name], want[name], rtol=2e-6, err_msg=name)
    for name in ("tokens", "scored", "count_NxE", "dropped_N"):
        np.testing.assert_array_equal(metrics[name], want[name], name)


@SLOW
def test_every_transport_gives_the_step_of_one_device_and_the_bits_of_the_others(monkeypatch):
    """XLA has no ragged all-to-all on the CPU, so what the step asks of it runs on a reference of it."""
    monkeypatch.setattr("moejax.ops.transport.refuses", lambda *_: None)
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_reference)
    want_before, want_after, _ = on_one_device("sgd", 2, 1)
    results = {}
    for transport in ("all_gather", "all_to_all", "ragged_all_to_all"):
        config = config_of()
        moe = dataclasses.replace(config.moe, transport=transport, minibatch_rows=128)
        config = dataclasses.replace(config, moe=moe)
        before, after, metrics = run(config, mesh_of(expert=4))
        results[transport] = after
        for name in want_before:
            assert relative(before[name] - after[name], want_before[name] - want_after[name]) < 1e-6, (transport, name)
        assert metrics["moved_bytes_N"].min() > 0
    for transport, after in results.items():
        for name, leaf in after.items():
            assert leaf.tobytes() == results["all_gather"][name].tobytes(), (transport, name)


def test_unrolled_layers_accumulate_the_same_gradients():
    before, after, _ = run(config_of(scan_layers=False, remat="layer"))
    want_before, want_after, _ = on_one_device("sgd", 2, 1)
    for name in want_before:
        assert relative(before[name] - after[name], want_before[name] - want_after[name]) < 1e-6, name


@SLOW
def test_adamw_with_clipping_gives_the_parameters_of_one_device():
    axes = {"data": 2, "fsdp": 2, "expert": 2}
    _, after, metrics = run(config_of("adamw", 1), mesh_of(**axes), steps=3)
    _, want_after, want = on_one_device("adamw", 1, 3)
    assert metrics["grad_norm"] > 0.05  # the clipping works
    np.testing.assert_allclose(metrics["grad_norm"], want["grad_norm"], rtol=1e-5)
    for name, leaf in want_after.items():
        assert relative(after[name], leaf) < 1e-6, name


@SLOW
def test_devices_without_a_real_token_take_part_with_zeros(monkeypatch):
    """The last rows of every micro-batch, all of two of four devices, are padding."""
    whole = batch_of(config_of(), 0)
    padded = {name: x.copy() for name, x in whole.items()}
    for name, empty in {"token": 0, "target": -1, "segment": 0, "position": 0}.items():
        padded[name][:, 4:] = empty
    monkeypatch.setitem(globals(), "batch_of", lambda *_: padded)
    before, after, metrics = run(config_of(), mesh_of(data=2, expert=2))
    want_before, want_after, want = run(config_of())
    assert metrics["tokens"] == want["tokens"] == (padded["segment"] > 0).sum() < (whole["segment"] > 0).sum()
    np.testing.assert_allclose(metrics["grad_norm"], want["grad_norm"], rtol=1e-6)
    for name in want_before:
        assert relative(before[name] - after[name], want_before[name] - want_after[name]) < 1e-6, name


@SLOW
@pytest.mark.parametrize("scope", ["global", "micro_batch"])
def test_balance_losses_of_wider_scopes_count_the_tokens_of_all_devices(scope):
    config = config_of()
    balance = dataclasses.replace(config.moe.balance, aux_scope=scope, aux_coef=0.5)
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, balance=balance))
    before, after, metrics = run(config, mesh_of(data=2, expert=2))
    want_before, want_after, want = run(config)
    assert metrics["balance_loss"] == pytest.approx(float(want["balance_loss"]), rel=1e-6)
    name = "moe_layers.moe.w_router"
    assert relative(before[name] - after[name], want_before[name] - want_after[name]) < 1e-6


class Plain(nnx.Module):
    """A model that knows nothing of stacks: the step differentiates it as it is."""

    def __init__(self, config, *, rngs):
        self.inner = Decoder(config, rngs=rngs)
        self.vocab_size = self.inner.vocab_size

    def __call__(self, token_BxL, segment_BxL=None, position_BxL=None, copies=None):
        return self.inner(token_BxL, segment_BxL, position_BxL, copies)

    def head_weight(self):
        return self.inner.head_weight()

    def expert_copies(self):
        return self.inner.expert_copies()


@SLOW
@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 2, "expert": 2}, {"expert": 2, "context": 2}], ids=str)
def test_a_model_without_stacks_gets_the_same_gradients(axes):
    """It does not say that it splits sequences itself, so on a mesh that does the compiler has the step."""
    config = config_of()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, module=f"{__name__}:Plain"))
    mesh = mesh_of(**axes)
    assert splits_by_hand(mesh.abstract_mesh, config) == ("context" not in axes)
    before, after, _ = run(config, mesh)
    want_before, want_after, _ = on_one_device("sgd", 2, 1)
    for name in want_before:
        gradient = before[f"inner.{name}"] - after[f"inner.{name}"]
        # Its weights start as the other model's do: the same keys are drawn in the same order.
        assert relative(gradient, want_before[name] - want_after[name]) < 1e-6, name


def own_heads(**changes) -> Config:
    """Four query and two key/value heads with norms of their own, and an embedding that is the head."""
    config = config_of()
    model = {"num_heads": 4, "num_kv_heads": 2, "qk_norm": "head", "tie_embeddings": True, "attention_bias": True}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **model | changes))


@SLOW
@pytest.mark.parametrize(
    ("axes", "qk_norm"),
    [({"expert": 2, "context": 2, "tensor": 2}, "head"), ({"data": 2, "tensor": 2}, "full")],
    ids=["by hand", "by the compiler"],
)
def test_heads_norms_and_tied_embeddings_split_over_tensor(axes, qk_norm):
    config = own_heads(qk_norm=qk_norm)
    mesh = mesh_of(**axes)
    assert splits_by_hand(mesh.abstract_mesh, config) == (qk_norm == "head")
    before, after, metrics = run(config, mesh)
    want_before, want_after, want = run(config)
    for name in want_before:
        gradient, expected = before[name] - after[name], want_before[name] - want_after[name]
        assert relative(gradient, expected) < 2e-6, name
    for name in ("loss", "balance_loss", "grad_norm"):
        np.testing.assert_allclose(metrics[name], want[name], rtol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    "axes",
    [{"fsdp": 2, "context": 2, "tensor": 2}, pytest.param({"data": 2, "expert": 2, "tensor": 2}, marks=SLOW)],
    ids=str,
)
def test_steps_that_split_sequences_and_heads_reduce_gradients_once(axes):
    """Inside the loops only what a piece must know of the others: keys' and values' gradients, counts of rows, heads' outputs."""
    with jax.set_mesh(mesh := mesh_of(**axes)):
        text = lowered(config_of(), mesh).compile(QUICK).as_text()
    found = collectives(text, mesh)
    inside = reductions_in_loops(found)
    assert [one for one in inside if one.axes & {"data", "fsdp", "expert"}] == []
    of_sequences = [(dtype, sizes) for one in inside if "context" in one.axes for dtype, sizes in one.shapes]
    assert all(dtype == "s32" or len(sizes) == 4 for dtype, sizes in of_sequences), of_sequences
    assert bool(of_sequences) == ("context" in axes)
    gathers = [one for one in over(found, "all-gather", "data", "fsdp", "expert") if one.loops]
    assert all(dtype == "s32" for one in gathers for dtype, _ in one.shapes), gathers  # counts of rows


def loops(text: str) -> str:
    """The bodies of all loops of a compiled program, with what they call."""
    bodies = dict(re.findall(r"^(?:ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    wanted, seen = list(re.findall(r"body=%?([\w.\-]+)", text)), {}
    while wanted:
        name = wanted.pop()
        if name not in seen and name in bodies:
            seen[name] = bodies[name]
            wanted += re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)", bodies[name])
    return "\n".join(seen.values())


def test_gradients_are_reduced_and_copies_gathered_once_per_step():
    with jax.set_mesh(mesh := mesh_of(data=2, fsdp=2, expert=2)):
        program = lowered(config_of(recipe="bf16"), mesh)
        text = program.compile(QUICK).as_text()
    inside = loops(text)
    assert "while(" in text and len(inside) > 1000
    found = re.findall(r"= [^\n=]* (all-reduce|reduce-scatter)(?:-start)?\(", inside)
    assert found == [], found
    assert re.search(r" (all-reduce|reduce-scatter)(-start)?\(", text)  # they are there, after the loops
    # The copies are gathered as they are, BF16, once each; the masters, which nobody reads, not at all.
    asked = re.findall(r"stablehlo.all_gather.*-> tensor<([\dx]+xbf16)>", program.as_text())
    gathers = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather(?:-start)?\(", text)
    inside_gathers = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather(?:-start)?\(", inside)
    for stack in (f"{LAYERS},{E // 2},2,{F},{D}", f"{LAYERS},{E // 2},{D},{F}"):
        assert asked.count(stack.replace(",", "x") + "xbf16") == 1, asked
        assert gathers.count(stack) == 1, gathers
        assert stack not in inside_gathers


def test_no_device_ever_holds_a_whole_expert_stack_when_the_state_is_made():
    config = config_of()
    with jax.set_mesh(mesh := mesh_of(fsdp=4, expert=2)):
        abstract = abstract_state(config, mesh)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        text = jax.jit(make_init(config), out_shardings=shardings).lower().compile(QUICK).as_text()
    largest = max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"[a-z]\d+\[([\d,]+)\]", text))
    whole = LAYERS * E * 2 * F * D
    assert whole // 8 <= largest < whole // 2, (largest, whole)


def test_a_step_is_compiled_once():
    config = config_of()
    with jax.set_mesh(mesh := mesh_of(**MESHES[0])):
        state, step = made(config, mesh)
        for index in range(3):
            state, _ = step(state, batch_of(config, index))
    assert step._cache_size() == 1 and int(state.step) == 3
