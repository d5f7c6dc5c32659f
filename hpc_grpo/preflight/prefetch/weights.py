"""Whether a model folder holds all of its weights, whole: by file names and headers, without loading them."""

from __future__ import annotations

import zipfile
from pathlib import Path

from hpc_grpo.data.hugging_face import WEIGHT_FORMS, read_header, weight_files
from hpc_grpo.errors import ConfigError


def check_weights(folder: Path) -> None:
    """Raise ConfigError that names the first file that is missing or cut short."""
    files = weight_files(folder)
    if not files:
        forms = " nor ".join(WEIGHT_FORMS)
        raise ConfigError(f"{folder} has no weights: neither {forms}, whole or in parts. Fetch them too.")
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file} is missing: the index beside it names it. Run prefetch again.")
        if not _is_whole(file):
            raise ConfigError(
                f"{file} ({file.stat().st_size:,} bytes) is cut short or damaged. Delete {file.resolve()} and run "
                f"prefetch again."
            )


def _is_whole(file: Path) -> bool:
    if file.suffix != ".safetensors":
        return zipfile.is_zipfile(file)
    try:
        return read_header(file).file_bytes == file.stat().st_size
    except ConfigError:
        return False
