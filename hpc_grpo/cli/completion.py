"""Tab completion of runs, configs and keys, and the scripts for bash and zsh that call it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from click.shell_completion import CompletionItem

from hpc_grpo.cli.options import all_runs
from hpc_grpo.config.describe import every_key
from hpc_grpo.config.load import CONFIGS_DIR
from hpc_grpo.run.files import write_atomic, writing

_BASH = """\
_hpc_grpo_complete() {
  local IFS=$'\\n' line value
  COMPREPLY=()
  for line in $(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD="$COMP_CWORD" \\
    _HPC_GRPO_COMPLETE=bash_complete "$1" 2> /dev/null); do
    value=${line#*,}
    case $line in
      plain,*) COMPREPLY+=("$value") ;;
      *) compopt -o default ;;
    esac
  done
  if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=./] ]]; then compopt -o nospace; fi
}
complete -o nosort -F _hpc_grpo_complete hpc-grpo
"""
_ZSH = """\
if (( ! $+functions[compdef] )); then autoload -Uz compinit && compinit; fi
_hpc_grpo_complete() {
  local -a ended open
  local type key description
  for type key description in "${(@f)$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) \\
    _HPC_GRPO_COMPLETE=zsh_complete "${words[1]}" 2> /dev/null)}"; do
    if [[ $type == (file|dir) ]]; then _path_files
    elif [[ $type != plain ]]; then continue
    elif [[ $key == *[=./] ]]; then open+=("$key")
    else ended+=("$key"); fi
  done
  (( $#ended )) && compadd -U -V hpc-grpo -a ended
  (( $#open )) && compadd -U -V hpc-grpo -S '' -a open
}
compdef _hpc_grpo_complete hpc-grpo
"""
_FIX = "Make it writable, or set HOME to another folder."
_SHELLS = {"bash": (_BASH, ".bashrc"), "zsh": (_ZSH, ".zshrc")}


def install(shell: str) -> str:
    """Write a shell's completion script, and a line in the user's rc file that reads it. Return a text for the user."""
    script, rc_name = _SHELLS[shell]
    file = Path.home() / ".local" / "share" / "hpc-grpo" / f"completion.{shell}"
    with writing(file, _FIX):
        write_atomic(file, script)
    rc = Path(os.environ.get("ZDOTDIR", Path.home()) if shell == "zsh" else Path.home()) / rc_name
    quoted = shlex.quote(str(file))
    line = f"[ -r {quoted} ] && . {quoted}  # hpc-grpo\n"
    before = rc.read_text(errors="replace") if rc.is_file() else ""
    if line not in before:
        with writing(rc, _FIX), rc.open("a") as lines:
            lines.write(line if before.endswith("\n") or not before else f"\n{line}")
    return f"{rc} reads {file}. Open a new shell, or type: . {quoted}"


def candidates(kinds: Sequence[str], text: str) -> list[CompletionItem]:
    """Return the completions of `text` among `kinds`: runs, configs (also files), keys (up to the next dot)."""
    found = {"runs": _runs, "configs": _configs, "keys": _keys}
    names = (name for kind in kinds for name in found[kind](text))
    return [CompletionItem(name) for name in sorted({*names}) if name.startswith(text)]


def _runs(text: str) -> Iterator[str]:
    for run in all_runs():
        yield from {run.name, run.name.partition("/")[0]}
    yield from (path for path in _paths(text) if path.endswith("/"))


def _configs(text: str) -> Iterator[str]:
    yield from (str(path.relative_to(CONFIGS_DIR).with_suffix("")) for path in CONFIGS_DIR.rglob("*.yaml"))
    yield from (path for path in _paths(text) if path.endswith(("/", ".yaml", ".yml", ".sh")))


def _paths(text: str) -> Iterator[str]:
    folder = text.rpartition("/")[0] + "/" if "/" in text else ""
    for path in Path(folder or ".").glob("[!.]*"):
        yield f"{folder}{path.name}/" if path.is_dir() else f"{folder}{path.name}"


def _keys(text: str) -> Iterator[str]:
    known = text.rpartition(".")[0] + "." if "." in text else ""
    for key in every_key():
        key = key.partition(".N.")[0]
        if key.startswith(known):
            section, dot, _ = key[len(known) :].partition(".")
            yield f"{known}{section}{dot or '='}"
