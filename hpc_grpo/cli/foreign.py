"""`hpc-grpo config --from-…`: translate a config of another system, and report on each key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from hpc_grpo.cli.options import echo, together
from hpc_grpo.config import to_yaml
from hpc_grpo.config.load import load_values
from hpc_grpo.errors import ConfigError
from hpc_grpo.foreign.systems import SYSTEMS
from hpc_grpo.foreign.table import Kind, Outcome, Translation
from hpc_grpo.run.files import writing
from hpc_grpo.system.readable import table

_FILE = click.Path(path_type=Path)
_VALUE_COLUMNS = 40

AREALS_KEYS = (
    "AReaL's names are taken as they are: allocation_mode (vllm:d4t1+d2), n_nodes, n_gpus_per_node, cluster.fileroot, "
    "mode, recover_mode, max_head_offpolicyness, save_freq_*, ckpt_freq_*, also as words after FILE."
)

foreign_options = together(
    click.option("--from-areal", type=_FILE, metavar="FILE", help=f"Translate a config of AReaL. {AREALS_KEYS}"),
    click.option("--from-trl", type=_FILE, metavar="FILE", help="Translate a config of TRL or open-r1; KEY=VALUE too."),
    click.option("--from-verl", is_flag=True, help="Translate a script of verl, or its words a.b.c=value."),
    click.option(
        "--from-open-instruct", is_flag=True, help="Translate a script of open-instruct, or its words --key value."
    ),
    click.option("--lenient", is_flag=True, help="Replace refused keys, and report the replacements."),
    click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the translation to FILE."),
)


def translated(words: Sequence[str], overrides: Sequence[str], options: dict[str, Any]) -> bool:
    """Write the translation that `options` ask for. Return False if they ask for none.

    `words` are arguments of the other system, `overrides` are ours. Raises ConfigError for refused keys without
    --lenient, and if the result is no valid config.
    """
    asked = [name for name in ("areal", "trl", "verl", "open_instruct") if options[f"from_{name}"]]
    if len(asked) > 1:
        raise click.UsageError("--from-… options exclude each other: give one.")
    if not asked:
        if options["lenient"] or options["out"] is not None:
            raise click.UsageError("--lenient and --out need a --from-… option.")
        return False

    file = options[f"from_{asked[0]}"]
    origin, translation = SYSTEMS[asked[0]].translate(words if file is True else [str(file), *words])
    echo(table_text(translation), err=True)
    if not options["lenient"]:
        refuse(origin, translation.of(Kind.REFUSED), "Change it there, or let --lenient leave it out.")
    config = load_values(translation.values, overrides, f"The translation of {origin}")
    given = config.model_dump(mode="json", exclude_unset=True)
    text = f"# From {origin}\n{to_yaml(given)}"
    if options["out"] is None:
        echo(text, nl=False)
    else:
        with writing(options["out"]):
            options["out"].write_text(text)
    return True


def refuse(origin: str, outcomes: Sequence[Outcome], how: str) -> None:
    """Raise ConfigError with the reasons and the fix `how` if there are refused `outcomes`."""
    if outcomes:
        raise ConfigError(f"{origin} has settings that are not supported:{notes(outcomes)}\n{how}")


def notes(outcomes: Iterable[Outcome]) -> str:
    return "".join(f"\n  {outcome.theirs} = {_short(outcome.value)}: {outcome.note}." for outcome in outcomes)


def table_text(translation: Translation) -> str:
    """Return a table for each kind of outcome, with a line for each key of the other system."""
    parts = []
    for kind in Kind:
        rows = [
            (
                outcome.theirs + ("" if outcome.is_given else " (its default)"),
                _short(outcome.value),
                ", ".join(f"{key} = {_short(value)}" for key, value in outcome.ours.items()),
                outcome.note,
            )
            for outcome in translation.of(kind)
        ]
        if rows:
            parts.append(f"{kind.value.upper()}\n{table(('THEIRS', 'VALUE', 'OURS', 'NOTE'), rows)}\n")
    counts = ", ".join(f"{translation.count(kind)} {kind.value}" for kind in Kind if translation.count(kind))
    return "\n".join([*parts, f"Of the keys given: {counts or 'none'}."])


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _VALUE_COLUMNS else f"{text[: _VALUE_COLUMNS - 1]}…"
