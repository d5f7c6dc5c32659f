"""Ray's own command line, without the parts that a node of a run has no use for.

`python -m hpc_grpo.launch.agent.ray_start start …`. Ray imports the commands of Ray Serve and Ray Jobs where it can,
and with them pandas and FastAPI: seconds of every start, on every node. And it starts a Ray Client server, a process
and a port for nobody, where its dependencies are there; no option says otherwise.
"""

from __future__ import annotations

import sys

_UNUSED = ("ray.serve", "ray.serve.scripts", "ray.dashboard.modules.job.cli", "ray.util.state.state_cli")


def main() -> None:
    for name in _UNUSED:
        sys.modules[name] = None  # type: ignore[assignment]  # the import fails, and Ray goes on without
    from ray.scripts import scripts

    scripts.get_ray_client_dependency_error = lambda: "Ray Client is not used"
    scripts.main()


if __name__ == "__main__":
    main()
