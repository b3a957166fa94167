#!/usr/bin/env bash
# Prints the path of a Python >= 3.12 that can make virtual environments, or says on stderr how to get one and fails.
# Looks at $PYTHON, or else at PATH, then at what pyenv and uv have installed.
set -u

candidates() {
  if [ -n "${PYTHON:-}" ]; then echo "$PYTHON"; return; fi
  printf '%s\n' python3.12 python3.13 python3.14 python3 python
  for version in 3.12 3.13 3.14; do
    ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python 2>/dev/null | sort -V -r
  done
  ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python 2>/dev/null | sort -V -r
  ls -d "$HOME"/.local/share/uv/python/cpython-3.1[2-9]*/bin/python3 2>/dev/null | sort -V
}

without_venv=""
while read -r candidate; do
  # Running it is the only reliable check: a pyenv shim exists for versions that are not active, and then fails.
  path=$("$candidate" -c 'import sys; sys.version_info >= (3, 12) and print(sys.executable)' 2>/dev/null) || continue
  [ -n "$path" ] || continue
  if "$path" -c 'import venv, ensurepip' 2>/dev/null; then
    echo "$path"
    exit 0
  fi
  without_venv=${without_venv:-$path}
done < <(candidates)

if [ -n "$without_venv" ]; then
  version=$("$without_venv" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  echo "moejax: $without_venv has no venv module. Install it with:  sudo apt-get install -y python$version-venv" >&2
  exit 1
fi
if command -v pyenv >/dev/null; then
  command="pyenv install 3.12"
elif command -v brew >/dev/null; then
  command="brew install python@3.12"
elif command -v apt-cache >/dev/null && apt-cache show python3.12 >/dev/null 2>&1; then
  command="sudo apt-get install -y python3.12 python3.12-venv python3.12-dev"
elif command -v dnf >/dev/null; then
  command="sudo dnf install -y python3.12 python3.12-devel"
else
  command="curl -LsSf https://astral.sh/uv/install.sh | sh && ~/.local/bin/uv python install 3.12"
fi
{
  if [ -n "${PYTHON:-}" ]; then
    echo "moejax: PYTHON=$PYTHON is not a working Python 3.12 or newer."
  else
    echo "moejax: needs Python 3.12 or newer; none found on PATH, or installed by pyenv or uv."
  fi
  echo "Install one with:  $command"
} >&2
exit 1
