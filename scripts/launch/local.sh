#!/bin/bash
# Trains with N processes on this machine, without a scheduler: on GPUs one process drives one of them; on a CPU it is a rehearsal.
#   scripts/launch/local.sh 4 configs/quickstart.yaml run_dir=runs/four mesh.expert=4
# (One process can drive all GPUs of a machine too: python train.py …, without this script.)
set -uo pipefail
if [ $# -lt 2 ] || ! [[ $1 =~ ^[1-9][0-9]*$ ]]; then
  sed -n '2,4s/^# \{0,1\}//p' "$0"
  exit 2
fi
processes=$1
shift
port=$((20000 + RANDOM % 20000))
pids=()
for ((process = 0; process < processes; process++)); do
  "${PYTHON:-.venv/bin/python}" train.py "$@" \
    distributed.coordinator=localhost:$port distributed.processes="$processes" distributed.process=$process &
  pids+=($!)
done
trap 'kill -TERM "${pids[@]}" 2>/dev/null' INT TERM # one signal to each: they agree on a step, save it, and end
code=0
for pid in "${pids[@]}"; do
  wait "$pid"
  status=$?
  while kill -0 "$pid" 2>/dev/null; do # wait was interrupted by the trap
    wait "$pid"
    status=$?
  done
  [ "$status" -gt "$code" ] && code=$status
done
exit "$code"
