"""What the benchmarks say about names that they do not know, what is missing, and which code they measured."""

import argparse
import importlib.util
import os
import pathlib
import subprocess
import sys
import types

import pytest

from benchmarks import arguments, result_lines

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_names_and_pairs_are_read_in_order():
    assert arguments.names(("a", "b"))("b,a") == ["b", "a"] and arguments.names(("a",), none=True)("") == []
    assert arguments.pairs(("down", "up"), ("x", "y"))("up=y,down=x") == {"up": "y", "down": "x"}


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (arguments.names(("mixtral", "qwen")), "qwen,mixtrl", "'mixtrl' is not known; expected of mixtral, qwen"),
        (arguments.pairs(("up",), ("x", "y")), "up=z", "'z' is not known; expected of x, y"),
        (arguments.pairs(("up",), ("x", "y")), "upp=x", "'upp' is not known; expected of up"),
        (arguments.pairs(("up",), ("x", "y")), "x", "'x' is no pair such as up=x"),
        (arguments.names(("mixtral", "qwen")), "", "names nothing; expected of mixtral, qwen"),
        (arguments.at_least(2), "1", "'1' is no number of at least 2"),
        (arguments.at_least(1), "ten", "'ten' is no number of at least 1"),
    ],
)
def test_a_name_that_is_not_known_is_refused_with_those_that_are(parse, text, message):
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        parse(text)
    assert str(caught.value) == message


def c_api(monkeypatch, torch):
    monkeypatch.setitem(sys.modules, "torch", torch)
    spec = importlib.util.spec_from_file_location("c_api_alone", ROOT / "kernels_cuda" / "c_api.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "c_api_alone", module)  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module


def test_without_torch_the_c_library_says_what_to_install(monkeypatch):
    with pytest.raises(ModuleNotFoundError, match="need torch, .* in an environment of its own: .*pip install torch"):
        c_api(monkeypatch, None)


def test_a_library_that_is_not_built_is_named_with_the_command_that_builds_it(monkeypatch, tmp_path):
    module = c_api(monkeypatch, types.SimpleNamespace(Tensor=object))
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/lib.so is not built, .*: run `make cuda-library`"):
        module.load(tmp_path / "lib.so")


def test_test_cuda_fails_before_it_builds_where_torch_is_missing(tmp_path):
    """A python that has no torch stands in for the environment; its dependencies count as installed."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin/python").chmod(0o755)
    (tmp_path / ".deps").touch()
    made = subprocess.run(
        ["make", "test-cuda", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert made.returncode != 0 and "needs torch" in made.stderr and "pip install torch==2.11.0" in made.stderr
    assert "pytest" not in made.stdout and "cmake" not in made.stdout


def test_test_cuda_builds_the_library_before_its_tests(tmp_path):
    (tmp_path / ".deps").touch()
    plan = subprocess.run(
        ["make", "--dry-run", "test-cuda", f"VENV={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    steps = ["import torch", "install.sh", "cmake --build build/cuda", "pytest -m gpu"]
    assert sorted(steps, key=plan.index) == steps


@pytest.mark.parametrize(
    ("program", "given", "message"),
    [
        ("gpu_moe.py", "--shapes=mixtral-8x7", "'mixtral-8x7' is not known; expected of qwen3-30b-a3b, mixtral-8x7b, "),
        ("gpu_moe.py", "--ways=up=gathered", "'up' is not known; expected of gate_up, down, dgrad_down, "),
        ("gpu_moe.py", "--ways=gate_up=gather", "'gather' is not known; expected of auto, dispatched, gathered, "),
        ("gpu_moe.py", "--peers=torsh", "'torsh' is not known; expected of torch, "),
        (
            "gpu_moe_mx.py",
            "--shapes=mixtral-8x7",
            "'mixtral-8x7' is not known; expected of qwen3-30b-a3b, mixtral-8x7b, ",
        ),
        ("gpu_moe.py", "--shapes=", "names nothing; expected of qwen3-30b-a3b, "),
        ("gpu_moe.py", "--iterations=0", "'0' is no number of at least 1"),
        ("gpu_variants.py", "--recipes=bf61", "'bf61' is not known; expected of bf16, aligned, "),
        ("gpu_moe_mx.py", "--rounds=-1", "'-1' is no number of at least 1"),
        ("gpu_moe_mx.py", "--variants=alined", "'alined' is not known; expected of aligned, aligned-wgrad_bf16, "),
    ],
)
def test_the_gpu_benchmarks_refuse_a_misspelt_name_before_they_need_a_gpu(program, given, message):
    code = (
        "import runpy, sys, unittest.mock\n"
        "sys.modules['torch'] = unittest.mock.MagicMock()\n"  # they parse before they call it
        "program, *sys.argv[1:] = sys.argv[1:]\n"
        "sys.path.insert(0, program.rpartition('/')[0])\n"
        "runpy.run_path(program, run_name='__main__')\n"
    )
    command = [sys.executable, "-c", code, str(ROOT / "benchmarks" / program), given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and f"argument {given.split('=')[0]}: {message}" in done.stderr, done.stderr


def gpu_moe(tmp_path, stand_in: str, *given: str) -> subprocess.CompletedProcess:
    """gpu_moe.py on a pretended torch with a GPU, without a library of ours, with statements that replace what would run there."""
    code = (
        "import sys, unittest.mock\n"
        "sys.modules['torch'] = unittest.mock.MagicMock(__version__='0')\n"
        "sys.path.insert(0, sys.argv.pop(1))\n"
        "import gpu_moe, gpu_peers, result_lines\n"
        "result_lines.stamp = lambda commit: {}\n"
        f"{stand_in}\n"
        "sys.exit(gpu_moe.main())\n"
    )
    command = [sys.executable, "-c", code, str(ROOT / "benchmarks"), "--shapes=qwen3-30b-a3b", *given]
    environment = os.environ | {"MOEJAX_CUDA_LIBRARY": str(tmp_path / "lib.so")}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--no-ours", "--peers=torch"], "timed qwen3-30b-a3b with ['torch']"),
        (["--no-ours"], "--no-ours leaves nothing to time: name peers with --peers"),
        (["--no-ours", "--peers=torch", "--ways=down=dispatched"], "about ours, which --no-ours leaves out"),
        (["--no-ours", "--peers=torch", "--profile"], "about ours, which --no-ours leaves out"),
        (["--peers=torch"], "lib.so is not built"),
    ],
)
def test_peers_alone_need_no_library_of_ours(tmp_path, given, says):
    measure = "gpu_moe.measure = lambda name, args, base: print(f'timed {name} with {args.peers}') or 1"
    done = gpu_moe(tmp_path, measure, *given)
    assert says in done.stdout + done.stderr, done.stderr
    assert done.returncode == (0 if says.startswith("timed") else 2)


@pytest.mark.parametrize(
    ("given", "order"),
    [
        ([], ["ours", "torch", "sonic-moe"]),
        (["--ours-last"], ["torch", "sonic-moe", "ours"]),
        (["--no-ours"], ["torch", "sonic-moe"]),
    ],
)
def test_a_peer_that_fails_stops_nobody_and_ours_has_the_place_it_was_given(tmp_path, given, order):
    stand_in = (
        "gpu_moe.Problem = gpu_peers.reference = gpu_moe.temperature = lambda *_: ''\n"
        "gpu_moe.dense_tflops, gpu_moe.c_api.load = lambda: 700.0, lambda: None\n"
        "gpu_moe.ours = lambda *_: print('ran ours') or ('ours', {}, '')\n"
        "def peer_run(name, peer, *_):\n"
        "    print('ran', peer)\n"
        "    raise ImportError('no such package')\n"
        "gpu_moe.peer_run = peer_run"
    )
    done = gpu_moe(tmp_path, stand_in, "--peers=torch,sonic-moe", *given)
    assert done.returncode == (0 if "ours" in order else 1), done.stderr  # 1 where nothing was timed
    assert [line[4:] for line in done.stdout.splitlines() if line.startswith("ran ")] == order
    assert done.stdout.count("did not run") == 2 and "no such package" in done.stdout


def test_a_machine_without_gpu_or_library_is_told_before_anything_is_made(capsys):
    parser = argparse.ArgumentParser(prog="gpu_moe.py")

    def missing():
        raise FileNotFoundError("libmoe_cuda_c.so is not built: run `make cuda-library`")

    for found, load, message in ((False, None, "needs an NVIDIA GPU"), (True, missing, "run `make cuda-library`")):
        with pytest.raises(SystemExit, match="2"):
            arguments.need_gpu(parser, found, load)
        assert message in capsys.readouterr().err
    arguments.need_gpu(parser, True, lambda: None)


def git(folder, *arguments):
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_a_result_is_marked_where_the_code_is_not_the_commits(tmp_path):
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    code = tmp_path / "kernel.cu"
    for path in (code, results / "lines.jsonl"):
        path.write_text("one\n")
    commit = lambda: result_lines.commit_of_code.__wrapped__(tmp_path / "benchmarks")  # noqa: E731
    assert commit() == "unknown"
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    head = git(tmp_path, "rev-parse", "--short", "HEAD")
    assert commit() == head
    (results / "lines.jsonl").write_text("one\ntwo\n")  # what a run itself does
    assert commit() == head
    code.write_text("two\n")
    assert commit() == f"{head}-dirty"
