"""The hosts of launch.hosts: one is this machine, the others are reached by an ssh that never asks."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import ConfigError, NodesUnavailableError
from hpc_grpo.launch.place.local import LocalPlace, SshPlace
from hpc_grpo.run.lock import LockOwner
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.processes import start_time

HOSTS = ["127.0.0.1", "ann@node2.example:2222"]


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ssh that notes its arguments, and runs the last of them here."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    noise = "printf 'Loading modules: 3\\n7'"  # of a ~/.bashrc
    program.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\nshift $(($# - 1))\n{noise}\nexec sh -c "$1"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path / "asked"


def place(**launch: object) -> SshPlace:
    return SshPlace({"CUDA_VISIBLE_DEVICES": ""}, LaunchConfig.model_validate({"hosts": HOSTS, **launch}))


def test_hosts_in_the_config_make_the_place(tmp_path: Path) -> None:
    launch = LaunchConfig(hosts=HOSTS)
    assert launch.num_nodes == 2
    assert LocalPlace({}).for_run(RunDir(tmp_path), launch).name == "ssh"
    assert LocalPlace({}).for_run(RunDir(tmp_path), LaunchConfig()).name == "local"


@pytest.mark.parametrize("hosts", [["-oProxyCommand=x"], ["a b"], ["a@-x"], ["n1:port"], ["n1", "n1"], ["$(x)"]])
def test_what_is_no_host_is_refused(hosts: list[str]) -> None:
    with pytest.raises(ValueError, match="host"):
        LaunchConfig(hosts=hosts)


def test_as_many_nodes_as_hosts() -> None:
    with pytest.raises(ValueError, match="number of hosts, 2"):
        LaunchConfig(hosts=HOSTS, num_nodes=3)


def test_this_machine_is_the_head_and_the_others_are_reached(ssh: Path) -> None:
    found = place(hosts=HOSTS[::-1]).allocation()
    assert found.nodes == ("127.0.0.1", "node2.example")
    assert found.this_node == found.head
    assert "-oBatchMode=yes -oStrictHostKeyChecking=yes" in ssh.read_text()
    assert "-p 2222 -- ann@node2.example " in ssh.read_text()


def test_words_reach_the_host_as_they_are(ssh: Path) -> None:
    found = place()
    assert found.start_command("127.0.0.1", ["agent"]) == ["agent"]
    assert found.start_command("node2.example", ["python", "a b", "$HOME"])[-1].endswith("; python 'a b' '$HOME'")
    assert ssh.exists()


def test_the_environment_goes_with_the_spec_and_what_is_true_of_this_machine_stays() -> None:
    environ = {"WANDB_API_KEY": "k", "HOME": "/h", "SLURM_JOB_ID": "7", "MINE": "1", "OTHER": "2", "PATH": "/bin"}
    environ["DEBUG_RAY"] = "1"
    carried = place(pass_env=["MINE"]).carried_environment(environ)
    assert carried == {"WANDB_API_KEY": "k", "MINE": "1", "PATH": "/bin", "DEBUG_RAY": "1"}


def test_a_machine_that_is_none_of_the_hosts_is_told_where_to_start() -> None:
    with pytest.raises(ConfigError, match="ssh -t node7"):
        place(hosts=["node7.invalid", "node8.invalid"]).allocation()


def test_a_host_that_does_not_answer_is_named(tmp_path: Path, ssh: Path) -> None:
    (tmp_path / "bin" / "ssh").write_text("#!/bin/sh\necho 'Host key verification failed.' >&2\nexit 255\n")
    with pytest.raises(NodesUnavailableError, match=r"node2.example cannot be reached.*Host key") as raised:
        place().allocation()
    assert raised.value.nodes == ("node2.example",)
    assert not ssh.exists()
    assert place().is_node_failure("its agent ended with exit code 255: Connection timed out")
    assert not place().is_node_failure("Ray ended by itself with exit code 255; see /logs.")


def test_a_host_that_is_lost_is_named_unless_the_others_are_enough(ssh: Path) -> None:
    before = place().allocation()
    with pytest.raises(NodesUnavailableError, match=r"node2.example.*min_nodes") as raised:
        place().remaining(before, ["127.0.0.1"], lambda: True)
    assert raised.value.nodes == ("node2.example",)
    assert place(min_nodes=1).remaining(before, ["127.0.0.1"], lambda: True).nodes == ("127.0.0.1",)
    assert ssh.exists()


def test_a_run_is_taken_over_at_once_where_its_owners_host_says_that_it_is_gone(ssh: Path) -> None:
    mine = replace(LockOwner.here("ssh7", 1), host="node2.example")
    found = place()
    assert found.owner_lives(mine)
    assert found.owner_lives(replace(mine, pid_started=mine.pid_started + 1)) is False
    assert found.owner_lives(replace(mine, boot_id="another")) is False
    assert found.owner_lives(replace(mine, pid_namespace=1)) is None
    assert found.owner_lives(replace(mine, host=socket.gethostname())) is None
    assert start_time(mine.pid) == mine.pid_started
    assert ssh.exists()
