"""The command itself, in processes of its own: runs, interrupts, kills, and what it says about wrong input."""

import fcntl
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
import yaml
from orbax.checkpoint import v1 as ocp

from moejax import native
from moejax.checkpoint import named_leaves
from moejax.training.metrics import read_records
from train import main as command_line

ROOT = pathlib.Path(__file__).parent.parent
STEPS = 12


def write_config(folder, name="tiny", **training):
    """A corpus, and a config whose run takes a second once it is compiled."""
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        corpus.write_text("".join(f"def f{i}(x):\n    return x + {i * i % 97}\n\n" for i in range(400)))
    config = {
        "model": {"d_model": 24, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 12},
        "moe": {
            "num_experts": 5,
            "expert_width": 20,
            "router": {"top_k": 2, "select_bias": True},
            "balance": {"aux_coef": 0.01, "z_coef": 0.001, "bias_rate": 0.001},
        },
        "data": {"source": str(corpus), "cache_dir": str(folder / "cache" / "data")},
        "optimizer": {"warmup_steps": 3},
        # Rows of a micro-batch divide over the eight devices of the test process.
        "training": {"steps": STEPS, "global_batch": 16, "micro_batches": 2, "sequence_length": 40, **training},
        "checkpoint": {"every_steps": 2, "keep": 2},
        "log": {"every_steps": 4, "sample_tokens": 8, "tensorboard": False},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def command(path, *overrides):
    return [sys.executable, str(ROOT / "train.py"), str(path), *overrides]


def environment():
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "PYTHONPATH": str(ROOT),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def train(folder, path, *overrides, ok=True):
    done = subprocess.run(
        command(path, *overrides), cwd=folder, env=environment(), capture_output=True, text=True, timeout=200
    )
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done


def start_and_signal(folder, path, run_dir, when, number):
    """Starts a run, and sends it a signal as soon as `when` holds; returns its output and exit code."""
    with subprocess.Popen(
        command(path, f"run_dir={run_dir}"),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        deadline = time.monotonic() + 120
        while child.poll() is None and not when() and time.monotonic() < deadline:
            time.sleep(0.002)
        child.send_signal(number)
        output = child.communicate(timeout=120)[0]
    return output, child.returncode


def outcome(folder, path, run_dir):
    """Bits of every leaf of the last checkpoint, and the loss of each step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no abstract tree: this reads what is there, whatever it is
        checkpoints = ocp.training.Checkpointer(folder / run_dir / "checkpoints")
        assert checkpoints.latest.step == STEPS
        saved = checkpoints.load_checkpointables(STEPS)
        checkpoints.close()
    records = list(read_records(folder / run_dir / "metrics.jsonl"))
    bits = {name: np.asarray(leaf).tobytes() for name, leaf in named_leaves(saved["state"]).items()}
    losses = [(r["step"], r["loss"], r["grad_norm"], r["balance_loss"]) for r in records]
    assert [step for step, *_ in losses] == list(range(1, STEPS + 1))
    return {"leaves": bits, "losses": losses, "position": saved["dataset"]}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """One whole run, its output, and its outcome; it also fills the compile cache for the others."""
    folder = tmp_path_factory.mktemp("train")
    path = write_config(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_LOG_COMPILES", "1")
        done = train(folder, path)
    return folder, path, done, outcome(folder, path, "runs/tiny")


def assert_same_run(left, right):
    assert left["losses"] == right["losses"] and left["position"] == right["position"]
    assert list(left["leaves"]) == list(right["leaves"])
    different = [name for name in left["leaves"] if left["leaves"][name] != right["leaves"][name]]
    assert not different, different


def test_a_run_trains_and_leaves_its_artefacts(undisturbed):
    folder, _, done, run = undisturbed
    losses = [loss for _, loss, *_ in run["losses"]]
    assert losses[-1] < losses[0] - 0.1
    assert any(name.endswith("select_bias") for name in run["leaves"]) and run["position"] == {"next_index": STEPS}
    assert len(re.findall(r"^step +\d+/12  loss ", done.stdout, re.M)) == 4  # 1, 4, 8, 12: output is not a terminal
    summary = json.loads((folder / "runs/tiny/summary.json").read_text())
    assert summary["steps"] == STEPS and summary["tokens"] > 0 and summary["seconds"] > 0
    assert summary["heldout_bits_per_byte"] == pytest.approx(summary["heldout_nats_per_byte"] / np.log(2))
    assert 0 < summary["active_parameters"] < summary["parameters"]
    assert 2.0 < summary["heldout_nats_per_byte"] < 5.6
    page = (folder / "runs/tiny/report.html").read_text()
    assert "Expert load over time" in page and "Generated sample" in page
    sample = (folder / "runs/tiny/sample.txt").read_text()
    assert sample.startswith("import ") and sample in done.stdout
    assert sorted(p.name for p in (folder / "runs/tiny/checkpoints").iterdir()) == ["10", "12"]


def test_a_run_says_with_what_its_experts_run(undisturbed):
    _, _, done, _ = undisturbed
    backend = "native" if native.missing("_cpu") is None else "xla (not native: "
    (line,) = re.findall(r"^experts: .*$", done.stdout, re.M)
    assert line.startswith(f"experts: backend {backend.split()[0]}, recipe fp32") and (backend == "native") == (
        "not native" not in line
    )


def test_the_step_compiles_once_and_nothing_compiles_while_it_runs(undisturbed):
    compiled = re.findall(r"Finished XLA compilation of jit\((\w+)\)", undisturbed[2].stderr)
    assert compiled.count("step") == 1, compiled
    assert compiled.count("init") == 1 and len(compiled) < 40, (
        compiled
    )  # 12 steps: one more program per step would show


def test_a_finished_run_prints_its_summary_and_does_not_train(undisturbed):
    folder, path, _, _ = undisturbed
    before = (folder / "runs/tiny/metrics.jsonl").read_bytes()
    done = train(folder, path)
    assert "has finished" in done.stdout and "nats per byte" in done.stdout and "step " not in done.stdout
    assert (folder / "runs/tiny/metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_interrupt_saves_and_the_same_command_continues_bit_for_bit(undisturbed):
    folder, path, _, expected = undisturbed
    metrics = folder / "runs/stopped/metrics.jsonl"
    checkpoints = folder / "runs/stopped/checkpoints"
    output, code = start_and_signal(folder, path, "runs/stopped", lambda: (checkpoints / "2").exists(), signal.SIGTERM)
    assert code == 143 and "SIGTERM: saved step" in output and "(exit code 143)" in output, output
    stopped = [record["step"] for record in read_records(metrics)]
    assert stopped == list(range(1, len(stopped) + 1)) and 2 <= len(stopped) < STEPS
    assert (checkpoints / str(len(stopped))).exists() and not (folder / "runs/stopped/summary.json").exists()
    done = train(folder, path, "run_dir=runs/stopped")
    assert f"from step {len(stopped)}" in done.stdout
    assert_same_run(outcome(folder, path, "runs/stopped"), expected)


def test_kill_at_any_moment_then_the_same_command_continues_bit_for_bit(undisturbed):
    """Three kills in a row: while the first checkpoint may be in the making, after some steps, and after more."""
    folder, path, _, expected = undisturbed
    run = folder / "runs/killed"
    temporary = lambda: any((run / "checkpoints").glob("*.orbax-checkpoint-tmp")) if run.exists() else False  # noqa: E731
    records = lambda: len(list(read_records(run / "metrics.jsonl")))  # noqa: E731
    for when in (temporary, lambda: (run / "checkpoints/4").exists(), lambda: records() >= 7 and temporary()):
        output, code = start_and_signal(folder, path, "runs/killed", when, signal.SIGKILL)
        assert code == -signal.SIGKILL, output
    train(folder, path, "run_dir=runs/killed")
    assert_same_run(outcome(folder, path, "runs/killed"), expected)


def say(capsys, monkeypatch, folder, *arguments):
    """What the command says about arguments it can't use. In this process: nothing here reaches a compiler."""
    monkeypatch.chdir(folder)
    code = command_line([str(argument) for argument in arguments])
    said = capsys.readouterr()
    assert code != 0 and "Traceback" not in said.err, said.err
    assert said.err.startswith("error: ") and said.err.count("\n") == 1, said.err
    return said.err


BAD = {
    "no config file": (["none.yaml"], "none.yaml"),
    "unknown key": (["{config}", "training.stpes=3"], "training.steps"),
    "wrong type": (["{config}", "training.steps=many"], "training.steps"),
    "more experts per token than experts": (["{config}", "moe.router.top_k=6"], "top_k"),
    "unknown preset": (["{config}", "preset=gpt-9"], "gpt-9"),
    "no such model": (["{config}", "model.module=models.nothing:Decoder"], "models.nothing"),
    "a model that is no class": (["{config}", "model.module=os:path"], "os has no class 'path'"),
    "a model that is no Flax module": (["{config}", "model.module=json:JSONDecoder"], "JSONDecoder is not a Flax"),
    "a path instead of a module": (["{config}", "model.module=./decoder:Decoder"], "write it as module:Class"),
    "missing corpus": (["{config}", "data.source=nowhere"], "nowhere"),
    "empty corpus": (["{config}", "data.source=empty.txt"], "empty"),
    "binary corpus": (["{config}", "data.source=binary.txt"], "binary.txt"),
    "sequence longer than the corpus": (["{config}", "training.sequence_length=1000000"], "1000000"),
    "run folder below a file": (["{config}", "run_dir=empty.txt/run"], "empty.txt/run"),
    "vocabulary below the tokenizer's": (["{config}", "model.vocab_size=200"], "model.vocab_size is 200"),
    "more mesh than devices": (["{config}", "mesh.data=1", "mesh.fsdp=3"], "devices"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_input_is_one_line(case, tmp_path, capsys, monkeypatch):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 40)
    path = write_config(tmp_path)
    arguments, named = BAD[case]
    said = say(capsys, monkeypatch, tmp_path, *(part.format(config=path) for part in arguments))
    assert named in said, said


def test_changed_config_lists_the_keys_and_free_keys_may_change(undisturbed, capsys, monkeypatch):
    folder, path, _, _ = undisturbed
    said = say(capsys, monkeypatch, folder, path, "training.global_batch=32", "optimizer.b1=0.8", "log.every_steps=3")
    assert "training.global_batch: 16 -> 32" in said and "optimizer.b1: 0.9 -> 0.8" in said and "log" not in said
    assert command_line([str(path), "log.every_steps=3", "checkpoint.keep=1"]) == 0
    assert "has finished" in capsys.readouterr().out


def test_changed_corpus_is_refused(undisturbed, capsys, monkeypatch, tmp_path):
    folder, path, _, _ = undisturbed
    copy = tmp_path / "runs" / "tiny"
    shutil.copytree(folder / "runs" / "tiny", copy)
    (copy / "summary.json").unlink()
    corpus = folder / "corpus.txt"
    text = corpus.read_text()
    try:
        corpus.write_text(text + "x = 1\n")
        said = say(capsys, monkeypatch, folder, path, f"run_dir={copy}")
    finally:
        corpus.write_text(text)
    assert "text changed" in said


DAMAGE = {
    "config.yaml": [("{{", "can't be read"), ("", "damaged: expected keys")],
    "data.json": [("{", "can't be read"), ("[1]", "damaged: expected keys")],
    "summary.json": [("{", "can't be read"), ('{"steps": 99}', "damaged: it has no active_parameters")],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_of_the_run_is_named(name, undisturbed, capsys, monkeypatch, tmp_path):
    folder, path, _, _ = undisturbed
    copy = tmp_path / "runs" / "tiny"
    shutil.copytree(folder / "runs" / "tiny", copy)
    if name != "summary.json":
        (copy / "summary.json").unlink()
    for text, words in DAMAGE[name]:
        (copy / name).write_text(text)
        said = say(capsys, monkeypatch, folder, path, f"run_dir={copy}")
        assert str(copy / name) in said and words in said, said


def test_folder_in_use_is_refused(undisturbed, capsys, monkeypatch):
    folder, path, _, _ = undisturbed
    with open(folder / "runs/tiny/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "in use" in say(capsys, monkeypatch, folder, path)


def test_help_lists_every_field(capsys):
    assert command_line(["--help"]) == 0
    text = capsys.readouterr().out
    for words in ("training.sequence_length", "tokens per sequence", "256", "moe.router.top_k", "a whole number"):
        assert words in text


def test_help_into_a_pipe_that_closes_ends_in_silence():
    """`| head`: its reader takes a line of the many and goes."""
    with subprocess.Popen(
        command("--help"), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.readline().startswith("Trains a mixture")
        child.stdout.close()
        said = child.stderr.read()
        assert child.wait(timeout=120) == 0 and said == ""


def test_full_disk_ends_the_run_with_one_line(undisturbed):
    """A limit on the size of files stands in for a full disk: both fail inside a write."""
    folder, path, _, _ = undisturbed
    limited = ["bash", "-c", 'ulimit -f 60 && exec "$@"', "run", *command(path, "run_dir=runs/full")]
    done = subprocess.run(limited, cwd=folder, env=environment(), capture_output=True, text=True, timeout=200)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    assert "could not write" in lines[0] and "File too large" in lines[0]
