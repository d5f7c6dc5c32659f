"""The snapshot of a run: its own copy of the package and of the user's functions, kept while the run lasts.

`freeze` has it taken at the first submit or start (`take_snapshot`) and checked whenever the user hands the run in
again (`check_snapshot`). The jobs of the run, and all their processes, run from it (run/source.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.source import (
    PACKAGE,
    changed_functions,
    copy_problems,
    copy_source,
    copyable,
    runs_from_copy,
    sums_of,
    written_sums,
)
from hpc_grpo.system.commands import run_command
from hpc_grpo.system.say import say
from hpc_grpo.system.secret import without_secrets

_GIT_DEADLINE_S = 10.0
"""Bounds all questions to git together: on a busy file system it looks at every file of the checkout."""
_MAX_DIFF_CHARACTERS = 4_000_000
_SHOWN = 4


def take_snapshot(run: RunDir, config: Config, folder: Path) -> dict[str, Any]:
    """Copy the package and the user's functions into the run; return what `source.json` says of it.

    `folder` is the one that relative paths of the config are relative to.
    """
    checkout = PACKAGE.parent
    git, diff = git_state(checkout)
    return {"git": git, "copy": copy_source(run, copyable(config, folder), diff)}


def check_snapshot(run: RunDir, config: Config, source: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError where the run's copy is damaged, or the user has changed functions that it holds.

    A package that is by now another one is no error: the run goes on with its copy, and says so.
    """
    digest = source.get("copy")
    if digest is None or runs_from_copy():  # begun before there were copies; a link, whose start has looked
        return
    again = "the same command with --accept-changes"
    if wrong := copy_problems(run, digest):
        raise ConfigError(
            f"The run's own copy of hpc-grpo in {run.source_dir} is damaged: {'; '.join(wrong[:_SHOWN])}"
            f"{f'; and {len(wrong) - _SHOWN} more' if len(wrong) > _SHOWN else ''}.\n"
            f"To copy the installed one ({PACKAGE}) and have that recorded: {again}"
        )
    if changed := changed_functions(run, config, folder):
        raise ConfigError(
            f"Changed since the run started, which runs with its copies in {run.source_dir}: {', '.join(changed)}.\n"
            f"Bring the files back; or, to train on with what they are now and have that recorded: {again}"
        )
    prefix = f"{PACKAGE.name}/"
    copied = {name: digest for name, digest in written_sums(run).items() if name.startswith(prefix)}
    if copied != {f"{prefix}{name}": digest for name, digest in sums_of(PACKAGE).items()}:
        say(
            f"The run goes on with its own copy of hpc-grpo; the installed one differs. To take that: {again}",
            sys.stderr,
        )


def git_state(checkout: Path) -> tuple[dict[str, Any] | None, str]:
    """Return commit and dirty flag of the package's checkout, and its diff to that commit without secrets.

    None and "" where it is not one. Where git does not answer in time, commit or flag are None: not known.
    """
    deadline = time.monotonic() + _GIT_DEADLINE_S

    def git(*words: str) -> str | None:
        left_s = max(deadline - time.monotonic(), 0.1)
        answer = run_command(["git", "--no-optional-locks", "-C", str(checkout), *words], left_s)
        return None if answer.error else answer.text

    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top.strip()) != checkout:
        return None, ""
    commit, status, diff = git("rev-parse", "HEAD"), git("status", "--porcelain"), git("diff", "HEAD")
    state = {"commit": commit and commit.strip(), "dirty": None if status is None else bool(status.strip())}
    kept = diff or ""
    return state, without_secrets(kept) if len(kept) <= _MAX_DIFF_CHARACTERS else f"left out: {len(kept)} characters\n"
