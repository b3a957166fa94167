#!/bin/bash
# Trains on 2 nodes of 8 GPUs, one process per GPU:
#   sbatch scripts/launch/slurm.sh configs/quickstart.yaml run_dir=/shared/runs/first mesh.expert=8
# The checkout, the run folder and data.cache_dir must lie on a file system that all nodes see. moejax has run this way on CPU
# processes of one machine only; nobody has run it on a Slurm cluster yet.
#SBATCH --job-name=moejax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail

# srun: SIGTERM reaches every task two minutes before the end (more, if a step and a save take longer); all agree on a step,
# save it and exit with 143.
# --kill-on-bad-exit: when the watchdog of one task ends it (exit code 75), the others need not wait for theirs.
code=0
srun --kill-on-bad-exit=1 .venv/bin/python train.py "$@" || code=$?
echo "train.py: exit code $code"
# 75: a process died or hung; 143: time was up. Both continue from the newest checkpoint.
if [ "$code" -eq 75 ] || [ "$code" -eq 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
