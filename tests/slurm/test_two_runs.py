"""Two runs share two nodes. One is attacked, searched for secrets and cancelled; the other does not notice.

Both come from an environment that is as wrong as users' environments get. On the nodes another ordinary user took every
name that could be guessed, and tries every door; a stranger on their network calls every port.
"""

from __future__ import annotations

import ipaddress
import json
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.ledger import check_ledger
from tests.integration.training_runs import PAUSING, metrics_of, write_workspace
from tests.slurm.conftest import ENVIRONMENT
from tests.slurm.neighbour import NOBODY
from tests.slurm.small_runs import Node, SmallRun, run_of, two_node_config
from tests.stand_ins.pausing import GO

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmCluster

pytestmark = pytest.mark.slurm

REPOSITORY = Path(__file__).resolve().parents[2]
SBATCH = str(REPOSITORY / "sbatch" / "grpo_rlzero.sbatch")
STRANGER = Path(__file__).with_name("stranger.py")
NEIGHBOUR = Path(__file__).with_name("neighbour.py")
NUM_STEPS = 12
LONG_NAME = ("a run name with spaces " * 9)[:199] + "."
STALE = {
    "MASTER_ADDR": "192.0.2.1",
    "MASTER_PORT": "1",
    "RANK": "3",
    "LOCAL_RANK": "3",
    "WORLD_SIZE": "8",
    "RAY_ADDRESS": "192.0.2.1:6379",
    "http_proxy": "http://192.0.2.1:9",
    "https_proxy": "http://192.0.2.1:9",
    "HTTPS_PROXY": "http://192.0.2.1:9",
    "LD_PRELOAD": "/no/such/library.so",
    "CUDA_VISIBLE_DEVICES": "5,6",
    "ROCR_VISIBLE_DEVICES": "7",
    "HIP_VISIBLE_DEVICES": "8",
}
"""Of other launchers, clusters and sites."""
MUCH = {f"{prefix}_JUNK_{index}": "x" * 10240 for prefix in ("MODULE", "HF", "NCCL") for index in range(10)}
"""300 KiB; two thirds of it is let through to training."""
PLANTED = {"WANDB_API_KEY": "0123456789abcdef" * 2 + "planted1", "HF_TOKEN": "hf_PlantedTokenOfNobody0123456789"}
PUBLIC_PATHS = {"GET /api/healthz", "GET /api/local_raylet_healthz"}
PUBLIC_METHOD = "/grpc.health.v1.Health/Check"
_STRANGER_DEADLINE_S = 300.0
_FOLDERS = ("/tmp", "/dev/shm")


@dataclass(frozen=True)
class Attacked:
    """What strangers did to a run, and got, while it trained.

    The neighbour `planted` so much on each node before the run, `got` what it tried for, and has so much `left`.
    """

    secrets: list[str]
    said: dict[str, Any]
    steps_meanwhile: int
    job_record: str
    planted: dict[str, int]
    got: dict[str, dict[str, str]]
    left: dict[str, int]


@dataclass(frozen=True)
class Outcome:
    """Of the run that went on, and of the one that was attacked and then cancelled."""

    survivor: SmallRun
    cancelled: SmallRun
    step_at_cancel: int
    before: dict[str, Node]
    after: dict[str, Node]
    shared_memory_of_others: dict[str, list[str]]
    attacked: Attacked


def submit_run(cluster: SlurmCluster, folder: Path, words: list[str], environment: Mapping[str, str]) -> int:
    """Run a command in a shell of this environment on the login node; the job id it prints."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in {**ENVIRONMENT, **environment}.items()]
    script = folder / "hand in.sh"
    script.write_text("\n".join([*exports, f"exec {shlex.join(words)}"]))
    try:
        return int(cluster.output(["bash", str(script)], cwd=folder).strip().rpartition("\n")[2])
    finally:
        script.unlink()  # it has the secrets


def broken_modules(folder: Path, *names: str) -> str:
    """A folder for PYTHONPATH: whoever imports one of these modules dies."""
    folder.mkdir()
    for name in names:
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} came from PYTHONPATH')")
    return str(folder)


@pytest.fixture(scope="module")
def neighbour(slurm_cluster: SlurmCluster) -> Iterator[tuple[Path, dict[str, int]]]:
    """Give a folder that others may enter, unlike pytest's, with the neighbour's program; and what it has planted."""
    workspace = Path(tempfile.mkdtemp(prefix="two runs-"))
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
def outcome(slurm_cluster: SlurmCluster, neighbour: tuple[Path, dict[str, int]]) -> Outcome:
    workspace, planted = neighbour
    write_workspace(workspace)
    long_folder = workspace / ("t" * (119 - len(str(workspace))))
    long_folder.mkdir()
    environment = {**STALE, **MUCH, "TMPDIR": str(long_folder)}
    # What Slurm sets for a job does not reach it from outside, so it is set inside.
    setup = {"launch": {"setup_lines": ["export SLURM_CPU_BIND=quiet,mask_cpu:0x1 SLURM_CPU_BIND_TYPE=mask_cpu:"]}}
    two_node_config(workspace, "survivor", NUM_STEPS, run=named(workspace, LONG_NAME), **setup)
    attacked = two_node_config(workspace, "attacked", 500)
    others = {name: slurm_cluster.output(["ls", "/dev/shm"], on=name).split() for name in slurm_cluster.node_names}
    # sbatch is no Python program.
    python_path = broken_modules(workspace / "light", "json", "click", "torch")
    sbatch = ["sbatch", "--parsable", "--nodes=2", "--gpus-per-node=2", "--cpus-per-task=4", "--exclusive=user"]
    sbatch += ["--time=20", SBATCH, "survivor.yaml", "--driver", PAUSING]
    first = submit_run(slurm_cluster, workspace, sbatch, {**environment, "PYTHONPATH": python_path})
    # `hpc-grpo submit` is a Python program of the user's own shell, so it needs Python's own modules to be whole.
    python_path = f"/no/such/folder:{broken_modules(workspace / 'heavy', 'ray', 'torch', 'vllm', 'numpy')}"
    submit = [sys.executable, "-m", "hpc_grpo.cli", "submit", str(attacked), "--parsable"]
    with_secrets = {**environment, **PLANTED, "WANDB_MODE": "offline", "PYTHONPATH": python_path}
    with SmallRun(slurm_cluster, run_of(workspace, LONG_NAME), first) as survivor, ExitStack() as stack:
        second = submit_run(slurm_cluster, workspace, submit, with_secrets)
        cancelled = stack.enter_context(SmallRun(slurm_cluster, run_of(workspace, "attacked"), second))
        survivor.wait_for_step(2)
        cancelled.wait_for_step(2)
        secrets = [*PLANTED.values(), cancelled.run.secret.read_text()]
        nodes, step_before = cancelled.node_states(secrets), cancelled.step
        said = ask_stranger(slurm_cluster, cancelled, nodes)
        words = ["/usr/bin/python3", str(workspace / NEIGHBOUR.name), "try", str(cancelled.run.path), str(second)]
        got = {node: json.loads(slurm_cluster.output(words, on=node)) for node in slurm_cluster.node_names}
        cancelled.wait_for_step(step_before + 2)
        steps_meanwhile = cancelled.step - step_before
        record = slurm_cluster.output(["scontrol", "show", "job", str(second)])
        step = survivor.step
        slurm_cluster.output(["scancel", str(second)])
        assert cancelled.wait().state == "CANCELLED"
        slurm_cluster.wait_until(lambda: is_gone(cancelled), 30.0, "the cancelled run has no process left")
        after = cancelled.node_states()
        (survivor.run.path / GO).touch()
        survivor.wait()
    left = {node: len(slurm_cluster.output(of_neighbour(), on=node).splitlines()) for node in planted}
    attack = Attacked(secrets, said, steps_meanwhile, record, planted, got, left)
    return Outcome(survivor, cancelled, step, nodes, after, others, attack)


def is_gone(run: SmallRun) -> bool:
    return not any(node.processes for node in run.node_states().values())


def named(workspace: Path, name: str) -> dict[str, str]:
    return {"name": name, "root": str(workspace / "runs")}


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


def test_a_run_from_a_hostile_environment_trains_to_the_end(outcome: Outcome) -> None:
    run = outcome.survivor.run
    assert run.is_complete()
    assert check_ledger(run).is_sound
    assert list(metrics_of(run)) == list(range(1, NUM_STEPS + 1))
    (attempt,) = read_attempts(run)
    assert attempt.restarts == []


def test_it_was_training_beside_the_other_and_went_on_without_it(outcome: Outcome) -> None:
    assert 2 <= outcome.step_at_cancel < NUM_STEPS
    assert all(node.processes for node in outcome.before.values())


def test_the_one_that_was_cancelled_leaves_nothing(outcome: Outcome) -> None:
    ports = {(name, entry["port"]) for name, node in outcome.before.items() for entry in node.listening}
    assert len(ports) > 10
    of_survivor = (f"hg-{outcome.survivor.job_id}-", f"sem.hg-{outcome.survivor.job_id}-")
    for name, node in outcome.after.items():
        assert (node.processes, node.listening) == ([], [])
        new = set(node.shared_memory) - set(outcome.shared_memory_of_others[name])
        assert [entry for entry in new if not entry.startswith(of_survivor)] == []
    cluster = outcome.survivor.cluster
    rows = {name: cluster.output(["ss", "-ltnH"], on=name).splitlines() for name in cluster.node_names}
    still_open = {(name, int(row.split()[3].rpartition(":")[2])) for name in rows for row in rows[name]}
    assert ports & still_open == set()


def test_every_listening_socket_is_documented(outcome: Outcome) -> None:
    found = {
        (program_of(entry["title"]), kind_of(entry["ip"]))
        for node in outcome.before.values()
        for entry in node.listening
    }
    assert found == documented()


def test_a_stranger_is_answered_nothing_but_that_the_run_is_there(outcome: Outcome) -> None:
    ports = outcome.attacked.said["ports"]
    assert len(ports) > 15
    for address, answers in ports.items():
        for method, answer in answers["grpc"].items():
            assert answer.startswith("UNAUTHENTICATED") or method == PUBLIC_METHOD, (address, method, answer)
        for path, answer in answers["http"].items():
            assert answer.startswith("401 ") or path in PUBLIC_PATHS, (address, path, answer)
        assert not answers["open_store"], address
    refusals = [answer for answers in ports.values() for answer in answers["grpc"].values()]
    assert sum(answer.startswith("UNAUTHENTICATED") for answer in refusals) > 100


def test_a_stranger_neither_joins_nor_submits(outcome: Outcome) -> None:
    assert "JOINED" not in outcome.attacked.said["join"]
    assert not outcome.attacked.said["join"].startswith("0 ")
    assert outcome.attacked.said["submit"]
    for address, said in outcome.attacked.said["submit"].items():
        assert "SUBMITTED" not in said, address
        assert not said.startswith("0 "), address


def test_the_run_goes_on_as_if_nobody_had_called(outcome: Outcome) -> None:
    assert outcome.attacked.steps_meanwhile >= 2
    (attempt,) = read_attempts(outcome.cancelled.run)
    # On a busy machine Slurm kills the supervisor before it has written its end.
    assert attempt.exit_kind == "cancelled" or attempt.was_killed_in_teardown
    assert (attempt.restarts, attempt.lost_nodes) == ([], {})


def test_names_that_a_neighbour_took_deny_no_node_and_are_not_swept_away(outcome: Outcome) -> None:
    assert min(outcome.attacked.planted.values()) > 200
    assert min(outcome.attacked.left.values()) >= min(outcome.attacked.planted.values())
    for node in outcome.attacked.planted:
        command = ["find", *_FOLDERS, "-maxdepth", "1", "-name", f"hg-{outcome.cancelled.job_id}-*", "-not"]
        assert outcome.cancelled.cluster.output([*command, "-user", str(NOBODY)], on=node) == ""


def test_a_neighbour_gets_into_nothing(outcome: Outcome) -> None:
    for node, said in outcome.attacked.got.items():
        print(node, said)
        assert int(said["folders seen"]) >= 2, "those of both nodes where they share /tmp"
        assert int(said["processes seen"]) >= 1
        assert {what: got for what, got in said.items() if got and not what.endswith("seen")} == {}


def test_no_prompt_and_no_secret_is_in_an_answer(outcome: Outcome) -> None:
    said = json.dumps(outcome.attacked.said)
    prompts = [json.loads(line)["question"] for line in (outcome.cancelled.run.path.parents[1] / "train.jsonl").open()]
    assert [text for text in [*outcome.attacked.secrets, *prompts] if json.dumps(text)[1:-1] in said] == []


def test_secrets_are_in_no_argument_no_record_and_no_file(outcome: Outcome) -> None:
    assert [place for node in outcome.before.values() for place in node.needles] == []
    assert not any(secret in outcome.attacked.job_record for secret in outcome.attacked.secrets)
    run = outcome.cancelled.run
    assert list(run.path.glob("wandb/offline-run-*"))
    holding = [
        path
        for path in run.path.parents[1].rglob("*")
        if path.is_file() and any(secret.encode() in path.read_bytes() for secret in outcome.attacked.secrets)
    ]
    assert holding == [run.secret]
    assert run.secret.stat().st_mode & 0o777 == 0o600
    assert run.secret.parent.stat().st_mode & 0o777 == 0o700
