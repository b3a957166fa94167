"""The estimate beside what can be counted by hand and what the compiler says of the same step."""

import dataclasses
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from moejax import flops
from moejax.config_load import config_from_dict
from moejax.estimate.__main__ import main, report
from moejax.estimate.compiling import compile_step
from moejax.estimate.hardware import GPUS
from moejax.estimate.liveness import Heap, peak_bytes
from moejax.estimate.memory import Mesh, abstract_on, skeleton_weights, state_bytes, step_bytes
from moejax.estimate.work import links, roofline, work
from moejax.mesh import AXES
from tests.test_train_cli import ROOT, environment

D, F, E, V, LAYERS = 128, 192, 8, 512, 3


def config_for(mesh, recipe="fp32", model=None, moe=None, **training):
    return config_from_dict(
        {
            "recipe": recipe,
            "model": {
                "vocab_size": V, "d_model": D, "num_layers": LAYERS, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32,
                **(model or {}),
            },
            "moe": {
                "num_experts": E, "expert_width": F, "router": {"top_k": 2, "select_bias": True}, "backend": "xla", **(moe or {}),
            },
            "training": {"global_batch": 16, "sequence_length": 128, "loss_chunk": 512, **training},
            "mesh": {"data": 1, **mesh},
        }
    )  # fmt: skip


def abstract(config):
    sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
    return Mesh(tuple(sizes.values()), AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))


def on_devices(config, monkeypatch):
    """The mesh of a config is over as many of this process's devices as it has."""
    some = jax.devices()[: abstract(config).size]
    monkeypatch.setattr(jax, "devices", lambda *_: some)


CASES = {
    "one device": ({}, {}),
    "expert": ({"expert": 2}, {}),
    "fsdp and expert": ({"fsdp": 2, "expert": 2}, {"micro_batches": 2}),
    "micro-batches": ({}, {"micro_batches": 4}),
    "remat layer": ({}, {"remat": "layer"}),
    "remat minimal on fsdp": ({"fsdp": 4}, {"remat": "minimal"}),
    "data": ({"data": 2}, {}),
    "context and tensor": ({"context": 2, "tensor": 2}, {"micro_batches": 2}),
    "long sequences": ({}, {"global_batch": 4, "sequence_length": 512}),
    # Activations are all that counts, and travel by the exchange.
    "all experts": (
        {"expert": 8},
        {
            "model": {"d_model": 32, "num_layers": 1},
            "moe": {"num_experts": 16, "expert_width": 32, "router": {"top_k": 16}, "transport": "all_to_all"},
            "global_batch": 8,
            "sequence_length": 256,
            "loss_chunk": 64,
        },
    ),
    "five of twelve, native": (
        {"expert": 6},
        {
            "model": {"d_model": 32, "num_heads": 6, "qk_norm": "head"},
            "moe": {
                "num_experts": 12,
                "expert_width": 32,
                "router": {"top_k": 5},
                "transport": "all_to_all",
                "backend": "native",
            },
            "global_batch": 6,
            "sequence_length": 256,
        },
    ),
    "shared experts": (
        {"tensor": 2, "context": 4},
        {
            "model": {"d_model": 32, "num_layers": 1, "vocab_size": 1200},
            "moe": {"expert_width": 32, "shared_experts": 3},
            "global_batch": 4,
            "sequence_length": 32,
        },
    ),
}
QUICK = ("one device", "all experts")


@pytest.mark.parametrize(
    "case", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_state_is_exact_and_temporaries_are_within_a_quarter_of_the_compiler(case, monkeypatch):
    mesh, training = CASES[case]
    config = config_for(mesh, **training)
    on_devices(config, monkeypatch)
    state, step = state_bytes(config, abstract(config)), step_bytes(config, abstract(config))
    compiled = compile_step(config)
    assert compiled.argument_bytes == state.total + step.batch
    assert step.temporaries == pytest.approx(compiled.temporary_bytes, rel=0.25), (step, compiled)


def peak(function, *shapes):
    inputs = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    return peak_bytes(jax.make_jaxpr(function)(*inputs), [4 * math.prod(shape) for shape in shapes])


def test_the_peak_of_a_chain_of_products_by_hand():
    """What is elementwise needs nothing; a product has its operands and its result."""
    N, bytes_ = 64, 4 * 64 * 64
    assert peak(lambda x: jnp.sin(x) @ x, (N, N)) == 2 * bytes_
    assert peak(lambda x: jnp.sin(jnp.sin(x @ x) @ x) @ x, (N, N)) == 2 * bytes_


def test_what_products_read_in_two_orders_is_there_twice():
    N, bytes_ = 64, 4 * 64 * 64
    assert peak(lambda x: (y := jnp.sin(x)) * (y @ x), (N, N)) == 2 * bytes_
    assert peak(lambda x: (y := jnp.sin(x)) * (y.T @ x), (N, N)) == 3 * bytes_
    assert peak(lambda x: jnp.sin(x).T @ x, (N, N)) == 2 * bytes_  # made as it is read


def test_what_needs_nothing_that_comes_later_is_there_early():
    """`late` is written last, but nothing keeps it from being computed at once, and it stays until it is read."""
    N, bytes_ = 64, 4 * 64 * 64

    def program(x, w):
        y = x
        for _ in range(4):
            y = y @ w
        late = x @ x
        return late @ y

    assert peak(program, (N, N), (N, N)) == 3 * bytes_


def test_packing_leaves_holes_and_uses_those_that_fit():
    def packed(*buffers):
        heap, numbers = Heap(), {}
        for heap.now in range(5):
            for number, (size, since, until) in enumerate(buffers):
                if until == heap.now:
                    heap.hold(numbers[number])
                if since == heap.now:
                    numbers[number] = heap.add(size)
        return heap.packed()

    assert packed((4, 0, 2), (3, 0, 1), (2, 1, 3), (4, 2, 3)) == 7  # 2 in the place of 3, 4 in that of 4
    assert (
        packed((2, 1, 2), (2, 3, 4), (1, 0, 3), (1, 2, 4)) == 4
    )  # never more than 3 at once: the small ones lie badly


def test_state_bytes_by_hand():
    config = config_for({"fsdp": 2, "expert": 4})
    state = state_bytes(config, abstract(config))
    experts = LAYERS * E * 3 * D * F
    router = LAYERS * E * D
    other = 2 * V * D + LAYERS * (2 * D + D * (4 + 2 + 2 + 4) * 32) + D
    assert state.expert_masters == 4 * experts // 8
    assert state.other_masters == 4 * (router // 8 + other // 2)  # the router has an expert axis and D
    assert state.optimizer == 2 * (state.expert_masters + state.other_masters) + 4  # two moments, and a count
    assert state.router_bias == 4 * LAYERS * E // 4
    assert state.counters == 4 + 8


def test_weights_and_copies_on_a_device_are_whole_over_fsdp():
    config = config_for({"fsdp": 4, "expert": 2}, recipe="bf16")
    mesh = abstract(config)
    weights, step = skeleton_weights(abstract_on(config, mesh), mesh), step_bytes(config, mesh)
    experts = 4 * LAYERS * E * 3 * D * F // 2
    assert weights["expert"] == experts
    assert step.copies == experts // 2  # BF16
    assert step.gathered == weights["other"]  # expert masters are not gathered where copies are
    assert step.gradients == weights["expert"] + weights["other"]


def test_row_buffers_by_hand():
    """16 sequences of 128 tokens over 8 devices: a window is 1.25 of 256 tokens x 2 slots, padding for one expert, and a rest."""
    config = config_for({"expert": 8}, recipe="bf16")
    window = -(-(int(1.25 * 256 * 2) + 127) // 128) * 128 + 128
    assert step_bytes(config, abstract(config)).rows == 3 * window * D * 2
    one = config_for({}, recipe="fp32")
    assert step_bytes(one, abstract(one)).rows == 3 * (2048 * 2 + 8 * 128) * D * 4  # any routing of all tokens


def of(config):
    mesh = abstract(config)
    state, step = state_bytes(config, mesh), step_bytes(config, mesh)
    return mesh, state, step, work(config, mesh, skeleton_weights(abstract_on(config, mesh), mesh), state, step)


def test_flops_are_those_of_the_hand_count_shared_by_the_devices():
    config = config_for({"data": 2, "expert": 4}, remat="layer")
    _, _, _, todo = of(config)
    tokens = 16 * 128
    assert todo.model_flops == pytest.approx(flops.training_flops_per_token(config, V) * tokens / 8)
    expert = LAYERS * 6 * D * F * 2 * tokens / 8
    assert todo.expert_flops == pytest.approx(expert * (4 + 2 / 3))  # forward twice, backward, gate and up once more
    assert todo.dense_flops < 4 / 3 * (todo.model_flops - 3 * expert)  # the head is not computed again


def test_traffic_by_hand():
    config = config_for({"data": 2, "fsdp": 2, "expert": 2})
    mesh, _, _, todo = of(config)
    weights = skeleton_weights(abstract_on(config, mesh), mesh)
    dense, expert = weights["other"], weights["expert"]
    assert todo.traffic["fsdp"] == pytest.approx((dense + expert) / 2 + (dense + expert) / 2)
    assert todo.traffic["data"] == pytest.approx(2 / 2 * (dense + expert) / 2)
    rows = todo.traffic["expert"] - 2 / 2 * dense / 2
    tokens = 16 * 128 / 8
    assert rows == pytest.approx(2.5 * min(1 * (1 + 2), 2 * 1.25 * 2 / 2) * D * 4 * tokens * LAYERS)


@pytest.mark.parametrize(
    ("mesh", "gpu", "expected"),
    [
        ({"expert": 8}, "H200", {"expert": "nvlink"}),
        ({"fsdp": 2, "expert": 8}, "H200", {"fsdp": "network", "expert": "nvlink"}),
        ({"data": 2, "fsdp": 9, "expert": 8}, "GB200", {"data": "network", "fsdp": "nvlink", "expert": "nvlink"}),
        ({"expert": 16}, "B200", {"expert": "network"}),
    ],
)
def test_axes_use_nvlink_where_they_fit_a_domain(mesh, gpu, expected):
    sizes = tuple(mesh.get(axis, 1) for axis in AXES)
    assert links(Mesh(sizes, AXES), GPUS[gpu]) == expected


def test_spare_gpus_keep_an_expert_axis_inside_its_rack():
    """Two racks of 64 and 8 spares; without spares the second group of 64 would lie in both racks."""
    mesh = Mesh((2, 1, 64, 1, 1), AXES)
    assert links(mesh, GPUS["GB200"], spares=8) == {"data": "network", "expert": "nvlink"}
    assert links(mesh, GPUS["GB200"]) == links(mesh, GPUS["H200"], spares=8) == {"data": "network", "expert": "network"}


def test_the_roofline_takes_the_largest_term_and_the_recipe_of_the_gpu():
    mesh, *_, todo = of(config_for({"expert": 8}, recipe="mxfp8"))
    config = config_for({"expert": 8}, recipe="mxfp8")
    hopper, blackwell = (roofline(config, mesh, todo, GPUS[name]) for name in ("H200", "B200"))
    assert hopper.terms["products"] == pytest.approx((todo.expert_flops + todo.dense_flops) / 989e12)
    assert blackwell.terms["products"] == pytest.approx(todo.expert_flops / 4500e12 + todo.dense_flops / 2250e12)
    assert hopper.seconds == max(hopper.terms.values()) and hopper.terms[hopper.limit] == hopper.seconds
    slow_links = dataclasses.replace(GPUS["H200"], nvlink_rate=1.0)
    assert roofline(config, mesh, todo, slow_links).limit == "NVLink"


def test_the_report_says_what_does_not_fit():
    config = config_for({"expert": 2})
    mesh, state, step, todo = of(config)
    small = dataclasses.replace(GPUS["H200"], name="small", memory_bytes=1e6)
    text = "\n".join(report(config, mesh, state, step, todo, [small, GPUS["GB300"]]))
    assert "!: does not fit" in text and "limited by" in text and "expert over nvlink" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mesh", "expert=9"], "moe.num_experts (E) = 8 does not divide over expert=9"),
        (["mesh.tensor=3"], "does not divide over tensor=3"),
        (["--mesh", "experts=8"], "--mesh: 'experts=8' is not axis=devices"),
        (["--mesh", "expert=8,data=x"], "'data=x' is not axis=devices"),
        (["--mesh", "data=2,expert=2,data=4"], "--mesh: data is given twice, as 2 and as 4"),
        (["--mesh", "expert=８"], "'expert=８' is not axis=devices"),
        (["--gpu", "H300"], "--gpu: 'H300' is not known: expected some of H200, B200, GB200, GB300"),
        (["--mesh", "data=5"], "rows of a micro-batch (B) = 16 does not divide over data=5: 1, 2, 4, 8 would fit"),
        (["--mesh", "tensor=3"], "does not divide over tensor=3"),
        (
            ["--mesh", "expert=8", "mesh.spares=8"],
            "mesh.spares=8 leaves 64 of the 72 GPUs of each rack, but the mesh has 8",
        ),
        (["training.stpes=3"], "training.steps"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, said, capsys):
    assert main([str(ROOT / "configs/quickstart.yaml"), *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1, error


@pytest.mark.slow
def test_the_real_step_compiles_for_a_rack_of_72(tmp_path):
    """fsdp 9 x expert 8 on fake devices, from the command line."""
    path = tmp_path / "rack.yaml"
    path.write_text((ROOT / "configs/quickstart.yaml").read_text())
    command = [
        sys.executable,
        "-m",
        "moejax.estimate",
        str(path),
        "training.global_batch=72",
        "model.d_model=288",
        "--compile",
    ]
    done = subprocess.run(
        [*command, "--mesh", "fsdp=9,expert=8"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "72 devices" in done.stdout and "compiled for 72 CPU devices" in done.stdout
    assert "all-to-all" in done.stdout and "all-gather" in done.stdout
