"""The process that manages one attempt on its VM: `python -m hpc_grpo.fleet.runner FOLDER`, started by a visit.

It outlives the visit and the controller. It starts the job's command on the claimed GPUs, ends the processes that the
job leaves, and writes exit.json. It ends the job on an order, and if nobody visits for the length of the lease.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hpc_grpo.errors import EXIT_UNAVAILABLE
from hpc_grpo.fleet.attempt_folder import CONFIG_FILE, MARK, AttemptFolder, uptime
from hpc_grpo.fleet.states import Ending
from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.contract import STOP_GRACE_VARIABLE
from hpc_grpo.run.files import when_there_is_space
from hpc_grpo.run.last_error import last_error_in_a_line
from hpc_grpo.run.paths import RunDir, step_dirs
from hpc_grpo.system.process_tree import descendants, end_processes
from hpc_grpo.system.processes import adopt_orphans, die_with_parent
from hpc_grpo.system.signals import Signals, signal_name

_LOOK_S = 0.2
_TAIL_BYTES = 1 << 16
_TEARDOWN_S = 10.0
_OWN_TEARDOWN_S = 30.0
"""Part of `end_s` for the job's teardown after its checkpoint."""


def main(path: str) -> None:
    """Run the attempt in folder `path` and write its end. Exits with a message if it has no spec or was revoked."""
    adopt_orphans()
    folder = AttemptFolder(Path(path))
    spec = folder.spec()
    if spec is None or folder.ending() is not None:
        sys.exit("the attempt has no spec, or was revoked")
    with Signals() as signals:
        folder.write_runner()
        if folder.ending() is not None:  # A visit gave the attempt up just now, and will read runner.json once more.
            sys.exit("its start came too late")
        ending = run_job(folder, spec, signals)
        when_there_is_space(lambda: folder.end(ending), "the end of the job")


def run_job(folder: AttemptFolder, spec: dict[str, Any], signals: Signals) -> Ending:
    """Run the job until it ends, and return how it ended."""
    run = run_dir(folder.path, spec)
    argv = _argv(folder, spec, run)
    own = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the numbers of nvidia-smi
        "CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in spec["gpus"]),
        MARK: str(folder.path),
        STOP_GRACE_VARIABLE: str(max(spec["end_s"] / 2, spec["end_s"] - _OWN_TEARDOWN_S)),
    }
    with folder.log.open("ab") as log:
        try:
            if spec["config"]:
                (folder.path / CONFIG_FILE).write_text(spec["config"])
            job = subprocess.Popen(
                argv,
                cwd=folder.path.parents[1],
                env={**os.environ, **spec["env"], **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(),  # if the runner is killed, its job checkpoints and ends
            )
        except OSError as error:
            return Ending("exit", EXIT_UNAVAILABLE, f"{argv[0]} could not be run: {error.strerror}")
        why = _wait(job, folder, spec, signals)
        end_processes(lambda: descendants(os.getpid()), _TEARDOWN_S)
    steps = step_dirs(run.checkpoints)
    why = "" if job.returncode == 0 else why or _why(folder, run, job.returncode)
    return Ending("exit", job.returncode, why, max(steps) if steps else None)


def run_dir(folder: Path, spec: dict[str, Any]) -> RunDir:
    """Return the folder of the job's run: below its config's root, else below the VM's `runs`.

    A run of train_grpo.py is in the folder `run` of its output_dir.
    """
    if spec["words"][0] != "train":
        return RunDir(folder.parents[1] / (spec["output_dir"] or Path("runs") / spec["run"]["name"]) / "run")
    root = spec["run"].get("root")
    base = Path(os.path.expandvars(root)).expanduser() if root else folder.parents[1] / "runs"
    return RunDir(folder.parents[1] / base / spec["run"]["name"])


def _argv(folder: AttemptFolder, spec: dict[str, Any], run: RunDir) -> list[str]:
    program = spec["program"] or [sys.executable, "-m", "hpc_grpo.cli"]
    command, *words = spec["words"]
    if command != "train":
        return [*program, command, f"--output_dir={run.path.parent}", *words]
    config, *overrides = words
    config = str(folder.path / CONFIG_FILE) if spec["config"] else config
    own = [f"run.{key}={json.dumps(str(value))}" for key, value in (("root", run.path.parent), ("name", run.path.name))]
    return [*program, command, config, *own, *overrides]


def _wait(job: subprocess.Popen[bytes], folder: AttemptFolder, spec: dict[str, Any], signals: Signals) -> str:
    """Wait for the job. End it on an order, a signal or the end of the lease. Return why; "" if it ended by itself."""
    why, kill_at = "", float("inf")
    while job.poll() is None:
        if not why:
            leased_at = folder.leased_at()
            if folder.is_cancelled():
                why = "it was cancelled"
            elif signals.pending:
                why = f"its VM's runner got {signal_name(signals.pending[0])}"
            elif leased_at is None or uptime() - leased_at > float(spec["lease_s"]):
                why = f"nobody visited its VM for {spec['lease_s']:.0f} s"
            if why:
                job.send_signal(signal.SIGTERM)
                kill_at = time.monotonic() + float(spec["end_s"])
        if time.monotonic() > kill_at:
            end_processes(lambda: [job.pid, *descendants(job.pid)] if job.poll() is None else [], 0.0)
        time.sleep(_LOOK_S)
    return why


def _why(folder: AttemptFolder, run: RunDir, code: int) -> str:
    """Return why the job ended, in one line: the run's record, else the last printed error, else its end."""
    began = folder.runner.stat().st_mtime
    recorded = [record.why for record in read_attempts(run) if record.why and record.started_at > began]
    if recorded:
        return recorded[-1]
    with folder.log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        printed = last_error_in_a_line(file.read().decode(errors="replace"))
    return printed or (f"killed by {signal_name(-code)}" if code < 0 else f"ended with {code}")


if __name__ == "__main__":
    main(sys.argv[1])
