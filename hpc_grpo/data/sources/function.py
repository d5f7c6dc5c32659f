"""Data source: a function of the user's that yields items, called with `args` as keyword arguments."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_grpo.data.sources.base import Item, Source
from hpc_grpo.errors import ConfigError, HpcGrpoError
from hpc_grpo.registry import SOURCES


@SOURCES.register("function")
class Function(Source):
    def items(self) -> Iterator[Item]:
        name = self.config.path
        function = SOURCES.find(name)
        try:
            for number, item in enumerate(function(**self.config.args)):
                if not isinstance(item, dict):
                    raise ConfigError(f"{name}, item {number}: must be a dict of columns, not {type(item).__name__}.")
                yield item
        except HpcGrpoError:
            raise
        except Exception as error:  # a function of the user's raises what it likes
            raise ConfigError(f"{name} (data source) failed: {type(error).__name__}: {error}") from error

    def identity(self) -> None:
        """Return nothing: what a function reads is not known, so its items are compared at every start."""
