"""A checkpoint for another number of learners than wrote it.

Consumes a checkpoint's DeepSpeed folder; produces, beside it and for as long as it takes to load, DeepSpeed's universal
form of it: every parameter and its optimizer state whole, which any number of ranks can take their shares of.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from hpc_grpo.errors import ConfigError, LaunchError
from hpc_grpo.learner.publish_dir import staging_path, start_staging

_WORKERS = 2
"""Processes that convert: each holds one rank's optimizer state in memory."""

_COPIES = 2
"""The conversion writes every byte twice: in fragments first, then whole."""

_SHOWN_LINES = 5


@contextmanager
def resharded(checkpoint: Path, tag: str, rank: int) -> Iterator[Path]:
    """A folder whose `tag` is the universal form of `checkpoint / tag`. A collective: rank 0 converts.

    Raises ConfigError without the disk space for it, LaunchError when DeepSpeed's conversion fails.
    """
    # Named as a checkpoint that was cut short, so that one left by a kill is swept as such.
    folder = staging_path(checkpoint.with_name(f"{checkpoint.name}_universal"))
    failure: list[ConfigError | LaunchError | None] = [None]
    if rank == 0:
        try:
            _convert(checkpoint / tag, start_staging(checkpoint.with_name(f"{checkpoint.name}_universal")) / tag)
        except (ConfigError, LaunchError) as error:
            failure = [error]
    dist.broadcast_object_list(failure)
    if failure[0] is not None:
        raise failure[0]
    yield folder
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)


def _convert(source: Path, target: Path) -> None:
    needed = _COPIES * sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise ConfigError(
            f"Resuming with another number of learners rewrites the checkpoint, for which {needed / 2**30:.1f} GiB are "
            f"needed beside {source.parent}; {free / 2**30:.1f} are free. Free some, or use as many learners as before."
        )
    print(f"Rewriting {source.parent.name} for another number of learners.", flush=True)
    # A process of its own: it forks workers, which a learner with its threads must not.
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(source), "--output_folder", str(target)]
    command += ["--num_extract_workers", str(_WORKERS), "--num_merge_workers", str(_WORKERS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n  ".join(done.stderr.strip().splitlines()[-_SHOWN_LINES:])
        raise LaunchError(f"DeepSpeed could not rewrite {source} for another number of learners:\n  {last}")
