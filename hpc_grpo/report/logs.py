"""The logs of a run: where they are, and the end of one."""

from __future__ import annotations

import os
from pathlib import Path

from hpc_grpo.errors import ConfigError
from hpc_grpo.run.chain import ChainRecord
from hpc_grpo.run.paths import RunDir

DRIVER_LOG = "driver.log"
_NODE_LOGS = ("agent.log", "ray_start.log")
_BLOCK_BYTES = 1 << 16
_MAX_TAIL_BYTES = 1 << 22


def attempt_dirs(run: RunDir) -> dict[int, Path]:
    """The folders of a run's attempts by number, in order."""
    numbered = {int(path.name.split("-")[0]): path for path in run.attempts.glob("[0-9]*-*")}
    return dict(sorted(numbered.items()))


def attempt_dir(run: RunDir, number: int | None) -> Path | None:
    """The folder of an attempt, or of the newest; None if there is none yet. Raises ConfigError for a bad number."""
    dirs = attempt_dirs(run)
    if number is None:
        return dirs[max(dirs)] if dirs else None
    if number not in dirs:
        known = ", ".join(map(str, dirs)) or "none"
        raise ConfigError(f"--attempt = {number} must be an attempt of the run {run.path.name}; it has: {known}.")
    return dirs[number]


def log_files(attempt: Path, node: str | None) -> list[Path]:
    """The log of an attempt's driver, or those of one of its nodes. Raises ConfigError for an unknown node."""
    if node is None:
        return [attempt / DRIVER_LOG]
    known = sorted(path.name for path in (attempt / "nodes").glob("*"))
    if node not in known:
        import difflib

        near = difflib.get_close_matches(node, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"--node = {node!r} must be a node of attempt {attempt.name}; it has: {', '.join(known) or 'none'}.{hint}"
        )
    return [attempt / "nodes" / node / name for name in _NODE_LOGS]


def ray_logs(attempt: Path, node: str) -> list[Path]:
    """What was kept of Ray's own logs of a node; they are copied when the attempt ends."""
    folders = (attempt / "nodes" / node).glob("ray*/")
    return sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())


def is_of_an_actor(path: Path) -> bool:
    """Whether a log of Ray's is what a learner, an engine or a grader printed, and not empty."""
    return path.name.startswith("worker-") and path.suffix in (".err", ".out") and path.stat().st_size > 0


def slurm_output(run: RunDir, chain: ChainRecord, job_id: str) -> Path:
    """What Slurm and the supervisor printed in a job; one handed in with sbatch says where when it starts."""
    link, path = chain.link(job_id), run.slurm_log(job_id)
    return Path(link.output) if link is not None and link.output and not path.exists() else path


def tail(path: Path, num_lines: int, max_bytes: int = _MAX_TAIL_BYTES) -> str:
    """The last lines of a file that may be huge: at most `max_bytes` of it are read. "" if there is no file."""
    return tail_and_end(path, num_lines, max_bytes)[0]


def tail_and_end(path: Path, num_lines: int, max_bytes: int = _MAX_TAIL_BYTES) -> tuple[str, int]:
    """The last lines, and the offset in bytes behind them."""
    try:
        with path.open("rb") as file:
            end = start = file.seek(0, os.SEEK_END)
            data = b""
            while start > 0 and end - start < max_bytes and data.count(b"\n", 0, -1) < num_lines:
                step = min(_BLOCK_BYTES, start, max_bytes - (end - start))
                start -= step
                file.seek(start)
                data = file.read(step) + data
    except FileNotFoundError:
        return "", 0
    lines = data.decode(errors="replace").split("\n")
    kept = num_lines + (lines[-1] == "")
    return "\n".join(lines[-kept:]) if num_lines else "", end
