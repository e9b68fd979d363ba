#!/bin/bash
#SBATCH --job-name=demo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --chdir=/work
#SBATCH --output=/runs/demo/logs/slurm-DIGEST/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:TERM@300
#SBATCH --gpus-per-node=8
# Written by `mcore-bundle launch slurm`; what every node executes is job.json beside it.
rm -f /runs/demo/logs/slurm-DIGEST/stop
save() { touch /runs/demo/logs/slurm-DIGEST/stop; }
trap save TERM
srun --cpu-bind=none --kill-on-bad-exit=0 -- /venv/bin/python -m bundle launch ray --job=/runs/demo/logs/slurm-DIGEST/job.json --restarts=2 --start &
# A signal ends the wait, and not the step; one that has ended says its code as often as it is asked.
while kill -0 $! 2>/dev/null; do wait $!; done
wait $!
code=$?
# Told to save, by its time limit or for another job: it goes on from its checkpoint, unless it was to stop.
if [ $code -eq 75 ] && [ ! -e /runs/demo/logs/slurm-DIGEST/stopped-"$SLURM_JOB_ID" ]; then
    scontrol requeue "$SLURM_JOB_ID"
else
    (echo $code >/runs/demo/logs/slurm-DIGEST/ended-"$SLURM_JOB_ID") 2>/dev/null
fi
exit $code
