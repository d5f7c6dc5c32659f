"""Data source: a .parquet file, read batch by batch."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_grpo.data.sources.base import BATCH_ITEMS, Item, Source
from hpc_grpo.errors import ConfigError
from hpc_grpo.registry import SOURCES


@SOURCES.register("parquet")
class Parquet(Source):
    def items(self) -> Iterator[Item]:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        self.check_readable()
        try:
            with ParquetFile(self.path) as file:
                for batch in file.iter_batches(batch_size=BATCH_ITEMS):
                    yield from batch.to_pylist()
        except (ArrowException, OSError) as error:
            raise ConfigError(f"{self.path} cannot be read as Parquet: {error}") from error
