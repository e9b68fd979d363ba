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
#SBATCH --signal=TERM@300
#SBATCH --gpus-per-node=8
# Written by `mcore-bundle launch slurm`; every node executes job.json beside this script.
# Memory that a network card writes to stays where it is: as much as this node allows.
ulimit -l "$(ulimit -Hl)"
latest=/runs/demo/checkpoints/latest
newest() { step=$(cat "$latest" 2>/dev/null | tr -dc 0-9); echo $((10#0$step)); }
starts=/runs/demo/logs/slurm-DIGEST/starts-$SLURM_JOB_ID
ended=/runs/demo/logs/slurm-DIGEST/ended-$SLURM_JOB_ID
rm -f "$ended"
(newest >>"$starts") 2>/dev/null
report_lost() {
    nodes=$(sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --states=down --format=%N | sort -u)
    [ -n "$nodes" ] || return
    nodes=${nodes//$'\n'/, }
    verdict='{"format": "mcore-bundle verdict", "code": 1, "kind": "lost node", "cause": "lost with all its ranks (Slurm says that it is down)", "action": "restart without node", "rank": null, "node": "@NODES@", "node_rank": 0, "nodes": 2, "device": null, "evidence": [], "details": [], "silent": [], "sentence": "@NODES@: lost with all its ranks (Slurm says that it is down); restart without @NODES@"}'
    echo "${verdict//@NODES@/$nodes}" >/runs/demo/logs/slurm-DIGEST/verdict-"$SLURM_JOB_ID".json
    sentence='@NODES@: lost with all its ranks (Slurm says that it is down); restart without @NODES@'
    echo "${sentence//@NODES@/$nodes}"
}
trap 'report_lost; trap - TERM; kill -TERM $$' TERM
srun --cpu-bind=none --kill-on-bad-exit=0 '--container-image=registry.example:5000#us/bundle:1' --container-mounts=/work:/work,/runs/demo:/runs/demo,/data:/data,/models:/m:ro,/dev/infiniband:/dev/infiniband --container-workdir=/work --no-container-mount-home -- mcore-bundle train --job=/runs/demo/logs/slurm-DIGEST/job.json &
wait $!
code=$?
# A job that was asked to save, as by its time limit, is queued again; a stopped job is not.
goes_on() {
    [ $code -eq 75 ] && [ ! -e /runs/demo/logs/slurm-DIGEST/stopped-"$SLURM_JOB_ID" ] || return
    mapfile -t last < <(tail -n 3 "$starts" 2>/dev/null)
    if [ ${#last[@]} -ge 3 ] && [ "$(newest)" -le $((last[0] + 3)) ]; then
        echo "not queued again: 3 starts in a row made one step each, as the job is asked to save while"
        echo "it starts. Give it more time (--sbatch time=...), or a partition without preemption"
        return 1
    fi
}
if ! { goes_on && scontrol requeue "$SLURM_JOB_ID"; }; then
    # The exit code tells other machines that the output is complete there.
    sync /dev/stdout 2>/dev/null
    (echo $code >"$ended") 2>/dev/null
    # The record of a job that was stopped says CANCELLED, not FAILED.
    case $code in 75 | 143)
        [ ! -e /runs/demo/logs/slurm-DIGEST/stopped-"$SLURM_JOB_ID" ] || scancel "$SLURM_JOB_ID" ;;
    esac
fi
exit $code
