#!/usr/bin/env bash
# Creates or updates a virtual environment with moejax in it. Called by the Makefile; quick when there is nothing to do.
#   scripts/install.sh VENV deps      the environment, and every dependency at the version in constraints.txt
#   scripts/install.sh VENV moejax    moejax itself, editable, with its compiled modules
# Environment: JAX_PIN another jax version than the one in constraints.txt; MOEJAX_CUDA=1/0 builds CUDA code always/never
# (unset: where a GPU is visible, or once `make cuda` has been run in this environment).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
step=$2
python=$venv/bin/python
headers=$venv/ffi-headers
pip() { "$python" -m pip --disable-pip-version-check "$@"; }

wants_cuda() {
  case "${MOEJAX_CUDA:-auto}" in
    1 | ON | on | true) return 0 ;;
    0 | OFF | off | false) return 1 ;;
    auto | "") [ -e "$venv/.cuda" ] || { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; } ;;
    *) echo "moejax: MOEJAX_CUDA=$MOEJAX_CUDA is not 1 (build CUDA code) or 0 (don't)" >&2; exit 1 ;;
  esac
}

gpu_visible() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; }

if [ "$step" = deps ]; then
  if ! [ -x "$python" ] || ! "$python" -c 'import pip' 2>/dev/null; then
    base=$(scripts/find_python.sh)
    echo "Creating $venv with $("$base" --version) ($base)"
    rm -rf "$venv"
    "$base" -m venv "$venv"
  fi
  constraints=$venv/constraints.txt
  cp constraints.txt "$constraints"
  if [ -n "${JAX_PIN:-}" ]; then
    sed -E "s/^(jax|jaxlib)==.*/\1==$JAX_PIN/" constraints.txt >"$constraints"
  fi
  extras="test,lint"
  gpu_visible && extras="$extras,cuda"
  echo "Installing the dependencies of moejax[$extras] into $venv (the first time: a few minutes)"
  pip install -qq -c "$constraints" pip
  requirements=$venv/requirements.txt
  "$python" scripts/requirements.py "$extras" >"$requirements"
  pip install -qq -c "$constraints" -r "$requirements"
  # The FFI headers of the oldest supported jaxlib, apart from the jaxlib that runs (pyproject.toml says why).
  oldest=$("$python" scripts/requirements.py --headers)
  if ! [ -e "$headers/.$oldest" ]; then
    rm -rf "$headers"
    pip install -qq --no-deps --target "$headers" "$oldest"
    find "$headers/jaxlib" -mindepth 1 -maxdepth 1 ! -name include ! -name '*.py' -exec rm -rf {} +
    touch "$headers/.$oldest"
  fi
else
  options=(-C "build-dir=build/$(basename "$venv")")
  cuda=OFF
  if wants_cuda; then
    if ! command -v nvcc >/dev/null && ! [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; then
      [ "${MOEJAX_CUDA:-auto}" = auto ] || { echo "moejax: no nvcc found on PATH or under ${CUDA_HOME:-/usr/local/cuda}: install the CUDA toolkit 13.0 or newer" >&2; exit 1; }
      echo "A GPU is visible but nvcc is not: building without CUDA kernels (install the CUDA toolkit 13.0 or newer, then: make cuda)"
    else
      cuda=ON
      touch "$venv/.cuda"
    fi
  fi
  # Always said, or CMake's cache would answer with what the last build in this folder was told.
  options+=(-C "cmake.define.MOEJAX_CUDA=$cuda")
  echo "Building and installing moejax into $venv"
  # Without isolation the build is incremental and uses the locked tools; PYTHONPATH puts the old headers first.
  PYTHONPATH="$PWD/$headers" pip install -qq --no-build-isolation --no-deps "${options[@]}" -e .
fi
