"""Data source: an .arrow file, in Arrow's file format or its stream format (that of the library `datasets`)."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_grpo.data.sources.base import Item, Source
from hpc_grpo.errors import ConfigError
from hpc_grpo.registry import SOURCES

_FILE_FORMAT = b"ARROW1"


@SOURCES.register("arrow")
class Arrow(Source):
    def items(self) -> Iterator[Item]:
        from pyarrow import ArrowException, ipc, memory_map

        self.check_readable()
        try:
            with memory_map(str(self.path)) as file:
                if file.read(len(_FILE_FORMAT)) == _FILE_FORMAT:
                    reader = ipc.open_file(file)
                    batches = map(reader.get_batch, range(reader.num_record_batches))
                else:
                    file.seek(0)
                    batches = iter(ipc.open_stream(file))
                for batch in batches:
                    yield from batch.to_pylist()
        except (ArrowException, OSError) as error:
            raise ConfigError(f"{self.path} cannot be read as Arrow: {error}") from error
