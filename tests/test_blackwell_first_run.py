"""scripts/blackwell_first_run.sh judges by the exit status of its steps: GPU, compiler, sanitizer, make and Python are played
by stubs that fail on demand."""

import os
import pathlib
import shutil
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "scripts" / "blackwell_first_run.sh"
# What the CPU module would print; of no weight.
LAYER = 'echo "12 ok, 0 failed, 4 skipped"; echo "{\\"failures\\": 0}"'


@pytest.fixture
def first_run(tmp_path):
    """Runs a copy of the script in an empty tree; `broken` steps exit with 3."""

    def start(broken=(), gpu="NVIDIA B200, 10.0", without=()):
        stubs, venv, scripts = tmp_path / "stubs", tmp_path / "venv" / "bin", tmp_path / "tree" / "scripts"
        for folder in (stubs, venv, scripts):
            folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(SCRIPT, scripts)
        fails = lambda *steps: "exit 3" if set(steps) & set(broken) else ":"  # noqa: E731

        def stub(path, body):
            path.write_text(f"#!/usr/bin/env bash\n{body}\n")
            path.chmod(0o755)

        stub(stubs / "nvidia-smi", f'[ $# = 0 ] && {fails("gpus")}\necho "{gpu}"')
        program = "\n".join(
            f'[ "$1" = {what} ] && {fails(step)}' for what, step in (("test", "test"), ("bench", "bench"))
        )
        program += f'\ncase "$0" in *guarded) {fails("guarded")};; esac'
        stub(tmp_path / "program", f"{LAYER}\n{program}")
        build = "".join(f'case "$out" in *{name}) {fails("build " + name)};; esac\n' for name in ("device", "guarded"))
        stub(
            stubs / "nvcc",
            f'[ "$1" = --version ] && exit 0\nout="${{@: -1}}"\n{build}cp {tmp_path}/program "$out"',
        )
        # As the tool: the program's own status, unless asked for another one on a finding.
        tools = "".join(
            f'[ "$2" = {tool} ] && [[ "$*" = *--error-exitcode* ]] && {fails(tool)}\n'
            for tool in ("memcheck", "racecheck")
        )
        stub(stubs / "compute-sanitizer", tools + "exit 0")
        stub(stubs / "make", fails("module"))
        stub(
            venv / "python",
            f'{LAYER}\n[ "$JAX_PLATFORMS" = cuda,cpu ] || exit 4\n'
            f'[ "$2" = moejax.info ] && {{ {fails("info")}; exit 0; }}\n{fails("selftest")}',
        )
        for name in without:
            (stubs / name).unlink()
        environment = {"PATH": f"{stubs}:/usr/bin:/bin", "VENV": str(tmp_path / "venv"), "NVCC": str(stubs / "nvcc")}
        done = subprocess.run(
            ["bash", "scripts/blackwell_first_run.sh", str(tmp_path / "result.txt")],
            cwd=scripts.parent,
            env=environment | {"HOME": os.environ.get("HOME", "/")},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout + done.stderr, tmp_path / "result.txt"

    return start


ALL = (
    "gpus,toolkit,build sm100_device,test,memcheck,racecheck,synccheck,initcheck,bench,"
    "build sm100_device_guarded,guarded,module,info,selftest"
)


def test_success_is_every_step(first_run):
    status, printed, result = first_run()
    assert status == 0 and "every step passed" in printed and f"passed: {ALL}\n" in printed
    assert "failed: none" in printed and f"passed: {ALL}\n" in result.read_text()


@pytest.mark.parametrize(
    "step, also_missing",
    [
        ("gpus", ()),
        ("build device", ("test", "memcheck", "bench")),
        ("test", ()),
        ("memcheck", ()),
        ("racecheck", ()),
        ("bench", ()),
        ("build guarded", ("guarded",)),
        ("guarded", ()),
        ("module", ("info", "selftest")),
        ("info", ()),
        ("selftest", ()),
    ],
)
def test_a_failing_step_is_the_verdict_whatever_is_printed(first_run, step, also_missing):
    status, printed, _ = first_run(broken=[step])
    name = step.replace("build guarded", "build sm100_device_guarded").replace("build device", "build sm100_device")
    lines = dict(line[3:].split(": ", 1) for line in printed.splitlines() if line.startswith("== ") and ": " in line)
    assert status == 1 and "every step passed" not in printed
    assert lines["failed"] == name and f"FAILED: {name} first" in printed and "moe.backend=xla" in printed
    assert not set(lines["passed"].split(",")) & {name, *also_missing}


@pytest.mark.parametrize("gpu", ["NVIDIA H200, 9.0", "NVIDIA RTX PRO 6000, 12.0", "No devices were found", ""])
def test_another_gpu_or_none_stops_before_anything_runs(first_run, gpu):
    status, printed, result = first_run(gpu=gpu)
    assert status == 2 and "no GPU of compute capability 10.x" in printed and (gpu or "nothing") in printed
    assert not result.exists()


def test_no_driver_and_no_compiler_stop_before_anything_runs(first_run):
    status, printed, result = first_run(without=["nvidia-smi"])
    assert status == 2 and "no GPU of compute capability 10.x" in printed and not result.exists()
    status, printed, result = first_run(without=["nvcc"])
    assert status == 2 and "nvcc not found" in printed and not result.exists()


def test_a_missing_sanitizer_is_no_success(first_run):
    status, printed, _ = first_run(without=["compute-sanitizer"])
    assert status == 1 and "INCOMPLETE" in printed and "skipped: memcheck,racecheck,synccheck,initcheck" in printed
