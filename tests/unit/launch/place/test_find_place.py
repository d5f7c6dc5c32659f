from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch import place
from hpc_grpo.launch.place import find_place, queue_of
from hpc_grpo.launch.place.base import KINDS
from hpc_grpo.launch.place.joined.place import HEAD_VARIABLE
from hpc_grpo.run.paths import RunDir

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
