"""Write docs/reference from the code: configuration keys, the command line, exit codes. `python -m tools.reference`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from hpc_grpo import errors
from hpc_grpo.cli import COMMANDS, SECTIONS, main
from hpc_grpo.config.describe import Key, every_key

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
_ALIKE = {
    "data.train.mix.N.": "data.train.",
    "data.eval.": "data.train.",
    "data.train.environment.": "environment.",
    "data.train.": "data.",
}
"""Prefixes of keys -> the keys that they repeat. The reference lists these once."""

_WRITTEN = "<!-- Written by tools/reference.py. -->"


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    texts = {"configuration.md": configuration(), "cli.md": command_line(), "exit-codes.md": exit_codes()}
    return {name: f"{_WRITTEN}\n\n{text}" for name, text in texts.items()}


def configuration() -> str:
    """Return a table of every key for each section."""
    sections: dict[str, list[str]] = {}
    keys = every_key()
    of_args: dict[str, list[str]] = {}
    for key in keys.values():
        parent, _, own = key.name.rpartition(".")
        if parent.endswith(".args"):
            of_args.setdefault(parent, []).append(f"{own} ({key.default}): {key.meaning}")
    chosen = [Key(name, "{}", "Settings that the chosen name has.") for name in of_args if name not in keys]
    for key in [*keys.values(), *chosen]:
        if any(key.name.startswith(own) and key.name.replace(own, other, 1) in keys for own, other in _ALIKE.items()):
            continue
        if ".args." in key.name:
            continue
        inner = of_args.get(key.name)
        meaning = f"{key.meaning} Of built-ins: {' '.join(inner)}" if inner else key.meaning
        row = f"| `{key.name}` | {_code(key.default)} | {_cell(meaning)} |"
        sections.setdefault(key.name.partition(".")[0], []).append(row)
    parts = [
        f"## {name}\n\n| key | default | meaning |\n|---|---|---|\n" + "\n".join(rows)
        for name, rows in sections.items()
    ]
    head = (
        "# Every key\n\nOverride any key on the command line: `KEY=VALUE`. `hpc-grpo config CONFIG KEY` shows one. "
        "`data.eval`, and each source of a `mix`, have the keys of `data.train`. A source's `environment` has the keys "
        "of `environment`. A source may override the keys of `data` from `template` to `template_args`, such as "
        "`data.train.template`."
    )
    return "\n\n".join([head, *parts]) + "\n"


def command_line() -> str:
    """Return the usage and the options of every command that the help shows."""
    shown = [name for names in SECTIONS.values() for name in names]
    parts = [f"## hpc-grpo {words}\n\n{text}" for words, text in _commands() if words.split()[0] in shown]
    return "\n\n".join(["# Every command", *parts]) + "\n"


def exit_codes() -> str:
    """Return the table of hpc_grpo.errors, and that of its classes."""
    rows = re.findall(r"^    (\d\S*(?: \+ n)?)\s{2,}(.*?)\s{2,}(.*)$", str(errors.__doc__), re.MULTILINE)
    table = "".join(f"| {code} | {meaning} | {again} |\n" for code, meaning, again in rows)
    named = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    kinds = [kind for kind in named if issubclass(kind, errors.HpcGrpoError)]
    kinds.sort(key=lambda kind: -kind.exit_code)
    by_code = "".join(
        f"| {kind.exit_code} | `{kind.__name__}` | {' '.join(str(kind.__doc__).split())} |\n" for kind in kinds
    )
    return (
        f"# Exit codes\n\n| code | meaning | the same command again |\n|---|---|---|\n{table}\n"
        "## Errors by code\n\nPython code that calls hpc-grpo catches these; all are in `hpc_grpo.errors`. The command "
        "line prints the error's text and ends with its code.\n\n"
        f"| code | error | meaning |\n|---|---|---|\n{by_code}"
    )


def _commands() -> Iterator[tuple[str, str]]:
    for words in COMMANDS:
        command: Any = main
        for word in words.split():
            command = command.get_command(click.Context(command), word)
        yield from _described(words, command)


def _described(words: str, command: click.Command) -> Iterator[tuple[str, str]]:
    """Yield a command, and those of a group that is no row of COMMANDS."""
    context = click.Context(command, info_name=f"hpc-grpo {words}")
    usage = " ".join([f"hpc-grpo {words}", *command.collect_usage_pieces(context)])
    help_text = inspect.cleandoc(command.help or "")
    rows = [param.get_help_record(context) for param in command.get_params(context) if isinstance(param, click.Option)]
    table = "".join(f"| `{_cell(name)}` | {_cell(text)} |\n" for name, text in filter(None, rows))
    options = f"\n\n| option | meaning |\n|---|---|\n{table}".rstrip()
    yield words, f"```text\n{usage}\n```\n\n{_cell(help_text)}{options}"
    if isinstance(command, click.Group) and not any(name.startswith(f"{words} ") for name in COMMANDS):
        for name in command.list_commands(context):
            if (child := command.get_command(context, name)) is not None and not child.hidden:
                yield from _described(f"{words} {name}", child)


def _code(text: str) -> str:
    return text if text == "required" else f"`{_cell(text)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    write()
