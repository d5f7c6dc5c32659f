# The same run as a shell config: what `sbatch sbatch/grpo_rlzero.sbatch configs/virtual_slurm/debug.sh` sources.
TRAINING_ARGS=(virtual_slurm/debug.yaml --set train.zero_stage=3 --set run.name=debug-slurm-zero3)
