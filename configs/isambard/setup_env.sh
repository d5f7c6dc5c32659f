#!/bin/bash
# One-time set-up on an Isambard-AI login node, from the repository:   bash configs/isambard/setup_env.sh [CONFIG ...]
# Makes .venv with the GPU libraries (aarch64 wheels) and fetches what the configs name to $SCRATCHDIR, since jobs run
# offline.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
configs=("${@:-isambard/grpo_debug_single_node}")

# reset, not purge: purge removes the site's own default modules
if type module > /dev/null 2>&1; then
  set +u  # module systems use unset variables
  module reset
  module load cudatoolkit gcc-native
  set -u
fi

python=$(command -v python3.12 || command -v python3.11) || {
  echo "error: Python 3.11.4 or newer is needed; 'module load cray-python' or uv gives one." >&2
  exit 69
}
PYTHON=$python tools/setup.sh gpu
source .venv/bin/activate

for config in "${configs[@]}"; do hpc-grpo cluster prefetch "$config"; done
echo "Ready. Runs go to \$SCRATCHDIR/hpc-grpo: put this into your ~/.bashrc, so that commands find them by name:"
echo "  export HPC_GRPO_RUNS_ROOT=\$SCRATCHDIR/hpc-grpo"
echo "Put your account in configs/isambard/site.yaml (account: brics.PROJECT), then:"
echo "  sbatch --account=ACCOUNT --time=1:00:00 sbatch/grpo_rlzero.sbatch configs/isambard/grpo_debug_single_node.sh"
