"""Pods whose disks are their own: the run is on the head's alone, and is trained as if nothing had happened to it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.checkpoint import valid_checkpoints
from hpc_grpo.run.ledger import check_ledger
from hpc_grpo.run.paths import RunDir, step_dirs
from tests.integration.training_runs import exported_weights, metrics_of, tiny_config, write_workspace
from tests.places.conftest import wait_until
from tools.virtual_machines.beds import Bed

pytestmark = [pytest.mark.places, pytest.mark.long]

HEAD, WORKER = "pod1", "pod2"
NUM_STEPS = 5
DEADLINE_S = 400.0


class Pods:
    """The run `name` on both pods, and what the host sees of it; `hpc-grpo place pod` on each."""

    def __init__(self, bed: Bed, name: str, **sections: Any) -> None:
        self.bed, self.name = bed, name
        self._started: dict[str, subprocess.Popen[str]] = {}
        sections = {"checkpoint": {"every": 1, "keep_last": 9}, **sections}
        sections["launch"] = {
            "num_nodes": 2,
            "object_store_gib": 0.1,
            "rejoin_s": 90,
            "disks": "private",
            **sections.get("launch", {}),
        }
        for pod in (HEAD, WORKER):
            folder = bed.storage(pod) / "work"
            if not folder.exists():
                write_workspace(folder)
            path = tiny_config(folder, name, **sections)
            path.write_text(path.read_text().replace(str(bed.storage(pod)), str(bed.layout.storage)))

    def run_on(self, pod: str) -> RunDir:
        return RunDir(self.bed.storage(pod) / "work" / "runs" / self.name)

    @property
    def run(self) -> RunDir:
        return self.run_on(HEAD)

    def start(self, *pods: str) -> subprocess.Popen[str]:
        """Type the command on each; return the process of the first."""
        for pod in pods:
            command = (
                f"cd {self.bed.layout.storage}/work && exec {sys.executable} -m hpc_grpo.cli place pod {self.name}.yaml"
            )
            log = (self.bed.storage(pod) / f"{self.name}.log").open("ab")
            environment = {"HPC_GRPO_TOKEN": "a token that both pods were given by their user"}
            options = {"environment": environment, "stdout": log, "stderr": log}
            self._started[pod] = self.bed.popen(pod, ["bash", "-c", command], **options)
        return self._started[pods[0]]

    def wait_for(self, condition: Any, what: str) -> None:
        wait_until(lambda: condition() or self._has_failed(), DEADLINE_S, what)
        assert condition(), self.said()

    def wait_until_complete(self) -> None:
        self.wait_for(lambda: self.run.is_complete(), f"{self.name} is complete")
        for process in self._started.values():
            assert process.wait(60) == 0, self.said()

    def said(self) -> str:
        logs = [self.bed.storage(pod) / f"{self.name}.log" for pod in (HEAD, WORKER)]
        logs += sorted(self.run.attempts.glob("*/driver.log"))
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in logs if path.exists())

    def end(self) -> None:
        for process in self._started.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(60)

    def _has_failed(self) -> bool:
        return any(process.poll() not in (None, 0) for process in self._started.values())


@contextmanager
def pods_of(bed: Bed, name: str, **sections: Any) -> Iterator[Pods]:
    pods = Pods(bed, name, **{"train": {"total_steps": NUM_STEPS, "lr": 1e-3, "zero_stage": 3}, **sections})
    try:
        yield pods
    finally:
        pods.end()


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def assert_same(run: RunDir, undisturbed: RunDir) -> None:
    """Check that metrics and weights are the same to the last bit, and every step was counted once."""
    assert check_ledger(run).is_sound
    found, expected = metrics_of(run), metrics_of(undisturbed)
    assert list(found) == list(expected)
    for step, values in expected.items():
        for name in ("loss/policy", "reward/mean", "grad_norm", "policy/entropy", "loss/kl"):
            assert found[step].get(name) == values.get(name), (step, name)
    weights, ours = exported_weights(undisturbed), exported_weights(run)
    assert all(np.array_equal(weights[name], ours[name]) for name in weights)
    print(f"{run.path.name}: {len(weights)} tensors after {len(expected)} steps, the same to the last bit")


def processes_like(bed: Bed, pod: str, words: str) -> Sequence[int]:
    return [pid for pid, command in bed.processes(pod).items() if words in command]


@pytest.fixture(scope="module")
def undisturbed(private_pods: Bed) -> RunDir:
    with pods_of(private_pods, "undisturbed") as pods:
        pods.start(WORKER, HEAD)
        pods.wait_until_complete()
        return pods.run


def test_the_run_is_whole_on_the_heads_disk_and_the_other_holds_its_code_alone(
    private_pods: Bed, undisturbed: RunDir
) -> None:
    there = RunDir(private_pods.storage(WORKER) / "work" / "runs" / undisturbed.path.name)
    assert {name.split("/")[0] for name in files_of(there.path)} <= {"source", ".secret"}
    (newest, *others) = valid_checkpoints(undisturbed)
    assert (newest.step, len(others)) == (NUM_STEPS, NUM_STEPS - 1)
    names = [entry.name for entry in newest.manifest.files]
    own = [[name for name in names if f"pp_rank_{rank}_" in name or f"rng_rank_{rank}." in name] for rank in (0, 1)]
    assert [len(each) for each in own] == [3, 3]
    (attempt,) = undisturbed.attempts.iterdir()
    logs = {path.name for path in (attempt / "nodes" / WORKER).rglob("*") if path.is_file()}
    assert {"ray_start.log", "raylet.out"} <= logs


def test_both_pods_killed_and_started_again_go_on_as_if_nothing_had_happened(
    private_pods: Bed, undisturbed: RunDir
) -> None:
    with pods_of(private_pods, "restarted") as pods:
        pods.start(HEAD, WORKER)
        pods.wait_for(lambda: 2 in step_dirs(pods.run.checkpoints), "it has saved step 2")
        for pod in (HEAD, WORKER):
            private_pods.kill(pod)
        assert not pods.run.is_complete()
        for pod in (HEAD, WORKER):
            private_pods.start(pod)
        pods.start(HEAD, WORKER)
        pods.wait_until_complete()
        assert [record.first_step > 0 for record in read_attempts(pods.run)] == [False, True]
        assert_same(pods.run, undisturbed)


def test_a_worker_that_dies_in_the_middle_of_a_checkpoint_leaves_none_and_the_run_goes_on(
    private_pods: Bed, undisturbed: RunDir
) -> None:
    with pods_of(private_pods, "mid-checkpoint") as pods:
        pods.start(HEAD, WORKER)
        pods.wait_for(lambda: 1 in step_dirs(pods.run.checkpoints), "it has saved step 1")
        (keeper,) = processes_like(private_pods, HEAD, "ray::Keeper")
        os.kill(keeper, signal.SIGSTOP)  # what the worker sends is under way, and does not arrive
        pods.wait_for(lambda: any(pods.run.checkpoints.glob(".step_*.tmp")), "a checkpoint is begun")
        before = set(step_dirs(pods.run.checkpoints))
        private_pods.kill(WORKER)
        os.kill(keeper, signal.SIGCONT)
        assert set(step_dirs(pods.run.checkpoints)) == before
        private_pods.start(WORKER)
        pods.start(WORKER)
        pods.wait_until_complete()
        assert not list(pods.run.checkpoints.glob(".step_*.tmp"))
        assert_same(pods.run, undisturbed)


def test_a_full_disk_at_the_head_has_the_run_wait_for_space(private_pods: Bed, undisturbed: RunDir) -> None:
    with pods_of(private_pods, "full-disk") as pods:
        # Mounted by the head, and so not seen from here.
        disk = private_pods.layout.storage / "work" / "runs" / pods.name

        def on_head(command: str) -> str:
            done = private_pods.run(HEAD, ["sh", "-c", command])
            return done.stdout + done.stderr

        assert on_head(f"mkdir -p {disk} && mount -t tmpfs -o size=200m,mode=700 tmpfs {disk}") == ""
        pods.start(HEAD, WORKER)
        pods.wait_for(lambda: "manifest.json" in on_head(f"ls {disk}/checkpoints/step_1"), "it has saved step 1")
        # Small files still find room, a checkpoint does not.
        on_head(f"head -c $(($(df --output=avail -B1 {disk} | tail -1) - 300000)) /dev/zero > {disk}/ballast")
        pods.wait_for(lambda: "waits for space" in pods.said(), "it waits for space")
        on_head(f"rm {disk}/ballast")
        pods.wait_for(lambda: "COMPLETE" in on_head(f"ls {disk}"), "it is complete")
        assert on_head(f"cp -a {disk} {disk}.seen") == ""
        assert_same(RunDir(pods.run.path.with_name(f"{pods.name}.seen")), undisturbed)


def test_a_node_without_the_model_is_named_and_joins_once_it_has_it_without_the_data(private_pods: Bed) -> None:
    with pods_of(private_pods, "absent-model", train={"total_steps": 1, "lr": 1e-3, "zero_stage": 3}) as pods:
        there = private_pods.storage(WORKER) / "work"
        for name in ("tied", "train.jsonl"):
            (there / name).rename(there / f"{name}.away")
        try:
            head = pods.start(HEAD, WORKER)
            assert head.wait(DEADLINE_S) == 69, pods.said()
            path = private_pods.layout.storage / "work" / "tied"
            assert f"The disk of node pod2 lacks files that the head node has: model.path = {path}." in pods.said()
            (there / "tied.away").rename(there / "tied")
            pods.start(HEAD)  # the worker waits for it
            pods.wait_until_complete()
        finally:
            (there / "train.jsonl.away").rename(there / "train.jsonl")


def test_disks_that_are_claimed_to_be_shared_are_refused_before_anything_trains(private_pods: Bed) -> None:
    with pods_of(private_pods, "claimed", launch={"disks": "shared", "bringup_deadline_s": 200}) as pods:
        pods.start(HEAD, WORKER)
        wait_until(lambda: "launch.disks=private" in pods.said(), DEADLINE_S, "the claim is refused")
        assert "node pod2 does not see the head's run directory" in pods.said()
        assert not step_dirs(pods.run.checkpoints)
    shutil.rmtree(pods.run.path)
