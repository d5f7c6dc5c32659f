"""The frozen config of a run, `config.yaml`: written with a digest and a copy beside it, read unchanged.

A truncated YAML file is still valid YAML with other values. So a damaged file is replaced by its copy, and an edited
one is refused: only `hpc-grpo submit` knows which keys may change. A file of another version of this package needs that
version, of which the run has a copy.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from hpc_grpo.config import Config, load_resolved, to_yaml
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.checkpoint import has_trained
from hpc_grpo.run.files import copy_path, digest_of, read_record, write_atomic, write_record
from hpc_grpo.run.owner import refuse_shared
from hpc_grpo.run.paths import RunDir

_HEADER = "# Written by hpc-grpo. To change what may change: hpc-grpo submit RUN KEY=VALUE. digest: {digest}\n\n"
_SIGNED = re.compile(r"#[^\n]* digest: ([0-9a-f]{32})\n\n")


def write_config(run: RunDir, config: Config) -> None:
    _write(run, config.model_dump(mode="json"))


def rewrite_config(run: RunDir, config: Config, changed: Collection[str]) -> None:
    """Write the config without the keys that the run's frozen config lacks. `changed` are the keys with new values.

    Jobs read the file with the run's copy of this package, which refuses newer keys. Raises ConfigError if one of
    `changed` is a newer key.
    """
    values = config.model_dump(mode="json")
    path = next(filter(_is_as_written, (run.config, copy_path(run.config))), None)
    if path is not None:
        written = yaml.safe_load(_text(path))
        if new := [key for key in changed if _is_new(key, config, written)]:
            raise ConfigError(
                f"The run uses its own copy of hpc-grpo, {run.source_dir}, which does not know {', '.join(new)}: "
                "its job would fail. Remove that key, or switch the run to the installed hpc-grpo: the same "
                "command with --accept-changes"
            )
        values = _without_new(values, written, changed)
    _write(run, values)


def read_config(run: RunDir) -> Config:
    """Return the run's frozen config, with `run.root` and `run.name` set to the run's current place.

    A config names code to run. Raises ConfigError if another user may write the run, if the config and its copy are
    damaged, if the config was edited, or if another version wrote keys that this version does not take.
    """
    refuse_shared(run.path)
    config = _frozen(run)
    there = config.run_path
    if there == run.path or (there.is_dir() and there.samefile(run.path)):
        return config
    moved = config.run.model_copy(update={"root": run.path.parent, "name": run.path.name})
    return config.model_copy(update={"run": moved})


def differences(before: Config, now: Config) -> dict[str, tuple[Any, Any]]:
    """Map dotted keys with different values to (before, now). A list's items are keys such as rewards.0.name."""
    old, new = flat(before.model_dump(mode="json")), flat(now.model_dump(mode="json"))
    return {key: (old.get(key), new.get(key)) for key in sorted({*old, *new}) if old.get(key) != new.get(key)}


def flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted key. A list of mappings gives keys with positions, such as rewards.0.name."""
    flattened: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, list) and any(isinstance(part, dict) for part in item):
            item = {str(position): part for position, part in enumerate(item)}
        if isinstance(item, dict) and item:
            flattened.update(flat(item, f"{prefix}{key}."))
        else:
            flattened[f"{prefix}{key}"] = item
    return flattened


def _write(run: RunDir, values: dict[str, Any]) -> None:
    body = to_yaml(values)
    text = _HEADER.format(digest=digest_of(body)) + body
    for path in (copy_path(run.config), run.config):
        write_atomic(path, text)


def _is_new(key: str, config: Config, written: Any) -> bool:
    """Return whether a dotted key names a field that was unknown to the package that wrote the config `written`."""
    value: Any = config
    for part in key.split("."):
        if isinstance(value, BaseModel) and isinstance(written, dict):
            if part not in written:
                return True
            value, written = getattr(value, part), written[part]
        elif isinstance(value, list) and isinstance(written, list) and int(part) < min(len(value), len(written)):
            value, written = value[int(part)], written[int(part)]
        else:
            return False  # a name of the user's own, or a list item that only one side has
    return False


def _without_new(now: Any, before: Any, changed: Collection[str], prefix: str = "") -> Any:
    """Return `now` without the keys that neither `before` has nor `changed` names."""
    if isinstance(now, list) and isinstance(before, list):
        pairs = enumerate(zip_longest(now, before[: len(now)]))  # None marks an item that `before` does not have.
        return [_without_new(item, old, changed, f"{prefix}{position}.") for position, (item, old) in pairs]
    if not (isinstance(now, dict) and isinstance(before, dict)):
        return now
    return {
        key: _without_new(value, before[key], changed, f"{prefix}{key}.") if key in before else value
        for key, value in now.items()
        if key in before or any(f"{name}.".startswith(f"{prefix}{key}.") for name in changed)
    }


def _frozen(run: RunDir) -> Config:
    path, copy = run.config, copy_path(run.config)
    if _is_as_written(path):
        return _written(run, path)
    if not _is_as_written(copy):
        if path.is_file() and _SIGNED.match(_text(path)):
            raise ConfigError(
                f"{path} is damaged, and so is its copy beside it: they are not what hpc-grpo wrote. Restore one from "
                f"a backup, or start a new run: hpc-grpo submit (or train) CONFIG run.name=NAME."
            )
        return load_resolved(path)  # the run is older than digests and copies
    written = _written(run, copy)
    try:
        found = load_resolved(path)
    except ConfigError:
        return written  # `path` is empty, truncated or missing
    if edited := differences(written, found):
        listed = "\n".join(f"  {key}: {old!r} written, {new!r} now" for key, (old, new) in edited.items())
        raise ConfigError(
            f"{path} is not what hpc-grpo wrote: damaged, or edited by hand:\n{listed}\n"
            f"Restore it: cp {copy} {path}\nTo change a key: hpc-grpo submit (or train) {run.path} KEY=VALUE"
        )
    return written


def _written(run: RunDir, path: Path) -> Config:
    """Load a config. Raises ConfigError, with how to start the run, if another version's config does not load here."""
    try:
        return load_resolved(path)
    except ConfigError as error:
        if Path(__file__).is_relative_to(run.source_dir.resolve()):
            raise
        if run.source_dir.is_dir():
            how = f"Use the run's copy of that version: python {run.source_dir} resume {run.path} (or eval, export)."
        else:
            how = "Install that version to continue the run."
        raise ConfigError(
            f"The run in {run.path} was written by another version of hpc-grpo, and this one cannot read its "
            f"config. {how}"
        ) from error


def _is_as_written(path: Path) -> bool:
    text = _text(path) if path.is_file() else ""
    signed = _SIGNED.match(text)
    return signed is not None and signed[1] == digest_of(text[signed.end() :])


def _text(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")


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
    _write_inputs(run, replace(read_inputs(run), accepting=tuple(argv)))


def inherit_inputs(run: RunDir, fork: RunDir, is_compared: Callable[[str], bool]) -> None:
    """Copy the fingerprints of `run` to its fork, for the keys that `is_compared` accepts."""
    kept = {key: parts for key, parts in read_inputs(run).fingerprints.items() if is_compared(key)}
    _write_inputs(fork, InputsRecord(kept))


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
            f"both. Restore the files (functions have copies in {run.source_dir}), or start a new run: run.name=NAME. "
            f"To accept the change, add --accept-changes (train, submit), which records it in {run.inputs.name}."
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
        _write_inputs(run, taken)


def changed_inputs(before: Fingerprints, now: Fingerprints) -> dict[str, tuple[str, str]]:
    """Map each difference to (before, now). A key that only one side has is no change: an eval may begin later."""
    changed = {}
    for key in sorted(before.keys() & now.keys()):
        for name in sorted({*before[key], *now[key]}):
            pair = (before[key].get(name, _NOT_THERE), now[key].get(name, _NOT_THERE))
            if pair[0] != pair[1]:
                changed[f"{key}, {name}"] = pair
    return changed


def _write_inputs(run: RunDir, record: InputsRecord) -> None:
    write_record(run.inputs, asdict(record), keep_copy=True)
