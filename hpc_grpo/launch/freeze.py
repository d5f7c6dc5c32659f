"""Freeze a run: write its resolved config and its origin into the run directory, once.

A run resumes only with the config it was started with, except for the keys of CHANGEABLE. The run's jobs use a
snapshot: a copy of the package and of the user's functions (run/source.py). The first submit or start makes the
snapshot; later ones check it.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_grpo import __version__
from hpc_grpo.config import Config, with_overrides
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.chain import read_chain
from hpc_grpo.run.checkpoint import find_checkpoint, has_trained
from hpc_grpo.run.files import read_record, write_record
from hpc_grpo.run.frozen_config import accept_changes, differences, read_config, rewrite_config, write_config
from hpc_grpo.run.paths import RunDir, is_sweep
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
from hpc_grpo.system.secret import secret_keys, without_secrets

CHANGEABLE: dict[str, str] = {
    **dict.fromkeys(("train.total_steps", "train.total_episodes", "train.total_epochs"), "extends or shortens the run"),
    "train.on_step.": "ends the run sooner, and changes no step",
    "train.max_tokens_per_microbatch": "splits the same sums differently",
    "train.sequence_parallel": "shares a row among more or fewer learners",
    "train.share_prompts": "computes a shared prompt once",
    "train.gradient_checkpointing": "recomputes activations",
    "train.attention": "another kernel of the same attention",
    "train.num_threads": "changes only the speed",
    "rollout.logged_fraction": "what is written down, not what is trained on",
    "data.cache_dir": "where tokenized data lie, not what they are",
    "rewards.*.timeout_s": "how long to wait for the same reward",
    "rewards.*.pass_env": "which secrets the same reward reads",
    "grading.": "how failed rewards are handled, and how many processes grade",
    "checkpoint.": "when state is saved, not what it is",
    "metrics.": "where numbers are sent",
    "launch.": "another partition, time or number of nodes resumes the same run",
    "placement.": "a checkpoint is rewritten for another number of learners",
    "eval.": "looks at the policy without changing it",
    "lora.publish": "how the same policy reaches the engines",
    "deadlines.": "how long to wait for a process",
    "engine.": "how engines sample from the same policy; suits another kind of node",
}
"""Keys that may change on resume, and why. A trailing dot means a section and all its keys, `*` a position in a list.

The learning rate may not change: a run has one schedule. `hpc-grpo fork` begins a new run with another.
"""

_GIT_DEADLINE_S = 10.0
"""Limits all git commands together: git looks at every file of the checkout, on a file system that may be busy."""
_MAX_DIFF_CHARACTERS = 4_000_000
_SHOWN = 4


def freeze(config: Config, argv: Sequence[str], overrides: Sequence[str], *, accepts_changes: bool = False) -> RunDir:
    """Create the run directory, or resume the existing one. A run that never trained accepts another config.

    Leaves a complete run as it is, unless it gets more steps. `accepts_changes`: continue with the current data,
    tokenizer, functions and package, and record that. Raises ConfigError if the config is not the run's or holds a
    secret, and if the run's files are missing or changed.
    """
    refuse_secrets(config)
    refuse_sweep(config)
    run = RunDir(config.run_path)
    run.create()
    if run.has_config():
        _take_up(run, config, _origin(Path.cwd(), argv, overrides), accepts_changes)
        return run
    if not _never_trained(run):
        raise ConfigError(
            f"{run.path} holds a run that has trained, and its {run.config.name} is gone, so its config is "
            f"unknown. Restore the file, or choose another run.name."
        )
    write_config(run, config)
    new_source(run, config, Path.cwd(), argv, overrides)
    return run


def new_source(
    run: RunDir, config: Config, folder: Path, argv: Sequence[str], overrides: Sequence[str], **facts: Any
) -> None:
    """Write a new run's snapshot, and source.json with `facts`. The config's paths are relative to `folder`."""
    source = {**_origin(folder, argv, overrides), **facts, "resumed": [], **take_snapshot(run, config, folder)}
    write_record(run.source, source, keep_copy=True)


def _origin(folder: Path, argv: Sequence[str], overrides: Sequence[str]) -> dict[str, Any]:
    now = {"version": __version__, "created_at": time.time(), "working_dir": str(folder)}
    return {**now, "argv": list(argv), "overrides": list(overrides)}


def refuse_sweep(config: Config) -> None:
    """Raise ConfigError if the run's folder holds the runs of a sweep."""
    if is_sweep(config.run_path):
        raise ConfigError(
            f"run.name = {config.run.name!r}: {config.run_path} is the folder of a sweep. Choose another run.name "
            "(--name NAME), or give --sweep or --seeds to submit the sweep again."
        )


def refuse_other_config(run: RunDir, config: Config) -> dict[str, tuple[Any, Any]]:
    """Return how `config` differs from the run's. Raises ConfigError if a resume may not change one of these keys."""
    changed = differences(read_config(run), config)
    taken = f"The run name {config.run.name!r} is taken by another config, in {run.path}"
    _refuse(run, config, changed, taken, "Choose another run.name, or give the values of that run to resume it.")
    return changed


def reconfigured(run: RunDir, overrides: Sequence[str]) -> Config:
    """Return a run's config with overrides, for `freeze`. Raises ConfigError for keys that may not change."""
    there = read_config(run)
    config = with_overrides(there, overrides)
    if config.run_path != there.run_path:
        raise ConfigError(
            f"run.name and run.root say which run it is, and cannot become {str(config.run_path)!r}. Leave them out, "
            f"or start a new run: hpc-grpo submit (or train) CONFIG run.name=NAME."
        )
    fork = f"from a checkpoint: hpc-grpo fork {run.path} --step N KEY=VALUE"
    fix = f"Start a new run with them: hpc-grpo submit (or train) CONFIG run.name=NAME KEY=VALUE, or {fork}."
    _refuse(run, config, differences(there, config), "A run that has trained cannot change these keys", fix)
    return config


def is_over(run: RunDir, config: Config) -> bool:
    """Return whether a run is complete and `config` does not extend it."""
    return run.is_complete() and not _extends(run, differences(read_config(run), config))


def working_dir(run: RunDir) -> Path:
    """Return the folder the run was started in: relative paths of the config are relative to it. Raises ConfigError."""
    folder = read_record(run.source, lambda values: Path(values["working_dir"]))
    if folder is None:
        raise ConfigError(
            f"{run.source} and its copy beside it are gone or damaged. They recorded the folder in which the run was "
            f"started: its config's paths are relative to it. Run in that folder: hpc-grpo submit (or train) CONFIG."
        )
    return folder


def changeable(config: Config) -> list[str]:
    """Return the entries of CHANGEABLE, without the length limit if the run drops demonstrations by it."""
    drops = config.data.drop_long_prompts and config.needs.labels
    return [entry for entry in CHANGEABLE if not (drops and entry == "train.max_tokens_per_microbatch")]


def is_listed(key: str, entries: Collection[str]) -> bool:
    """Return whether an entry names a dotted key. Entries have the form of the keys of CHANGEABLE."""
    key = re.sub(r"\.[0-9]+(?=\.)", ".*", f"{key}.")
    return any(key.startswith(entry) if entry.endswith(".") else key == f"{entry}." for entry in entries)


def _take_up(run: RunDir, config: Config, now: Mapping[str, Any], accepts_changes: bool) -> None:
    changed = refuse_other_config(run, config)
    if run.is_complete() and not _extends(run, changed):
        return
    source = read_record(run.source, _resumable) or {**now, "resumed": []}
    folder = Path(source["working_dir"])
    if not folder.is_dir():
        if not accepts_changes:
            raise ConfigError(
                f"The run in {run.path} was started in {folder}, which is gone. Paths of its config are relative to "
                f"it. In the folder that has them now, repeat the command with --accept-changes."
            )
        folder = Path.cwd()
        source["working_dir"] = str(folder)
    takes_copy = accepts_changes or _never_trained(run)
    if takes_copy:
        source |= take_snapshot(run, config, folder)
    else:
        check_snapshot(run, config, source, folder)
        find_checkpoint(run, check_hashes=False)
    if accepts_changes:
        accept_changes(run, now["argv"])
    # Before the config: a command killed between the two can be repeated.
    run.complete_marker.unlink(missing_ok=True)
    # Also replace a damaged copy, and the copy of a moved run.
    if takes_copy or "copy" not in source:
        write_config(run, config)
    else:
        rewrite_config(run, config, changed)
    pairs = {key: list(pair) for key, pair in changed.items()}
    source["resumed"].append({**now, "changed": pairs, "accepts_changes": accepts_changes})
    write_record(run.source, source, keep_copy=True)


def _refuse(run: RunDir, config: Config, changed: Mapping[str, tuple[Any, Any]], problem: str, fix: str) -> None:
    """Raise ConfigError with `problem` and `fix` if a resume may not change one of the keys."""
    may = changeable(config)
    keys = [] if _never_trained(run) else [key for key in changed if not is_listed(key, may)]
    if keys:
        listed = "\n".join(f"  {key}: {changed[key][0]!r} there, {changed[key][1]!r} now" for key in keys)
        shown = ", ".join(f"{key}*" if key.endswith(".") else key for key in may)
        raise ConfigError(f"{problem}:\n{listed}\n{fix} What may change in it: {shown}.")


def _extends(run: RunDir, changed: Collection[str]) -> bool:
    """Return whether a complete run continues with these changes."""
    ended_early = len(run.complete_marker.read_text().splitlines()) > 1  # `train.on_step` adds a line
    return any(key.startswith("train.total_") or (ended_early and key.startswith("train.on_step")) for key in changed)


def _never_trained(run: RunDir) -> bool:
    """Return whether nothing depends on the config yet: no waiting job, no finished step and no checkpoint."""
    chain = read_chain(run)
    is_queued = bool(chain.links) and not chain.ended
    return not (is_queued or has_trained(run))


def _resumable(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "working_dir": str(values["working_dir"]), "resumed": [*values["resumed"]]}


def refuse_secrets(config: Config) -> None:
    """Raise ConfigError with the keys whose values contain a secret."""
    if found := secret_keys(config.model_dump(mode="json")):
        raise ConfigError(
            f"The config must not hold secrets, and these keys do: {', '.join(found)}. config.yaml is kept and shared, "
            f"and every user of a node sees the arguments of a command. Export the secret, and name its variable: in "
            f"launch.pass_env, in api_key_env of a reward, or as $NAME in a shell line."
        )


def take_snapshot(run: RunDir, config: Config, folder: Path) -> dict[str, Any]:
    """Copy the package and the user's functions, relative to `folder`, into the run. Return facts for source.json."""
    git, diff = git_state(PACKAGE.parent)
    return {"git": git, "copy": copy_source(run, copyable(config, folder), diff)}


def check_snapshot(run: RunDir, config: Config, source: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError if the run's copy is damaged, or if the user's functions differ from their copies.

    Another installed package is no error: the run continues with its copy. A message says this.
    """
    digest = source.get("copy")
    # The run is older than snapshots, or this is a job, which checked its copy at its start.
    if digest is None or runs_from_copy():
        return
    again = "the same command with --accept-changes"
    if wrong := copy_problems(run, digest):
        raise ConfigError(
            f"The run's own copy of hpc-grpo in {run.source_dir} is damaged: {'; '.join(wrong[:_SHOWN])}"
            f"{f'; and {len(wrong) - _SHOWN} more' if len(wrong) > _SHOWN else ''}.\n"
            f"To copy the installed package ({PACKAGE}) and record that: {again}"
        )
    if changed := changed_functions(run, config, folder):
        raise ConfigError(
            f"Changed since the run started (its copies are in {run.source_dir}): {', '.join(changed)}.\n"
            f"Restore the files; or, to continue with the changed files and record that: {again}"
        )
    prefix = f"{PACKAGE.name}/"
    copied = {name: digest for name, digest in written_sums(run).items() if name.startswith(prefix)}
    if copied != {f"{prefix}{name}": digest for name, digest in sums_of(PACKAGE).items()}:
        told = f"The run continues with its own copy of hpc-grpo; the installed one differs. To use that one: {again}"
        say(told, sys.stderr)


def git_state(checkout: Path) -> tuple[dict[str, Any] | None, str]:
    """Return commit and dirty flag of the package's checkout, and its diff to that commit without secrets.

    Returns None and "" if the folder is no checkout or git fails. A value that git does not give in time is None.
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
