"""Several real processes on this machine, over loopback: the same numbers as one, and a clear end when one of them dies."""

import dataclasses
import json
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import yaml

from moejax.checkpoint import Checkpoints, named_leaves
from moejax.config import DistributedConfig
from moejax.config_load import ConfigError, config_from_dict, load
from moejax.coordinator import _require_free, place
from moejax.data import open_dataset
from moejax.data.tokenizer import ByteTokenizer
from moejax.distributed import _start_error, processes
from moejax.launch import DistributedError, Launch, find_launch
from moejax.training.metrics import read_records
from moejax.training.run import RunError, RunFolder, read_stored
from moejax.training.state import abstract_state, with_vocabulary
from tests.test_train_cli import ROOT, environment, write_config

STEPS, STALL = 20, 20  # a loaded machine may not run a thread for some seconds
# SGD: Adam would hide a factor of two. A constant rate: the length of the run is no part of the program.
SETTINGS = [
    "optimizer.name=sgd",
    "optimizer.learning_rate=0.1",
    "optimizer.schedule=constant",
    "moe.num_experts=4",
    "training.global_batch=8",
    "checkpoint.every_steps=4",
    f"training.steps={STEPS}",
    f"distributed.stall_seconds={STALL}",
]
MESHES = {1: [], 2: ["mesh.data=1", "mesh.expert=2"], 4: ["mesh.data=1", "mesh.fsdp=2", "mesh.expert=2"]}


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


class Job:
    """Processes of one command, started; `finish` waits for all and returns their outputs and exit codes."""

    def __init__(self, folder, ranks, command, own=None):
        """`own`: further arguments of some ranks."""
        where = [f"distributed.coordinator=localhost:{free_port()}", f"distributed.processes={ranks}"]
        self.files = [open(folder / f"rank{rank}.log", "w+") for rank in range(ranks)]
        self.children = [
            subprocess.Popen(
                [*command, *(where if ranks > 1 else []), *([f"distributed.process={rank}"] if ranks > 1 else []),
                 *(own or {}).get(rank, [])],
                cwd=folder, env=environment(), stdout=self.files[rank], stderr=subprocess.STDOUT,
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def wait_for(self, ready, seconds=150):
        deadline = time.monotonic() + seconds
        while not ready() and time.monotonic() < deadline and all(child.poll() is None for child in self.children):
            time.sleep(0.01)
        if not ready():
            outputs, codes = self.finish(kill=True)
            raise AssertionError(f"codes {codes}\n" + "\n".join(outputs))

    def finish(self, seconds=150, leave_out=(), kill=False):
        """Exit codes and outputs; `leave_out`: ranks that can't end by themselves and are killed after the others."""
        deadline = time.monotonic() + seconds
        try:
            for rank, child in enumerate(self.children):
                if rank not in leave_out and not kill:
                    child.wait(max(deadline - time.monotonic(), 0.1))
        finally:
            for child in self.children:
                child.kill()
                child.wait()
        outputs = []
        for file in self.files:
            file.seek(0)
            outputs.append(file.read())
            file.close()
        return outputs, [child.returncode for child in self.children]


def train(folder, path, ranks, run_dir, *overrides, own=None):
    command = [sys.executable, str(ROOT / "train.py"), str(path), *SETTINGS, *MESHES[ranks], f"run_dir={run_dir}"]
    return Job(folder, ranks, [*command, *overrides], own)


def outcome(folder, run_dir):
    """The record of every step, and the leaves of the last checkpoint, wherever their shards lay."""
    run = folder / run_dir
    records = {record["step"]: record for record in read_records(run / "metrics.jsonl")}
    config = config_from_dict(read_stored(run / "config.yaml"))
    abstract = abstract_state(with_vocabulary(config, ByteTokenizer.vocab_size))
    checkpoints = Checkpoints(run / "checkpoints")
    state, _ = checkpoints.restore(abstract, STEPS)
    checkpoints.close()
    return records, {name: np.asarray(leaf, np.float64) for name, leaf in named_leaves(state).items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process that all others must equal."""
    folder = tmp_path_factory.mktemp("distributed")
    path = write_config(folder)
    outputs, codes = train(folder, path, 1, "runs/alone").finish()
    assert codes == [0], outputs
    return folder, path, *outcome(folder, "runs/alone")


def assert_same_metrics(expected, got, steps):
    assert steps
    for step in steps:
        # Each step amplifies the rounding of those before it, gradients more than losses.
        for name, bound in (("loss", 1e-6), ("balance_loss", 1e-6), ("grad_norm", 1e-6 if step <= 4 else 1e-5)):
            assert got[step][name] == pytest.approx(expected[step][name], rel=bound), (step, name)
        for name in ("tokens", "expert_rows_mean", "learning_rate"):
            assert got[step][name] == expected[step][name], (step, name)


def last_words(folder, rank):
    """The step after which a rank was killed, as the shell beside it says."""
    log, deadline = folder / f"rank{rank}.log", time.monotonic() + 10
    while time.monotonic() < deadline:
        if found := re.search(rf"error: rank {rank} ended without a word after step (\d+)", log.read_text()):
            return int(found[1])
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def ended_within_the_bound(job, lost, seconds):
    """All processes but `lost` end by themselves, non-zero, and say which rank was lost and at which step."""
    outputs, codes = job.finish(seconds, leave_out=(lost,))
    for rank, (output, code) in enumerate(zip(outputs, codes, strict=True)):
        if rank != lost:
            assert code == 75, (rank, code, output)
            assert re.search(rf"error: rank {lost} has been silent .* at step \d+ \(", output), output
            assert f"Rank {rank} ends" in output


@pytest.mark.slow  # two minutes: seven processes compile a training step
def test_one_of_four_processes_is_killed_and_two_continue_with_the_numbers_of_one(alone):
    """Four processes train as one does until one of them is killed; the others end; two processes finish the run."""
    folder, path, expected, leaves = alone
    run = folder / "runs/killed"
    job = train(folder, path, 4, "runs/killed")
    job.wait_for(lambda: (run / "checkpoints" / "4").exists())
    started = time.monotonic()
    job.children[2].send_signal(signal.SIGKILL)
    ended_within_the_bound(job, lost=2, seconds=3 * STALL)
    assert time.monotonic() - started < 2 * STALL + 5
    assert last_words(folder, 2) >= 4
    seen = {record["step"]: record for record in read_records(run / "metrics.jsonl")}
    assert_same_metrics(expected, seen, range(1, 5))

    outputs, codes = train(folder, path, 2, "runs/killed").finish()
    assert codes == [0, 0], outputs
    assert "continuing runs/killed from step" in outputs[0] and "2 cpu device(s) of 2 processes" in outputs[0]
    assert "step " not in outputs[1] and "held-out" not in outputs[1], "only the first process reports"
    got, got_leaves = outcome(folder, "runs/killed")
    assert_same_metrics(expected, got, range(1, STEPS + 1))
    errors = {
        name: np.linalg.norm(got_leaves[name] - leaf) / np.linalg.norm(leaf)
        for name, leaf in leaves.items()
        if np.linalg.norm(leaf)
    }
    assert max(errors.values()) < 1e-6, errors
    summaries = [json.loads((folder / f"runs/{name}/summary.json").read_text()) for name in ("alone", "killed")]
    assert summaries[1]["heldout_nats_per_byte"] == pytest.approx(summaries[0]["heldout_nats_per_byte"], rel=1e-6)
    assert summaries[1]["tokens"] == summaries[0]["tokens"]


@pytest.mark.slow
def test_one_of_four_processes_is_stopped_and_the_job_ends_within_the_bound(alone):
    folder, path, _, _ = alone
    run = folder / "runs/stopped"
    job = train(folder, path, 4, "runs/stopped", "training.steps=100000")
    job.wait_for(lambda: (run / "checkpoints" / "4").exists())
    started = time.monotonic()
    job.children[1].send_signal(signal.SIGSTOP)
    ended_within_the_bound(job, lost=1, seconds=4 * STALL)
    assert time.monotonic() - started < 2 * STALL + 5


@pytest.mark.slow
def test_the_first_process_is_killed_and_the_job_ends_at_once(alone):
    """The others end through JAX, whose store is gone with it; the shell beside each says at which step."""
    folder, path, _, _ = alone
    run = folder / "runs/headless"
    job = train(folder, path, 4, "runs/headless", "training.steps=100000")
    job.wait_for(lambda: (run / "checkpoints" / "4").exists())
    job.children[0].send_signal(signal.SIGKILL)
    outputs, codes = job.finish(2 * STALL + 5)
    assert all(codes), (codes, outputs)
    assert last_words(folder, 0) >= 4


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_at_the_same_step(alone):
    folder, path, expected, _ = alone
    run = folder / "runs/told"
    job = train(folder, path, 2, "runs/told", "training.steps=100000")
    job.wait_for(lambda: (run / "checkpoints" / "4").exists())
    job.children[1].send_signal(signal.SIGTERM)
    outputs, codes = job.finish()
    assert codes == [143, 143], outputs
    step = int(re.search(r"SIGTERM: saved step (\d+) of", outputs[0])[1])
    assert (run / "checkpoints" / str(step)).exists()
    got = {record["step"]: record for record in read_records(run / "metrics.jsonl")}
    assert max(got) == step
    assert_same_metrics(expected, got, range(1, min(step, STEPS) + 1))


LAYER = """
    import hashlib, json, pathlib, sys
    import jax, jax.numpy as jnp, numpy as np
    from moejax.config import Config, DistributedConfig, MeshConfig, ModelConfig, MoEConfig, RouterConfig
    from moejax.distributed import processes
    from moejax.mesh import make_mesh
    from moejax.ops.moe import moe_layer, prepare_experts
    from moejax.ops.spec import moe_spec

    keys = dict(argument.split("=") for argument in sys.argv[1:])
    where = DistributedConfig(keys["distributed.coordinator"], int(keys["distributed.processes"]), int(keys["distributed.process"]))
    with processes(where):
        moe = MoEConfig(num_experts=8, expert_width=28, router=RouterConfig(top_k=3), backend="xla")
        config = Config(model=ModelConfig(d_model=20), moe=moe)
        draw = np.random.default_rng(0)
        x, dy = (draw.normal(size=(4, 6, 20)).astype(np.float32) for _ in range(2))
        expert = draw.permuted(np.tile(np.arange(8, dtype=np.int32), (4, 6, 1)), axis=-1)[..., :3]
        weight = draw.random(size=(4, 6, 3), dtype=np.float32)
        gate_up = draw.normal(size=(8, 2, 28, 20)).astype(np.float32)
        down = draw.normal(size=(8, 20, 28)).astype(np.float32)

        def run(mesh):
            spec = moe_spec(config, mesh)
            def both(x, weight, gate_up, down, expert, dy):
                def layer(x, weight, gate_up, down):
                    return moe_layer(x, weight, expert, prepare_experts(gate_up, down, spec), spec)[0]
                y, pull = jax.vjp(layer, x, weight, gate_up, down)
                return y, *pull(dy)
            whole, experts = jax.NamedSharding(mesh, jax.P()), jax.NamedSharding(mesh, jax.P("expert"))
            place = lambda a, s: jax.make_array_from_callback(a.shape, s, lambda i: a[i])
            inputs = (x, weight, gate_up, down, expert, dy)
            inputs = [place(a, experts if a is gate_up or a is down else whole) for a in inputs]
            with jax.set_mesh(mesh):
                return [np.asarray(out) for out in jax.jit(both, out_shardings=whole)(*inputs)]

        def digests(outputs):
            names = ("y", "dx", "d_weight", "dw_gate_up", "dw_down")
            assert len(outputs) == len(names) and all(np.abs(a).max() > 0 for a in outputs)
            return {name: hashlib.sha256(a.tobytes()).hexdigest() for name, a in zip(names, outputs)}

        auto = jax.sharding.AxisType.Auto
        found = [digests(run(make_mesh(MeshConfig(data=1, expert=jax.process_count()), 8, axis_type=auto)))]
        if jax.process_index() == 0:  # alone, on its own device
            found.append(digests(run(make_mesh(MeshConfig(data=1), 8, jax.local_devices(), axis_type=auto))))
        pathlib.Path(f"bits{jax.process_index()}.json").write_text(json.dumps(found))
"""


def test_the_expert_layer_over_processes_gives_the_bits_of_one(tmp_path):
    outputs, codes = Job(tmp_path, 4, [sys.executable, "-c", textwrap.dedent(LAYER)]).finish()
    assert codes == [0, 0, 0, 0], outputs
    (first, one), *others = (json.loads((tmp_path / f"bits{rank}.json").read_text()) for rank in range(4))
    assert len(one) == 5 and [first] + [found for (found,) in others] == [one] * 4


# Finding the job this process belongs to.

SLURM = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "node[01-02]", "SLURM_NTASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
}  # fmt: skip
OMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        ({}, {}, None),
        ({}, SLURM, Launch("slurm")),
        ({}, SLURM | {"CUDA_VISIBLE_DEVICES": "6"}, Launch("slurm", devices=(0,))),  # --gpus-per-task=1: number 0 here
        ({"devices": "all"}, SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2"}, Launch("slurm", devices=(0, 1, 2))),
        ({}, SLURM | {"SLURM_NTASKS": "1"}, None),
        ({"cluster": "none"}, SLURM, None),
        ({}, SLURM | {"SLURM_STEP_NUM_TASKS": "8"}, Launch("slurm")),
        ({}, SLURM | {"PMI_SIZE": "8", "PMI_RANK": "5"}, Launch("slurm")),  # srun --mpi=pmi2
        ({}, SLURM | {"JAX_COORDINATOR_ADDRESS": "[fe80::1%eth0]:9"}, Launch("slurm", "[fe80::1%eth0]:9")),
        ({}, {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}, None),  # a batch script without --ntasks
        ({}, OMPI, Launch("ompi")),
        ({}, OMPI | {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, Launch("ompi")),  # mpirun in a batch script
        ({}, {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({}, {"PMI_SIZE": "1", "PMI_RANK": "0"}, None),
        ({"cluster": "mpi4py"}, {"PMI_SIZE": "4", "PMI_RANK": "1"}, Launch("mpi4py")),
        ({"cluster": "none"}, {"JAX_COORDINATOR_ADDRESS": "b:2", "OMPI_COMM_WORLD_SIZE": "two"}, None),
        ({"cluster": "mpi4py"}, {}, Launch("mpi4py")),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # any pod has it
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, Launch("k8s")),
        ({"coordinator": "a:1", "processes": 4, "process": 3}, SLURM, Launch("config", "a:1", 4, 3)),
        ({"processes": 4, "process": 3}, {"JAX_COORDINATOR_ADDRESS": "b:2"}, Launch("config", "b:2", 4, 3)),
        (
            {"coordinator": "a:1", "processes": 16, "process": 11},
            {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
            Launch("config", "a:1", 16, 11, (3,)),
        ),
        (
            {"coordinator": "a:1", "processes": 2, "process": 1, "devices": "4, 5"},
            {},
            Launch("config", "a:1", 2, 1, (4, 5)),
        ),
    ],
)
def test_the_job_is_found_in_the_config_or_the_environment(given, environment, expected):
    assert find_launch(DistributedConfig(**given), NO_GPU | environment) == expected


@pytest.mark.parametrize(
    ("given", "environment", "said"),
    [
        ({"process": 1}, {}, "distributed.process=1 given, but not distributed.coordinator and distributed.processes"),
        ({"coordinator": "a:1", "processes": 2}, {}, "but not distributed.process:"),
        ({"coordinator": "node", "processes": 2, "process": 0}, {}, "expected host:port"),
        (
            {"coordinator": "a:1", "processes": 2, "process": 2},
            {},
            "distributed.process is 2, but distributed.processes=2",
        ),
        ({"devices": "gpu0"}, SLURM, "distributed.devices is 'gpu0': expected auto, all"),
        ({"devices": "0,0"}, {}, "distributed.devices is '0,0': expected auto, all, or different numbers"),
        ({}, {"JAX_COORDINATOR_ADDRESS": "b:2"}, "JAX_COORDINATOR_ADDRESS=b:2 is set, but not distributed.processes"),
        ({}, SLURM | {"JAX_COORDINATOR_ADDRESS": "b"}, "JAX_COORDINATOR_ADDRESS is 'b': expected host:port"),
    ],
)
def test_half_given_settings_say_what_is_missing(given, environment, said):
    with pytest.raises(DistributedError) as caught:
        find_launch(DistributedConfig(**given), NO_GPU | environment)
    assert said in str(caught.value)


def without(variables, name):
    return {key: value for key, value in variables.items() if key != name}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        # `python train.py` in a batch script or the shell of salloc, where only srun would start tasks.
        (
            {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"},
            "no SLURM_LOCALID and no SLURM_STEP_NODELIST: start with `srun",
        ),
        ({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, "SLURM_NTASKS=8, SLURM_JOB_ID=1 of a job, but no SLURM_PROCID "),
        (
            SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
            "SLURM_STEP_NUM_TASKS=1, as in the shell of salloc",
        ),
        (without(SLURM, "SLURM_NTASKS"), "SLURM_PROCID=5 is set, but no SLURM_NTASKS"),
        (SLURM | {"SLURM_NTASKS": "x"}, "SLURM_NTASKS is 'x': expected a number from 1 on"),
        (SLURM | {"SLURM_NTASKS": ""}, "SLURM_NTASKS is ''"),
        (SLURM | {"SLURM_NTASKS": "-2"}, "SLURM_NTASKS is '-2'"),
        (SLURM | {"SLURM_PROCID": ""}, "but no SLURM_PROCID:"),
        (SLURM | {"SLURM_PROCID": "8"}, "SLURM_PROCID is 8, but SLURM_NTASKS=8"),
        (SLURM | {"SLURM_LOCALID": "one"}, "SLURM_LOCALID is 'one'"),
        (SLURM | {"SLURM_JOB_ID": "77_3"}, "SLURM_JOB_ID is '77_3'"),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, "but no SLURM_STEP_NODELIST:"),
        ({"OMPI_COMM_WORLD_SIZE": "two"}, "OMPI_COMM_WORLD_SIZE is 'two'"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "no OMPI_COMM_WORLD_RANK and no OMPI_COMM_WORLD_LOCAL_RANK"),
        (without(OMPI, "OMPI_COMM_WORLD_SIZE"), "but no OMPI_COMM_WORLD_SIZE:"),
        (OMPI | {"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK is 4, but OMPI_COMM_WORLD_SIZE=4"),
        ({"PMI_SIZE": "4", "PMI_RANK": "1"}, "with distributed.cluster=mpi4py and the package mpi4py"),
        ({"PMI_SIZE": "4"}, "PMI_SIZE=4 of a job, but no PMI_RANK:"),
        ({"PMI_RANK": "1"}, "PMI_RANK=1 of a job, but no PMI_SIZE:"),
        ({"PMI_SIZE": "4", "PMI_RANK": "3", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, "PMI_SIZE=4: MPICH"),
        ({"JOB_COMPLETION_INDEX": "1"}, "but KUBERNETES_SERVICE_HOST is not"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "a"}, "JOB_COMPLETION_INDEX is 'a'"),
    ],
)
def test_a_half_set_or_junk_variable_of_a_scheduler_is_named(environment, said):
    """JAX would take such a process for one that is alone, or for another scheduler's."""
    with pytest.raises(DistributedError) as caught:
        find_launch(DistributedConfig(), NO_GPU | environment)
    assert said in str(caught.value) and "distributed.cluster=none" in str(caught.value)


@pytest.mark.parametrize(
    "address",
    ["a", "a:", ":1", "a:0", "a:65536", "a:1x", "http://a:1", "a b:1", "::1:99", "[::1]", "[a]:1", "a:1:2", "a:١"],
)
def test_a_coordinator_of_another_form_than_host_port_is_refused(address):
    with pytest.raises(DistributedError, match="distributed.coordinator is .* expected host:port"):
        find_launch(DistributedConfig(address, 2, 0), NO_GPU)


@pytest.mark.parametrize("source", ["ompi", "slurm", "k8s"])
def test_only_a_job_of_kubernetes_is_told_of_its_package(source):
    """JAX has the same words for whatever it can't find."""
    for words in ("coordinator_address should be defined.", "Number of processes must be defined."):
        said = _start_error(Launch(source), ValueError(words))
        assert ("Kubernetes" in said) == (source == "k8s") and (source == "k8s" or words in said)


def test_half_given_settings_are_refused_with_the_rest_of_the_config(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"distributed\.coordinator is not set, but distributed\.processes=2"):
        load(write_config(tmp_path), ["distributed.processes=2", "distributed.process=0"])


def test_a_stall_that_a_loaded_machine_would_reach_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"distributed\.stall_seconds is 1; expected at least 10, or 0 for never"):
        load(write_config(tmp_path), ["distributed.stall_seconds=1"])


def test_bounds_as_large_as_a_config_allows_reach_the_runtime(monkeypatch):
    """It takes 32-bit seconds; ours and its grace on top of them are more."""
    given = {}

    def initialize(**arguments):
        given.update(arguments)
        raise RuntimeError("enough")

    monkeypatch.setattr("jax.distributed.initialize", initialize)
    longest = 2**31 - 1
    config = DistributedConfig(f"localhost:{free_port()}", 2, 0, start_seconds=longest, stall_seconds=longest)
    with pytest.raises(DistributedError, match="enough"), processes(config):
        pass
    for name in ("initialization_timeout", "heartbeat_timeout_seconds"):
        assert 10**6 < given[name] <= longest, name


def test_a_process_with_another_config_ends_the_job(tmp_path):
    """Each would train on, every process with its own numbers, or wait for a step the others do not take."""
    path = write_config(tmp_path)
    own = {0: ["data.cache_dir=cache0"], 1: ["optimizer.learning_rate=0.2", "data.cache_dir=cache1"]}
    outputs, codes = train(tmp_path, path, 2, "runs/rates", own=own).finish(60)
    said = "process 1 was given another config than process 0: optimizer.learning_rate: 0.1 -> 0.2"
    assert said in outputs[1] and f"rank 1 failed at step 0 (starting): {said}" in outputs[0], outputs
    assert codes == [1, 1] and "Rank 0 ends too" in outputs[0], (codes, outputs)  # not 75: again would fail again


def test_a_process_that_finds_other_text_than_the_first_is_refused(tmp_path, monkeypatch):
    """The same path may hold another file on another machine, and `stdlib` is another text in another Python."""
    config = load(write_config(tmp_path), [f"run_dir={tmp_path / 'run'}"])
    dataset = open_dataset(config.data)
    with RunFolder(config) as run:
        run.keep_data(dataset)
        first = {"corpus": "0" * 32, "train_tokens": len(dataset.train.tokens)}
        monkeypatch.setattr("moejax.training.run.of_first", lambda name, text: json.dumps(first))
        with pytest.raises(RunError, match="process 0 finds other text at data.source than process 0"):
            run.keep_data(dataset)


JOIN = """
    import contextlib, os, sys
    import moejax.coordinator
    from moejax.config import DistributedConfig
    from moejax.distributed import DistributedError, processes
    where, processes_, process, seconds = sys.argv[1:]
    if "ELSEWHERE" in os.environ:  # as on a machine of its own, where nothing of this one is seen
        moejax.coordinator.place = lambda launch: contextlib.nullcontext()
    try:
        with processes(DistributedConfig(where, int(processes_), int(process), start_seconds=int(seconds))):
            print("joined", file=sys.stderr, flush=True)
            sys.stdin.read()
    except DistributedError as error:
        sys.exit(f"error: {error}")
"""


def joining(*arguments):
    return [sys.executable, "-c", textwrap.dedent(JOIN), *map(str, arguments)]


class Joined:
    """A job of two processes, once both have joined; they leave when told."""

    def __init__(self, where):
        self.children = [
            subprocess.Popen(
                joining(where, 2, process, 30),
                env=environment(),
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for process in (0, 1)
        ]
        for child in self.children:
            assert any(line == "joined\n" for line in child.stderr)

    def leave(self):
        for child in self.children:
            child.stdin.close()
        errors = [child.stderr.read() for child in self.children]
        return [child.wait(30) for child in self.children], errors


def test_a_second_job_at_the_same_coordinator_is_refused_and_the_first_lives_on():
    """JAX's servers share a port, and a second process of a number aborts the job; the port is free again at once."""
    port = free_port()
    job = Joined(f"localhost:{port}")
    try:
        for where, process in ((f"localhost:{port}", 0), (f"127.0.0.1:{port}", 1)):
            done = subprocess.run(
                joining(where, 2, process, 30), env=environment(), capture_output=True, text=True, timeout=30
            )
            pid = job.children[process].pid
            said = (
                f"error: the process with the id {pid} on this machine already is process {process} of a job with the"
            )
            assert done.returncode == 1 and f"{said} coordinator {where}. " in done.stderr, done.stderr
            assert "choose another port, with the same distributed.coordinator=host:port" in done.stderr
        launch = Launch("config", f"localhost:{port}", 2, 0)
        with pytest.raises(DistributedError, match="Address already in use"):
            _require_free("localhost", port, launch)  # what a job of another container on this machine would find
    finally:
        codes, errors = job.leave()
    assert codes == [0, 0], errors
    with place(launch):  # its connections may linger in TIME_WAIT
        pass


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("options", [(), (socket.SO_REUSEADDR,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)])
def test_a_port_that_a_server_holds_is_refused_and_one_it_has_left_is_not(host, options):
    with socket.socket() as server:
        for option in options:
            server.setsockopt(socket.SOL_SOCKET, option, 1)
        server.bind((host, 0))
        server.listen()
        port = server.getsockname()[1]
        launch = Launch("config", f"localhost:{port}", 2, 0)
        said = rf"process 0 can't listen at port {port} .* coordinator localhost:{port}: Address already in use"
        with pytest.raises(DistributedError, match=said), place(launch):
            pass
        with place(dataclasses.replace(launch, process=1)):  # connects to whoever is there
            pass
        client = socket.create_connection(("127.0.0.1", port))
        accepted = server.accept()[0]
    accepted.close()  # first: its side of the connection lingers in TIME_WAIT
    client.close()
    if socket.SO_REUSEADDR in options:  # without it Linux refuses any successor, JAX's server too
        with place(launch):
            pass


def test_a_foreign_server_at_the_port_is_an_error_and_no_crash():
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        done = subprocess.run(joining(where, 2, 0, 30), env=environment(), capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and "error: process 0 can't listen" in done.stderr and where in done.stderr, done.stderr


def test_a_coordinator_on_another_machine_than_process_0_is_refused(monkeypatch):
    """A server answers where the name leads, and the port is free here."""
    monkeypatch.setattr("moejax.coordinator._bind", lambda host, port: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        launch = Launch("slurm", f"127.0.0.1:{server.getsockname()[1]}", 2, 0)
        with (
            pytest.raises(DistributedError, match="a server already answers .* JAX_COORDINATOR_PORT=port"),
            place(launch),
        ):
            pass


def test_the_coordinator_of_a_schedulers_job_is_known_before_jax_joins_it(monkeypatch):
    """Two steps of one Slurm job get the same port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        own = SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "localhost", "JAX_COORDINATOR_PORT": str(port)}
        for name, value in (NO_GPU | own).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("jax.distributed.initialize", lambda **arguments: pytest.fail("joined"))
        with (
            pytest.raises(DistributedError, match=f"coordinator localhost:{port}: Address"),
            processes(DistributedConfig()),
        ):
            pass


def test_a_process_that_waits_for_others_in_vain_says_so(tmp_path):
    """The second of two processes never comes."""
    command = joining(f"localhost:{free_port()}", 2, 0, 3)
    started = time.monotonic()
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and time.monotonic() - started < 30
    assert re.search(r"error: process 0 of 2, .* distributed.start_seconds=3", done.stderr), done.stderr


def test_a_number_given_to_two_processes_is_said(tmp_path):
    """On two machines JAX aborts one of them, from a thread of its own, with a stack trace; a shell says what that means."""
    where = f"localhost:{free_port()}"
    files = [open(tmp_path / f"{name}.log", "w+") for name in ("first", "one", "again")]
    children = [
        subprocess.Popen(
            joining(where, 3, number, 12), env=environment() | {"ELSEWHERE": "1"}, stdout=file, stderr=subprocess.STDOUT
        )
        for number, file in zip((0, 1, 1), files, strict=True)
    ]
    codes = [child.wait(60) for child in children]
    assert all(codes), codes
    deadline, said = (
        time.monotonic() + 10,
        "was aborted while it joined the job. Was another process started with the same",
    )
    while time.monotonic() < deadline and not any(
        said in (tmp_path / f"{n}.log").read_text() for n in ("one", "again")
    ):
        time.sleep(0.05)
    texts = {name: (tmp_path / f"{name}.log").read_text() for name in ("first", "one", "again")}
    assert any(f"error: process 1 of 3, coordinator {where} {said}" in texts[name] for name in ("one", "again")), texts
    assert "each with a number of its own" in texts["first"]


def test_the_pods_of_the_example_may_finish_a_compile_after_sigterm():
    """Kubernetes kills them after 30 s unless told otherwise, and SIGTERM waits for the step that compiles."""
    documents = list(yaml.safe_load_all((ROOT / "scripts/launch/kubernetes.yaml").read_text()))
    pod = documents[1]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= 600
    given = dict(argument.partition("=")[::2] for argument in pod["containers"][0]["args"])
    find_launch(
        DistributedConfig(given["distributed.coordinator"], int(given["distributed.processes"]), 0), NO_GPU
    )  # of the form host:port
    assert int(given["distributed.processes"]) == documents[1]["spec"]["completions"]
