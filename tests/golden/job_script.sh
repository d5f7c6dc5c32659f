#!/bin/bash

# Parameters
#SBATCH --account=brics.x
#SBATCH --exclusive
#SBATCH --gpus-per-node=4
#SBATCH --job-name=demo
#SBATCH --mail-user=a@b
#SBATCH --no-requeue
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output='/scratch/my runs/demo/slurm/%j_0_log.out'
#SBATCH --partition=workq
#SBATCH --signal=B:USR1@120
#SBATCH --time=60
#SBATCH --wckey=''

# setup
trap '' USR1
hostname > '/scratch/my runs/demo/slurm/'"$SLURM_JOB_ID"'.began' || true
module reset
module load brics/nccl || { echo "error: launch.modules: 'brics/nccl' could not be loaded on $(hostname). Name a module that 'module avail' lists there, or take it out." >&2; exit 78; }
module load cudatoolkit || { echo "error: launch.modules: 'cudatoolkit' could not be loaded on $(hostname). Name a module that 'module avail' lists there, or take it out." >&2; exit 78; }
ulimit -l unlimited
export PATH=/env/bin:$PATH

# command
export SUBMITIT_EXECUTOR=slurm
exec /env/bin/python -E -u '/scratch/my runs/demo/source' attempt '/scratch/my runs/demo'
