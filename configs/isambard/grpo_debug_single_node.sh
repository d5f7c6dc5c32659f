# sbatch sbatch/grpo_rlzero.sbatch configs/isambard/grpo_debug_single_node.sh
# or: hpc-grpo submit configs/isambard/grpo_debug_single_node.sh
TRAINING_ARGS=(isambard/grpo_debug_single_node)
MAX_JOB_CHAINS=0
