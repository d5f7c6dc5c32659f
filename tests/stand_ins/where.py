"""A driver for tests: writes into the run directory which package the driver and a worker of Ray import, and waits.

It calls `ray.init` as the real driver does, started in a checkout whose package must not win.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import ray

import hpc_grpo
from hpc_grpo.driver.remote import connect
from hpc_grpo.driver.schedule import wait_for_ray
from hpc_grpo.run.files import write_json_atomic


@ray.remote(num_cpus=0.5)
def package_of_worker() -> str:
    import hpc_grpo

    return str(hpc_grpo.__file__)


def main(run_dir: Path) -> None:
    address = wait_for_ray(lambda: False)
    connect(address)
    found = {"driver": hpc_grpo.__file__, "worker": ray.get(package_of_worker.remote()), "cwd": str(Path.cwd())}
    write_json_atomic(run_dir / "where.json", found)
    signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
