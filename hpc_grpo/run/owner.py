"""Refuse folders that another user may write, if they hold code or data of this user's runs.

Checks owner and mode of a folder and of its direct children, not of the folders above. If a member of the group
replaced a run, the run belongs to that member and is refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_grpo.errors import ConfigError

SHARED_VARIABLE = "HPC_GRPO_SHARED_RUNS"
"""Set to 1 by a user who trusts everybody with write access to the runs. Not a config key: others may write the config.
"""

PRIVATE_DIR_MODE = 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH


@dataclass(frozen=True)
class Holding:
    """`risk`: what a user who may write to the folder could do. `instead`: how to choose another folder."""

    risk: str
    instead: str


_RUN = Holding(
    "run code as you: config, rewards and checkpoints are in a run directory", "Choose another run.name or run.root."
)


def refuse_shared(folder: Path, environ: Mapping[str, str] = os.environ, holding: Holding = _RUN) -> None:
    """Raise ConfigError if another user owns or may write a folder or its children. Accepts a missing folder."""
    if environ.get(SHARED_VARIABLE) == "1" or not folder.is_dir():
        return
    outer = folder.stat()
    for path in (folder, *sorted(folder.iterdir())):
        try:
            found = path.stat()
        except FileNotFoundError:  # a broken link, or removed since it was listed
            continue
        if found.st_uid != os.geteuid():
            raise ConfigError(
                f"{path} belongs to user {found.st_uid}, not to you ({os.geteuid()}). That user could {holding.risk}. "
                f"{holding.instead} If you trust that user: export {SHARED_VARIABLE}=1"
            )
        # Others cannot reach a child of a folder that they cannot enter, even with a site's default ACL.
        if found.st_mode & _OTHERS_WRITE and (path == folder or outer.st_mode & _OTHERS_ENTER):
            raise ConfigError(
                f"{path} may be written by others (mode {stat.S_IMODE(found.st_mode):o}), who could {holding.risk}. "
                f"Check whether they did, then: chmod -R go-w {folder}. If you trust them: export {SHARED_VARIABLE}=1"
            )


def keep_others_from_writing() -> None:
    """Deny group and others write access to the files that this process and its children create."""
    if os.environ.get(SHARED_VARIABLE) != "1":
        os.umask(os.umask(_OTHERS_WRITE) | _OTHERS_WRITE)


def make_private_dir(path: Path) -> None:
    """Create a folder for secrets, or use an existing one. Raises ConfigError if others than the user have access."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=PRIVATE_DIR_MODE)
    except FileExistsError:
        found = path.lstat()
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if not is_own or stat.S_IMODE(found.st_mode) & ~PRIVATE_DIR_MODE & 0o777:
            raise ConfigError(
                f"{path} must be a folder of yours that nobody else can enter; it is {stat.filemode(found.st_mode)} of "
                f"user {found.st_uid}. Remove it, and hpc-grpo creates it again: rm -r {path}"
            ) from None
