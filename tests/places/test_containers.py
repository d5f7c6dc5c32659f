"""A run in containers on two hosts, with the host's own root, or a folder that shows it, as the image."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.run.ledger import check_ledger
from tests.places.conftest import residue_of
from tests.places.scene import Scene
from tools.virtual_machines.beds import Bed
from tools.virtual_machines.containers import write_rootfs

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


def apptainer(folder: Path) -> dict[str, Any]:
    """Apptainer without privileges, as sites have it; the image is a folder."""
    write_rootfs(folder)
    mounts = ["/usr", str(Path(__file__).parents[2]), sys.prefix, sys.base_prefix]
    return {
        "image": str(folder),
        "engine": "apptainer",
        "python": sys.executable,
        "mounts": mounts,
        "args": ["--userns"],
    }


def in_apptainer(bed: Bed, host: str) -> bool:
    """Tell whether Ray's node on a host runs in an image of Apptainer."""
    raylets = [pid for pid, words in bed.processes(host).items() if "/raylet" in words.split()[0]]
    return bool(raylets) and all(
        b"APPTAINER_CONTAINER=" in Path(f"/proc/{pid}/environ").read_bytes() for pid in raylets
    )


@pytest.mark.parametrize("engine", ["podman", "apptainer"])
def test_two_hosts_train_in_containers_and_keep_none(hosts: Bed, engine: str) -> None:
    if shutil.which(engine) is None:
        pytest.skip("Debian's unstable gives no Apptainer: `make machines-install` says why")
    launch = PODMAN if engine == "podman" else {"container": apptainer(hosts.storage("host1") / "image")}
    with Scene(hosts, f"boxed-{engine}", train={"total_steps": 4}, launch=launch) as scene:
        worker = scene.start("host2", "place", "host", "worker", str(scene.config), RAY_HEAD_IP="host1")
        head = scene.start("host1", "place", "host", "head", str(scene.config))
        scene.wait_for_step(1)
        if engine == "podman":
            assert [programs(hosts, host) for host in ("host1", "host2")] == [["driver", "ray"], ["ray"]]
        else:
            assert [in_apptainer(hosts, host) for host in ("host1", "host2")] == [True, True]
        assert head.wait() == 0, head.text
        assert worker.wait() == 0, worker.text
        assert scene.is_complete_to_the_end()
        assert check_ledger(scene.run).is_sound
        (attempt,) = scene.attempts
        assert len(attempt.nodes) == 2
    assert [programs(hosts, host) for host in ("host1", "host2")] == [[], []]
    assert residue_of(hosts) == {}
