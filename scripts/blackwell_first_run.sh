#!/usr/bin/env bash
# For the first person with a B200, GB200, B300 or GB300: builds the Blackwell kernels, tests every program against plain loops, runs them
# under compute-sanitizer and with guards on tensor memory, times them, runs moejax's self-test of the whole layer, and leaves one file to
# send. None of this has run on such a GPU before: expect a failure, and send the file either way.
#
# Needs: nvcc 13.0 or newer, a C++17 compiler; for the self-test Python 3.12 and JAX with CUDA, as `make cuda` installs. Takes about fifteen
# minutes, most of it compute-sanitizer.
#   scripts/blackwell_first_run.sh [RESULT_FILE]
set -u
cd "$(dirname "$0")/.."
result=$(realpath -m "${1:-blackwell-result.txt}")
build=build/blackwell
kernels=kernels_cuda
mkdir -p "$build"
: > "$result"

say() { echo "== $*" | tee -a "$result"; }
run() {  # name, command...
  local name=$1; shift
  say "$name: $*"
  "$@" >> "$result" 2>&1
  say "$name: exit status $?"
}

nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
[ -x "$nvcc" ] || { echo "nvcc not found: install the CUDA toolkit 13.0 or newer, or set NVCC"; exit 2; }
toolkit=$(dirname "$(dirname "$(realpath "$nvcc")")")
say "commit $(git rev-parse HEAD 2>/dev/null || echo unknown), $(date -u +%Y-%m-%dT%H:%MZ)"
run gpus nvidia-smi
run toolkit "$nvcc" --version

build_program() {  # output, extra options...
  local output=$1; shift
  run "build $(basename "$output")" "$nvcc" -std=c++17 -O3 -gencode arch=compute_100f,code=sm_100f "$@" -I"$kernels" -Itests/cuda \
    "$kernels/sm100_kernels.cu" "$kernels/task_list.cu" "$kernels/quantize_rows.cu" "$kernels/quantize_tiles.cu" \
    tests/cuda/sm100_device.cc "$kernels/tensor_map.cc" -o "$output"
}
build_program "$build/sm100_device"
build_program "$build/sm100_device_guarded" -Xptxas -g-tmem-access-check

run test timeout 600 "$build/sm100_device" test
run guarded timeout 600 "$build/sm100_device_guarded" small
sanitizer=$(command -v compute-sanitizer || echo "$toolkit/bin/compute-sanitizer")
if [ -x "$sanitizer" ]; then
  for tool in memcheck racecheck synccheck initcheck; do
    run "$tool" timeout 900 "$sanitizer" --tool "$tool" --print-limit 20 "$build/sm100_device" small
  done
else
  say "compute-sanitizer not found: skipped"
fi
run bench timeout 600 "$build/sm100_device" bench

# The layer as a user's program would run it: schedule, dispatch, quantisers, products, combine, through XLA's FFI.
python=${VENV:-.venv}/bin/python
run module make cuda
run info "$python" -m moejax.info
run selftest timeout 900 "$python" -m moejax.selftest --backend native

if grep -q '"failures": 0' "$result"; then
  say "all programs agree with plain loops"
else
  say "some programs failed"
fi
if grep -qE '^[1-9][0-9]* ok, 0 failed' "$result"; then
  say "the layer agrees with the exact path"
else
  say "the layer failed, or could not run; moejax refuses it on this GPU then, and moe.backend=xla runs BF16 and MXFP8"
fi
echo "please send $result"
