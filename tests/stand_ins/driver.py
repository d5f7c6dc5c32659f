"""A driver for tests of launching: real Ray, no training.

`python -m tests.stand_ins.driver RUN_DIR` shows what the cluster and each node look like, then writes COMPLETE and
exits 0; HPC_GRPO_STAND_IN_EXIT gives another code, HPC_GRPO_STAND_IN_SLEEP_S keeps it running before that,
HPC_GRPO_STAND_IN_STUCK has it hang in a phase of which more was expected.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import ray

from hpc_grpo.driver.schedule import wait_for_ray
from hpc_grpo.run.pulse import PULSE, Patience
from hpc_grpo.run.stacks import dump_stacks_on_signal


@ray.remote(num_cpus=0.5)
class Witness:
    """Tells what an actor on its node sees."""

    def __init__(self) -> None:
        dump_stacks_on_signal("witness")

    def see(self) -> dict[str, object]:
        store = Path(os.environ["HPC_GRPO_SHM_DIR"])
        (store / "bucket").write_bytes(b"weights")
        names = (entry.split("=")[0] for entry in Path("/proc/self/environ").read_text().split("\0"))
        return {
            "host": os.uname().nodename,
            "ip": ray.util.get_node_ip_address(),
            "cwd": str(Path.cwd()),
            "env": {name: "***" if "KEY" in name else os.environ.get(name, "") for name in sorted(names) if name},
            "store_mode": oct(store.stat().st_mode & 0o777),
        }


def on_signal(sig: int, _frame: object) -> None:
    print(f"driver got {signal.Signals(sig).name}", flush=True)
    sys.exit(75)


def listen() -> None:
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(sig, on_signal)


def main(run_dir: Path) -> int:
    listen()
    dump_stacks_on_signal("driver")
    ray.init(address=wait_for_ray(lambda: False), log_to_driver=False)
    listen()  # Ray's crash handler takes SIGTERM for itself
    nodes = [node for node in ray.nodes() if node["Alive"]]
    witnesses = [Witness.options(resources={f"node:{node['NodeManagerAddress']}": 0.01}).remote() for node in nodes]
    seen = ray.get([witness.see.remote() for witness in witnesses])
    contract = {name: value for name, value in os.environ.items() if name.startswith("HPC_GRPO_")}
    report = {"resources": ray.cluster_resources(), "witnesses": seen, "contract": contract}
    (run_dir / "stand_in.json").write_text(json.dumps(report, indent=2))
    print(f"stand-in: {len(nodes)} nodes, {ray.cluster_resources().get('GPU', 0):.0f} GPUs", flush=True)
    if "HPC_GRPO_STAND_IN_STUCK" in os.environ:
        PULSE.open("driver", Patience(least_s=1.0, other_s=1.0, repeats=frozenset()))
        with PULSE.working("train"):
            time.sleep(600)
    time.sleep(float(os.environ.get("HPC_GRPO_STAND_IN_SLEEP_S", "0")))
    code = int(os.environ.get("HPC_GRPO_STAND_IN_EXIT", "0"))
    if code == 0:
        (run_dir / "COMPLETE").touch()
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
