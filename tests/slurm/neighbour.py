"""Another ordinary user on a node of a run: `python neighbour.py take|try ...` as root becomes nobody first.

`take JOB_ID` makes, under every name that an attempt of this job or the next ones could be expected to use, what would
keep it from its folders or its sweep; prints how many. `try RUN_DIR JOB_ID` does what it can to a run and prints a JSON
object: attempt -> "" where it was kept out, else what it got.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

NOBODY = 65534
_SHARED = (Path("/tmp"), Path("/dev/shm"))


def take(job_id: int) -> int:
    planted = 0
    for parent in _SHARED:
        for number in range(job_id, job_id + 20):
            for rest in ("1-0", "1-1", "2-0", "2-1", "0", "1"):
                (parent / f"hg-{number}-{rest}").mkdir(mode=0o777, exist_ok=True)
                planted += 1
        leftover = parent / f"hg-{job_id}-leftover"
        leftover.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):  # nodes that share their /tmp
            os.mkfifo(leftover / ".agent")
            (parent / f"hg-{job_id}-link").symlink_to("/etc")
        (parent / f"sem.hg-{job_id}-1-0").touch(mode=0o000)
        (parent / f"hg-{job_id}-file").touch(mode=0o000)
    return planted


def attempt(do: Callable[[], object]) -> str:
    try:
        return f"got {do()!r}"[:200]
    except OSError:
        return ""


def processes_of(job_id: str) -> list[Path]:
    """Those that name a folder of the job in their arguments, which everybody may read."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # over meanwhile
            if f"/hg-{job_id}-".encode() in path.read_bytes():
                found.append(path.parent)
    return found


def trials(run: Path, job_id: str) -> dict[str, str]:
    own = [path for parent in _SHARED for path in parent.glob(f"hg-{job_id}-*") if path.lstat().st_uid != NOBODY]
    processes = processes_of(job_id)
    said = {
        "list the run": attempt(lambda: list(run.iterdir())),
        "read its config": attempt((run / "config.yaml").read_text),
        "read its token": attempt((run / ".secret" / "ray_token").read_text),
        "stop it": attempt((run / "STOP").touch),
        "plant a checkpoint": attempt((run / "checkpoints" / "step_999").mkdir),
    }
    for path in own:
        said[f"list {path.parent}/hg-"] = attempt(lambda path=path: list(path.iterdir()))
        said[f"remove {path.parent}/hg-"] = attempt(lambda path=path: path.rename(path.with_name("gone")))
    for process in processes:
        said[f"environment of {process.name}"] = attempt((process / "environ").read_bytes)
        said[f"memory of {process.name}"] = attempt((process / "mem").open)
    return {**said, "folders seen": str(len(own)), "processes seen": str(len(processes))}


def main() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.umask(0)
    if sys.argv[1] == "take":
        print(take(int(sys.argv[2])))
    else:
        print(json.dumps(trials(Path(sys.argv[2]), sys.argv[3])))


if __name__ == "__main__":
    main()
