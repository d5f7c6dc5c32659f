# The same run as a shell config: what `sbatch sbatch/grpo_rlzero.sbatch configs/virtual_slurm/debug.sh` sources.
TRAINING_ARGS=(virtual_slurm/debug.yaml train.zero_stage=3 run.name=debug-slurm-zero3)
