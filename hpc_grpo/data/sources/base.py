"""The base of data sources: the items of one data set, and what tells that they are still the same."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc_grpo.config import SourceConfig
from hpc_grpo.data.contents import of_files
from hpc_grpo.errors import ConfigError

Item = dict[str, Any]
"""The columns of one row. Values are those that JSON has; what is no JSON becomes text (cache.py)."""

BATCH_ITEMS = 1000
"""Items read or tokenized in one call: enough for the libraries' threads, few enough to stay small in memory."""


def answer_of(item: Mapping[str, Any], field: str) -> Any:
    """Return the column `field`, or with a dotted name a value inside a column. Raises KeyError without it.

    >>> answer_of({"a.b": 1, "a": {"b": 2}}, "a.b"), answer_of({"a": {"b": 2}}, "a.b")
    (1, 2)
    """
    if field in item:
        return item[field]
    column, _, inside = field.partition(".")
    if not inside or not isinstance(item[column], Mapping):
        raise KeyError(field)
    return answer_of(item[column], inside)


class Source(ABC):
    """One data set. A built-in is a file of this folder, named like the suffix or the prefix of the paths it reads."""

    def __init__(self, config: SourceConfig) -> None:
        self.config = config

    @property
    def path(self) -> Path:
        return Path(self.config.path)

    @abstractmethod
    def items(self) -> Iterator[Item]:
        """Yield all items, in an order that never changes. Raises ConfigError where they cannot be read."""

    def identity(self) -> Mapping[str, str] | None:
        """Return what changes when the items do; None where only the items themselves tell. Raises ConfigError."""
        self.check_readable()
        return of_files(self.path, whole=True)

    def files(self) -> list[Path]:
        """Return the files that the items lie in; none of a source that makes them."""
        return [self.path] if self.path.exists() else []

    def check_readable(self) -> None:
        try:
            if self.path.is_file():
                self.path.open("rb").close()
            else:
                self.path.stat()
        except OSError as error:
            raise ConfigError(
                f"Data set {self.path} cannot be read ({error.strerror}; looked at {self.path.absolute()}). "
                f"Check data.train.path and data.eval.path."
            ) from error
