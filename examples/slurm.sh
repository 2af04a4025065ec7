#!/bin/bash
#SBATCH --job-name=stretto
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
# Run a command on all nodes until it ends, over as many time limits as it needs:
#
#   sbatch --nodes 2 examples/slurm.sh torchrun --nproc-per-node 8 --no-python \
#       stretto train run.yaml --folder runs/a --resume auto
#
# SLURM sends USR1 to this script before the limit. torchrun passes on TERM, not USR1, so TERM goes
# to the command, which writes a checkpoint and ends; then the job is requeued.
if [ $# -eq 0 ]; then
    echo "usage: sbatch examples/slurm.sh COMMAND..." >&2
    exit 2
fi
# torchrun reads these in place of options: the nodes of a job are known only here.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export PET_NNODES=${PET_NNODES:-$SLURM_NNODES} PET_RDZV_BACKEND=${PET_RDZV_BACKEND:-c10d}
export PET_RDZV_ID=${PET_RDZV_ID:-$SLURM_JOB_ID}
export PET_RDZV_ENDPOINT=${PET_RDZV_ENDPOINT:-$first:$((20000 + SLURM_JOB_ID % 10000))}
# How long torchrun waits after TERM before it kills, by default 30 seconds: longer than a batch and
# a checkpoint, shorter than the time after USR1.
export PET_SHUTDOWN_TIMEOUT=${PET_SHUTDOWN_TIMEOUT:-150}
stopping=0
stop() {
    stopping=1
    kill -TERM "$child" 2>/dev/null
}
trap stop USR1
srun --kill-on-bad-exit=0 "$@" &
child=$!
wait "$child"
code=$?
# A signal ends `wait` early, and the command is still there.
while kill -0 "$child" 2>/dev/null; do
    wait "$child"
    code=$?
done
# Whatever the code is: a run that had just ended begins, finds nothing left to do, and ends.
if [ "$stopping" = 1 ]; then
    echo "stopped at the time limit (exit code $code); requeued"
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
