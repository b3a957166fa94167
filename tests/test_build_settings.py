"""What the environment of an installation decides about the build."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize(("value", "define"), [(None, "OFF"), ("1", "1"), ("0", "0")])
def test_pip_passes_moejax_cuda_on_to_cmake(value, define, monkeypatch):
    reader = pytest.importorskip("scikit_build_core.settings.skbuild_read_settings").SettingsReader
    if value is None:
        monkeypatch.delenv("MOEJAX_CUDA", raising=False)
    else:
        monkeypatch.setenv("MOEJAX_CUDA", value)
    settings = reader.from_file(ROOT / "pyproject.toml", {}, state="wheel").settings
    assert settings.cmake.define["MOEJAX_CUDA"] == define


def install(folder, value, *, nvcc, built_before=False):
    """Runs the second step of scripts/install.sh with a python that prints its arguments, and nothing of this machine on PATH."""
    venv, tools = folder / "venv", folder / "tools"
    (venv / "bin").mkdir(parents=True)
    tools.mkdir()
    if built_before:
        (venv / ".cuda").touch()
    for name in ("bash", "basename", "dirname", "grep", "touch"):
        (tools / name).symlink_to(shutil.which(name))
    scripts = {venv / "bin/python": 'printf "%s\\n" "$@"', tools / "nvidia-smi": "exit 1"}
    if nvcc:
        scripts[tools / "nvcc"] = "exit 0"
    for path, text in scripts.items():
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    environment = {"PATH": str(tools), "MOEJAX_CUDA": value, "CUDA_HOME": "/nowhere"}
    command = [tools / "bash", ROOT / "scripts/install.sh", venv, "moejax"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("value", "built_before", "define"),
    [("0", True, "OFF"), ("0", False, "OFF"), ("auto", False, "OFF"), ("", True, "ON"), ("1", False, "ON")],
)
def test_the_installer_says_on_or_off_whatever_was_built_before(value, built_before, define, tmp_path):
    """A build folder keeps what it was told, so an option left out would be the last build's."""
    done = install(tmp_path, value, nvcc=True, built_before=built_before)
    assert done.returncode == 0, done.stderr
    assert f"cmake.define.MOEJAX_CUDA={define}" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("value", "message"), [("1", "no nvcc found on PATH or under /nowhere"), ("maybe", "MOEJAX_CUDA=maybe is not 1")]
)
def test_the_installer_refuses_cuda_without_nvcc_and_words_it_does_not_know(value, message, tmp_path):
    done = install(tmp_path, value, nvcc=False)
    assert done.returncode == 1 and message in done.stderr and done.stdout == ""
