"""The programs of a node that import Ray, each a separate process: `python -m hpc_grpo.launch.agent.ray_program ...`

`start ...` is Ray's command line, started by the node agent. Each `--template=...` starts a template of actors
(template/server.py), which ends with `start`. `probe IP:PORT` tells the supervisor which nodes have joined Ray.
`status IP:PORT` shows the user the nodes of a run's Ray, and their usage.

Imports nothing of this package: every import here delays Ray on every node.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_TEMPLATE = "--template="


def start() -> None:
    """Start the templates, and run Ray's command line without Ray Serve, Jobs and Client.

    The imports of those three parts would take seconds on every node. Ray starts the dashboard's process even without
    a dashboard. It only collects statistics, which are off, so it is not started.
    """
    options = [word for word in sys.argv if word.startswith(_TEMPLATE)]
    sys.argv = [word for word in sys.argv if word not in options]
    templates = []
    for template in [json.loads(option.removeprefix(_TEMPLATE)) for option in options]:
        with Path(template["log"]).open("ab") as log:
            command = [*template["program"], str(os.getpid()), *template["words"]]
            templates.append(subprocess.Popen(command, stdout=log, stderr=log))
    for name in ("ray.serve", "ray.serve.scripts", "ray.dashboard.modules.job.cli", "ray.util.state.state_cli"):
        sys.modules[name] = None  # type: ignore[assignment]  # the import fails, and Ray goes on without
    from ray._private import services
    from ray.scripts import scripts

    if "--include-dashboard=false" in sys.argv:
        services.start_api_server = _name_dashboard
    scripts.get_ray_client_dependency_error = lambda: "Ray Client is not used"
    scripts.main()


def _name_dashboard(*given: Any, **_: Any) -> tuple[None, None]:
    """Write an address of the dashboard to Ray's table, in place of `start_api_server`.

    Every node looks for the address, and logs an error each second until it is there. Nodes send reports of events to
    it, with Ray's token. Nobody can listen on port 0.
    """
    from ray import _raylet
    from ray._private.ray_constants import DASHBOARD_ADDRESS, KV_NAMESPACE_DASHBOARD

    client = _raylet.GcsClient(address=given[3], cluster_id=given[4])  # type: ignore[attr-defined]
    client.internal_kv_put(DASHBOARD_ADDRESS.encode(), b"127.0.0.1:0", True, namespace=KV_NAMESPACE_DASHBOARD)
    return None, None


def probe(address: str) -> None:
    """Print a JSON line at each change ({"nodes": {ip: num_gpus}}), until killed.

    A separate process: importing ray would start threads in the supervisor.
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


def status(address: str) -> None:
    """Print each node and its usage. `ray status` needs the autoscaler, which a run's Ray does not have."""
    import ray

    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace="hpc-grpo-status")
    for node in ray.nodes():
        has = ", ".join(f"{node['Resources'].get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))
        state = "alive" if node["Alive"] else "dead"
        print(f"{state:5}  {node['NodeManagerAddress']}  {node['NodeManagerHostname']}  {has}")
    total, free = ray.cluster_resources(), ray.available_resources()
    for kind in ("CPU", "GPU"):
        print(f"{total.get(kind, 0) - free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s are reserved")


if __name__ == "__main__":
    if sys.argv[1] == "probe":
        probe(sys.argv[2])
    elif sys.argv[1] == "status":
        status(sys.argv[2])
    else:
        start()
