"""Translate another system's config by a table of rows: their keys, our key, a function, what differs.

No key is dropped. A key that no row knows is listed as unknown. A value that we cannot honour and that would change
the training is refused. Keys are dotted, values are those of YAML.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    """We cannot honour a value that would change the training. `instead` is what --lenient takes, by our keys."""

    def __init__(self, reason: str, instead: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.instead = dict(instead or {})


class ByHandError(Exception):
    """Only the user can put the value into our terms, such as a file that is elsewhere."""


@dataclass(frozen=True)
class Differs:
    """Our keys for a value, and what is different here, with both formulas where they matter."""

    ours: Any
    note: str


class Theirs:
    """Their keys: the given ones, and upstream's defaults of the others, as the table has them.

    `read` collects the names that conversions asked for: a test compares them with what rows say they read.
    """

    def __init__(self, rows: Sequence[Row], given: Mapping[str, Any]) -> None:
        self.given = given
        self.read: set[str] = set()
        self._defaults: dict[str, Any] = {}
        for row in reversed(rows):
            self._defaults |= dict(row.also)
            if row.default is not NOT_GIVEN:
                self._defaults |= dict.fromkeys(row.names, row.default)

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first of `names` that is given and not null, else upstream's default, else `default`."""
        self.read.update(names)
        for values in (self.given, self._defaults):
            for name in names:
                if values.get(name) is not None:
                    return values[name]
        return default

    def exact(self, name: str) -> Any:
        """Return the value of a key whose null is a value of its own: given, or upstream's default."""
        self.read.add(name)
        return self.given[name] if name in self.given else self._defaults.get(name)

    def is_given(self, name: str) -> bool:
        self.read.add(name)
        return name in self.given

    def has(self, prefix: str) -> bool:
        """Return True if a key that begins with `prefix` is given, and is not null."""
        self.read.add(prefix)
        return any(key.startswith(prefix) and value is not None for key, value in self.given.items())


Convert = Callable[[Any, Theirs], Any]


@dataclass(frozen=True)
class Row:
    """One key of theirs under all of its names; `*` stands for any text.

    `convert` takes the value and all their keys. With `ours` it returns the value of that key, else {our key: value}.
    It may return `Differs`, and raise RefusedError or ByHandError. Without `ours` and `convert` the key has no
    counterpart, and `note` says why. Else `note` says what is different here.

    `default` is upstream's default. `also` maps further keys that `convert` reads to their defaults: the row accounts
    for these keys too.
    """

    theirs: str
    ours: str = ""
    convert: Convert | None = None
    default: Any = NOT_GIVEN
    note: str = ""
    also: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return self.theirs.split()

    def matches(self, key: str) -> bool:
        return any(fnmatchcase(key, name) for name in self.names)

    def converted(self, value: Any, theirs: Theirs) -> tuple[dict[str, Any], str]:
        """Return our keys with their values, and the note of a difference."""
        if self.convert is None and not self.ours:
            return {}, ""
        result = self.convert(value, theirs) if self.convert else value
        note = self.note
        if isinstance(result, Differs):
            result, note = result.ours, result.note
        ours = {self.ours: result} if self.ours else dict(result)
        return ours, note if ours else ""


@dataclass(frozen=True)
class Outcome:
    """The outcome for one key of theirs. `is_given` is False for a default of theirs."""

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
    def ours(self) -> dict[str, Any]:
        """Return our dotted keys with their values. Later rows win over earlier ones."""
        return {key: value for outcome in self.outcomes for key, value in outcome.ours.items()}

    @property
    def values(self) -> dict[str, Any]:
        """Return our config as nested mappings."""
        nested: dict[str, Any] = {}
        for key, value in self.ours.items():
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
    """Translate `given`, by dotted keys, row by row. A key belongs to the first row that matches it."""
    return Translation(tuple(_outcomes(rows, given)))


def _outcomes(rows: Sequence[Row], given: Mapping[str, Any]) -> Iterator[Outcome]:
    theirs, left = Theirs(rows, given), dict(given)
    for row in rows:
        found = [key for key in left if row.matches(key)]
        further = {key: left.pop(key) for key in row.also if key in left and key not in found}
        for key in found:
            yield _outcome(row, key, left.pop(key), theirs)
        if not found and row.default is not NOT_GIVEN and not any(name in given for name in row.names):
            outcome = _outcome(row, row.names[0], row.default, theirs, is_given=False)
            if further and outcome.kind in (Kind.REFUSED, Kind.BY_HAND, Kind.DIFFERS):
                # What a given key led to stands beside that key, not beside a default.
                key, value = next(iter(further.items()))
                del further[key]
                outcome = replace(outcome, theirs=key, value=value, is_given=True)
            yield outcome
        for key, value in further.items():
            yield Outcome(Kind.TRANSLATED, key, value, note=f"with {row.names[0]}")
    for key, value in left.items():
        yield Outcome(Kind.UNKNOWN, key, value, note="neither translated nor known to be without effect")


def _outcome(row: Row, key: str, value: Any, theirs: Theirs, *, is_given: bool = True) -> Outcome:
    try:
        ours, note = row.converted(value, theirs)
    except RefusedError as refused:
        return Outcome(Kind.REFUSED, key, value, refused.instead, str(refused), is_given)
    except ByHandError as by_hand:
        return Outcome(Kind.BY_HAND, key, value, {}, str(by_hand), is_given)
    except (TypeError, ValueError) as error:  # the file may hold anything: a text where a number is meant, null
        return Outcome(Kind.REFUSED, key, value, {}, f"the value cannot be read: {error}", is_given)
    if not row.ours and row.convert is None:
        return Outcome(Kind.NO_COUNTERPART, key, value, {}, row.note, is_given)
    return Outcome(Kind.DIFFERS if note else Kind.TRANSLATED, key, value, ours, note, is_given)


def choice(table: Mapping[Any, Any], what: str) -> Convert:
    """Return a conversion by a table, in which an error stands for a refusal. Other values are refused as `what`."""

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
    """Return a conversion of a key that changes nothing at one of `values` or null. Others are refused for `why`."""

    def convert(value: Any, _theirs: Theirs) -> dict[str, Any]:
        if value is not None and value not in values:
            raise RefusedError(why)
        return {}

    return convert


def whole_groups(count: Any, what: str) -> Any:
    """Return the number of minibatches, which are made of whole groups here, and of `what` there."""
    if int(count) == 1:
        return 1
    return Differs(int(count), f"minibatches are made of whole groups here, of {what} there")


def shared_memory(value: Any, _theirs: Theirs) -> Any:
    """Bound the share of a GPU's memory that an engine may have beside a learner (config/placement_rules.py)."""
    if float(value) <= MOST_BESIDE_A_LEARNER:
        return value
    return Differs(MOST_BESIDE_A_LEARNER, "the largest share of a GPU's memory for an engine beside a learner")


def by_hand(how: str) -> Convert:
    """Return a conversion of a key that the user must set. Null, false, 0 and empty values need nothing."""

    def convert(value: Any, _theirs: Theirs) -> dict[str, Any]:
        if value in (None, False, "", 0) or value in ([], {}):
            return {}
        raise ByHandError(how)

    return convert
