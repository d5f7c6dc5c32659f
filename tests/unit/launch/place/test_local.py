from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import ConfigError, LaunchError
from hpc_grpo.launch import place
from hpc_grpo.launch.place import find_place, local, queue_of
from hpc_grpo.launch.place.base import KINDS
from hpc_grpo.launch.place.joined.place import HEAD_VARIABLE
from hpc_grpo.launch.place.local import LocalPlace
from hpc_grpo.run.paths import RunDir


def test_outside_of_any_job_the_place_is_this_machine() -> None:
    place = find_place({})
    found = place.allocation()
    assert (place.name, place.queue, place.is_attended) == ("local", None, True)
    assert found.this_node == found.head
    assert found.ends_at is None
    assert place.start_command(found.head, ["agent"]) == ["agent"]


@pytest.mark.parametrize(
    ("environ", "hosts", "name", "grace_s"),
    [
        ({}, [], "local", math.inf),
        ({"HPC_GRPO_STOP_GRACE_S": "90.0"}, [], "local", 90.0),
        ({"SLURM_JOB_ID": "7"}, [], "slurm", math.inf),  # which kills by itself
        ({HEAD_VARIABLE: "1"}, [], "joined", math.inf),
        ({}, ["here", "there"], "ssh", math.inf),
        ({"HPC_GRPO_STOP_GRACE_S": "90.0"}, ["here", "there"], "ssh", 90.0),
    ],
)
def test_a_checkpoint_after_sigterm_takes_as_long_as_it_takes_unless_somebody_waits_for_it(
    tmp_path: Path, environ: dict[str, str], hosts: list[str], name: str, grace_s: float
) -> None:
    place = find_place(environ).for_run(RunDir(tmp_path), LaunchConfig(hosts=hosts))
    assert (place.name, place.stop_grace_s) == (name, grace_s)


@pytest.mark.parametrize(("visible", "gpus"), [("2,3", 2), ("", 0), ("-1", 0)])
def test_the_gpus_are_those_that_the_user_left_visible(visible: str, gpus: int) -> None:
    assert LocalPlace({"CUDA_VISIBLE_DEVICES": visible}).node_resources().num_gpus == gpus


def test_where_none_are_named_the_gpus_are_those_that_nvidia_smi_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert LocalPlace({}).node_resources().num_gpus == 0
    tool.write_text("#!/bin/sh\necho 'GPU 0: H100'; echo 'GPU 1: RTX 4090 Laptop GPU (UUID: GPU-8f)'\n")
    tool.chmod(0o755)
    assert LocalPlace({}).node_resources().num_gpus == 2


def test_an_nvidia_smi_that_hangs_is_an_error_and_not_a_node_without_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 30\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(local, "_LIST_GPUS_S", 0.1)
    with pytest.raises(LaunchError, match="nvidia-smi gave no answer"):
        LocalPlace({}).node_resources()


PODS = """
from hpc_grpo.launch.place.base import place_kind
from hpc_grpo.launch.place.local import LocalPlace

@place_kind
class PodPlace(LocalPlace):
    name = "pods"

    @staticmethod
    def is_here(environ):
        return "HEAD_POD_ID" in environ
"""


@pytest.fixture
def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One more file in the folder of places."""
    (tmp_path / "pods_of_a_test.py").write_text(PODS)
    monkeypatch.setattr(place, "__path__", [*place.__path__, str(tmp_path)])
    known = list(KINDS)
    yield
    KINDS[:] = known


@pytest.mark.usefixtures("pods")
def test_a_file_in_the_folder_is_all_that_a_new_kind_of_place_takes() -> None:
    assert find_place({"HEAD_POD_ID": "x7"}).name == "pods"
    assert queue_of("pods") is None
    assert find_place({}).name == "local"
    assert find_place({"SLURM_JOB_ID": "17"}).name == "slurm"


@pytest.mark.parametrize("environ", [{"SLURM_JOB_ID": "17"}, {HEAD_VARIABLE: "1"}])
def test_a_place_with_nodes_of_its_own_refuses_hosts_to_reach_by_ssh(tmp_path: Path, environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"launch\.hosts = n1, n2 .*launch\.hosts=\[\]") as refused:
        find_place(environ).for_run(RunDir(tmp_path), LaunchConfig(hosts=["n1", "n2"]))
    assert refused.value.exit_code == 78


def test_an_attempt_says_which_queue_it_was_a_job_of() -> None:
    assert queue_of("local") is None
    assert queue_of("a place of a later version") is None
    assert queue_of("slurm") is not None
