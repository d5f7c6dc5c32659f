"""Data sources, one file for each kind of path: a suffix of files, a prefix, or a name on the hub.

Consumes a `SourceConfig`; produces its items, dicts of columns, in an order that never changes. A kind is imported when
a path asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from hpc_grpo.config import SourceConfig
from hpc_grpo.data.sources.base import Item, Source
from hpc_grpo.errors import ConfigError
from hpc_grpo.registry import SOURCES, names_function

_TAKE_ARGS = ("function", "reasoning_gym")
_NOT_SUFFIXES = (*_TAKE_ARGS, "hub")


def open_source(config: SourceConfig) -> Source:
    """Return the source that `config.path` names.

    Raises ConfigError for a file of a kind that none reads, and for arguments that nobody takes.
    """
    kind = _kind(config.path)
    if config.args and kind not in _TAKE_ARGS:
        raise ConfigError(
            f"Data set {config.path}: args are for a function or a task of reasoning_gym, and this is neither. Remove "
            f"them."
        )
    source: Source = SOURCES.find(kind)(config)
    return source


def read_items(config: SourceConfig) -> Iterator[Item]:
    """Yield the items of a source, at most `max_items`. Raises ConfigError where it cannot be read."""
    return islice(open_source(config).items(), config.max_items)


def _kind(path: str) -> str:
    prefix, separator, _ = path.partition(":")
    if separator and prefix in SOURCES.names():
        return prefix
    if names_function(path):
        return "function"
    suffixes = [name for name in SOURCES.names() if name not in _NOT_SUFFIXES]
    suffix = Path(path).suffix
    if suffix[1:] in suffixes and not Path(path).is_dir():
        return suffix[1:]
    if Path(path).is_file():
        raise ConfigError(
            f"Data set {path}: files must end in {', '.join(f'.{name}' for name in suffixes)}, not "
            f"{suffix or 'nothing'!r}. Convert it, or read it with a function of yours: path/to/file.py:function."
        )
    return "hub"
