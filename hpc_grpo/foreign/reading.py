"""Read what users of other systems bring: YAML with interpolations, hydra's words, options, scripts that hold them.

The command `hpc-grpo config --from-…` calls `read`. A script is the user's own: bash runs it up to its command.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_grpo.config.yaml_text import read_value, read_yaml
from hpc_grpo.errors import ConfigError

_INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")
_DEADLINE_S = 60.0

# The script runs with the programs that would train replaced by one that prints its words, and without a PATH: it sets
# variables and comes to its command, and starts nothing.
_PROGRAM = r"""
_print_words() { printf '%s\0' "$@" >&3; exit 0; }
for _name in python python3 uv ray accelerate torchrun trl; do eval "$_name() { _print_words \"\$@\"; }"; done
PATH=/nonexistent
_script=$1; shift
source "$_script" 3>&1 1>/dev/null 2>/dev/null
"""


def read(
    words: Sequence[str],
    parse: Callable[[Sequence[str]], dict[str, Any]],
    program: str = "",
    of_launcher: Sequence[str] = (),
) -> tuple[str, dict[str, Any]]:
    """Return what is translated, in words, and its keys.

    `words` begin with a YAML file, or with a script that comes to `program`, or they are that program's own. `parse`
    reads words. `of_launcher` are options that are taken from the words before the program. Raises ConfigError.
    """
    if not words:
        raise ConfigError("There is nothing to translate: give a file, or the words of the command that it runs.")
    path = Path(words[0])
    if path.suffix == ".sh" or not program:
        if not path.is_file():
            raise ConfigError(f"There is no file {path}. Give a file, or the words of the command that it runs.")
        if not program:
            return path.name, read_nested(path, words[1:])
    else:
        return "its words", parse(words)
    before, arguments = command_words(path, words[1:], program)
    first = next((place for place, word in enumerate(before) if word.startswith("--")), len(before))
    launcher = read_options(before[first:]) if of_launcher else {}
    return path.name, {key: launcher[key] for key in of_launcher if key in launcher} | parse(arguments)


def read_nested(path: Path, words: Sequence[str] = ()) -> dict[str, Any]:
    """Read a YAML file and `a.b=c` over it, with OmegaConf's `${a.b}` written out, as dotted keys.

    Raises ConfigError for a file that cannot be read, and for an interpolation of nothing.
    """
    flat = {**dict(dotted(read_yaml(path))), **read_words(words)}
    return {key: _interpolated(value, flat, key) for key, value in flat.items()}


def read_words(words: Sequence[str]) -> dict[str, Any]:
    """Read hydra's overrides `a.b=c`, also `+a.b=c` and `++a.b=c`. Raises ConfigError for other words."""
    values: dict[str, Any] = {}
    for word in words:
        key, separator, text = word.lstrip("+").partition("=")
        if not separator or not key:
            raise ConfigError(f"{word!r} must have the form key=value, as that system's own command takes it.")
        values.update(dotted({key: read_value(text, word)}))
    return values


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """Read `--key value`, `--key=value`, flags, and options with several values, which become lists.

    Raises ConfigError for words before the first option.
    """
    values: dict[str, Any] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key, separator, text = word[2:].partition("=")
            values[key] = _option_value(text) if separator else []
        elif not key:
            raise ConfigError(f"{word!r} comes before the first option. Give --key value, as for the program itself.")
        else:
            value = _option_value(word)
            values[key] = [*values[key], value] if isinstance(values[key], list) else [values[key], value]
    return {key: _single(value) for key, value in values.items()}


def command_words(path: Path, words: Sequence[str], program: str) -> tuple[list[str], list[str]]:
    """Return the words before and after `program` on the command line that a script comes to.

    `words` are the script's arguments, its `$@`. Raises ConfigError where the script never comes to such a line.
    """
    command = ["/bin/bash", "--noprofile", "--norc", "-c", _PROGRAM, "bash", str(path.absolute()), *words]
    environ = {"HOME": os.environ.get("HOME", "/"), "USER": os.environ.get("USER", "")}
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_DEADLINE_S, env=environ, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{path} did not come to its command within {_DEADLINE_S:.0f} s.") from error
    found = done.stdout.decode(errors="replace").split("\0")[:-1]
    places = [number for number, word in enumerate(found) if program in word]
    if not places:
        raise ConfigError(f"{path} comes to no command with {program}. Give the command's own words instead.")
    after = found[places[-1] + 1 :]
    return found[: places[-1]], [word for word in after if word.strip()]


def dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings with their dotted keys. An empty mapping is a value."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _interpolated(value: Any, flat: Mapping[str, Any], key: str, depth: int = 0) -> Any:
    if not isinstance(value, str) or "${" not in value or depth > len(flat):
        return value
    if whole := _INTERPOLATION.fullmatch(value):
        name = whole[1]
        if name in flat:
            return _interpolated(flat[name], flat, key, depth + 1)
        if any(other.startswith(f"{name}.") for other in flat):
            return value  # a whole section: what is in it stands under its own keys
        raise ConfigError(f"{key} = {value}: there is no key {name}.")
    text = _INTERPOLATION.sub(lambda match: str(flat.get(match[1], match[0])), value)
    return text if text == value else _interpolated(text, flat, key, depth + 1)


def _option_value(text: str) -> Any:
    """Read an option's value as YAML has it: a number, true. Any other text is a text, such as `{prompt}` and more."""
    try:
        return read_value(text, text)
    except ConfigError:
        return text


def _single(value: Any) -> Any:
    """Return the value of an option: a flag is true, one word is no list."""
    if not isinstance(value, list):
        return value
    return True if not value else value[0] if len(value) == 1 else value
