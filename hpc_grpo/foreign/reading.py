"""Read configs of other systems: YAML with interpolations, hydra's overrides, options, and scripts that hold these.

bash runs a user's script up to its training command.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_grpo.config.yaml_text import read_value, read_yaml
from hpc_grpo.errors import ConfigError
from hpc_grpo.system.commands import run_command

_INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")
_DEADLINE_S = 60.0
_COMMAND, _ARGUMENTS, _NOT_RUN = "\1", "\2", "\3"

# The script runs in a subshell with an empty PATH: it sets variables and starts no program. At the first command with
# the program's name, the subshell prints this command and ends. A script without such a command may set TRAINING_ARGS.
_PROGRAM = r"""
(
trap '' PIPE
exec 9>/dev/null
BASH_XTRACEFD=9 _shell=$BASHPID _program=$1 _script=$2
shift 2
command_not_found_handle() {
  for _word; do
    if [[ $_word =~ $_program$ ]]; then printf '\1%s\0' "$@" >&3; kill -KILL "$_shell"; exit; fi
  done
  printf '\3%s\0' "$1" >&3
}
exec() { "$@"; }
ulimit() { :; }
for _name in python python3 uv ray accelerate torchrun srun nohup; do
  eval "$_name() { command_not_found_handle $_name \"\$@\"; }"
done
for _name in basename dirname date; do eval "$_name() { command -p $_name \"\$@\"; }"; done
PATH=/nonexistent
source "$_script"
printf '\2%s\0' "${TRAINING_ARGS[@]}" >&3
) 3>&1 1>/dev/null
exit 0
"""


def read_nested(path: Path, over: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dotted keys of a YAML file, overridden by `over`, with OmegaConf's `${a.b}` resolved.

    An interpolation of a key that the file lacks gets upstream's value in `defaults`. Raises ConfigError for an
    unreadable file, and for an interpolation of an unknown key.
    """
    flat = {**dict(dotted(read_yaml(path))), **over}
    return {key: _interpolated(value, flat, defaults, key) for key, value in flat.items()}


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

    `--a-b` means a_b, as for HfArgumentParser. Raises ConfigError for words before the first option.
    """
    values: dict[str, list[Any]] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key, separator, text = word[2:].partition("=")
            key = key.replace("-", "_")
            values[key] = [_option_value(text)] if separator else []
        elif not key:
            raise ConfigError(f"{word!r} comes before the first option. Give --key value, as for the program itself.")
        else:
            values[key].append(_option_value(word))
    return {key: True if not own else own[0] if len(own) == 1 else own for key, own in values.items()}


def read_script(path: Path, words: Sequence[str], program: str) -> tuple[list[str] | None, list[str], str]:
    """Return the words before and after the pattern `program` in a script's first matching command, and a note.

    `words` are the script's arguments, its `$@`. For a script that only sets TRAINING_ARGS, returns None and these
    words. The note names the programs that were not run. Raises ConfigError if the script has neither.
    """
    # An outer shell prints, because the inner shell kills itself. A script may set its own traps and options.
    command = ["/bin/bash", "--noprofile", "--norc", "-c", _PROGRAM, "bash", program, str(path.absolute()), *words]
    answer = run_command(command, _DEADLINE_S, environ={**os.environ, "BASH_ENV": ""}, stdin="")
    if answer.is_late:
        raise ConfigError(f"{path} did not reach its training command within {_DEADLINE_S:.0f} s.")
    fields = answer.text.split("\0")[:-1]
    not_run = sorted({field[1:] for field in fields if field[0] == _NOT_RUN})
    told = f" (not run: {', '.join(not_run)})" if not_run else ""
    found = [field[1:] for field in fields if field[0] == _COMMAND]
    for place, word in enumerate(found):
        if re.search(f"{program}$", word):
            return found[:place], [word for word in found[place + 1 :] if word.strip()], told
    if arguments := [field[1:] for field in fields if field[0] == _ARGUMENTS and field[1:]]:
        return None, shlex.split(arguments[0], comments=True) if len(arguments) == 1 else arguments, told
    said = f" Bash says: {answer.said.splitlines()[-1]}." if answer.said else ""
    shown = program.replace("\\w", "").replace("\\", "")  # a pattern
    raise ConfigError(f"{path} runs no command with {shown}.{said} Give the command's own words instead.")


def dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings with their dotted keys. An empty mapping is a value."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _interpolated(value: Any, flat: Mapping[str, Any], defaults: Mapping[str, Any], key: str, depth: int = 0) -> Any:
    if not isinstance(value, str) or "${" not in value or depth > len(flat):
        return value
    if whole := _INTERPOLATION.fullmatch(value):
        name = whole[1]
        if name in flat or name in defaults:
            return _interpolated(flat.get(name, defaults.get(name)), flat, defaults, key, depth + 1)
        if any(other.startswith(f"{name}.") for other in flat):
            return value  # The value is a section, whose keys are listed separately.
        raise ConfigError(f"{key} = {value}: there is no key {name}.")
    text = _INTERPOLATION.sub(lambda match: str(flat.get(match[1], match[0])), value)
    return text if text == value else _interpolated(text, flat, defaults, key, depth + 1)


def _option_value(text: str) -> Any:
    """Parse an option's value as YAML: a number, true. Other text stays text, such as `{prompt}`."""
    try:
        return read_value(text, text)
    except ConfigError:
        return text
