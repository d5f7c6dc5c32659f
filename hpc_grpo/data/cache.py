"""A disk cache of tokenized data: one folder for each source with its settings, made once, then mapped into memory.

    <cache>/<key>/rows.arrow      a row for each item: text, token ids, the item as JSON, the hash of its prompt
    <cache>/<key>/made.json       number of rows, digest of the items, size of rows.arrow; written last

Uses no lock, because shared file systems rarely honour locks. A writer fills its own folder and renames it. If two
write the same entry, the second finds the name taken and removes its copy. A changed file, template or tokenizer gets
another key. You may delete an entry while no run reads it: the next start makes it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_grpo.data.sources import BATCH_ITEMS
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.files import digest_of, fsync, read_record, write_record
from hpc_grpo.run.owner import Holding, refuse_shared

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_FORMAT = 4
_ROWS, _MADE = "rows.arrow", "made.json"
_STAGED = ".tmp"
_ROWS_OF_OTHERS = Holding(
    "change what a run trains on: tokenized data is in the folder", "Set data.cache_dir to a folder of your own."
)


@dataclass(frozen=True)
class Row:
    """One item as a prompt. `fields` is the item as JSON; `completion_ids` are empty except for SFT.

    `prompt_ids` have one token for each of the `images`. The model expands these to `num_image_tokens` more tokens.
    """

    text: str
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    fields: str
    prompt_hash: int
    images: Sequence[bytes] = ()
    num_image_tokens: int = 0


class Rows:
    """The rows of one source, mapped from the disk. Only rows that are read use memory.

    `digest` is the digest of the items. `num_prompt_tokens`, `num_tokens` (with the completion) and `prompt_hashes`
    have one entry for each row.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        import numpy as np
        from pyarrow import compute, ipc, memory_map

        def as_numpy(column: Any) -> NDArray[Any]:
            # Arrow's own way imports pandas, which takes a second of each start.
            return np.concatenate([np.from_dlpack(chunk) for chunk in column.chunks])

        self.folder, self.digest = folder, digest
        self._table = ipc.open_file(memory_map(str(folder / _ROWS))).read_all()
        self.num_prompt_tokens = as_numpy(compute.list_value_length(self._table["prompt_ids"]))
        if "num_image_tokens" in self._table.column_names:
            self.num_prompt_tokens = self.num_prompt_tokens + as_numpy(self._table["num_image_tokens"])
        self.num_tokens = self.num_prompt_tokens + as_numpy(compute.list_value_length(self._table["completion_ids"]))
        self.prompt_hashes: NDArray[np.uint64] = as_numpy(self._table["prompt_hash"])

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, number: int) -> Row:
        return Row(**{name: self._table[name][number].as_py() for name in self._table.column_names})


class RowCache:
    """The entries below one folder. Any number of runs on any number of nodes share them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, identity: Mapping[str, Any]) -> Rows | None:
        """Return the rows of `identity`; None if their entry is missing or damaged.

        Raises ConfigError if they cannot be read, or if another user may write them.
        """
        entry = self._entry(identity)
        refuse_shared(entry, holding=_ROWS_OF_OTHERS)
        try:
            digest = _digest_if_whole(entry)
            return None if digest is None else Rows(entry, digest)
        except (OSError, ValueError) as error:  # The file belongs to another user, or is no Arrow file (ValueError).
            raise ConfigError(
                f"Tokenized data in {entry} cannot be read ({error}). Delete the folder, or set data.cache_dir to "
                f"another one."
            ) from error

    def write(self, identity: Mapping[str, Any], rows: Iterator[Row]) -> Rows:
        """Write all rows or none, and return them as mapped from the disk. Raises ConfigError if that is impossible."""
        entry = self._entry(identity)
        staging = self.folder / f".{entry.name}.{secrets.token_hex(8)}{_STAGED}"
        try:
            staging.mkdir(parents=True)
            self._remove_abandoned()
            digest = _write_table(staging / _ROWS, rows, has_images="images" in identity)
            fsync(staging / _ROWS)
            num_bytes = (staging / _ROWS).stat().st_size
            write_record(staging / _MADE, {"items": digest, "num_bytes": num_bytes, "identity": dict(identity)})
            try:
                staging.rename(entry)
            except OSError:
                # Another writer was faster, or a damaged entry must be moved away.
                if _digest_if_whole(entry) is None:
                    if not entry.is_dir():
                        raise
                    entry.rename(staging.with_suffix(".old" + _STAGED))
                    staging.rename(entry)
            fsync(self.folder)
        except OSError as error:
            raise ConfigError(
                f"Tokenized data cannot be written below {self.folder} ({error.strerror or error}). Set data.cache_dir "
                f"to a folder that can be written, has space, and is seen by all nodes."
            ) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        if (found := self.find(identity)) is None:
            raise ConfigError(f"{entry} was damaged while it was made. Delete the folder and start again.")
        return found

    def _remove_abandoned(self) -> None:
        """Remove damaged entries that were moved away, and folders of dead writers, if older than a day."""
        for folder in self.folder.glob(f".*{_STAGED}"):
            # The writer or another cleaner is removing the folder too, or it belongs to another user.
            with contextlib.suppress(OSError):
                if time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir())) > 24 * 3600.0:
                    shutil.rmtree(folder, ignore_errors=True)

    def _entry(self, identity: Mapping[str, Any]) -> Path:
        return self.folder / digest_of({"format": _FORMAT, **identity})


def _digest_if_whole(entry: Path) -> str | None:
    made = read_record(entry / _MADE, lambda values: (str(values["items"]), int(values["num_bytes"])))
    rows = entry / _ROWS
    return made[0] if made is not None and rows.is_file() and rows.stat().st_size == made[1] else None


def _write_table(path: Path, rows: Iterator[Row], *, has_images: bool) -> str:
    """Write rows as they come, in batches; return the digest of the items."""
    import pyarrow as pa

    text, ids = pa.string(), pa.list_(pa.int32())
    kinds = {"text": text, "prompt_ids": ids, "completion_ids": ids, "fields": text, "prompt_hash": pa.uint64()}
    if has_images:
        kinds |= {"images": pa.list_(pa.large_binary()), "num_image_tokens": pa.int32()}
    schema = pa.schema(list(kinds.items()))
    hashed = hashlib.sha256()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        while batch := list(islice(rows, BATCH_ITEMS)):
            columns = {name: [getattr(row, name) for row in batch] for name in schema.names}
            for fields in columns["fields"]:
                hashed.update(fields.encode() + b"\n")
            writer.write_batch(pa.record_batch(columns, schema=schema))
    return hashed.hexdigest()[:32]
