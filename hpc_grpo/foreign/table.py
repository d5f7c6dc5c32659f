"""Translate another system's config by a table of rows: their keys, our key, a function, the difference.

Drops no key. A key without a row is listed as unknown. A value is refused if we cannot honour it and it would change
the training. Keys are dotted, values are YAML's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from hpc_grpo.config.resources import MOST_BESIDE_A_LEARNER

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
    """We cannot honour a value that would change the training. `instead` has our keys that --lenient uses."""

    def __init__(self, reason: str, instead: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.instead = dict(instead or {})


class ByHandError(Exception):
    """Only the user can choose the replacement of a value: set `key` to `what`."""

    def __init__(self, what: str, key: str) -> None:
        super().__init__(f"{what}: set {key}")
        self.key = key


@dataclass(frozen=True)
class Differs:
    """A translated value, or our keys with values, and a note on the difference, with both formulas if needed."""

    ours: Any
    note: str


class Theirs:
    """The other system's keys: given values, and for all other keys of the table the system's defaults."""

    def __init__(self, rows: Sequence[Row], given: Mapping[str, Any]) -> None:
        self.given = given
        self.defaults: dict[str, Any] = {}
        for row in reversed(rows):
            self.defaults |= dict(row.also)
            if row.default is not NOT_GIVEN:
                self.defaults |= dict.fromkeys(row.names, row.default)

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first of `names` that is given and not null, else upstream's default, else `default`."""
        for values in (self.given, self.defaults):
            for name in names:
                if values.get(name) is not None:
                    return values[name]
        return default

    def exact(self, name: str) -> Any:
        """Return the value of a key for which null is meaningful: the given value, or upstream's default."""
        return self.given[name] if name in self.given else self.defaults.get(name)

    def is_given(self, name: str) -> bool:
        return name in self.given

    def has(self, prefix: str) -> bool:
        """Return True if a key that begins with `prefix` is given, and is not null."""
        return any(key.startswith(prefix) and value is not None for key, value in self.given.items())

    def section(self, name: str) -> dict[str, Any]:
        """Return the given keys below section `name`, without the section's name."""
        return {key.removeprefix(f"{name}."): own for key, own in self.given.items() if key.startswith(f"{name}.")}


Convert = Callable[..., Any]
"""A function of a value and all their keys."""


@dataclass(frozen=True)
class Row:
    """A key of the other system, under all of its names; `*` stands for any text.

    `convert` takes the value and all their keys. With `ours` it returns the value of our key, else {our key: value}.
    `convert` may return `Differs`, and raise RefusedError or ByHandError. Without `ours` and `convert` the key has no
    counterpart, and `note` says why. Else `note` says what is different here.

    `default` is upstream's default. `also` maps further keys that `convert` reads to their defaults. The row handles
    these keys too.
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

    def converted(self, value: Any, theirs: Theirs) -> tuple[dict[str, Any], str]:
        """Return our keys with their values, and the note of a difference."""
        result = self.convert(value, theirs) if self.convert else value
        told = result if isinstance(result, Differs) else Differs(result, self.note if result or self.ours else "")
        return {self.ours: told.ours} if self.ours else dict(told.ours), told.note


@dataclass(frozen=True)
class Outcome:
    """The outcome for one of their keys. `is_given` is False for a default; `by_hand` is our key that the user sets."""

    kind: Kind
    theirs: str
    value: Any
    ours: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    is_given: bool = True
    by_hand: str = ""


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
        """Count the given keys whose outcome is `kind`."""
        return sum(outcome.is_given for outcome in self.of(kind))

    def unset(self, overrides: Iterable[str]) -> list[Outcome]:
        """Return the outcomes that need a key from the user, if `overrides` do not set this key."""
        return [own for own in self.of(Kind.BY_HAND) if not any(each.startswith(own.by_hand) for each in overrides)]


def translate(rows: Sequence[Row], given: Mapping[str, Any]) -> Translation:
    """Translate the dotted keys `given` row by row. The first matching row handles a key."""
    return Translation(tuple(_outcomes(rows, given)))


def with_defaults(rows: Sequence[Row], defaults: Mapping[str, Any]) -> tuple[Row, ...]:
    """Return the rows with the defaults of another version."""

    def own(row: Row) -> Row:
        default = next((defaults[name] for name in row.names if name in defaults), row.default)
        return replace(row, default=default, also={key: defaults.get(key, old) for key, old in row.also.items()})

    return tuple(map(own, rows))


def _outcomes(rows: Sequence[Row], given: Mapping[str, Any]) -> Iterator[Outcome]:
    theirs, left = Theirs(rows, given), dict(given)
    for row in rows:
        found = [key for key in left if any(fnmatchcase(key, name) for name in row.names)]
        further = {key: left.pop(key) for key in row.also if key in left and key not in found}
        for key in found:
            yield _outcome(row, key, left.pop(key), theirs)
        if not found and row.default is not NOT_GIVEN and not any(name in given for name in row.names):
            outcome = _outcome(row, row.names[0], row.default, theirs, is_given=False)
            if further and outcome.kind in (Kind.REFUSED, Kind.BY_HAND, Kind.DIFFERS):
                # Report the result of a given key at that key, not at a default.
                key = next(iter(further))
                outcome = replace(outcome, theirs=key, value=further.pop(key), is_given=True)
            yield outcome
        for key, value in further.items():
            yield Outcome(Kind.TRANSLATED, key, value, note=f"with {row.names[0]}")
    for key, value in left.items():
        yield Outcome(Kind.UNKNOWN, key, value, note="the table has no row for this key")


def _outcome(row: Row, key: str, value: Any, theirs: Theirs, *, is_given: bool = True) -> Outcome:
    if not row.ours and row.convert is None:
        return Outcome(Kind.NO_COUNTERPART, key, value, {}, row.note, is_given)
    try:
        ours, note = row.converted(value, theirs)
    except RefusedError as refused:
        return Outcome(Kind.REFUSED, key, value, refused.instead, str(refused), is_given)
    except ByHandError as error:
        return Outcome(Kind.BY_HAND, key, value, {}, str(error), is_given, error.key)
    # The file may contain anything, such as text, null, 0 or infinity in place of a number.
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        return Outcome(Kind.REFUSED, key, value, {}, f"the value cannot be read: {error}", is_given)
    return Outcome(Kind.DIFFERS if note else Kind.TRANSLATED, key, value, ours, note, is_given)


def choice(table: Mapping[Any, Any], what: str) -> Convert:
    """Return a conversion by a table. Refuses other values; `what` names the key's meaning in the error."""

    def convert(value: Any, _theirs: Theirs | None = None) -> Any:
        if value not in table:
            raise RefusedError(f"{what} {value!r} is not supported; supported are {', '.join(map(str, table))}")
        return table[value]

    return convert


def only(*values: Any, why: str, instead: Mapping[str, Any] | None = None) -> Convert:
    """Return a conversion that accepts `values` and null, and sets no key of ours. Refuses others, and says `why`."""

    def convert(value: Any, _theirs: Theirs) -> dict[str, Any]:
        if value is not None and value not in values:
            raise RefusedError(why, instead)
        return {}

    return convert


def by_hand(what: str, key: str) -> Convert:
    """Return a conversion for a key that the user must set. Null, false, 0 and empty values need nothing."""

    def convert(value: Any, _theirs: Theirs) -> dict[str, Any]:
        if value in (None, False, "", 0) or value in ([], {}):
            return {}
        raise ByHandError(what, key)

    return convert


def below(key: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with names below our section `key`.

    >>> below("data.train", {"path": "d", "split": "train"})
    {'data.train.path': 'd', 'data.train.split': 'train'}
    """
    return {f"{key}.{name}": value for name, value in values.items()}


def named(prefix: str, names: str) -> str:
    """Return names, separated by blanks, each below the section `prefix` of theirs."""
    return " ".join(f"{prefix}.{name}" for name in names.split())


def as_list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def lora(rank: str, alpha: str, targets: str) -> Convert:
    """Return a conversion of a switch or rank to section `lora`. The arguments are names of their keys."""

    def convert(value: Any, theirs: Theirs) -> Any:
        if not value:
            return {}
        named = as_list(theirs.get(targets, default="all-linear"))
        ours: dict[str, Any] = {"lora.rank": int(theirs.get(rank)), "lora.alpha": float(theirs.get(alpha))}
        ours["lora.targets"] = "all-linear" if named == ["all-linear"] else named
        return Differs(ours, "here without dropout, which would change ratios of policies at random")

    return convert


def positive(value: Any, _theirs: Theirs) -> int | None:
    """Return a number of steps; None (never) for 0, a negative number or null."""
    return int(value) if value is not None and int(value) > 0 else None


def kept(value: Any, _theirs: Theirs) -> Any:
    return Differs(2, "all checkpoints stay there, the newest two here") if value is None else value


def differs(note: str) -> Convert:
    """Return a conversion that keeps the value. `note` is the difference, unless the value is 0, false or null."""
    return lambda value, _: Differs(value, note) if value else value


weight_decay = differs("on all weights there; only on matrices here")


def one_sequence(tokens: Any, longest: int) -> Any:
    """Return the tokens of a microbatch. They are at least `longest`, because ours must hold a full sequence."""
    return int(tokens) if int(tokens) >= longest else Differs(longest, "here at least one full sequence")


def whole_groups(count: Any, what: str) -> Any:
    """Return the number of minibatches. Ours hold complete groups; `what` describes theirs."""
    return 1 if int(count) == 1 else Differs(int(count), f"minibatches hold {what} there, complete groups here")


def length(steps: Any, epochs: Any) -> dict[str, Any]:
    """Return the run's length: steps, or epochs if no steps are given. Our config has only one of the two."""
    return {"train.total_steps": int(steps)} if steps else {"train.total_epochs": int(epochs)}


def share_of_steps(share: Any, steps: Any, key: str) -> float:
    """Return a share of the run's `steps`. Raises ByHandError if the number of steps depends on the data."""
    if share and not steps:
        raise ByHandError(f"{share:g} of the run's steps, whose number depends on the data", key)
    return float(share or 0) * int(steps or 0)


def schedule(name: Any, note: str = "") -> Any:
    """Return our schedule, with `note` as the difference unless the schedule is constant."""
    ours = choice(
        {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine",
         "cosine_with_min_lr": "cosine"}, "learning-rate schedule")(name, NOT_GIVEN)  # fmt: skip
    return Differs(ours, note) if note and ours != "constant" else ours


dtype = choice({"bfloat16": "bfloat16", "float32": "float32"}, "dtype")

engine = choice({"vllm": "", "sglang": "SGLang samples there, vLLM here", None: ""}, "the engine")


def reporters(value: Any, _theirs: Theirs) -> dict[str, Any]:
    names = as_list(value)
    return {
        "metrics.wandb.mode": "auto" if {"all", "wandb"} & {*names} else "disabled",
        "metrics.tensorboard": bool({"all", "tensorboard"} & {*names}),
    }


def overlong(is_on: Any, tokens: Any, factor: Any) -> int | None:
    """Return the buffer in tokens of DAPO's penalty for long completions; None if the penalty is off."""
    if not is_on:
        return None
    if float(factor) != 1.0:
        instead = {"rollout.overlong_tokens": int(tokens)}
        raise RefusedError(f"the penalty of an overlong completion is at most 1 here, {factor} there", instead)
    return int(tokens)


def shared_memory(value: Any, _theirs: Theirs) -> Any:
    """Return the share of a GPU's memory for an engine, bounded as beside a learner (config/resources.py)."""
    if float(value) <= MOST_BESIDE_A_LEARNER:
        return value
    return Differs(MOST_BESIDE_A_LEARNER, "the largest share of a GPU's memory for an engine beside a learner")


def split_sequences(value: Any, _theirs: Theirs) -> Any:
    note = f"a sequence is split over {value} GPUs there; here only if train.sequence_parallel is set"
    return {} if value in (None, 1) else Differs({}, note)


def node_shape(learners: int, engines: int, tensor: int, nodes: int, gpus_per_node: int) -> dict[str, Any]:
    """Return our keys for these total numbers of learners and engines: all nodes get equal numbers.

    Raises RefusedError if they do not divide evenly, or need too many GPUs; --lenient takes a shape near them.
    """
    shape = {
        "launch.num_nodes": nodes, "launch.slurm.gpus_per_node": gpus_per_node, "engine.tensor_parallel": tensor,
        "placement.learners_per_node": learners // nodes, "engine.engines_per_node": engines // nodes,
    }  # fmt: skip
    needed = learners + engines * tensor
    if needed > nodes * gpus_per_node:
        reason = (f"{learners} learners and {engines} engines of {tensor} GPUs take {needed}, and {nodes} nodes of "
                  f"{gpus_per_node} have {nodes * gpus_per_node}")  # fmt: skip
    elif learners % nodes or engines % nodes:
        reason = (f"{learners} learners and {engines} engines do not divide evenly among {nodes} nodes. Nodes have "
                  f"equal numbers here: change both to multiples of {nodes}")  # fmt: skip
    else:
        return shape
    shape["placement.learners_per_node"] = min(max(1, round(learners / nodes)), max(1, gpus_per_node - tensor))
    left = gpus_per_node - shape["placement.learners_per_node"]
    raise RefusedError(reason, shape | {"engine.engines_per_node": max(1, left // tensor)})
