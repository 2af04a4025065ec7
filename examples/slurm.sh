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
#   sbatch examples/slurm.sh torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \
#       --rdzv-endpoint "$HOST:29500" --shutdown-timeout 120 --no-python \
#       stretto train run.yaml --folder runs/a --resume auto
#
# SLURM sends USR1 to this script before the limit. torchrun passes on TERM, not USR1, so TERM goes
# to the command, which writes a checkpoint and ends. --shutdown-timeout is how long torchrun then
# waits before it kills (30 s by default): longer than a batch and a checkpoint, shorter than USR1@.
if [ $# -eq 0 ]; then
    echo "usage: sbatch examples/slurm.sh COMMAND..." >&2
    exit 2
fi
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
