"""`inputs.json`: fingerprints of a run's inputs besides its config, and the changes that the user accepted.

At every start, before training, the driver compares the inputs with those of the first start (data/fingerprint.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpc_grpo.errors import ConfigError
from hpc_grpo.run.checkpoint import has_trained
from hpc_grpo.run.files import read_record, write_record
from hpc_grpo.run.paths import RunDir

Fingerprints = Mapping[str, Mapping[str, str]]
"""Key of the config -> name of a file, or of another part -> its fingerprint."""

_NOT_THERE = "not there"


@dataclass(frozen=True)
class InputsRecord:
    """The files that a run began with, and their changes that the user accepted.

    `accepted` has these changes in their order. `accepting` is the command line that accepts changes at the next start;
    () if none does.
    """

    fingerprints: Fingerprints
    accepting: tuple[str, ...] = ()
    accepted: tuple[dict[str, Any], ...] = ()


def read_inputs(run: RunDir) -> InputsRecord:
    """Return the record. It is empty for a run that has not started, or that started before fingerprints existed."""

    def parse(values: dict[str, Any]) -> InputsRecord:
        fingerprints = {key: dict(parts) for key, parts in values["fingerprints"].items()}
        return InputsRecord(fingerprints, tuple(values["accepting"]), tuple(values["accepted"]))

    return read_record(run.inputs, parse) or InputsRecord({})


def accept_changes(run: RunDir, argv: Sequence[str]) -> None:
    """Record that the next start accepts the inputs that it finds. `argv` is the user's command line."""
    _write(run, replace(read_inputs(run), accepting=tuple(argv)))


def inherit_inputs(run: RunDir, fork: RunDir, is_compared: Callable[[str], bool]) -> None:
    """Copy the fingerprints of `run` to its fork, for the keys that `is_compared` accepts."""
    kept = {key: parts for key, parts in read_inputs(run).fingerprints.items() if is_compared(key)}
    _write(fork, InputsRecord(kept))


def refuse_changed(run: RunDir, now: Fingerprints) -> None:
    """Raise ConfigError for inputs that changed since the first start.

    Allows changed inputs if the run has not trained yet, or if the user accepts changes at this start.
    """
    record = read_inputs(run)
    changed = changed_inputs(record.fingerprints, now)
    if changed and not record.accepting and has_trained(run):
        listed = "\n".join(f"  {name}: {before} at the start, {after} now" for name, (before, after) in changed.items())
        raise ConfigError(
            f"The inputs of the run in {run.path} have changed since it started:\n{listed}\nTraining would mix "
            "both. Restore the files. To accept the change, add --accept-changes (train, submit), which "
            f"records it in {run.inputs.name}."
        )


def take_inputs(run: RunDir, now: Fingerprints) -> None:
    """Refuse changed inputs (`refuse_changed`), and record new and accepted ones."""
    refuse_changed(run, now)
    record = read_inputs(run)
    changed = changed_inputs(record.fingerprints, now)
    accepted = record.accepted
    if changed:
        pairs = {name: list(pair) for name, pair in changed.items()}
        accepted = (*accepted, {"at": time.time(), "argv": list(record.accepting), "changed": pairs})
    taken = InputsRecord({**record.fingerprints, **now}, (), accepted)
    if taken != record:
        _write(run, taken)


def changed_inputs(before: Fingerprints, now: Fingerprints) -> dict[str, tuple[str, str]]:
    """Map each difference to (before, now). A key that only one side has is no change: an eval may begin later."""
    changed = {}
    for key in sorted(before.keys() & now.keys()):
        for name in sorted({*before[key], *now[key]}):
            pair = (before[key].get(name, _NOT_THERE), now[key].get(name, _NOT_THERE))
            if pair[0] != pair[1]:
                changed[f"{key}, {name}"] = pair
    return changed


def _write(run: RunDir, record: InputsRecord) -> None:
    write_record(run.inputs, asdict(record), keep_copy=True)
