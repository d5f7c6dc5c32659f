# sbatch --nodes=4 sbatch/grpo_rlzero.sbatch configs/isambard/grpo_7b_rlzero_general.sh
# or: hpc-grpo submit configs/isambard/grpo_7b_rlzero_general.sh --nodes 4
TRAINING_ARGS=(
  isambard/grpo_7b_rlzero_general
  metrics.wandb.project=hpc-grpo
)
MAX_JOB_CHAINS=10  # follow-on jobs, each queued when the one before starts
export NCCL_DEBUG=WARN
