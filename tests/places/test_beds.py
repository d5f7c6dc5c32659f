"""The beds themselves: what other tests of places rely on is true of them."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from tests.places.conftest import residue_of, wait_until
from tools.virtual_machines import containers, controller, daemons, gpus
from tools.virtual_machines.bed_layout import CONTROLLER
from tools.virtual_machines.beds import Bed

pytestmark = pytest.mark.places

ROUTE_TO_THE_WORLD = (
    "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.connect(('8.8.8.8', 80)); print(s.getsockname()[0])"
)
DIAL = "import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5); print(s.getsockname()[0])"


LISTEN = (
    "import socket, sys, time; s = socket.create_server(('0.0.0.0', int(sys.argv[1]))); print(flush=True)\n"
    "time.sleep(1000)"
)


def output(bed: Bed, name: str, *argv: str, **environment: str) -> str:
    done = bed.run(name, argv, environment=environment)
    assert done.returncode == 0, done
    return done.stdout.strip()


class TestPods:
    def test_they_find_each_other_by_their_ids_alone(self, pods: Bed) -> None:
        look_up = "import socket, sys; print(socket.gethostbyname(sys.argv[1]))"
        assert output(pods, "pod2", "python3", "-c", look_up, "pod1.runpod.internal") == "198.18.0.11"
        own = output(pods, "pod2", "hostname")
        assert output(pods, "pod2", "python3", "-c", look_up, own) == "198.19.0.12"
        assert pods.run("pod1", ["python3", "-c", look_up, own]).returncode != 0

    def test_their_route_to_the_world_is_not_how_they_reach_each_other(self, pods: Bed) -> None:
        assert output(pods, "pod3", "python3", "-c", ROUTE_TO_THE_WORLD) == "198.19.0.13"
        listener = pods.popen("pod1", ["python3", "-c", LISTEN, "7000"], stdout=-1)
        assert listener.stdout is not None
        listener.stdout.readline()
        assert pods.run("pod3", ["python3", "-c", DIAL, "198.19.0.11", "7000"]).returncode != 0
        assert output(pods, "pod3", "python3", "-c", DIAL, "pod1.runpod.internal", "7000") == "198.18.0.13"
        os.killpg(listener.pid, signal.SIGKILL)
        listener.communicate()

    def test_each_has_its_own_tmp_shared_memory_and_processes_and_all_one_storage(self, pods: Bed) -> None:
        output(pods, "pod1", "touch", "/tmp/mine", "/dev/shm/mine", str(pods.layout.storage / "ours"))
        assert "mine" not in output(pods, "pod2", "ls", "/tmp", "/dev/shm")
        assert output(pods, "pod2", "ls", str(pods.layout.storage)) == "ours"
        sleeper = pods.popen("pod1", ["sleep", "1000"])
        wait_until(lambda: "sleep 1000" in pods.processes("pod1").values(), 10, "it runs")
        left = pods.residue("pod1")
        assert list(left.processes) == [sleeper.pid]
        assert (left.shared_memory, left.tmp) == (["mine"], ["mine"])
        assert not pods.residue("pod2")
        os.killpg(sleeper.pid, signal.SIGTERM)
        assert sleeper.wait(60) == -signal.SIGTERM
        output(pods, "pod1", "rm", "/tmp/mine", "/dev/shm/mine", str(pods.layout.storage / "ours"))
        assert residue_of(pods) == {}

    def test_each_is_told_its_role_and_nothing_of_who_runs_the_tests(self, pods: Bed) -> None:
        show = ["sh", "-c", "echo $RUNPOD_POD_ID $HEAD_POD_ID $RAY_WORKER $EXPECTED_WORKERS $SECRET"]
        os.environ["SECRET"] = "of the tests"
        try:
            assert output(pods, "pod1", *show) == "pod1 pod1 0 2"
            assert output(pods, "pod3", *show, RAY_WORKER="0", SECRET="given") == "pod3 pod1 0 2 given"
        finally:
            del os.environ["SECRET"]

    def test_one_that_is_unplugged_hears_nothing_and_runs_on(self, pods: Bed) -> None:
        ping = ["timeout", "3", "bash", "-c", "exec 3<>/dev/tcp/pod1.runpod.internal/7001"]
        listener = pods.popen("pod1", ["python3", "-c", LISTEN, "7001"], stdout=-1)
        assert listener.stdout is not None
        listener.stdout.readline()
        assert pods.run("pod2", ping).returncode == 0
        pods.unplug("pod1")
        assert pods.run("pod2", ping).returncode != 0
        assert listener.poll() is None
        pods.plug("pod1")
        wait_until(lambda: pods.run("pod2", ping).returncode == 0, 30, "it is heard again")
        listener.kill()
        listener.communicate()

    def test_one_that_is_killed_and_started_again_has_a_new_container(self, pods: Bed) -> None:
        output(pods, "pod2", "touch", "/tmp/lost", str(pods.layout.storage / "kept"))
        sleeper = pods.popen("pod2", ["sleep", "1000"])
        pods.kill("pod2")
        assert sleeper.wait(60) == -signal.SIGKILL
        pods.start("pod2")
        assert "lost" not in output(pods, "pod2", "ls", "/tmp").split()
        assert output(pods, "pod2", "ls", str(pods.layout.storage)) == "kept"
        output(pods, "pod2", "rm", str(pods.layout.storage / "kept"))
        assert residue_of(pods) == {}


def test_private_disks_are_under_one_path(private_pods: Bed) -> None:
    path = private_pods.layout.storage / "mine"
    output(private_pods, "pod1", "touch", str(path))
    assert private_pods.run("pod2", ["ls", str(path)]).returncode != 0
    assert (private_pods.storage("pod1") / "mine").exists()


class TestHosts:
    def test_one_reaches_the_other_by_ssh_without_a_question(self, hosts: Bed) -> None:
        done = hosts.run("host1", ["ssh", "-T", "-o", "BatchMode=yes", "host2", "hostname; echo $SSH_TTY; exit 75"])
        assert (done.returncode, done.stdout.split(), done.stderr) == (75, ["host2"], "")

    def test_a_session_gets_nothing_of_the_callers_environment(self, hosts: Bed) -> None:
        done = hosts.run("host1", ["ssh", "host2", "env"], environment={"SECRET": "1"})
        assert "SECRET" not in done.stdout
        assert f"{hosts.layout.programs}:" in done.stdout

    def test_what_a_lost_session_leaves_is_seen(self, hosts: Bed) -> None:
        hosts.run("host1", ["ssh", "host2", "nohup sleep 1000 > /dev/null 2>&1 &"])
        # The session ends while the shell it leaves is still on its way to `nohup` and `sleep`.
        wait_until(lambda: list(hosts.residue("host2").processes.values()) == ["sleep 1000"], 30, "sleep is left alone")
        (left,) = hosts.residue("host2").processes
        os.kill(left, signal.SIGKILL)
        assert residue_of(hosts) == {}

    def test_a_frozen_sshd_answers_nobody(self, hosts: Bed) -> None:
        daemons.freeze(hosts.layout, "host2", "sshd")
        assert hosts.run("host1", ["ssh", "-o", "ConnectTimeout=2", "host2", "true"]).returncode == 255
        daemons.thaw(hosts.layout, "host2", "sshd")
        assert hosts.run("host1", ["ssh", "-o", "ConnectTimeout=60", "host2", "true"]).returncode == 0


@pytest.mark.parametrize("options", [["--ipc=host"], ["--ipc=host", "--pid=host", "--cgroups=enabled"]])
def test_podman_runs_a_command_from_a_folder(hosts: Bed, options: list[str]) -> None:
    rootfs = hosts.layout.storage / f"rootfs-{len(options)}"
    containers.write_rootfs(rootfs)
    script = (
        "import os, signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\n"
        "print(os.listdir('/dev/shm')); signal.pause()"
    )
    hosts.run("host1", ["touch", "/dev/shm/seen-from-within"])
    argv = ["podman", "run", "--rm", *options, "-v", "/usr:/usr:ro", "--rootfs", str(rootfs)]
    process = hosts.popen("host1", [*argv, "/usr/bin/python3", "-uc", script], stdout=-1)
    assert process.stdout is not None
    assert "'seen-from-within'" in process.stdout.readline()
    process.send_signal(signal.SIGUSR1)
    assert process.wait(30) == 75
    process.stdout.close()
    hosts.run("host1", ["rm", "/dev/shm/seen-from-within"])
    assert residue_of(hosts) == {}


class TestVms:
    def test_nvidia_smi_shows_what_the_file_says(self, vms: Bed) -> None:
        gpus.occupy(vms.layout, "vm2", index=3, memory_mib=30000, pid=77)
        query = "nvidia-smi --query-gpu=index,memory.used,memory.total --format=csv,noheader,nounits"
        done = vms.run(CONTROLLER, ["ssh", "vm2", query])
        assert done.stdout.splitlines()[2:] == ["2, 4, 81920", "3, 30004, 81920"]
        uuid = json.loads(vms.layout.gpus("vm2").read_text())["gpus"][3]["uuid"]
        apps = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader"]
        assert output(vms, "vm2", *apps) == f"{uuid}, 77, 30000 MiB"
        assert output(vms, "vm1", *apps) == ""
        assert vms.run(CONTROLLER, ["nvidia-smi", "-L"]).returncode == 9

    def test_nats_and_postgresql_answer_every_machine_and_can_be_frozen_stopped_and_wiped(self, vms: Bed) -> None:
        psql = ["psql", controller.database_url(vms.layout), "-Atc"]
        assert output(vms, "vm1", *psql, "CREATE TABLE t (x int); SELECT count(*) FROM t").splitlines()[-1] == "0"
        greeting = ["bash", "-c", f"exec 3<>/dev/tcp/{CONTROLLER}/4222; timeout 5 head -n 1 <&3"]
        assert '"jetstream":true' in output(vms, "vm1", *greeting)

        controller.freeze(vms.layout, "nats")
        assert vms.run("vm1", greeting).stdout == ""
        controller.thaw(vms.layout, "nats")
        assert "INFO" in output(vms, "vm1", *greeting)

        controller.stop(vms.layout, "postgres")
        assert vms.run("vm1", [*psql, "SELECT 1"]).returncode != 0
        controller.start(vms.layout, "postgres")
        assert output(vms, "vm1", *psql, "SELECT count(*) FROM t") == "0"

        controller.stop(vms.layout, "nats")
        controller.wipe(vms.layout, "nats")
        controller.start(vms.layout, "nats")
        assert "INFO" in output(vms, "vm1", *greeting)


def test_the_python_of_the_checkout_is_that_of_the_machines(vms: Bed) -> None:
    assert output(vms, "vm1", sys.executable, "-c", "import sys; print(sys.prefix)") == sys.prefix
