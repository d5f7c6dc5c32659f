from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.run.evals import EvalRequest
from hpc_grpo.run.paths import RunDir
from hpc_grpo.template import client
from hpc_grpo.template.server import is_needed, why_not_forked
from tests.support.configs import minimal_config
from tests.support.processes import wait_until

PROGRAM = """
import json, os, sys
import ray
print(json.dumps({
    "parent": os.getppid(), "words": sys.argv[1:], "cwd": os.getcwd(), "given": os.environ["GIVEN"],
    "by_import": os.environ.get("BY_IMPORT"), "is_imported": "slow_module" in sys.modules, "ray": ray.__name__,
}))
sys.exit(3)
"""
SLOW_MODULE = """
import os
os.environ["BY_IMPORT"] = "1"
try:
    import ray
except ImportError:
    pass
else:
    raise SystemExit("Ray has taken the template's settings for those of all workers")
"""
ENVIRON = {**os.environ, "GIVEN": "by Ray"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slow_module.py").write_text(SLOW_MODULE)
    (tmp_path / "ray.py").write_text("")
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


@pytest.fixture
def start_template(folder: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started = []

    def start() -> subprocess.Popen[bytes]:
        code = "import sys; from pathlib import Path; from hpc_grpo.template.server import main\n"
        code += "main(Path(sys.argv[1]), sys.argv[2:])"
        command = [sys.executable, "-c", code, str(folder / "socket"), "slow_module", "no_module"]
        environ = {**ENVIRON, "PYTHONPATH": str(folder)}
        with (folder / "log").open("wb") as log:
            started.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def run_worker(folder: Path, **environ: str) -> tuple[int, dict[str, Any]]:
    """Start a worker as Ray does; returns the exit code of the command, and what the worker says of itself."""
    with (folder / "output").open("w+b") as output:
        command = [sys.executable, "-I", "-S", client.__file__, str(folder / "socket")]
        done = subprocess.run(
            [*command, str(folder / "program.py"), "a", "b"],
            env={**ENVIRON, "PYTHONPATH": str(folder), **environ},
            cwd=folder,
            stdout=output,
            timeout=60,
            check=False,
        )
    deadline = time.monotonic() + 60.0
    while not (text := (folder / "output").read_text()).endswith("\n"):
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.01)
    return done.returncode, json.loads(text)


def test_a_worker_is_a_fork_that_has_imported_and_is_otherwise_as_ray_started_it(
    folder: Path, start_template: Callable[..., subprocess.Popen[bytes]]
) -> None:
    template = start_template()
    wait_until((folder / "socket").exists, "the template serves")
    for number in range(2):
        code, worker = run_worker(folder, RAY_JOB_ID=str(number))
        assert code == 0
        assert (worker["parent"], worker["is_imported"], worker["by_import"]) == (template.pid, True, "1")
        assert (worker["words"], worker["cwd"], worker["given"]) == (["a", "b"], str(folder), "by Ray")
        assert worker["ray"] == "ray"
    assert "no_module is not imported: No module named 'no_module'" in (folder / "log").read_text()


@pytest.mark.parametrize("has_template", [True, False])
def test_a_worker_of_another_environment_or_without_a_template_imports_for_itself(
    folder: Path, start_template: Callable[..., subprocess.Popen[bytes]], has_template: bool
) -> None:
    if has_template:
        start_template()
        wait_until((folder / "socket").exists, "the template serves")
    code, worker = run_worker(folder, OMP_NUM_THREADS="5")
    assert (code, worker["is_imported"], worker["words"]) == (3, False, ["a", "b"])
    if has_template:
        assert "its OMP_NUM_THREADS differs from this template" in (folder / "log").read_text()


def test_a_worker_that_ray_gives_up_while_the_template_imports_is_not_forked(
    folder: Path, start_template: Callable[..., subprocess.Popen[bytes]]
) -> None:
    may_go_on = folder / "may_go_on"
    waiting = f"import time, pathlib\nwhile not pathlib.Path({str(may_go_on)!r}).exists():\n    time.sleep(0.01)"
    (folder / "slow_module.py").write_text(waiting)
    template = start_template()
    wait_until((folder / "socket").exists, "the template serves")
    given_up = folder / "given_up.py"
    given_up.write_text("raise SystemExit")
    asked = json.dumps({"words": [str(given_up)], "environ": ENVIRON, "cwd": str(folder)}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(folder / "socket"))
        socket.send_fds(connection, [client.SIZE.pack(len(asked))], [0, 1, 2])
        connection.sendall(asked)
    may_go_on.touch()
    _, worker = run_worker(folder)
    assert worker["parent"] == template.pid
    assert "A worker was not forked: Ray gave up on it" in (folder / "log").read_text()


def test_a_template_whose_parent_is_gone_ends(tmp_path: Path) -> None:
    words = ["-m", "hpc_grpo.template.server", "1", str(tmp_path / "socket"), "engine", str(tmp_path)]
    assert subprocess.run([sys.executable, *words], timeout=60, check=False).returncode == 1


@pytest.mark.parametrize(
    ("kind", "task", "is_eval", "expected"),
    [
        ("learner", "grpo", False, True),
        ("learner", "grpo", True, False),
        ("learner", "sft", False, True),
        ("engine", "grpo", False, True),
        ("engine", "grpo", True, True),
        ("engine", "sft", False, False),
    ],
)
def test_a_template_is_needed_only_for_actors_that_the_run_starts(
    tmp_path: Path, kind: str, task: str, is_eval: bool, expected: bool
) -> None:
    if is_eval:
        EvalRequest({"m": "m"}).save(RunDir(tmp_path))
    assert is_needed(kind, minimal_config(task=task), RunDir(tmp_path)) == expected


@pytest.mark.parametrize(
    ("num_tasks", "opened", "why"),
    [
        (1, "/dev/null", ""),
        (2, "/dev/null", "an import has started threads"),
        (1, "/dev/nvidia0", "an import has opened /dev/nvidia0"),
    ],
)
def test_a_process_with_threads_or_an_open_gpu_is_not_forked(
    tmp_path: Path, num_tasks: int, opened: str, why: str
) -> None:
    for number in range(num_tasks):
        (tmp_path / "task" / str(number)).mkdir(parents=True)
    (tmp_path / "fd").mkdir()
    (tmp_path / "fd" / "3").symlink_to(opened)
    assert why_not_forked(tmp_path) == why


NVML = """
import os
from pathlib import Path

class NVMLError(Exception):
    pass

device, users, descriptor = Path(__file__).with_name("nvidiactl"), 0, None

def nvmlInit():
    global users, descriptor
    descriptor = os.open(device, os.O_RDONLY) if users == 0 else descriptor
    users += 1

def nvmlShutdown():
    global users
    if users == 0:
        raise NVMLError("uninitialized")
    users -= 1
    if users == 0:
        os.close(descriptor)
"""


def test_a_template_closes_nvml_that_its_imports_have_opened_and_its_workers_have_it_open(folder: Path) -> None:
    """DeepSpeed and torch each open NVML while they are imported."""
    (folder / "nvidiactl").touch()
    (folder / "pynvml.py").write_text(NVML)
    (folder / "slow_module.py").write_text("import pynvml\npynvml.nvmlInit()\npynvml.nvmlInit()")
    shown = "import json, os, pynvml\nprint(json.dumps({'parent': os.getppid(), 'users': pynvml.users}))"
    (folder / "program.py").write_text(shown)
    code = (
        "import sys; from pathlib import Path; from hpc_grpo.template import server as template\n"
        "template._GPU_DEVICES = str(Path(sys.argv[1]).with_name('nvidia'))\n"
        "template.main(Path(sys.argv[1]), sys.argv[2:])"
    )
    with (folder / "log").open("wb") as log:
        template = subprocess.Popen(
            [sys.executable, "-c", code, str(folder / "socket"), "slow_module"],
            env={**ENVIRON, "PYTHONPATH": str(folder)},
            stdout=log,
            stderr=log,
        )
    try:
        wait_until((folder / "socket").exists, "the template serves")
        assert run_worker(folder) == (0, {"parent": template.pid, "users": 1})
    finally:
        template.kill()
        template.wait()
