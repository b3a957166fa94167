"""Packaging: the locked versions, the search for a Python, and an installation without a compiler."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import moejax

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# What the scripts call; nothing else is on PATH, so that no Python of this machine is found by accident.
TOOLS = "bash sh env ls sort cat cp mv rm mkdir touch sed grep find head dirname basename uname tr cut make".split()


@pytest.fixture
def bare(tmp_path):
    """The environment of a machine without Python, pyenv, compiler and CMake; `bin` is its PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        if path := shutil.which(tool):
            (folder / tool).symlink_to(path)
    (tmp_path / "home").mkdir()
    keep = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.endswith("_proxy")}
    return keep | {"PATH": str(folder), "HOME": str(tmp_path / "home")}


def find_python(environment):
    return subprocess.run(
        [ROOT / "scripts/find_python.sh"], env=environment, capture_output=True, text=True, timeout=60
    )


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_every_requirement_is_locked_at_a_version_it_allows():
    locked = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    locked = {canonicalize_name(name): version for name, version in locked.items()}
    extras = PROJECT["project"]["optional-dependencies"]
    for text in [*PROJECT["project"]["dependencies"], *extras["test"], *extras["lint"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), text
    for text in PROJECT["build-system"]["requires"]:
        requirement = Requirement(text)
        if requirement.name != "jaxlib":  # the build's is the oldest, for its headers; the locked one runs
            assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), text


def test_the_oldest_jax_is_the_same_everywhere():
    (oldest,) = re.findall(r"^OLDEST_JAX = (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    jax = Requirement(next(text for text in PROJECT["project"]["dependencies"] if text.startswith("jax>")))
    assert str(jax.specifier) == f"<0.13,>={oldest}"
    assert f"jaxlib=={oldest}" in PROJECT["build-system"]["requires"]


def test_ci_runs_what_the_readme_says():
    script = (ROOT / ".ci/run").read_text()
    readme = (ROOT / "README.md").read_text()
    for command in ("make test", "make train"):
        assert re.search(rf"^{command}\b", readme, re.M), f"README.md does not show {command}"
    assert re.search(r"^make test$", script, re.M)
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_help_names_every_target_a_person_may_run():
    text = (ROOT / "Makefile").read_text()
    phony = set(re.search(r"^\.PHONY: (.*)$", text, re.M).group(1).split())
    shown = set(re.findall(r'@echo "make (\S+)', text))
    assert shown <= phony and {"train", "test", "test-all", "cuda", "lint", "sanitize", "bench-cpu"} <= shown


def test_a_python_under_pyenv_is_found_although_its_shim_on_path_fails(bare):
    executable(pathlib.Path(bare["PATH"]) / "python3.12", "#!/bin/sh\nexit 127\n")
    versions = pathlib.Path(bare["HOME"]) / ".pyenv/versions"
    executable(versions / "3.11.4/bin/python", "#!/bin/sh\nexit 0\n")  # too old: prints no path
    executable(versions / "3.12.9/bin/python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    done = find_python(bare)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == sys.executable


def test_without_a_python_one_line_says_how_to_install_one(bare):
    done = find_python(bare)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("moejax: needs Python 3.12 or newer; none found")
    assert done.stderr.splitlines()[1].startswith("Install one with:  ") and len(done.stderr.splitlines()) == 2
    executable(pathlib.Path(bare["PATH"]) / "pyenv", "#!/bin/sh\n")
    assert "pyenv install 3.12" in find_python(bare).stderr
    assert "PYTHON=/nowhere/python is not a working Python" in find_python(bare | {"PYTHON": "/nowhere/python"}).stderr


def test_a_python_without_venv_is_told_apart_from_none(bare):
    answers = f'*ensurepip*) exit 1;; *executable*) echo "$0";; *) exec {sys.executable} "$@";;'
    script = f'#!/bin/sh\ncase "$2" in {answers} esac\n'
    executable(pathlib.Path(bare["PATH"]) / "python3", script)
    done = find_python(bare)
    assert done.returncode == 1
    assert "has no venv module" in done.stderr and "apt-get install -y python3.1" in done.stderr


def test_make_stops_with_that_message(bare, tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "moejax").mkdir()
    (tmp_path / "moejax/__init__.py").touch()
    done = subprocess.run(["make", "test"], cwd=tmp_path, env=bare, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "Install one with:" in done.stderr


def test_without_headers_of_python_nothing_is_compiled_and_the_reason_is_said(tmp_path):
    cmake = shutil.which("cmake", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    if cmake is None or shutil.which("c++") is None:
        pytest.skip("needs CMake and a C++ compiler")
    build = tmp_path / "build"
    options = [f"-DPython_EXECUTABLE={sys.executable}", "-DPython_INCLUDE_DIR=/nowhere"]
    configure = [cmake, "-S", ROOT, "-B", build, *options]
    done = subprocess.run(configure, capture_output=True, text=True, timeout=120)
    if "or higher is required" in done.stderr:
        pytest.skip("needs a newer CMake")
    assert done.returncode == 0, done.stderr
    assert "has no headers (Python.h)" in done.stderr and "xla" in done.stderr
    install = [cmake, "--install", build, "--component", "python", "--prefix", tmp_path / "site"]
    subprocess.run(install, capture_output=True, check=True, timeout=60)
    assert not (tmp_path / "site").exists()
    wanted = subprocess.run([*configure, "-DMOEJAX_CUDA=ON"], capture_output=True, text=True, timeout=120)
    assert wanted.returncode != 0 and "MOEJAX_CUDA is on but" in wanted.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_installs_and_works_without_a_compiler(bare, tmp_path):
    source = tmp_path / "source"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", source], env=bare, check=True, timeout=800)
    program = "import moejax, moejax.native as n; print(moejax.__version__); print(n.missing('_cpu'))"
    done = subprocess.run([python, "-c", program], cwd=tmp_path, env=bare, capture_output=True, text=True, timeout=120)
    version, reason = done.stdout.splitlines()
    assert version == moejax.__version__ and reason != "None", done.stderr
