#!/usr/bin/env bash
# Builds and runs the C++ tests of the CPU kernels under the address and undefined-behaviour sanitizers, then under the thread
# sanitizer. Any report fails. OpenBLAS is used as it is, so what happens inside it is not observed. Takes about two minutes.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-$(command -v python3)}

run() {
  local name=$1 sanitizers=$2
  cmake -S . -B "build/$name" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DMOEJAX_TESTS=ON -DMOEJAX_SANITIZE="$sanitizers" \
    -DPython_EXECUTABLE="$python" ${MOEJAX_XLA_INCLUDE:+-DMOEJAX_XLA_INCLUDE="$MOEJAX_XLA_INCLUDE"} >"build/$name.log" 2>&1 ||
    { cat "build/$name.log"; exit 1; }
  cmake --build "build/$name" --target cpp_tests
  echo "== $sanitizers"
  ctest --test-dir "build/$name" --output-on-failure -R '^cpp_'
}

mkdir -p build
export UBSAN_OPTIONS=print_stacktrace=1 ASAN_OPTIONS=detect_leaks=1 TSAN_OPTIONS=halt_on_error=1
run sanitize-address address,undefined
run sanitize-thread thread
