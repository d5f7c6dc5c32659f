"""Validate values against a section. All errors become one `ConfigError` with each key, its value and the choices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from hpc_grpo.errors import ConfigError, nearest
from hpc_grpo.section import OWN, ByName, Loading, Section, variants

_SECTION = "must be a section: keys with values"
_IN_PLAIN_WORDS = {
    "model_type": _SECTION, "dict_type": _SECTION, "union_tag_not_found": "must be a name, or a section with a name",
    "path_type": "must be a path", "list_type": "must be a list",
    "string_type": "must be a text in quotes",
    "int_type": "must be a whole number", "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number", "float_type": "must be a number", "float_parsing": "must be a number",
    "bool_type": "must be true or false", "bool_parsing": "must be true or false",
}  # fmt: skip
"""Pydantic's types of errors -> what a value must be."""

_OTHER_WORDS = {
    "max_steps": "max_turns", "max_episode_steps": "max_turns", "algorithm": "task", "eval_steps": "eval.every",
    "name": "path", "gpus": "gpus_per_node", "r": "lora.rank", "lora_r": "lora.rank", "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout", "modules": "lora.targets", "target_modules": "lora.targets",
    "lora_target_modules": "lora.targets", "peft_config": "lora", "epochs": "train.total_epochs",
    "num_epochs": "train.total_epochs", "function": "name",
}  # fmt: skip
"""Keys of other systems -> our keys, in the same section or from the top. Spelling alone would suggest a wrong key."""

_OTHER_NAMES = {
    "dpo": "training on preference pairs is not supported", "gae": "set task=ppo", "gkd": "set task=distill",
    "reinforce": "set loss.advantage=rloo", "reinforce_plus_plus": "set loss.advantage=reinforce_pp",
    "reinforce_plus_plus_baseline": "set loss.advantage=reinforce_pp_baseline", "vanilla": "set loss.name=grpo",
    "trpo": "TRPO is not supported: set loss=grpo, whose clip bounds a step",
}  # fmt: skip
"""Names of methods in other systems -> what to set here. `_chosen_elsewhere` maps our own names."""

Checked = TypeVar("Checked", bound=Section)


class InvalidConfigError(ConfigError):
    """Values do not fit a section. `lines` maps each error text to (unknown key, value), or None for other errors."""

    def __init__(self, origin: str, lines: Mapping[str, tuple[str, Any] | None]) -> None:
        super().__init__("\n  ".join([f"{origin} is not a valid config:", *lines]))
        self.origin, self.lines = origin, lines


def checked(
    section: type[Checked], values: Mapping[str, Any], origin: str, *above: str, loading: Loading | None = None
) -> Checked:
    """Return the section. Raises ConfigError with a line for each mistake; `above` are the keys above the section."""
    try:
        return section.model_validate(values, context=loading)
    except ValidationError as error:
        lines: dict[str, tuple[str, Any] | None] = {}
        for detail in error.errors():
            place = _place(section, detail["loc"])
            place.keys[:0] = above
            key, is_unknown = ".".join(place.keys), detail["type"] == "extra_forbidden"
            if is_unknown and (meant := _in_another_section(key, place, section)):
                lines[f"{key}: unknown key; did you mean {meant!r}?"] = None
            else:
                lines[_explained(place, detail, section)] = (key, detail["input"]) if is_unknown else None
        raise InvalidConfigError(origin, lines) from None


def meant_key(key: str, root: type[Section]) -> str:
    """Return the key of `root` that an unknown key probably means; "" if no key is clear."""
    return _in_another_section(key, _place(root, key.split(".")), root)


def _in_another_section(key: str, place: _Place, root: type[BaseModel]) -> str:
    """Return the key in another section that an unknown key probably means; "" if no key is clear."""
    *_, last = place.keys
    everywhere, words = _Place([], root).valid_below, {last, _OTHER_WORDS.get(last)}
    if named := [each for each in everywhere if "." in each and each in words]:
        return named[0] if place.chosen is None else ""
    if place.chosen is not None or get_close_matches(last, place.valid, cutoff=0.8):
        return ""
    below = [each for each in place.valid_below if "." in each and each.rpartition(".")[2] in words]
    if below and place.section is not root:
        return f"{key.removesuffix(last)}{below[0]}"
    if same := next((each for each in everywhere if "." in key and each.endswith(f".{key}")), ""):
        return same
    elsewhere = [each for each in everywhere if each.endswith(f".{last}") and each.count(".") == 1]
    return elsewhere[0] if len(elsewhere) == 1 else ""


def _explained(place: _Place, detail: Any, root: type[BaseModel]) -> str:
    key, value = ".".join(place.keys), "null" if detail["input"] is None else repr(detail["input"])
    if detail["type"] == "extra_forbidden":
        *parents, last = place.keys
        name, colon, rest = last.partition(":")
        if colon and name in place.valid:
            return f"{key!r}: unknown key. Write a space after the colon: {name}: {rest}"
        meant = ours if (ours := _OTHER_WORDS.get(last)) in place.valid_below else last
        shown = {each: ".".join([*parents, each]) for each in place.valid_below if "." in each}
        near, valid = nearest(str(meant), place.valid_below, shown), ", ".join(place.valid)
        if near == "." and "extra" in place.valid:
            near = f"; an option of sbatch is {'.'.join(parents)}.extra.{last}."
        if place.chosen is None:
            return f"{key}: unknown key{near} Valid here: {valid or 'none'}."
        chosen = "of your own" if place.chosen == OWN else f"= {place.chosen}"
        return f"{key}: {'.'.join(parents)}.name {chosen} has no such key{near} It has: {valid}."
    if detail["type"] == "missing":
        return f"{key}: must be set."
    if detail["type"] == "union_tag_invalid":
        name, names = detail["ctx"]["tag"], [name for name in place.variants if name != OWN]
        instead = (_chosen_elsewhere(root) | _OTHER_NAMES).get(name)
        near = f"; {instead}." if instead else nearest(name, names)
        return (
            f"{key}.name = {name} does not exist{near} Built in: {', '.join(names)}. Or name your own: "
            f"module:NAME or path/to/file.py:NAME."
        )
    info = place.section.model_fields.get(place.keys[-1])
    meant = info.description if info and info.description and detail["type"].endswith("_parsing") else ""
    meaning = f" Meaning: {meant.partition('. ')[0].removesuffix('.')}." if meant else ""
    if (said := in_plain_words(detail)) == _IN_PLAIN_WORDS["string_type"]:
        meaning = f""" In a shell: '{key}="{detail["input"]}"'."""
    return f"{key} = {value}: {said}{_example(place, detail)}.{meaning}"


def _chosen_elsewhere(section: type[BaseModel], above: str = "") -> dict[str, str]:
    """Map each name that a key of the section can choose, except the default, to the text `set KEY=NAME`."""
    found: dict[str, str] = {}
    for key, info in section.model_fields.items():
        for by_name in (each for each in info.metadata if isinstance(each, ByName)):
            for name, kind in variants(info.annotation).items():
                below = {name: f"set {above}{key}={name}"} if name not in (OWN, by_name.default) else {}
                found = below | _chosen_elsewhere(kind, f"{above}{key}.") | found
    return found


def _example(place: _Place, detail: Any) -> str:
    """Return the text after an error: the choices of a name, or an example of a section or list; else ""."""
    if detail["type"] == "union_tag_not_found":
        return f". Built in: {', '.join(name for name in place.variants if name != OWN)}"
    given, info = detail["input"], place.section.model_fields.get(place.keys[-1])
    null = ", or null" if info is not None and type(None) in get_args(info.annotation) else ""
    if detail["type"] not in ("model_type", "dict_type", "list_type"):
        return null
    kinds = [place.section] if place.keys[-1].isdigit() else list(sections_in(info.annotation)) if info else []
    defaults = {name: each.default for kind in kinds[:1] for name, each in kind.model_fields.items()}
    text = str(given) if isinstance(given, str | int | float) and not isinstance(given, bool) else ""
    key, colon, rest = text.partition(":")
    if colon and key in defaults:
        return f", with a space after the colon: {key}: {rest}"
    section = _as_section(kinds[0], text or "VALUE") if kinds else ""
    if detail["type"] == "list_type":
        return f", such as [{section or 'VALUE'}]"
    own = getattr(info.annotation, "__annotations__", {}) if info is not None and not kinds else {}
    if not section and (first := next(iter([*defaults, *own]), "")):
        default = defaults[first] if isinstance(defaults.get(first), str | int | float) else "VALUE"
        section = f"{{{first}: {text or default}}}"
    return f", such as {section or '{KEY: VALUE}'}{null}" + (f". Valid here: {', '.join(defaults)}" if defaults else "")


def _as_section(kind: type[BaseModel], text: str) -> str:
    """Return an example of the section: `text` is its path or name, or that of a required inner section. Else ""."""
    if key := next((each for each in ("path", "name") if each in kind.model_fields), ""):
        return f"{{{key}: {text}}}"
    fields = kind.model_fields.items()
    required = ((name, [*sections_in(info.annotation)]) for name, info in fields if info.is_required())
    return next((f"{{{name}: {_as_section(inner[0], text)}}}" for name, inner in required if inner), "")


def in_plain_words(detail: Any) -> str:
    """Return what a value must be, from one error of pydantic."""
    if detail["type"] == "string_type" and isinstance(detail["input"], list | dict | None):
        return "must be a text"
    message: str = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
    message = message.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    return _IN_PLAIN_WORDS.get(detail["type"], message)


@dataclass
class _Place:
    """The place of an error in a config. `keys`: the path of the wrong key. `section`: the class with the last key.

    `chosen`: the variant's name if `section` is a variant, else None. `variants`: the last key's choices, by name.
    """

    keys: list[str]
    section: type[BaseModel]
    chosen: str | None = None
    variants: Mapping[str, type[BaseModel]] = field(default_factory=dict)

    @property
    def valid(self) -> list[str]:
        return [info.alias or name for name, info in self.section.model_fields.items()]

    @property
    def valid_below(self) -> list[str]:
        """List the valid keys of the section and of all sections in it: the user may have misplaced the key."""
        fields = self.section.model_fields.items()
        pairs = ((name, kind) for name, info in fields for kind in sections_in(info.annotation, items=False))
        below = (f"{name}.{inner}" for name, kind in pairs for inner in _Place([], kind).valid_below)
        return [*self.valid, *dict.fromkeys(below)]


def _place(section: type[Section], location: Sequence[int | str]) -> _Place:
    """Find the keys in an error's location, without the tags of variants between them."""
    place = _Place([], section)
    below: tuple[type[BaseModel], str | None] | None = None
    for part in map(str, location):
        if part in place.variants:
            below, place.variants = (place.variants[part], part), {}
            continue
        if below is not None:
            (place.section, place.chosen), below = below, None
        place.keys.append(part)
        # Otherwise: a position in a list, a name in a mapping, or an unknown key.
        if part in place.section.model_fields:
            info = place.section.model_fields[part]
            is_chosen = any(isinstance(each, ByName) for each in info.metadata)
            place.variants = variants(info.annotation) if is_chosen else {}
            below = None if is_chosen else next(((kind, None) for kind in sections_in(info.annotation)), None)
    return place


def sections_in(annotation: Any, *, items: bool = True) -> Iterator[type[BaseModel]]:
    """Yield the section classes in a field's type; with `items`, also the classes in its lists and mappings."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif items or get_origin(annotation) in (Union, UnionType, Annotated):
        for part in get_args(annotation):
            yield from sections_in(part, items=items)
