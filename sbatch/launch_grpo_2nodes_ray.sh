#!/bin/bash
# Train on two hosts or more by hand, without a scheduler:   launch_grpo_2nodes_ray.sh [head|worker|stop] [CONFIG] [KEY=VALUE ...]
#
# On every host:   export RAY_HEAD_IP=192.168.1.100 RAY_HEAD_PORT=10001 EXPECTED_WORKERS=1 CONFIG=my_run.yaml
# and, where the hosts share no file system, the same secret:   export HPC_GRPO_TOKEN=...   (openssl rand -hex 32)
# Hosts may be started in any order. Ctrl+C or `stop` on a host ends what runs there.

set -euo pipefail

role=head
case "${1:-}" in head | worker | stop) role=$1 && shift ;; esac
# Without a CONFIG among the words the variable of that name counts.
if (($# == 0)) || [[ $1 == *=* ]]; then
  if [[ -z ${CONFIG:-} ]]; then
    echo "usage: launch_grpo_2nodes_ray.sh [head|worker|stop] [CONFIG] [KEY=VALUE ...]; or export CONFIG" >&2
    exit 78
  fi
  set -- "$CONFIG" "$@"
fi
home=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
if [[ -f $home/.venv/bin/activate ]]; then source "$home/.venv/bin/activate"; fi
exec hpc-grpo place host "$role" "$@"
