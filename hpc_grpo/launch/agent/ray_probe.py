"""Reports which nodes Ray sees: `python -m hpc_grpo.launch.agent.ray_probe IP:PORT`.

A process of its own, since importing ray in the supervisor would start threads there. Prints one JSON line
each time the picture changes ({"nodes": {ip: num_gpus}}), until it is killed.
"""

from __future__ import annotations

import json
import logging
import sys
import time


def main(address: str) -> None:
    import ray

    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace="hpc-grpo-probe")
    before = ""
    while True:
        alive = [node for node in ray.nodes() if node["Alive"]]
        gpus = {node["NodeManagerAddress"]: int(node["Resources"].get("GPU", 0)) for node in alive}
        line = json.dumps({"nodes": gpus}, sort_keys=True)
        if line != before:
            print(line, flush=True)
            before = line
        time.sleep(0.25)


if __name__ == "__main__":
    main(sys.argv[1])
