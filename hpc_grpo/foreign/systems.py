"""The systems whose configs are translated: their tables, and the readers of their commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

from hpc_grpo.errors import ConfigError
from hpc_grpo.foreign import areal, open_instruct, trl, verl
from hpc_grpo.foreign.reading import read_nested, read_options, read_script, read_words
from hpc_grpo.foreign.table import Kind, Outcome, Row, Theirs, Translation, translate, with_defaults


@dataclass(frozen=True)
class System:
    """A system and its reader. `program` is a pattern for the training program in a script; "": only YAML files.

    `of_launcher` names the options that are read before the program. A config with a key that starts with one of
    `older_keys` belongs to an older version, with `older_defaults`.
    """

    title: str
    rows: Sequence[Row]
    parse: Callable[[Sequence[str]], dict[str, Any]] = read_words
    program: str = ""
    of_launcher: tuple[str, ...] = ()
    older_keys: tuple[str, ...] = ()
    older_defaults: Mapping[str, Any] = field(default_factory=dict)
    of_training_args: Callable[[dict[str, Any]], dict[str, Any]] = dict

    def translate(self, words: Sequence[str]) -> tuple[str, Translation]:
        """Return a description of the source, and the translation of `words`.

        `words`: a YAML file, a script with its arguments, or options. Raises ConfigError if they cannot be read.
        """
        name, given = self._read(words)
        return f"{self.title}: {name}", self.translated(given)

    def translated(self, given: Mapping[str, Any]) -> Translation:
        is_older = any(key.startswith(self.older_keys) for key in given if self.older_keys)
        return translate(with_defaults(self.rows, self.older_defaults) if is_older else self.rows, given)

    def _read(self, words: Sequence[str]) -> tuple[str, dict[str, Any]]:
        path = Path(words[0] if words else "")
        is_file = path.suffix in (".yaml", ".yml", ".sh")
        if not words or not (is_file or self.program):
            raise ConfigError("Give a .yaml or .sh file (no Python), or the words of a training command.")
        if not is_file:
            return "its words", self.parse(words)
        if not path.is_file():
            raise ConfigError(f"There is no file {path}. Give a file, or the words of a training command.")
        if path.suffix != ".sh":
            return path.name, read_nested(path, self.parse(words[1:]), Theirs(self.rows, {}).defaults)
        before, arguments, told = read_script(path, words[1:], self.program)
        if before is None:
            return path.name + told, self.of_training_args(self.parse(arguments))
        options = dropwhile(lambda word: not word.startswith("--"), before)
        launcher = read_options(list(takewhile(lambda word: word != "--", options)))
        of_launcher = {key: launcher[key] for key in self.of_launcher if key in launcher}
        return path.name + told, of_launcher | self.parse(arguments)


SYSTEMS = {
    "areal": System("AReaL", areal.ROWS, older_keys=("ppo.", "exp_ctrl."), older_defaults=areal.DEFAULTS_0_3),
    "trl": System("TRL", trl.ROWS),
    "verl": System("verl", verl.ROWS, program=r"verl\.trainer\.main_ppo"),
    "open_instruct": System(
        "open-instruct", open_instruct.ROWS, open_instruct.read, r"grpo\w*\.py", ("num_nodes", "gpus"),
        open_instruct.OLDER_KEYS, open_instruct.OLDER_DEFAULTS, open_instruct.of_training_args,
    ),
}  # fmt: skip

_SAID_OTHERWISE = {
    "use_vllm": "use_vllm is TRL's: leave it out (vLLM samples always).",
    "algorithm.gamma": "algorithm.gamma is verl's: here set task=ppo task.args.discount=VALUE.",
    "algorithm.lam": "algorithm.lam is verl's: here set task=ppo task.args.gae_lambda=VALUE.",
    "critic.optim.lr": "critic.optim.lr is verl's: here set task=ppo task.args.critic_lr=VALUE.",
    "critic.model.path": "critic.model.path is verl's: here set task=ppo task.args.critic=FOLDER, of a trained critic.",
    "critic.cliprange_value": "critic.cliprange_value is verl's: here set task=ppo task.args.value_clip=VALUE.",
    "critic.*": "critic is verl's: here set task=ppo, which has a critic. Its keys are in task.args.",
}
"""Answers for keys that have no row of their own in the tables, such as those of PPO's critic."""


def counterpart(key: str, value: Any) -> str:
    """Return a sentence with our keys for an unknown key that TRL (or transformers) or verl has; "" for other keys.

    For a section, the sentence is about its first key with a counterpart.
    """
    if isinstance(value, Mapping):
        return next(filter(None, (counterpart(f"{key}.{below}", inner) for below, inner in value.items())), "")
    own = key.removeprefix("train.")
    if said := next((said for name, said in _SAID_OTHERWISE.items() if fnmatchcase(own, name)), ""):
        return said
    systems, (section, _, tail) = [SYSTEMS[name] for name in ("trl", "verl")], key.rpartition(".")
    if any(key == row.ours for each in systems for row in each.rows):
        return ""
    names = [(each, name) for each in systems for row in each.rows for name in (*row.names, *row.also)]
    wanted = key if tail in {row.ours.rpartition(".")[2] for each in systems for row in each.rows} else tail
    tails = [(each, name) for each, name in names if f".{name}".endswith(f".{wanted}")]
    if section in ("", "train"):
        tails += [(each, tail) for each, name in names if "*" in name and "." not in name and fnmatchcase(tail, name)]
    found = [(name, each.title, said) for each, name in tails if (said := _said(each.rows, name, key, value))]
    found.sort(key=lambda own: (own[0] != key, not own[2].startswith("here set"), not own[0].endswith(key)))
    return next((f"{name} is {title}'s: {said}." for name, title, said in found), "")


def _said(rows: Sequence[Row], name: str, key: str, value: Any) -> str:
    """Return which of our keys their key `name` sets, or why it sets none; "" if neither is known.

    `key` is what the user wrote. Gives a reason only if `name` has no dot, or ends with `key`.
    """
    if isinstance(value, list):
        return ""
    before, outcomes = translate(rows, {}).ours, list[Outcome]()
    other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else 1
    for tried in (value, other):  # a default sets nothing; 1 replaces a text
        given = translate(rows, {name: tried})
        own = [outcome for outcome in given.outcomes if outcome.theirs == name and outcome.is_given]
        ours = [new for outcome in own for new in outcome.ours]
        ours = ours or [new for new, now in given.ours.items() if before.get(new) != now]
        if ours := ours or [row.ours for row in rows if row.ours and name in (*row.names, *row.also)]:
            return f"here set {', '.join(ours)}"
        outcomes += own
    for each in outcomes if "." not in name or name.endswith(key) else ():
        if each.kind in (Kind.REFUSED, Kind.NO_COUNTERPART):
            return f"leave it out ({each.note})"
        if each.kind is Kind.BY_HAND:
            return each.note
    return ""
