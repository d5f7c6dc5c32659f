"""Whether a model folder holds all of its weights, whole: by file names and headers, without loading them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from hpc_grpo.errors import ConfigError

_FORMS = ("model.safetensors", "pytorch_model.bin")
_MAX_HEADER_BYTES = 100_000_000


def check_weights(folder: Path) -> None:
    """Raise ConfigError that names the first file that is missing or cut short."""
    for file in _weight_files(folder):
        if not file.is_file():
            raise ConfigError(f"{file} is missing: the index beside it names it. Run prefetch again.")
        is_whole = _is_whole_safetensors(file) if file.suffix == ".safetensors" else zipfile.is_zipfile(file)
        if not is_whole:
            raise ConfigError(
                f"{file} ({file.stat().st_size:,} bytes) is cut short or damaged. Delete {file.resolve()} and run "
                f"prefetch again."
            )


def _weight_files(folder: Path) -> list[Path]:
    for name in _FORMS:
        index = folder / f"{name}.index.json"
        if index.is_file():
            return [folder / part for part in sorted(set(_weight_map(index).values()))]
        if (folder / name).is_file():
            return [folder / name]
    raise ConfigError(f"{folder} has no weights: neither {' nor '.join(_FORMS)}, whole or in parts. Fetch them too.")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{index} is no index of weights: {error!r}. Run prefetch again.") from error
    return found


def _is_whole_safetensors(file: Path) -> bool:
    """The header's length (8 bytes, little-endian), the header, then tensors up to the last offset in the header."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(length) if length <= _MAX_HEADER_BYTES else b""
    try:
        tensors: dict[str, Any] = json.loads(header)
    except ValueError:
        return False
    ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"]
    return file.stat().st_size == 8 + length + max(ends, default=0)
