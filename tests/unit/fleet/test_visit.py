"""The program of a visit, and the runner that it leaves behind: real processes on this machine."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from hpc_grpo.fleet.attempt_folder import AttemptFolder, marked_processes, uptime
from hpc_grpo.fleet.machine import LocalMachine, VisitError, Vm, converse
from hpc_grpo.fleet.messages import AttemptKey, Observation, Orders, Outcome, Request, encode
from hpc_grpo.fleet.states import Ending
from hpc_grpo.fleet.visit import obey, observe
from hpc_grpo.system import processes
from hpc_grpo.system.commands import MARK
from hpc_grpo.system.processes import start_time
from tests.support.processes import wait_until

STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("héllo", flush=True)
told = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "HPC_GRPO_STOP_GRACE_S")}
seen = {"argv": sys.argv[1:], "told": told, "pid": os.getpid()}
path = Path(os.environ["SEEN"])
path.with_suffix(".new").write_text(json.dumps(seen))
path.with_suffix(".new").replace(path)
until = time.monotonic() + float(os.environ["SECONDS"])
while time.monotonic() < until:
    time.sleep(0.05)
sys.exit(int(os.environ["CODE"]))
"""
NVIDIA_SMI = """#!/bin/sh
case "$1" in
--query-gpu*) echo "0, GPU-a, 81559, 0"; echo "1, GPU-b, 81559, 700" ;;
*) echo "GPU-b, 4242" ;;
esac
"""
KEY = AttemptKey("; touch owned", 1)


class Scene:
    """A VM that is this machine: its folder, a stand-in for nvidia-smi, and one for training."""

    def __init__(self, folder: Path) -> None:
        self.work_dir = folder / "vm"
        self.seen = folder / "seen.json"
        self.nvidia_smi = folder / "nvidia-smi"
        self.nvidia_smi.write_text(NVIDIA_SMI)
        self.nvidia_smi.chmod(0o755)
        self.program = folder / "stand_in.py"
        self.program.write_text(STAND_IN)
        self.folder = AttemptFolder(self.work_dir / "attempts" / KEY.folder)
        self._machine = LocalMachine(Vm(1, "here", "here", "", "", 22, "", "local", "", "", ""))

    def spec(self, seconds: float, code: int = 0, **values: Any) -> dict[str, Any]:
        env = {"SEEN": str(self.seen), "SECONDS": str(seconds), "CODE": str(code)}
        program = [sys.executable, str(self.program)]
        told = {
            "program": program,
            "words": ["grpo", "--model=$(id) ;"],
            "config": "",
            "output_dir": "out",
            "run": {"name": "r"},
            "env": env,
        }
        return {**KEY._asdict(), "gpus": [1, 3], **told, "lease_s": 60.0, "end_s": 10.0, **values}

    def visit(self, orders: Orders | None = None) -> tuple[Observation, Outcome]:
        seen: list[Observation] = []

        async def decide(observation: Observation) -> Orders | None:
            seen.append(observation)
            return orders

        request = Request(str(self.work_dir), str(self.nvidia_smi))
        outcome = asyncio.run(self._machine.visit(request, decide))
        return seen[0], outcome

    def ending(self) -> Ending | None:
        """Visit until the attempt is over."""
        wait_until(lambda: self.visit()[0].attempts[0].ended is not None, "the attempt is over")
        return self.visit()[0].attempts[0].ended


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


class Pipe:
    """The lines that a program prints, and what it is sent."""

    def __init__(self, printed: bytes) -> None:
        self._lines = io.BytesIO(printed)
        self.sent: list[bytes] = []

    async def readline(self) -> bytes:
        return self._lines.readline()

    async def read(self) -> bytes:
        return self._lines.read()

    def write(self, data: bytes) -> None:
        self.sent.append(data)


def test_a_visit_passes_over_what_a_login_shell_prints() -> None:
    welcome = b'Welcome to vm-1.\n{"gpus": []} [3 updates]'
    printed = (
        welcome + f"\n{MARK}\n".encode() + encode(Observation((), (), "none")) + encode(Outcome((KEY,), (), (), ""))
    )
    seen: list[Observation] = []

    async def decide(observation: Observation) -> Orders:
        seen.append(observation)
        return Orders(start=(KEY._asdict(),))

    pipe = Pipe(printed)
    outcome = asyncio.run(converse(pipe, pipe, pipe, Request("w", "nvidia-smi"), decide, is_marked=True))
    assert ([one.problem for one in seen], outcome.started) == (["none"], (KEY,))


def test_an_attempt_of_another_machine_with_the_same_home_is_left_alone(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Homes are often on NFS, and a process of another machine is none that can be looked at here."""
    scene.visit(Orders(start=(scene.spec(60.0),)))
    mine = json.loads((scene.folder.path / "runner.json").read_text())
    with monkeypatch.context() as elsewhere:
        for name, value in (("boot_id", "another-boot"), ("machine_id", "another-machine")):
            elsewhere.setattr(processes, name, lambda value=value: value)
        assert observe(scene.work_dir, Request(str(scene.work_dir), str(scene.nvidia_smi))).attempts == ()
        assert obey(scene.work_dir, Orders(revoke=(KEY,)), 0.0).revoked == ()
    assert scene.folder.ending() is None
    with monkeypatch.context() as rebooted:
        rebooted.setattr(processes, "boot_id", lambda: "the-next-boot")
        assert not scene.folder.runner_lives()
        assert scene.folder.is_of_this_machine()
    assert scene.folder.runner_lives()
    wait_until(scene.seen.exists, "the job has a handler of SIGTERM")
    os.kill(mine["pid"], signal.SIGTERM)
    ended = scene.ending()
    assert ended is not None
    assert ended.code == 75


def test_an_attempt_of_a_machine_that_was_renamed_is_over_after_its_lease(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.visit(Orders(start=(scene.spec(60.0),)))
    os.kill(json.loads((scene.folder.path / "runner.json").read_text())["pid"], signal.SIGKILL)
    long_ago = time.time() - 3600.0
    os.utime(scene.folder.path / "lease", (long_ago, long_ago))
    monkeypatch.setattr(processes.socket, "gethostname", lambda: "renamed")
    assert obey(scene.work_dir, Orders(revoke=(KEY,)), 0.0).revoked == (KEY,)


def test_a_job_that_has_more_than_a_minute_to_end_keeps_half_a_minute_for_what_follows_its_checkpoint(
    scene: Scene,
) -> None:
    scene.visit(Orders(start=(scene.spec(0.0, end_s=120.0),)))
    assert scene.ending() == Ending("exit", 0, "")
    assert json.loads(scene.seen.read_text())["told"]["HPC_GRPO_STOP_GRACE_S"] == "90.0"


def test_a_job_runs_on_its_gpus_by_words_and_leaves_its_log_and_its_code(scene: Scene) -> None:
    seen, outcome = scene.visit(Orders(start=(scene.spec(0.0, code=3),)))
    assert [(gpu.uuid, gpu.used_mib, gpu.num_processes) for gpu in seen.gpus] == [("GPU-a", 0, 0), ("GPU-b", 700, 1)]
    assert outcome.started == (KEY,)
    assert scene.ending() == Ending("exit", 3, "ended with 3")
    (attempt,) = scene.visit()[0].attempts
    assert (attempt.key, attempt.gpus, attempt.log.decode()) == (KEY, (1, 3), "héllo\n")
    told = json.loads(scene.seen.read_text())
    assert told["argv"] == ["grpo", f"--output_dir={scene.work_dir}/out", "--model=$(id) ;"]
    assert told["told"] == {"CUDA_VISIBLE_DEVICES": "1,3", "HPC_GRPO_STOP_GRACE_S": "5.0"}
    assert scene.visit(Orders(start=(scene.spec(0.0),)))[1].failed  # its attempt was decided
    old, recent = (scene.work_dir / "over" / name for name in ("old.1", "recent.1"))
    for path, days in ((old, 8), (recent, 6)):
        (path / "below").mkdir(parents=True)
        os.utime(path, (time.time() - days * 86_400,) * 2)
    stray = old.with_name("a_file")  # cannot be deleted as a folder, as little as what another user has left below one
    stray.touch()
    os.utime(stray, (0, 0))
    assert not scene.visit(Orders(forget=(KEY,)))[1].problem
    assert (old.exists(), recent.exists()) == (False, True)
    assert scene.visit()[0].attempts == ()
    assert scene.visit(Orders(start=(scene.spec(0.0),)))[1].failed


def test_a_job_that_nobody_visits_for_its_lease_checkpoints_and_ends(scene: Scene) -> None:
    scene.visit(Orders(start=(scene.spec(60.0),)))
    wait_until(scene.seen.exists, "the job runs")
    scene.folder.renew(uptime() - 61.0)
    wait_until(lambda: scene.folder.ending() is not None, "the attempt is over")
    assert scene.folder.ending() == Ending("exit", 75, "nobody visited its VM for 60 s")


def test_a_cancelled_job_checkpoints_and_ends_and_a_revoked_attempt_never_starts(scene: Scene) -> None:
    scene.visit(Orders(start=(scene.spec(60.0),)))
    wait_until(scene.seen.exists, "the job runs")
    other = AttemptKey("other", 1)
    _, outcome = scene.visit(Orders(cancel=(KEY,), revoke=(other, KEY)))
    assert outcome.revoked == (other,)
    wait_until(lambda: scene.folder.ending() is not None, "the attempt is over")
    assert scene.folder.ending() == Ending("exit", 75, "it was cancelled")
    late = {**scene.spec(60.0), **other._asdict()}
    assert scene.visit(Orders(start=(late,)))[1].started == ()


def test_an_attempt_whose_folder_was_deleted_is_over_once_its_job_has_ended(scene: Scene) -> None:
    scene.program.write_text(STAND_IN.replace("lambda *_: sys.exit(75)", "lambda *_: None"))
    scene.visit(Orders(start=(scene.spec(3600.0),)))
    wait_until(scene.seen.exists, "the job runs")
    pid = json.loads(scene.seen.read_text())["pid"]
    shutil.rmtree(scene.work_dir)
    assert scene.visit(Orders(revoke=(KEY,)))[1].revoked == (), "its job checkpoints"
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: scene.visit(Orders(revoke=(KEY,)))[1].revoked == (KEY,), "it is revoked")
    assert start_time(pid) == 0


def test_a_runner_that_is_killed_takes_its_job_along_and_the_next_visit_says_so(scene: Scene) -> None:
    scene.visit(Orders(start=(scene.spec(60.0),)))
    wait_until(scene.seen.exists, "the job runs")
    pid = json.loads(scene.seen.read_text())["pid"]
    runner = json.loads((scene.folder.path / "runner.json").read_text())["pid"]
    os.kill(runner, signal.SIGKILL)
    ending = scene.ending()
    assert ending is not None
    assert (ending.kind, ending.code) == ("exit", None)
    assert "runner died" in ending.why
    assert start_time(pid) == 0
    assert marked_processes(scene.folder.path) == []


def test_a_relative_work_dir_is_below_the_home_wherever_the_controller_was_started(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(scene.work_dir.parent))
    work_dir, scene.work_dir = scene.work_dir, Path("vm")
    scene.visit()
    assert work_dir.is_dir()
    assert not Path("vm").exists()


def test_many_long_logs_fit_into_one_answer(scene: Scene) -> None:
    for number in range(40):
        folder = AttemptFolder(scene.work_dir / "attempts" / f"job-{number}@1")
        folder.path.mkdir(parents=True)
        folder.write_key(AttemptKey(f"job-{number}", 1))
        with folder.log.open("wb") as log:
            log.truncate(2 << 20)
    seen = observe(scene.work_dir, Request(str(scene.work_dir), str(scene.nvidia_smi))).attempts
    assert [len(one.log) for one in seen] == [(16 << 20) // 40] * 40


def test_a_lease_is_renewed_in_place_so_that_a_full_disk_ends_no_job(scene: Scene) -> None:
    scene.folder.path.mkdir(parents=True)
    scene.folder.renew(9.5)
    before = (scene.folder.path / "lease").stat()
    scene.folder.renew(123456.25)
    after = (scene.folder.path / "lease").stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    assert scene.folder.leased_at() == 123456.25


def test_gpus_of_which_nvidia_smi_knows_no_memory_are_listed(scene: Scene) -> None:
    scene.nvidia_smi.write_text(NVIDIA_SMI.replace("81559, 700", "[N/A], [N/A]"))
    assert [
        (gpu.uuid, gpu.memory_mib)
        for gpu in observe(scene.work_dir, Request(str(scene.work_dir), str(scene.nvidia_smi))).gpus
    ] == [
        ("GPU-a", 81559),
        ("GPU-b", 0),
    ]


def test_a_start_asks_for_no_logs(scene: Scene) -> None:
    scene.visit(Orders(start=(scene.spec(0.0),)))
    scene.ending()
    request = Request(str(scene.work_dir), str(scene.nvidia_smi), with_logs=False)
    (attempt,) = observe(scene.work_dir, request).attempts
    assert (attempt.log, attempt.log_size) == (b"", 0)


def test_an_attempt_that_another_visit_forgets_meanwhile_is_not_seen(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.visit(Orders(start=(scene.spec(0.0),)))
    scene.ending()

    def lives(folder: AttemptFolder) -> bool:
        obey(scene.work_dir, Orders(forget=(KEY,)), uptime())
        return False

    monkeypatch.setattr(AttemptFolder, "runner_lives", lives)
    assert observe(scene.work_dir, Request(str(scene.work_dir), str(scene.nvidia_smi))).attempts == ()


def test_a_job_of_this_machine_does_not_see_the_fleets_passwords(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_GRPO_FLEET_DATABASE", "postgresql://u:hunter2secret@h/d")
    scene.visit(Orders(start=(scene.spec(60.0),)))
    wait_until(scene.seen.exists, "the job runs")
    pid = json.loads(scene.seen.read_text())["pid"]
    assert b"hunter2secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    scene.visit(Orders(cancel=(KEY,)))
    scene.ending()


def test_orders_that_come_too_late_are_refused(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpc_grpo.fleet import visit

    times = iter((100.0, 111.0))
    said: list[Any] = []
    monkeypatch.setattr(visit, "uptime", lambda: next(times))
    monkeypatch.setattr(visit, "_orders_line", lambda: b"{}")
    monkeypatch.setattr(visit, "_say", said.append)
    request = Request(str(scene.work_dir), str(scene.nvidia_smi))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(encode(request))))
    visit.main()
    assert "11 s after" in said[1].problem


def test_a_vm_without_an_answer_of_nvidia_smi_says_so_and_still_tells_of_its_jobs(scene: Scene) -> None:
    scene.visit(Orders(start=(scene.spec(0.0),)))
    scene.nvidia_smi.write_text("#!/bin/sh\necho 'driver mismatch' >&2; exit 18\n")
    seen, _ = scene.visit()
    assert "driver mismatch" in seen.problem
    assert len(seen.attempts) == 1


@pytest.mark.parametrize(
    ("answer", "said", "told"),
    [
        (b"[" * 100_000, b"", "gave an invalid answer: maximum recursion"),
        (b"{}\n", b"a warning", r"gave an invalid answer: 3 validation errors.*: a warning$"),
        (b"", b"No module named x\n", "was cut off: its program printed nothing: No module named x$"),
        (asyncssh.ConnectionLost("gone"), asyncssh.ConnectionLost("gone"), "was cut off: gone$"),
    ],
)
def test_a_visit_that_failed_says_its_cause_and_what_the_program_said(answer: Any, said: Any, told: str) -> None:
    class Program(Pipe):
        async def readline(self) -> bytes:
            if isinstance(answer, Exception):
                raise answer
            return await super().readline()

        async def read(self) -> bytes:
            if isinstance(said, Exception):
                raise said
            return said  # type: ignore[no-any-return]

    async def decide(_seen: Observation) -> None:
        raise AssertionError

    program = Program(answer if isinstance(answer, bytes) else b"")
    with pytest.raises(VisitError, match=f"(?s){told}") as caught:
        asyncio.run(converse(program, program, program, Request("w", ""), decide))
    assert caught.value.is_before_orders


def test_a_python_without_the_package_is_named_with_what_it_said(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho 'No module named hpc_grpo' >&2; exit 1\n")
    bare.chmod(0o755)
    machine = LocalMachine(Vm(1, "here", "here", "", "", 22, "", "local", str(bare), "", ""))

    async def decide(_seen: Observation) -> None:
        raise AssertionError

    with pytest.raises(VisitError, match="No module named hpc_grpo") as caught:
        asyncio.run(machine.visit(Request(str(tmp_path), ""), decide))
    assert caught.value.is_before_orders
