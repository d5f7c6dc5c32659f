from __future__ import annotations

import json
import socket
import sys
from dataclasses import astuple
from pathlib import Path

import pytest

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import ConfigError, LaunchError
from hpc_grpo.launch.agent import ray_command
from hpc_grpo.launch.agent.folders import shm_dir_path
from hpc_grpo.launch.agent.protocol import NodeSpec, Stage
from hpc_grpo.launch.agent.ray_command import RayPorts, ray_environment, start_command, temp_dir_path
from hpc_grpo.launch.agent.stage import staged
from hpc_grpo.launch.place.base import NodeResources
from hpc_grpo.launch.place.container import Container
from hpc_grpo.launch.supervisor.attempt_setup import AttemptSetup
from hpc_grpo.run.paths import RunDir
from tests.support.places import FakePlace, allocation

PORTS = RayPorts(1, 2, 3, 4, 5, 6, 7, 8, 99)


def spec(**changes: object) -> NodeSpec:
    values: dict[str, object] = {
        "node": "n1",
        "tag": "17-1-0",
        "head_address": "",
        "token_path": "/run/token",
        "log_dir": "/logs",
        "working_dir": "/work",
        "interface": None,
        "loopback": False,
        "local_dir": None,
        "object_store_gib": 1.0,
    }
    return NodeSpec(**{**values, **changes})  # type: ignore[arg-type]


def command(node: NodeSpec) -> list[str]:
    return start_command(node, "10.0.0.1", PORTS, Path("/tmp/hg/r"), NodeResources(72, 4))


def test_every_port_is_pinned_and_resources_are_the_allocations() -> None:
    argv = command(spec())
    assert "--head" in argv
    assert {"--port=1", "--object-manager-port=2", "--node-manager-port=3", "--max-worker-port=99"} <= set(argv)
    assert {"--num-cpus=72", "--num-gpus=4", "--temp-dir=/tmp/hg/r", "--node-ip-address=10.0.0.1"} <= set(argv)


@pytest.mark.parametrize(("asked", "debugger"), [("1", "legacy"), ("0", None), (None, None)])
def test_debug_ray_switches_the_older_debugger_on(asked: str | None, debugger: str | None) -> None:
    environ = {} if asked is None else {"DEBUG_RAY": asked}
    assert ray_environment(environ, spec(), "10.0.0.1", "lo").get("RAY_DEBUG") == debugger


def test_a_worker_joins_the_head_and_starts_no_head_services() -> None:
    argv = command(spec(head_address="10.0.0.1:6000"))
    assert "--address=10.0.0.1:6000" in argv
    assert not [word for word in argv if word.startswith(("--head", "--port", "--ray-client", "--dashboard-port"))]


def test_the_dashboard_is_on_the_heads_loopback_where_it_is_asked_for() -> None:
    assert {"--include-dashboard=false", "--dashboard-host=127.0.0.1"} <= set(command(spec()))
    assert {"--include-dashboard=true", "--dashboard-host=127.0.0.1", "--dashboard-port=7"} <= set(
        command(spec(dashboard_port=0))
    )


def test_a_ray_without_the_packages_of_its_dashboard_is_refused_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_command.refuse_without_dashboard()
    gone = {"aiohttp_cors", "opencensus"}
    there = ray_command.distributions
    monkeypatch.setattr(ray_command, "distributions", lambda name: iter(()) if name in gone else there(name=name))
    with pytest.raises(ConfigError, match=r"needs aiohttp_cors, opencensus, which .* install ray\[default\]"):
        ray_command.refuse_without_dashboard()


def test_templates_are_started_beside_ray_which_starts_such_actors_by_their_client() -> None:
    node = spec(templates_of="/runs/r")
    options = [word.removeprefix("--template=") for word in command(node) if word.startswith("--template=")]
    learner, engine = sorted((json.loads(option) for option in options), key=lambda told: -len(told["words"][1]))
    assert engine["words"] == ["/dev/shm/hg-17-1-0/engine.socket", "engine", "/runs/r"]
    assert learner["log"] == "/tmp/hg/learner_template.log"
    client = ray_environment({}, node, "10.0.0.1", "lo")["HPC_GRPO_ENGINE_PYTHON"]
    assert client.startswith(f"{sys.executable} -I -S ")
    assert client.endswith("template/client.py /dev/shm/hg-17-1-0/engine.socket")


def test_ray_and_its_actors_run_the_python_of_the_nodes_copy(tmp_path: Path) -> None:
    stage = Stage(environment=str(tmp_path / "environment"))
    python = str(staged(stage, Path("/tmp"))["environment"] / "bin" / "python")
    node = spec(stage=stage)
    assert command(node)[0] == python
    assert ray_environment({}, node, "10.0.0.1", "lo")["HPC_GRPO_LEARNER_PYTHON"] == python
    node = spec(stage=stage, templates_of="/runs/r")
    [template, _] = [json.loads(word.partition("=")[2]) for word in command(node) if word.startswith("--template=")]
    assert template["program"][0] == python
    assert ray_environment({}, node, "10.0.0.1", "lo")["HPC_GRPO_LEARNER_PYTHON"].startswith(f"{python} -I -S ")


def test_copies_of_another_run_are_not_taken_over() -> None:
    environ = {"HPC_GRPO_WEIGHTS_DIR": "/tmp/hg-another", "HPC_GRPO_COMPILED_DIR": "/tmp/hg-another"}
    env = ray_environment(environ, spec(), "10.0.0.1", "lo")
    assert not [name for name in environ if name in env]


def test_in_a_container_there_are_no_templates() -> None:
    node = spec(templates_of="/runs/r", container=Container("i", "docker", "python3"))
    assert not [word for word in command(node) if word.startswith("--template=")]
    assert "HPC_GRPO_ENGINE_PYTHON" not in ray_environment({}, node, "10.0.0.1", "lo")


def test_no_secret_is_in_the_command() -> None:
    assert not [word for word in command(spec()) if "token" in word]


def test_the_environment_authenticates_and_binds_to_this_node() -> None:
    environ = {"PATH": "/bin", "RAY_ADDRESS": "elsewhere", "SLURM_JOB_ID": "17"}
    node = spec(contract_env={"HPC_GRPO_ATTEMPT": "1"})
    env = ray_environment(environ, node, "10.0.0.1", "hsn0")
    assert env["RAY_AUTH_MODE"] == "token"
    assert env["RAY_AUTH_TOKEN_PATH"] == "/run/token"
    assert env["OMP_NUM_THREADS"] == "1"
    assert (env["VLLM_HOST_IP"], env["GLOO_SOCKET_IFNAME"]) == ("10.0.0.1", "hsn0")
    assert (env["HPC_GRPO_ATTEMPT"], env["HPC_GRPO_SHM_DIR"]) == ("1", "/dev/shm/hg-17-1-0")
    assert "RAY_ADDRESS" not in env
    assert "SLURM_JOB_ID" not in env


def test_nccl_starts_on_the_interface_of_the_run_unless_the_user_says_otherwise() -> None:
    def name(environ: dict[str, str], env: dict[str, str]) -> str:
        return ray_environment(environ, spec(env=env), "10.0.0.1", "hsn0")["NCCL_SOCKET_IFNAME"]

    assert name({}, {}) == "=hsn0"
    assert name({"NCCL_SOCKET_IFNAME": "ib"}, {}) == "ib"
    assert name({"NCCL_SOCKET_IFNAME": "ib"}, {"NCCL_SOCKET_IFNAME": "hsn"}) == "hsn"


def test_a_proxy_that_gets_through_spares_every_node_on_every_node() -> None:
    place = FakePlace(allocation("nid001", "nid002", "nid003"))
    nodes = place.allocation().nodes
    setup = AttemptSetup(RunDir(Path("/run")), LaunchConfig(pass_env=["http_proxy"]), place, place.nodes, 1, Path("/w"))
    environ = {"http_proxy": "http://proxy:3128", "no_proxy": ".site"}
    for index, head_address in enumerate(["", "10.0.0.1:6379", "10.0.0.1:6379"]):
        ip = f"10.0.0.{index + 1}"
        env = ray_environment(environ, setup.node_spec(nodes[index], head_address), ip, "lo")
        direct = env["no_proxy"].split(",")
        assert {".site", "localhost", "127.0.0.1", "10.0.0.1", ip, *nodes} <= set(direct)
        assert "127.0.0.0/8" in direct, "the network of the interface"
        assert "" not in direct
        assert env["NO_PROXY"] == env["no_proxy"]


def test_the_users_thread_count_wins() -> None:
    assert ray_environment({"OMP_NUM_THREADS": "4"}, spec(), "ip", "lo")["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize(
    ("value", "expanded"), [("$LOCALDIR/triton", "/local/7/triton"), ("/disk${LOCALDIR}", "/disk/local/7")]
)
def test_a_variable_that_the_node_does_not_have_is_an_error_there(value: str, expanded: str) -> None:
    node = spec(env={"HF_HOME": "$HOME/hf", "TRITON_CACHE_DIR": value})
    environ = {"HOME": "/h", "LOCALDIR": "/local/7"}
    env = ray_environment(environ, node, "ip", "lo")
    assert (env["HF_HOME"], env["TRITON_CACHE_DIR"]) == ("/h/hf", expanded)
    del environ["LOCALDIR"]
    with pytest.raises(ConfigError, match=r"launch\.env\.TRITON_CACHE_DIR = .*: LOCALDIR is not set on .*setup_lines"):
        ray_environment(environ, node, "ip", "lo")


def test_the_temp_dir_is_node_local_and_short() -> None:
    assert temp_dir_path(spec(), {}) == Path("/tmp/hg-17-1-0")
    local = spec(local_dir="$LOCALDIR")
    assert temp_dir_path(local, {"LOCALDIR": "/local/7"}) == Path("/local/7/hg-17-1-0")
    assert temp_dir_path(local, {}) == Path("/tmp/hg-17-1-0")
    with pytest.raises(LaunchError, match="107 bytes"):
        temp_dir_path(spec(local_dir="/a/very/long/folder/for/temporary/files"), {})


def test_nobody_can_take_the_names_of_an_attempts_folders_before_it_does() -> None:
    nodes = allocation("n1")
    setups = [AttemptSetup(RunDir(Path("/run")), LaunchConfig(), FakePlace(nodes), nodes, 1, Path("/w")) for _ in "ab"]
    first, second = (setup.node_spec("n1", "") for setup in setups)
    assert temp_dir_path(first, {}) != temp_dir_path(second, {})
    assert shm_dir_path(first.tag) != shm_dir_path(second.tag)


def test_rays_longest_socket_path_fits_with_a_long_job_id() -> None:
    nodes = allocation("n1", job_id="123456789")
    setup = AttemptSetup(RunDir(Path("/run")), LaunchConfig(), FakePlace(nodes), nodes, 1, Path("/w"))
    folder = temp_dir_path(setup.node_spec("n1", ""), {})
    assert len(f"{folder}/r/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store") < 107


def test_ports_are_distinct_free_and_below_the_ephemeral_range() -> None:
    ports = ray_command.choose_ports("job-1-0", 4)
    *fixed, first, last = astuple(ports)
    assert len({*fixed, *range(first, last + 1)}) == 7 + 64 + 2 * 4
    assert last < ray_command._ephemeral_ports().start
    assert ports == ray_command.choose_ports("job-1-0", 4)


def test_a_taken_port_moves_the_whole_block() -> None:
    before = ray_command.choose_ports("job-2-0", 4)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", before.runtime_env))
        taken.listen()
        after = ray_command.choose_ports("job-2-0", 4)
    assert set(range(after.gcs, after.last_worker + 1)).isdisjoint(range(before.gcs, before.last_worker + 1))


def test_skip_passes_over_free_blocks() -> None:
    assert ray_command.choose_ports("job-3-0", 4, skip=1) != ray_command.choose_ports("job-3-0", 4)


def test_the_dashboard_has_the_port_that_users_look_for_unless_it_is_taken_or_was_lost_before() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        wished = taken.getsockname()[1]
    drawn = ray_command.choose_ports("job-4-0", 4).dashboard
    assert ray_command.choose_ports("job-4-0", 4, dashboard=wished).dashboard == wished
    assert ray_command.choose_ports("job-4-0", 4, skip=1, dashboard=wished).dashboard != wished
    assert ray_command.choose_ports("job-4-0", 4, dashboard=0).dashboard == drawn
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", wished))
        taken.listen()
        assert ray_command.choose_ports("job-4-0", 4, dashboard=wished).dashboard == drawn


def test_different_jobs_look_at_different_places() -> None:
    assert len({ray_command.choose_ports(f"{job}-1-0", 4).gcs for job in range(8)}) > 4


@pytest.mark.parametrize(
    ("first", "last", "lowest", "highest"),
    [
        (32768, 60999, 10240, 32767),  # Linux as it comes
        (1024, 65535, 10240, 65535),  # nothing is left outside: among them
        (1024, 60999, 61000, 65535),
        (10300, 60999, 61000, 65535),  # less than a block is left below
        (10240, 65500, 10240, 65500),
        (1024, 4999, 10240, 65535),
        (32768, 65535, 10240, 32767),
    ],
)
def test_blocks_keep_off_the_ephemeral_range_where_there_is_room(
    first: int, last: int, lowest: int, highest: int
) -> None:
    stride, ephemeral = 100, range(first, last + 1)
    starts = list(ray_command.block_starts("job-4-0", stride, ephemeral))
    blocks = [range(start, start + stride) for start in starts]
    room = (highest + 1 - lowest) // stride
    assert sorted(starts[:room]) == list(range(lowest, highest - stride + 2, stride))
    assert all(block.start >= 10240 and block.stop <= 65536 for block in blocks)
    assert len({port for block in blocks for port in block}) == len(blocks) * stride
    among = [block[0] in ephemeral or block[-1] in ephemeral for block in blocks]
    assert among == sorted(among), "those outside come first"


def test_ports_are_found_where_every_port_is_ephemeral(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_command, "_ephemeral_ports", lambda: range(1024, 65536))
    ports = ray_command.choose_ports("job-5-0", 4)
    assert 10240 <= ports.gcs < ports.last_worker <= 65535


def test_an_unknown_interface_is_named_with_those_that_exist() -> None:
    with pytest.raises(LaunchError, match=r"launch\.interface = hsn9.*It has: "):
        ray_command.choose_interface("hsn9")


def test_loopback_has_an_address() -> None:
    assert str(ray_command._interfaces()["lo"]) == "127.0.0.1/8"


def test_an_interface_knows_its_network() -> None:
    assert ray_command.network_of("lo") == "127.0.0.0/8"
    assert ray_command.network_of("nope0") is None


def test_the_default_route_with_the_lowest_metric_wins() -> None:
    table = (
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\n"
        "ib0\t00000000\t0100000A\t0003\t0\t0\t200\t00000000\n"
        "eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\n"
        "eth1\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\n"
    )
    assert ray_command._default_route(table) == "eth0"
    assert ray_command._default_route("Iface\n") == ""
