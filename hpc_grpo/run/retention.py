"""The disk usage of a run, and what may be removed.

Keeps what a run needs: its newest valid checkpoint and newest export, its config, ledger, metrics and records.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from hpc_grpo.errors import ConfigError
from hpc_grpo.run.checkpoint import newest_step, valid_checkpoints
from hpc_grpo.run.paths import RunDir, step_dirs

_REWRITTEN = "_universal"


class Taken(NamedTuple):
    num_bytes: int
    num_files: int


@dataclass(frozen=True)
class Usage:
    """A part of the run directory with its bytes and files on disk. `note` is a short remark."""

    name: str
    num_bytes: int
    num_files: int
    note: str = ""


@dataclass(frozen=True)
class Removable:
    """A folder that the run does not need, and the reason."""

    path: Path
    taken: Taken
    why: str


def usage(run: RunDir) -> list[Usage]:
    """Return the disk usage of each part of a run, largest first, without empty parts."""
    named = {
        "checkpoints": (run.checkpoints, _steps(run.checkpoints)),
        "exports": (run.exports, _steps(run.exports)),
        "rollouts": (run.rollouts(0).parent, ""),
        "evals": (run.evals, "of hpc-grpo model eval"),
        "batches": (run.batches(0).parent, "for hpc-grpo model replay"),
        "logs of attempts": (run.attempts, ""),
        "copy of hpc-grpo": (run.source_dir, "and of your reward files"),
        "Slurm's output": (run.slurm_logs, ""),
        "TensorBoard": (run.tensorboard, ""),
    }
    parts = [Usage(name, *taken_on_disk(path), note) for name, (path, note) in named.items()]
    num_bytes, num_files = taken_on_disk(run.path)
    num_bytes -= sum(part.num_bytes for part in parts)
    num_files -= sum(part.num_files for part in parts)
    parts.append(Usage("records", num_bytes, num_files, "config, metrics, ledger and the rest"))
    return sorted((part for part in parts if part.num_bytes > 0), key=lambda part: -part.num_bytes)


def taken_on_disk(path: Path) -> Taken:
    """Count the bytes and files of a file or folder. Does not follow links, and ignores files that vanish.

    Folders and links count as files, as in quotas of files (inodes). Raises ConfigError for an unreadable folder,
    because the sum would be too small.
    """

    def pass_over_gone(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    blocks = []
    try:
        inside = os.walk(path, onerror=pass_over_gone)
        paths = (Path(parent, name) for parent, folders, files in inside for name in (*folders, *files))
        for each in chain((path,), paths):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                blocks.append(each.lstat().st_blocks)
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be read ({error.strerror}), so the disk usage of {path} is unknown. Make it "
            f"readable: chmod -R u+rwX {path}. Or measure it by hand: du -sh {path}"
        ) from error
    return Taken(512 * sum(blocks), len(blocks))


def removable(run: RunDir) -> list[Removable]:
    """List what `clean` would remove: older checkpoints and exports, and remains of interrupted or damaged saves.

    Without a valid checkpoint, all checkpoints stay: a damaged one may be repaired. Links are the user's, and stay.
    """
    newest = newest_step(run)
    exports = step_dirs(run.exports)
    found = [
        (path, f"older than checkpoint {newest}")
        for step, path in sorted(step_dirs(run.checkpoints).items())
        if step < newest
    ]
    found += [(exports[step], f"older than export {max(exports)}") for step in sorted(exports)[:-1]]
    for parent in (run.checkpoints, run.exports):
        for path in sorted(parent.glob(".step_*.tmp")):
            why = "a rewritten checkpoint" if path.name.endswith(f"{_REWRITTEN}.tmp") else "a save that was cut"
            found.append((path, why))
    if newest:
        found += [(path, "a damaged checkpoint, set aside") for path in sorted(run.checkpoints.glob("step_*.damaged*"))]
    return [Removable(path, taken_on_disk(path), why) for path, why in found if not path.is_symlink()]


def refuse_unless_newest_is_whole(run: RunDir, items: Sequence[Removable]) -> None:
    """Raise ConfigError if a checkpoint would be removed while the newest one has wrong hashes.

    Reads the whole newest checkpoint, but only if a checkpoint would be removed.
    """
    if not any(run.checkpoints in item.path.parents for item in items):
        return
    newest = newest_step(run)
    whole = next(valid_checkpoints(run), None)
    if newest and (whole is None or whole.step != newest):
        raise ConfigError(
            f"{run.checkpoint(newest)} is damaged: its files do not have the hashes of its manifest. Nothing of this "
            f"run was removed; the run will resume from an older checkpoint. Move the damaged one away first."
        )


def prune_exports(run: RunDir, newest: int, keep: int | None) -> None:
    """Remove the oldest exports before step `newest` until `keep` are left, including the newest; None keeps all.

    Exports of step `newest` and later stay. Later ones may be from steps that a crash undid.
    """
    if keep is None:
        return
    older = sorted(step for step in step_dirs(run.exports) if step < newest)
    for step in older[: max(0, len(older) - (keep - 1))]:
        shutil.rmtree(run.export(step))


def _steps(parent: Path) -> str:
    steps = sorted(step_dirs(parent))
    return f"{'step' if len(steps) == 1 else 'steps'} {', '.join(map(str, steps))}" if steps else ""
