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
from typing import Any

from hpc_grpo.errors import LaunchError
from hpc_grpo.run.files import staging_path, start_staging

_WORKERS = 2
"""Processes that convert: each holds one rank's optimizer state in memory."""

_COPIES = 2
"""The conversion writes every byte twice: in fragments first, then whole."""

_SHOWN_LINES = 5


def universal_folder(checkpoint: Path) -> Path:
    """Where the universal form of a checkpoint lies: named as one cut short, so that it is swept like those."""
    return staging_path(_beside(checkpoint))


def write_universal(checkpoint: Path, tag: str) -> None:
    """Write the universal form of `checkpoint / tag`. Long for a large model: let no learner wait in a collective.

    Raises LaunchError without the disk space for it, or when DeepSpeed's conversion fails.
    """
    source, target = checkpoint / tag, start_staging(_beside(checkpoint)) / tag
    needed = _COPIES * sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise LaunchError(
            f"Resuming with another number of learners rewrites the checkpoint, for which {needed / 2**30:.1f} GiB are "
            f"needed beside {checkpoint}; {free / 2**30:.1f} are free. Free some, or use as many learners as before."
        )
    # A process of its own: it forks workers, which a learner with its threads must not.
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(source), "--output_folder", str(target)]
    command += ["--num_extract_workers", str(_WORKERS), "--num_merge_workers", str(_WORKERS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n  ".join(done.stderr.strip().splitlines()[-_SHOWN_LINES:])
        raise LaunchError(f"DeepSpeed could not rewrite {checkpoint} for another number of learners:\n  {last}")


@contextmanager
def universal_loading(engine: Any) -> Iterator[None]:
    """Have the engine load a universal form, and put right what DeepSpeed 0.19 makes of the optimizer under ZeRO-3.

    It gives all parameter groups the settings of the first one, and all their states one and the same step counter,
    on the CPU: every group would then advance it, and a fused optimizer read it on the wrong device.
    """
    groups = engine.optimizer.optimizer.param_groups
    settings = [{name: group[name] for name in group if name not in ("params", "lr")} for group in groups]
    engine._config.load_universal_checkpoint = True
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = False
    for group, own in zip(groups, settings, strict=True):
        group.update(own)
    for parameter, state in engine.optimizer.optimizer.state.items():
        state["step"] = state["step"].clone().to(parameter.device)


def _beside(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}_universal")
