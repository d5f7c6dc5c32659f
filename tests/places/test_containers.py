"""A run in containers on two hosts: podman on each, with the host's own root as the image."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from hpc_grpo.run.ledger import check_ledger
from tests.places.conftest import residue_of
from tests.places.scene import Scene
from tools.virtual_machines.beds import Bed

pytestmark = pytest.mark.places

PODMAN: dict[str, Any] = {
    "container": {
        "image": "/:O",
        "engine": "podman",
        "python": sys.executable,
        # Theirs is to make none, which podman allows in a process space of a container's own alone.
        "args": ["--cgroups=enabled"],
    }
}


def programs(bed: Bed, host: str) -> list[str]:
    """What podman knows of on a host, running or not."""
    label = '--format={{index .Labels "hpc-grpo.program"}}'
    return sorted(bed.run(host, ["podman", "ps", "--all", label]).stdout.split())


def test_two_hosts_train_in_containers_and_keep_none(hosts: Bed) -> None:
    with Scene(hosts, "boxed", train={"total_steps": 4}, launch=PODMAN) as scene:
        worker = scene.start("host2", "host", "worker", str(scene.config), RAY_HEAD_IP="host1")
        head = scene.start("host1", "host", "head", str(scene.config))
        scene.wait_for_step(1)
        assert [programs(hosts, host) for host in ("host1", "host2")] == [["driver", "ray"], ["ray"]]
        assert head.wait() == 0, head.text
        assert worker.wait() == 0, worker.text
        assert scene.is_complete_to_the_end()
        assert check_ledger(scene.run).is_sound
        (attempt,) = scene.attempts
        assert len(attempt.nodes) == 2
    assert [programs(hosts, host) for host in ("host1", "host2")] == [[], []]
    assert residue_of(hosts) == {}
