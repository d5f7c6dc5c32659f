"""What a run takes on disk, and what of it may go.

What a run needs stays: its newest valid checkpoint and newest export, its config, ledger, metrics and records.
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
from hpc_grpo.run.checkpoint import newest_step, remove_checkpoint, valid_checkpoints
from hpc_grpo.run.paths import RunDir, step_dirs

_REWRITTEN = "_universal"


class Taken(NamedTuple):
    num_bytes: int
    num_files: int


@dataclass(frozen=True)
class Usage:
    """A part of the run directory, the bytes and files it takes on disk; `note` says more in a few words."""

    name: str
    num_bytes: int
    num_files: int
    note: str = ""


@dataclass(frozen=True)
class Removable:
    """A folder of a run that the run does not need, and why."""

    path: Path
    taken: Taken
    why: str


def usage(run: RunDir) -> list[Usage]:
    """Return what each part of a run takes, largest first, without parts that take nothing."""
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
    """Count the bytes and files that a file or folder takes, links not followed, without files that vanish.

    Folders and links count as files, as in quotas of files (inodes). Raises ConfigError for what cannot be read: a sum
    without it would say that there is room.
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
            f"{error.filename} cannot be read ({error.strerror}), so that what {path} takes on disk is not known. Make "
            f"it readable, chmod -R u+rwX {path}, or look by hand: du -sh {path}"
        ) from error
    return Taken(512 * sum(blocks), len(blocks))


def removable(run: RunDir) -> list[Removable]:
    """List what `clean` would remove: older checkpoints and exports, and what cut or damaged saves left.

    Without a valid checkpoint no checkpoint goes, damaged or not: one may be mended. A link is the user's, and stays.
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
    """Raise ConfigError where a checkpoint would go while the one that stays has wrong hashes.

    Reads all of the newest checkpoint, and nothing where no checkpoint would go.
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


def remove(item: Removable) -> None:
    remove_checkpoint(item.path)


def prune_exports(run: RunDir, newest: int, keep: int | None) -> list[int]:
    """Remove the oldest exports before step `newest` until `keep` are left with it; None keeps all.

    That of step `newest` stays, and later ones, which may be of steps that a crash undid.
    """
    if keep is None:
        return []
    older = sorted(step for step in step_dirs(run.exports) if step < newest)
    removed = older[: max(0, len(older) - (keep - 1))]
    for step in removed:
        shutil.rmtree(run.export(step))
    return removed


def _steps(parent: Path) -> str:
    steps = sorted(step_dirs(parent))
    return f"{'step' if len(steps) == 1 else 'steps'} {', '.join(map(str, steps))}" if steps else ""
