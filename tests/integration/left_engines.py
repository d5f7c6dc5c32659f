"""End engines that a killed driver has left in its Ray: `one` of them, or `all` and what they had reserved."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import ray
from ray.util import get_placement_group, list_named_actors, placement_group_table, remove_placement_group

from hpc_grpo.run.contract import RAY_ADDRESS_FILE_VARIABLE

_DEADLINE_S = 60.0


def main(which: str) -> None:
    address = Path(os.environ[RAY_ADDRESS_FILE_VARIABLE]).read_text().strip()
    ray.init(address=address, log_to_driver=False, configure_logging=False, namespace="hpc-grpo")
    doomed = sorted(list_named_actors())[: 1 if which == "one" else None]
    for name in doomed:
        ray.kill(ray.get_actor(name))
    ends_at = time.monotonic() + _DEADLINE_S
    while not set(doomed).isdisjoint(list_named_actors()):
        assert time.monotonic() < ends_at, doomed
        time.sleep(0.05)
    if which == "all":
        groups = [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]
        for name in filter(None, groups):
            remove_placement_group(get_placement_group(name))


if __name__ == "__main__":
    main(sys.argv[1])
