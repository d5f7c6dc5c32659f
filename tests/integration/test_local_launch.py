"""`hpc-grpo train` on this machine: real Ray, a stand-in for training."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.integration

DRIVER = Path(__file__).resolve().parents[1] / "stand_ins" / "driver.py"
_DEADLINE_S = 180.0


def command(root: Path, driver: str = DRIVER.name, *words: str, starts: str = "train") -> list[str]:
    run = [*starts.split(), "local/debug", f"run.root={root}", "--driver", str(DRIVER.with_name(driver)), *words]
    return [sys.executable, "-m", "hpc_grpo.cli", *run]


def environment(**changes: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return {**clean, "CUDA_VISIBLE_DEVICES": "", **changes}


def record(root: Path) -> dict[str, Any]:
    (path,) = (root / "debug" / "attempts").glob("*/attempt.json")
    return dict(json.loads(path.read_text()))


def left_behind(root: Path) -> list[str]:
    """Folders of the attempt, and processes that name them."""
    name = f"hg-{record(root)['job_id']}-"
    folders = [str(path) for parent in ("/tmp", "/dev/shm") for path in Path(parent).glob(f"{name}*")]
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if name in process.read_text(errors="replace"):
                folders.append(str(process))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return folders


def wait_until(condition: Any, what: str, deadline_s: float = _DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"after {deadline_s:.0f} s still not true: {what}"
        time.sleep(0.2)


def test_a_run_completes_and_leaves_nothing(tmp_path: Path) -> None:
    env = environment(RAY_ADDRESS="10.9.9.9:1", WORLD_SIZE="8")
    done = subprocess.run(command(tmp_path), capture_output=True, text=True, env=env, timeout=_DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stand-in: 1 nodes, 0 GPUs" in done.stdout
    ended = record(tmp_path)
    assert ended["exit_kind"] == "complete"
    assert set(ended["phases_s"]) == {"head", "ray", "driver", "teardown"}
    seen = json.loads((tmp_path / "debug" / "stand_in.json").read_text())
    assert seen["witnesses"][0]["ip"] == "127.0.0.2"
    assert "WORLD_SIZE" not in seen["witnesses"][0]["env"]
    attempt_dir = Path(seen["contract"]["HPC_GRPO_ATTEMPT_DIR"])
    assert "stand-in: 1 nodes" in (attempt_dir / "driver.log").read_text()
    [of_agent] = attempt_dir.rglob("dashboard_agent.log")
    assert "Get dashboard http address failed" not in of_agent.read_text()
    assert not (of_agent.parent / "dashboard.log").exists(), "nobody has asked for Ray's dashboard"
    assert left_behind(tmp_path) == []


def test_ctrl_c_on_a_terminal_reaches_the_driver_once_and_everything_ends(tmp_path: Path) -> None:
    terminal, slave = pty.openpty()
    env = environment(HPC_GRPO_STAND_IN_SLEEP_S="100")
    run = subprocess.Popen(command(tmp_path), stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True)
    os.close(slave)
    wait_until((tmp_path / "debug" / "stand_in.json").exists, "the driver runs")
    os.killpg(run.pid, signal.SIGINT)  # what a terminal does on Ctrl+C
    assert run.wait(timeout=60) == 75
    assert record(tmp_path)["exit_kind"] == "resumable"
    printed = b""
    with suppress(OSError):  # once all is read: nobody has the other end open any more
        while select.select([terminal], [], [], 5.0)[0]:
            printed += os.read(terminal, 65536)
    assert printed.count(b"driver got SIGINT") == 1
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    "starts", ["train", *(pytest.param(f"place {each}", marks=pytest.mark.long) for each in ("pod", "host head"))]
)
def test_a_terminal_that_is_gone_ends_the_run_with_a_checkpoint(tmp_path: Path, starts: str) -> None:
    terminal, slave = pty.openpty()
    env = environment(HPC_GRPO_STAND_IN_SLEEP_S="100", EXPECTED_WORKERS="0")
    words = command(tmp_path, starts=starts)
    run = subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True)
    os.close(slave)
    wait_until((tmp_path / "debug" / "stand_in.json").exists, "the driver runs")
    os.close(terminal)
    for _ in range(2):  # the kernel tells, and the shell
        os.killpg(run.pid, signal.SIGHUP)
    assert run.wait(timeout=60) == 75
    ended = record(tmp_path)
    assert (ended["exit_kind"], ended["signalled"]) == ("resumable", "SIGHUP")
    assert "driver got SIGTERM" in (tmp_path / "debug" / "attempts" / f"1-{ended['job_id']}" / "driver.log").read_text()
    assert left_behind(tmp_path) == []


def test_driver_and_workers_import_the_runs_copy_and_a_killed_supervisor_takes_all_with_it(tmp_path: Path) -> None:
    """The run starts in a checkout, whose package must not win."""
    checkout, found = DRIVER.parents[2], tmp_path / "debug" / "where.json"
    run = subprocess.Popen(
        command(tmp_path, "where.py"),
        cwd=checkout,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    wait_until(found.exists, "the driver runs")
    copy = str(tmp_path / "debug" / "source" / "hpc_grpo" / "__init__.py")
    assert json.loads(found.read_text()) == {"driver": copy, "worker": copy, "cwd": str(checkout)}
    assert left_behind(tmp_path)
    run.kill()
    run.wait()
    wait_until(lambda: not left_behind(tmp_path), "nothing is left", 30.0)


def test_a_stuck_driver_leaves_the_stacks_of_every_process_and_is_ended(tmp_path: Path) -> None:
    env = environment(HPC_GRPO_STAND_IN_STUCK="1")
    done = subprocess.run(command(tmp_path), capture_output=True, text=True, env=env, timeout=_DEADLINE_S, check=False)
    assert done.returncode == 128 + signal.SIGKILL
    ended = record(tmp_path)
    assert ended["exit_kind"] == "crash"
    assert re.match(r"The driver \(process \d+\) made no progress in 'train' for \d+ s", ended["why"])
    assert "The stacks of its processes are in " in ended["why"]
    (attempt_dir,) = (tmp_path / "debug" / "attempts").iterdir()
    stacks = {path.stem.rpartition("-")[2]: path.read_text() for path in (attempt_dir / "stacks").iterdir()}
    assert sorted(stacks) == ["driver", "witness"]
    assert "driver.py" in stacks["driver"]
    assert "main_loop" in stacks["witness"]
    assert left_behind(tmp_path) == []


def _status(url: str, token: str = "") -> int:
    """Return the status of a GET; 0 where nothing answers."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:  # one that is starting may hang up, which urllib raises as it is
        return 0


@pytest.mark.long
def test_rays_dashboard_answers_on_loopback_and_with_the_token_alone(tmp_path: Path) -> None:
    run_dir, env = tmp_path / "debug", environment(HPC_GRPO_STAND_IN_SLEEP_S="600")
    run = subprocess.Popen([*command(tmp_path), "launch.ray_dashboard=true"], stdout=subprocess.DEVNULL, env=env)

    def ask(*words: str) -> str:
        asked = [sys.executable, "-m", "hpc_grpo.cli", "cluster", "ray", str(run_dir), *words]
        done = subprocess.run(asked, capture_output=True, text=True, env=environment(), timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        wait_until((run_dir / "stand_in.json").exists, "the driver runs")
        address = record(tmp_path)["ray_dashboard"]
        host, _, port = address.rpartition(":")
        assert host == "127.0.0.1"
        for path in ("/api/jobs/", "/nodes?view=summary", "/api/v0/actors", "/logs/", "/api/version"):
            url = f"http://{address}{path}"
            assert (_status(url), _status(url, "0" * 64)) == (401, 403), path
        token = (run_dir / ".secret" / "ray_token").read_text()
        assert _status(f"http://{address}/nodes?view=summary", token) == 200
        elsewhere = ["127.0.0.2", *_addresses()]
        assert {ip: _status(f"http://{ip}:{port}/") for ip in elsewhere} == dict.fromkeys(elsewhere, 0)
        assert ask("status").startswith("alive  127.0.0.2 ")
        assert f"http://{address}" in ask("dashboard")
        assert "Witness" in ask("list", "actors")
        program = "import ray; ray.init(); print('nodes:', len(ray.nodes()))"
        assert "nodes: 1" in ask("job", "submit", "--", sys.executable, "-c", program)
    finally:
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=60) == 75
    assert left_behind(tmp_path) == []


@pytest.mark.long
def test_a_run_starts_as_a_job_of_a_ray_that_is_there(tmp_path: Path) -> None:
    """`ray job submit -- hpc-grpo train`: it brings up a Ray of its own beside that one, and leaves that one alone."""
    token, ray = tmp_path / "token", [sys.executable, "-m", "ray.scripts.scripts"]
    token.write_text("t" * 64)
    env = environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token), RAY_USAGE_STATS_ENABLED="0")
    names = ("port", "dashboard-port", "dashboard-agent-listen-port", "ray-client-server-port")
    ports = dict(zip(names, _free_ports(len(names)), strict=True))
    start = [*ray, "start", "--head", "--block", "--num-cpus=2", *(f"--{name}={port}" for name, port in ports.items())]
    url, log_path = f"http://127.0.0.1:{ports['dashboard-port']}", tmp_path / "outer.log"
    # A folder of its own: the paths of its sockets would be too long below pytest's.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, log_path.open("w") as log:
        outer = subprocess.Popen([*start, f"--temp-dir={folder}/r"], stdout=log, stderr=log, env=env)

        def answers() -> bool:
            assert outer.poll() is None, log_path.read_text()
            return _status(f"{url}/api/version", "t" * 64) == 200

        try:
            wait_until(answers, "the Ray that is there answers")
            (tmp_path / "files").mkdir()
            (tmp_path / "files" / "mine.txt").touch()
            options = [f"--address={url}", f"--working-dir={tmp_path / 'files'}"]
            submit = [*ray, "job", "submit", *options, "--", *command(tmp_path)]
            done = subprocess.run(submit, capture_output=True, text=True, env=env, timeout=_DEADLINE_S, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "stand-in: 1 nodes" in done.stdout
            assert record(tmp_path)["exit_kind"] == "complete"
            told = json.loads((tmp_path / "debug" / "stand_in.json").read_text())["witnesses"][0]["env"]
            assert "RAY_AUTH_TOKEN_PATH" in told
            assert [name for name in told if name.startswith(("RAY_JOB_CONFIG", "RAY_EXPERIMENTAL_NOSET"))] == []
            assert left_behind(tmp_path) == []
            assert outer.poll() is None
        finally:
            outer.terminate()
            outer.wait(timeout=60)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]


def _addresses() -> list[str]:
    """Return this machine's IPv4 addresses but for loopback."""
    found = [each for addresses in psutil.net_if_addrs().values() for each in addresses]
    return [each.address for each in found if each.family == socket.AF_INET and not each.address.startswith("127.")]
