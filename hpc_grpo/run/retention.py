"""Say what a run takes on disk and what of it may go; remove exports beyond those to keep, and what `clean` names.

What a run needs stays: its newest whole checkpoint and newest export, its config, ledger, metrics and records.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpc_grpo.errors import ConfigError
from hpc_grpo.run.checkpoint import newest_step, remove_checkpoint, valid_checkpoints
from hpc_grpo.run.paths import RunDir, step_dirs

_REWRITTEN = "_universal"


@dataclass(frozen=True)
class Usage:
    """A part of the run directory, the bytes and files it takes on disk; `note` says more in a few words."""

    name: str
    num_bytes: int
    num_files: int
    note: str = ""


class Taken(NamedTuple):
    num_bytes: int
    num_files: int


@dataclass(frozen=True)
class Removable:
    """A folder of a run that it does not need, and why."""

    path: Path
    taken: Taken
    why: str


def usage(run: RunDir) -> list[Usage]:
    """Return what each part of a run takes, largest first; parts that take nothing are left out."""
    named = {
        "checkpoints": (run.checkpoints, _steps(run.checkpoints)),
        "exports": (run.exports, _steps(run.exports)),
        "rollouts": (run.rollouts(0).parent, ""),
        "evals": (run.evals, "of hpc-grpo eval"),
        "batches": (run.batches(0).parent, "for hpc-grpo replay"),
        "logs of attempts": (run.attempts, ""),
        "copy of hpc-grpo": (run.source_dir, "and of your reward files"),
        "Slurm's output": (run.slurm_logs, ""),
        "TensorBoard": (run.tensorboard, ""),
    }
    parts = [Usage(name, *taken_on_disk(path), note) for name, (path, note) in named.items()]
    whole = taken_on_disk(run.path)
    rest = whole.num_bytes - sum(part.num_bytes for part in parts)
    files = whole.num_files - sum(part.num_files for part in parts)
    parts.append(Usage("records", rest, files, "config, metrics, ledger and the rest"))
    return sorted((part for part in parts if part.num_bytes > 0), key=lambda part: -part.num_bytes)


def taken_on_disk(path: Path) -> Taken:
    """Count the bytes and files that a file or folder takes, links not followed; a file that vanishes counts nothing.

    Folders and links count as files, as quotas of files (inodes) count them.

    Raises ConfigError for what cannot be looked at: a sum without it would say that there is room.
    """
    try:
        blocks = [_blocks(path)]
        for parent, folders, files in os.walk(path, onerror=_unless_gone):
            blocks += [_blocks(Path(parent, name)) for name in (*folders, *files)]
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be read ({error.strerror}), so that what {path} takes on disk is not known. Make "
            f"it readable, chmod -R u+rwX {path}, or look by hand: du -sh {path}"
        ) from error
    there = [size for size in blocks if size is not None]
    return Taken(sum(there), len(there))


def removable(run: RunDir) -> list[Removable]:
    """List what `clean` would remove: older checkpoints and exports, and what cut or damaged saves left.

    Without a whole checkpoint no checkpoint goes, damaged or not: one may be mended. A link is the user's, and stays.
    """
    found = [*_old_checkpoints(run), *_old_exports(run), *_leftovers(run)]
    return [Removable(path, taken_on_disk(path), why) for path, why in found if not path.is_symlink()]


def refuse_unless_newest_is_whole(run: RunDir, items: Sequence[Removable]) -> None:
    """Raise ConfigError where a checkpoint would go while the one that stays has wrong hashes: it may be the better.

    Reads the whole of the newest checkpoint, once for a run, and nothing where no checkpoint would go.
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


def _old_checkpoints(run: RunDir) -> Iterator[tuple[Path, str]]:
    newest = newest_step(run)
    for step, path in sorted(step_dirs(run.checkpoints).items()):
        if step < newest:
            yield path, f"older than checkpoint {newest}"


def _old_exports(run: RunDir) -> Iterator[tuple[Path, str]]:
    exports = sorted(step_dirs(run.exports).items())
    for _, path in exports[:-1]:
        yield path, f"older than export {exports[-1][0]}"


def _leftovers(run: RunDir) -> Iterator[tuple[Path, str]]:
    """Yield staging folders of cut saves, and damaged checkpoints that a run has set aside and gone past."""
    newest = newest_step(run)
    for parent in (run.checkpoints, run.exports):
        for path in sorted(parent.glob(".step_*.tmp")):
            yield path, "a rewritten checkpoint" if path.name.endswith(f"{_REWRITTEN}.tmp") else "a save that was cut"
    if newest:
        for path in sorted(run.checkpoints.glob("step_*.damaged*")):
            yield path, "a damaged checkpoint, set aside"


def _steps(parent: Path) -> str:
    steps = sorted(step_dirs(parent))
    return f"{'step' if len(steps) == 1 else 'steps'} {', '.join(map(str, steps))}" if steps else ""


def _blocks(path: Path) -> int | None:
    """Return the bytes of one file, None where it has vanished."""
    try:
        return path.lstat().st_blocks * 512
    except (FileNotFoundError, NotADirectoryError):
        return None


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
