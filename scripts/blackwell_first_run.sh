#!/usr/bin/env bash
# For the first person with a B200, GB200, B300 or GB300: builds the Blackwell kernels, tests every program against plain loops, runs them
# under compute-sanitizer and with guards on tensor memory, times them, runs moejax's self-test of the whole layer, and leaves one file to
# send. None of this has run on such a GPU before: expect a failure, and send the file either way.
#
# Needs: nvcc 13.0 or newer, a C++17 compiler; for the self-test Python 3.12 and JAX with CUDA, as `make cuda` installs. Takes about fifteen
# minutes by our guess, most of it compute-sanitizer.
#   scripts/blackwell_first_run.sh [RESULT_FILE]
# Exit status: 0 every step passed, 1 a step failed or could not run, 2 there is no such GPU or no compiler, and nothing was run.
set -u
result=$(realpath -m "${1:-blackwell-result.txt}")
cd "$(dirname "$0")/.." || exit 2
build=build/blackwell
kernels=kernels_cuda

capabilities=$(nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader 2>&1)
if ! grep -qE ', 10\.[0-9]+$' <<< "$capabilities"; then
  echo "no GPU of compute capability 10.x (B200, GB200, B300, GB300) here, nothing was run; nvidia-smi says: ${capabilities:-nothing}" >&2
  exit 2
fi
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
[ -x "$nvcc" ] || { echo "nvcc not found, nothing was run: install the CUDA toolkit 13.0 or newer, or set NVCC" >&2; exit 2; }
toolkit=$(dirname "$(dirname "$(realpath "$nvcc")")")

: > "$result" || exit 2
mkdir -p "$build"
passed=() failed=() skipped=()

say() { echo "== $*" | tee -a "$result"; }
run() {  # name, command...; the command's own exit status decides
  local name=$1 status; shift
  say "$name: $*"
  "$@" >> "$result" 2>&1
  status=$?
  if [ $status = 0 ]; then passed+=("$name"); else failed+=("$name"); fi
  say "$name: exit status $status"
  return $status
}
skip() {  # name, why
  skipped+=("$1")
  say "$1: skipped, $2"
}

say "commit $(git rev-parse HEAD 2>/dev/null || echo unknown), $(date -u +%Y-%m-%dT%H:%MZ)"
say "GPUs: $capabilities"
run gpus nvidia-smi
run toolkit "$nvcc" --version

build_program() {  # output, extra options...
  local output=$1; shift
  rm -f "$output"  # an older build must not be what is tested
  run "build $(basename "$output")" "$nvcc" -std=c++17 -O3 -gencode arch=compute_100f,code=sm_100f "$@" -I"$kernels" -Itests/cuda \
    "$kernels/sm100_kernels.cu" "$kernels/task_list.cu" "$kernels/quantize_gathered.cu" "$kernels/quantize_rows.cu" \
    "$kernels/quantize_tiles.cu" "$kernels/quantize_transposed.cu" tests/cuda/sm100_device.cc "$kernels/tensor_map.cc" -o "$output"
}

sanitizer=$(command -v compute-sanitizer || echo "$toolkit/bin/compute-sanitizer")
if build_program "$build/sm100_device"; then
  run test timeout 600 "$build/sm100_device" test
  for tool in memcheck racecheck synccheck initcheck; do
    if [ -x "$sanitizer" ]; then  # which else exits with the program's own status, whatever it finds
      run "$tool" timeout 900 "$sanitizer" --tool "$tool" --error-exitcode 9 --print-limit 20 "$build/sm100_device" small
    else
      skip "$tool" "compute-sanitizer not found"
    fi
  done
  run bench timeout 600 "$build/sm100_device" bench
fi
if build_program "$build/sm100_device_guarded" -Xptxas -g-tmem-access-check; then
  run guarded timeout 600 "$build/sm100_device_guarded" small
fi

# The layer as a user's program would run it: schedule, dispatch, quantisers, products, combine, through XLA's FFI. On the GPU
# or not at all: JAX must not fall back to the CPU, whose kernels pass.
python=${VENV:-.venv}/bin/python
if run module make cuda; then
  export JAX_PLATFORMS=cuda,cpu
  run info timeout 300 "$python" -m moejax.info
  run selftest timeout 1800 "$python" -m moejax.selftest --backend native
fi

join() { local IFS=,; echo "${*:-none}"; }
say "passed: $(join "${passed[@]}")"
say "failed: $(join "${failed[@]}")"
say "skipped: $(join "${skipped[@]}")"
echo "please send $result"
if [ ${#failed[@]} != 0 ]; then
  say "FAILED: ${failed[0]} first. moejax refuses a layer whose self-test fails on this GPU; moe.backend=xla runs BF16 and MXFP8"
  exit 1
fi
if [ ${#skipped[@]} != 0 ]; then
  say "INCOMPLETE: what ran passed, and steps were skipped"
  exit 1
fi
say "every step passed: the programs agree with plain loops, the layer with the exact path"
