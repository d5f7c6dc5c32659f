"""Translate another system's config by a table of rows: their key, our key, the conversion, and what differs.

No key is dropped: what no row knows is told as unknown, and what would change the training and cannot be honoured is
refused. Keys are dotted, values those of YAML.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from hpc_grpo.config.placement_rules import MOST_BESIDE_A_LEARNER

NOT_GIVEN: Any = object()


class Kind(Enum):
    """The outcome of translating a key, in the order of the printed list."""

    REFUSED = "refused"
    BY_HAND = "to be set by hand"
    UNKNOWN = "unknown to the table"
    DIFFERS = "translated, with a difference"
    TRANSLATED = "translated"
    NO_COUNTERPART = "no counterpart"


class RefusedError(Exception):
    """A value cannot be honoured and would change the training; `instead` is what --lenient takes, by our keys."""

    def __init__(self, reason: str, **instead: Any) -> None:
        super().__init__(reason)
        self.instead = {key.replace("__", "."): value for key, value in instead.items()}


class ByHandError(Exception):
    """A value that only the user can put into our terms, such as a file that is elsewhere."""


class Theirs:
    """Their keys: those given, and what their system takes for the others, as the table has it."""

    def __init__(self, rows: Sequence[Row], given: Mapping[str, Any]) -> None:
        self.given = given
        self._defaults = {
            name: row.default for row in reversed(rows) for name in row.names if row.default is not NOT_GIVEN
        }

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of `names` that is given and not null, else their default, else `default`."""
        for values in (self.given, self._defaults):
            for name in names:
                if values.get(name) is not None:
                    return values[name]
        return default


Convert = Callable[[Any, Theirs], Any]


def as_it_is(value: Any, _theirs: Theirs) -> Any:
    return value


@dataclass(frozen=True)
class Row:
    """One key of theirs under all of its names, with `*` for any text.

    `convert` takes its value and all their keys; with `ours` it returns that key's value, without it {our key: value},
    and it may raise RefusedError or ByHandError. With neither, the key has no counterpart, and `note` says why. Else
    `note` says what is different here. `default` is what their system takes where the key is left out; ours may take
    another.
    """

    theirs: str
    ours: str = ""
    convert: Convert | None = None
    default: Any = NOT_GIVEN
    note: str = ""

    @property
    def names(self) -> list[str]:
        return self.theirs.split()

    def matches(self, key: str) -> bool:
        return any(fnmatchcase(key, name) for name in self.names)

    def converted(self, value: Any, theirs: Theirs) -> dict[str, Any]:
        """Return our keys and their values."""
        if self.convert is None and not self.ours:
            return {}
        result = (self.convert or as_it_is)(value, theirs)
        return {self.ours: result} if self.ours else dict(result)


@dataclass(frozen=True)
class Outcome:
    """The outcome for one key of theirs; `is_given` is false for a default of theirs."""

    kind: Kind
    theirs: str
    value: Any
    ours: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    is_given: bool = True


@dataclass(frozen=True)
class Translation:
    outcomes: tuple[Outcome, ...]

    @property
    def values(self) -> dict[str, Any]:
        """Return our config as nested mappings. Later rows win over earlier ones."""
        nested: dict[str, Any] = {}
        for outcome in self.outcomes:
            for key, value in outcome.ours.items():
                *parents, last = key.split(".")
                section = nested
                for parent in parents:
                    section = section.setdefault(parent, {})
                section[last] = value
        return nested

    def of(self, kind: Kind) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.kind is kind]

    def count(self, kind: Kind) -> int:
        """Count the given keys that became `kind`."""
        return sum(outcome.is_given for outcome in self.of(kind))


def translate(rows: Sequence[Row], given: Mapping[str, Any]) -> Translation:
    """Translate `given`, by dotted keys, row by row; a key belongs to the first row that matches it."""
    return Translation(tuple(_outcomes(rows, given)))


def _outcomes(rows: Sequence[Row], given: Mapping[str, Any]) -> Iterator[Outcome]:
    theirs, left = Theirs(rows, given), dict(given)
    for row in rows:
        found = [key for key in left if row.matches(key)]
        for key in found:
            yield _outcome(row, key, left.pop(key), theirs)
        if not found and row.default is not NOT_GIVEN and not any(name in given for name in row.names):
            yield _outcome(row, row.names[0], row.default, theirs, is_given=False)
    for key, value in left.items():
        yield Outcome(Kind.UNKNOWN, key, value, note="neither translated nor known to be without effect")


def _outcome(row: Row, key: str, value: Any, theirs: Theirs, *, is_given: bool = True) -> Outcome:
    try:
        ours = row.converted(value, theirs)
    except RefusedError as refused:
        return Outcome(Kind.REFUSED, key, value, refused.instead, str(refused), is_given)
    except ByHandError as by_hand:
        return Outcome(Kind.BY_HAND, key, value, {}, str(by_hand), is_given)
    except (TypeError, ValueError) as error:  # the file may hold anything: a text where a number is meant, null
        return Outcome(Kind.REFUSED, key, value, {}, f"the value cannot be read: {error}", is_given)
    if not row.ours and row.convert is None:
        kind = Kind.NO_COUNTERPART
    else:
        kind = Kind.DIFFERS if ours and row.note else Kind.TRANSLATED
    return Outcome(kind, key, value, ours, row.note, is_given)


def elsewhere(_value: Any, _theirs: Theirs) -> dict[str, Any]:
    """Convert a key that another row reads: its note says which."""
    return {}


def choice(table: Mapping[Any, Any], what: str) -> Convert:
    """Return a conversion by a table, in which an error stands for a refusal; other values are refused as `what`."""

    def convert(value: Any, _theirs: Theirs) -> Any:
        found = table.get(value, NOT_GIVEN)
        if found is NOT_GIVEN:
            known = ", ".join(str(key) for key, ours in table.items() if not isinstance(ours, RefusedError))
            raise RefusedError(f"{what} {value!r} is not here; translated are {known}")
        if isinstance(found, RefusedError):
            raise found
        return found

    return convert


def only(*values: Any, why: str) -> Convert:
    """Return a conversion of a key that has no effect at one of `values`, and is refused for `why` at others."""

    def convert(value: Any, _theirs: Theirs) -> dict[str, Any]:
        if value is not None and value not in values:
            raise RefusedError(why)
        return {}

    return convert


def shared_memory(value: Any, _theirs: Theirs) -> float:
    """Bound the share of a GPU's memory that an engine may have beside a learner (config/placement_rules.py)."""
    return min(float(value), MOST_BESIDE_A_LEARNER)


def by_hand(how: str) -> Convert:
    """Return a conversion of a key that the user must set: null and false need nothing."""

    def convert(value: Any, _theirs: Theirs) -> dict[str, Any]:
        if value in (None, False, "", 0) or value == []:
            return {}
        raise ByHandError(how)

    return convert
