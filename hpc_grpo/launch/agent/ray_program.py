"""The two programs of a node that import Ray, each a process of its own.

`python -m hpc_grpo.launch.agent.ray_program start …` is Ray's own command line; started by the node agent.
`python -m hpc_grpo.launch.agent.ray_program probe IP:PORT` tells the supervisor which nodes have joined Ray.

Imports nothing of this package: every import here delays Ray on every node.
"""

from __future__ import annotations

import json
import logging
import sys
import time

_UNUSED = ("ray.serve", "ray.serve.scripts", "ray.dashboard.modules.job.cli", "ray.util.state.state_cli")


def start() -> None:
    """Run Ray's command line without the parts that a node of a run has no use for.

    Ray imports the commands of Ray Serve and Ray Jobs where it can, and with them pandas and FastAPI: seconds of every
    start, on every node. And it starts a Ray Client server, a process and a port for nobody, where its dependencies
    are there; no option says otherwise.
    """
    for name in _UNUSED:
        sys.modules[name] = None  # type: ignore[assignment]  # the import fails, and Ray goes on without
    from ray.scripts import scripts

    scripts.get_ray_client_dependency_error = lambda: "Ray Client is not used"
    scripts.main()


def probe(address: str) -> None:
    """Print one JSON line each time the picture changes ({"nodes": {ip: num_gpus}}), until killed.

    Not in the supervisor: importing ray would start threads there.
    """
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
    if sys.argv[1] == "probe":
        probe(sys.argv[2])
    else:
        start()
