"""A run that trains on two nodes, seen by others on its network and on its nodes, and searched for secrets.

On the nodes another ordinary user took every name that could be guessed, and tries every door.
"""

from __future__ import annotations

import ipaddress
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpc_grpo.run.attempt import read_attempts
from tests.integration.training_runs import write_workspace
from tests.slurm.conftest import ENVIRONMENT
from tests.slurm.neighbour import NOBODY
from tests.slurm.small_runs import Node, SmallRun, run_of, two_node_config

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmCluster

pytestmark = pytest.mark.slurm

REPOSITORY = Path(__file__).resolve().parents[2]
STRANGER = Path(__file__).with_name("stranger.py")
NEIGHBOUR = Path(__file__).with_name("neighbour.py")
PLANTED = {"WANDB_API_KEY": "0123456789abcdef" * 2 + "planted1", "HF_TOKEN": "hf_PlantedTokenOfNobody0123456789"}
PUBLIC_PATHS = {"GET /api/healthz", "GET /api/local_raylet_healthz"}
PUBLIC_METHOD = "/grpc.health.v1.Health/Check"
_STRANGER_DEADLINE_S = 300.0
_FOLDERS = ("/tmp", "/dev/shm")


@dataclass(frozen=True)
class Probed:
    """A run as it was while a stranger called all of its ports, and after it was stopped.

    The neighbour `planted` so much on each node before the run, `got` what it tried for, and has so much `left`.
    """

    run: SmallRun
    nodes: dict[str, Node]
    secrets: list[str]
    said: dict[str, Any]
    steps_meanwhile: int
    job_record: str
    planted: dict[str, int]
    got: dict[str, dict[str, str]]
    left: dict[str, int]


@pytest.fixture(scope="module")
def neighbour(slurm_cluster: SlurmCluster) -> Iterator[tuple[Path, dict[str, int]]]:
    """Give a folder that others may enter, unlike pytest's, with the neighbour's program; and what it has planted."""
    workspace = Path(tempfile.mkdtemp(prefix="project-"))
    workspace.chmod(0o755)
    shutil.copy(NEIGHBOUR, workspace)
    probe = slurm_cluster.output(["sbatch", "--parsable", "--output=/dev/null", "--wrap=true"], environment=ENVIRONMENT)
    take = ["/usr/bin/python3", str(workspace / NEIGHBOUR.name), "take", probe.strip()]
    try:
        yield workspace, {node: int(slurm_cluster.output(take, on=node)) for node in slurm_cluster.node_names}
    finally:
        for node in slurm_cluster.node_names:
            slurm_cluster.run([*of_neighbour(), "-exec", "rm", "-r", "{}", "+"], on=node)
        shutil.rmtree(workspace)


def of_neighbour() -> list[str]:
    return ["find", *_FOLDERS, "-maxdepth", "1", "-user", str(NOBODY)]


@pytest.fixture(scope="module")
def probed(slurm_cluster: SlurmCluster, neighbour: tuple[Path, dict[str, int]]) -> Probed:
    workspace, planted = neighbour
    config = two_node_config(write_workspace(workspace), "guarded", 2000)
    command = [sys.executable, "-m", "hpc_grpo.cli", "submit", str(config), "--parsable"]
    environment = {**ENVIRONMENT, **PLANTED, "WANDB_MODE": "offline"}
    job_id = int(slurm_cluster.output(command, environment=environment, cwd=workspace))  # type: ignore[arg-type]
    with SmallRun(slurm_cluster, run_of(workspace, "guarded"), job_id) as run:
        run.wait_for_step(2)
        secrets = [*PLANTED.values(), run.run.secret.read_text()]
        nodes = run.node_states(secrets)
        before = run.step
        said = ask_stranger(slurm_cluster, run, nodes)
        words = ["/usr/bin/python3", str(workspace / NEIGHBOUR.name), "try", str(run.run.path), str(job_id)]
        got = {node: json.loads(slurm_cluster.output(words, on=node)) for node in slurm_cluster.node_names}
        run.wait_for_step(before + 2)
        meanwhile = run.step - before
        record = slurm_cluster.output(["scontrol", "show", "job", str(job_id)])
        run.run.stop_marker.touch()
        run.wait()
    left = {node: len(slurm_cluster.output(of_neighbour(), on=node).splitlines()) for node in planted}
    return Probed(run, nodes, secrets, said, meanwhile, record, planted, got, left)


def ask_stranger(cluster: SlurmCluster, run: SmallRun, nodes: dict[str, Node]) -> dict[str, Any]:
    """Have the stranger call every port of the run that is reached from the login node, but for Slurm's own."""
    (attempt,) = read_attempts(run.run)
    addresses = [
        f"{ip_of(cluster, name)}:{entry['port']}"
        for name, node in nodes.items()
        for entry in node.listening
        if kind_of(entry["ip"]) != "loopback" and program_of(entry["title"]) != "srun"
    ]
    words = [attempt.ray_address, *(address for address in addresses if address != attempt.ray_address)]
    command = ["env", "-i", sys.executable, str(STRANGER), *words]
    return dict(json.loads(cluster.output(command, deadline_s=_STRANGER_DEADLINE_S)))


def ip_of(cluster: SlurmCluster, node: str) -> str:
    return cluster.output(["getent", "hosts", node]).split()[0]


def program_of(title: str) -> str:
    """The name that docs/security.md has for the program of a process."""
    if actor := re.match(r"ray::\w+", title):
        return actor[0]
    program = Path(title.split()[0]).name
    module = re.search(r"-m (hpc_grpo[.\w]+)", title) if program.startswith("python") else None
    return module[1] if module else program


def kind_of(ip: str) -> str:
    address = ipaddress.ip_address(ip)
    return "every interface" if address.is_unspecified else "loopback" if address.is_loopback else "the run's interface"


def documented() -> set[tuple[str, str]]:
    """(program, address) of the rows of the table of ports, but for those of other places."""
    text = (REPOSITORY / "docs" / "security.md").read_text().split("## Ports", 1)[1].split("\n### ", 1)[0]
    rows = [[cell.strip(" `") for cell in line.split("|")] for line in text.splitlines() if line.startswith("| `")]
    return {(cells[1], cells[2]) for cells in rows}


def test_every_listening_socket_is_documented(probed: Probed) -> None:
    found = {
        (program_of(entry["title"]), kind_of(entry["ip"])) for node in probed.nodes.values() for entry in node.listening
    }
    assert found == documented()


def test_a_stranger_is_answered_nothing_but_that_the_run_is_there(probed: Probed) -> None:
    ports = probed.said["ports"]
    assert len(ports) > 15
    for address, answers in ports.items():
        for method, answer in answers["grpc"].items():
            assert answer.startswith("UNAUTHENTICATED") or method == PUBLIC_METHOD, (address, method, answer)
        for path, answer in answers["http"].items():
            assert answer.startswith("401 ") or path in PUBLIC_PATHS, (address, path, answer)
        assert not answers["open_store"], address
    refusals = [answer for answers in ports.values() for answer in answers["grpc"].values()]
    assert sum(answer.startswith("UNAUTHENTICATED") for answer in refusals) > 100


def test_a_stranger_neither_joins_nor_submits(probed: Probed) -> None:
    assert "JOINED" not in probed.said["join"]
    assert not probed.said["join"].startswith("0 ")
    assert probed.said["submit"]
    for address, said in probed.said["submit"].items():
        assert "SUBMITTED" not in said, address
        assert not said.startswith("0 "), address


def test_the_run_goes_on_as_if_nobody_had_called(probed: Probed) -> None:
    assert probed.steps_meanwhile >= 2
    (attempt,) = read_attempts(probed.run.run)
    assert (attempt.exit_kind, attempt.restarts, attempt.lost_nodes) == ("stopped", [], {})


def test_names_that_a_neighbour_took_deny_no_node_and_are_not_swept_away(probed: Probed) -> None:
    assert min(probed.planted.values()) > 200
    assert min(probed.left.values()) >= min(probed.planted.values())
    for node in probed.planted:
        command = ["find", *_FOLDERS, "-maxdepth", "1", "-name", f"hg-{probed.run.job_id}-*", "-not"]
        assert probed.run.cluster.output([*command, "-user", str(NOBODY)], on=node) == ""


def test_a_neighbour_gets_into_nothing(probed: Probed) -> None:
    for node, said in probed.got.items():
        print(node, said)
        assert int(said["folders seen"]) >= 2, "those of both nodes where they share /tmp"
        assert int(said["processes seen"]) >= 1
        assert {what: got for what, got in said.items() if got and not what.endswith("seen")} == {}


def test_no_prompt_and_no_secret_is_in_an_answer(probed: Probed) -> None:
    said = json.dumps(probed.said)
    prompts = [json.loads(line)["question"] for line in (probed.run.run.path.parents[1] / "train.jsonl").open()]
    assert [text for text in [*probed.secrets, *prompts] if json.dumps(text)[1:-1] in said] == []


def test_secrets_are_in_no_argument_no_record_and_no_file(probed: Probed) -> None:
    assert [place for node in probed.nodes.values() for place in node.needles] == []
    assert not any(secret in probed.job_record for secret in probed.secrets)
    run = probed.run.run
    assert list(run.path.glob("wandb/offline-run-*"))
    holding = [
        path
        for path in run.path.parents[1].rglob("*")
        if path.is_file() and any(secret.encode() in path.read_bytes() for secret in probed.secrets)
    ]
    assert holding == [run.secret]
    assert run.secret.stat().st_mode & 0o777 == 0o600
    assert run.secret.parent.stat().st_mode & 0o777 == 0o700
