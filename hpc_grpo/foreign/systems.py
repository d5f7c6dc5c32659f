"""The systems whose configs are translated: their table, and how their words are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_grpo.foreign import areal, open_instruct, trl, verl
from hpc_grpo.foreign.reading import read, read_options, read_words
from hpc_grpo.foreign.table import Row, Translation, translate


@dataclass(frozen=True)
class System:
    """`program` is in the last command of a script; without one, configs are YAML files."""

    title: str
    rows: Sequence[Row]
    parse: Callable[[Sequence[str]], dict[str, Any]] = read_words
    program: str = ""
    of_launcher: tuple[str, ...] = ()

    def translate(self, words: Sequence[str]) -> tuple[str, Translation]:
        """Return what is translated, in words, and the translation. Raises ConfigError for what cannot be read."""
        name, given = read(words, self.parse, self.program, self.of_launcher)
        return f"{self.title}: {name}", translate(self.rows, given)


SYSTEMS = {
    "areal": System("AReaL", areal.ROWS),
    "trl": System("TRL", trl.ROWS),
    "verl": System("verl", verl.ROWS, program="verl.trainer.main_ppo"),
    "open_instruct": System("open-instruct", open_instruct.ROWS, read_options, "grpo", ("num_nodes", "gpus")),
}
