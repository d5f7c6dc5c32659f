"""Fork a run: a new run that continues from a checkpoint of another run, with other values of some keys.

The new run has the checkpoint, the metrics and the ledger up to its step, and its own config and copy of the package.
The other run is not changed, and not needed again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from hpc_grpo.config import Config, with_overrides
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.freeze import changeable, is_listed, new_source, refuse_secrets, working_dir
from hpc_grpo.run.checkpoint import newest_step, valid_checkpoints
from hpc_grpo.run.files import fsync, read_jsonl, staging_path, write_atomic
from hpc_grpo.run.frozen_config import differences, inherit_inputs, read_config, write_config
from hpc_grpo.run.paths import RunDir

_POSITION = "the checkpoint holds a position in the data"
KEPT: dict[str, str] = {
    **dict.fromkeys(("model.", "lora."), "the checkpoint holds the weights"),
    "task.name": "the checkpoint holds the parts of the task",
    "task.args.critic": "the checkpoint holds the critic",
    "loss.kl.refresh_steps": "the checkpoint holds the reference, or none",
    "train.num_minibatches": "the checkpoint counts optimizer steps",
    **dict.fromkeys(("train.zero_stage", "train.offload_optimizer"), "decides the files of the checkpoint"),
    "data.curriculum.": "the checkpoint holds its state",
    **dict.fromkeys(("data.train.", "data.held_out", "data.deduplicate", "data.shuffle"), _POSITION),
    **dict.fromkeys(("data.max_prompt_tokens", "data.drop_long_prompts", "train.max_tokens_per_microbatch"), _POSITION),
}
"""Key -> why a fork cannot change it. A key that a resume may change is allowed here too. Written like CHANGEABLE."""


def fork(run: RunDir, step: int | None, argv: Sequence[str], overrides: Sequence[str]) -> RunDir:
    """Create a run that continues from the checkpoint of `run` at `step`, with its config and `overrides`.

    None stands for the newest checkpoint. The new directory appears when it is complete. The fork of a sweep's run lies
    beside the sweep. Its checkpoint consists of hard links where the disk has them, so both runs may prune their own.
    Raises ConfigError for keys that cannot change, if the directory exists, and without a valid checkpoint at `step`.
    """
    step = newest_step(run) if step is None else step
    before = read_config(run)
    place = [f"run.name={json.dumps(run.name.replace('/', '-') + f'-from-{step}')}"]
    if run.is_cell:
        place.append(f"run.root={json.dumps(str(run.shared_root))}")
    config = with_overrides(before, [*place, *overrides])
    _refuse_kept(before, config, step)
    refuse_secrets(config)
    folder = working_dir(run)
    _refuse_without_checkpoint(run, step)
    if config.run_path.exists():
        raise ConfigError(
            f"{config.run_path} exists, and a fork needs a new directory. Give the fork another name: run.name=NAME"
        )
    new = RunDir(staging_path(config.run_path))
    shutil.rmtree(new.path, ignore_errors=True)
    new.create()
    try:
        try:
            shutil.copytree(run.checkpoint(step), new.checkpoint(step), copy_function=_link)
        finally:
            _refuse_without_checkpoint(run, step)  # a run that still trains may have removed it
        for source, target in ((run.metrics, new.metrics), (run.ledger, new.ledger)):
            lines = [line for line in read_jsonl(source) if isinstance(line.get("step"), int) and line["step"] <= step]
            # Attempts of the new run count from 1.
            write_atomic(target, "".join(f"{json.dumps({**line, 'attempt': 0})}\n" for line in lines))
        # The fork's model and training data are compared with those of the other run.
        inherit_inputs(run, new, lambda key: is_listed(key, KEPT) and key.endswith((".path", ".items")))
        new_source(new, config, folder, argv, overrides, forked_from={"run": str(run.path), "step": step})
        write_config(new, config)
        new.path.rename(config.run_path)  # not publish_dir, which would replace a run of this name
        fsync(config.run_path.parent)
    except BaseException:  # also at Ctrl+C
        shutil.rmtree(new.path, ignore_errors=True)
        raise
    return RunDir(config.run_path)


def _refuse_kept(before: Config, config: Config, step: int) -> None:
    changed = differences(before, config)
    fixed = [key for key in changed if not is_listed(key, changeable(config))]
    kept = {key: why for key in fixed for entry, why in KEPT.items() if is_listed(key, [entry])}
    if (before.train.adamw["weight_decay"] > 0.0) != (config.train.adamw["weight_decay"] > 0.0):
        kept["train.adamw.weight_decay"] = "AdamW has other parameter groups without a decay"
    sizes = [] if config.train.total_steps else ["rollout.prompts_per_step", "task.args.batch_size"]
    sizes += ["rollout.group_size"] if config.train.total_episodes else []
    kept |= {key: "it may change if you also give train.total_steps" for key in changed if key in sizes}
    if config.data.deduplicate:
        kept |= {key: "data.deduplicate compares with the eval sets" for key in changed if key.startswith("data.eval")}
    if kept:
        listed = "\n".join(f"  {key}: {changed[key][0]!r} there, {changed[key][1]!r} now ({kept[key]})" for key in kept)
        raise ConfigError(
            f"A fork keeps what is in the checkpoint: the model, the optimizer and the position in the data. These "
            f"keys cannot change:\n{listed}\nLeave them out, or start a new run from an export (hpc-grpo model "
            f"export): hpc-grpo submit CONFIG model.path={before.run_path}/export/step_{step} KEY=VALUE"
        )


def _refuse_without_checkpoint(run: RunDir, step: int) -> None:
    steps = sorted(found.step for found in valid_checkpoints(run, check_hashes=False))
    if not steps:
        raise ConfigError(f"Run {run.name} has no valid checkpoint. A run writes its first one after its first step.")
    if step not in steps:
        raise ConfigError(
            f"--step = {step}: {run.path} has no checkpoint of this step. Steps with a checkpoint: "
            f"{', '.join(map(str, steps))}. checkpoint.keep_last decides how many a run keeps."
        )


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without hard links
        shutil.copy2(source, target)
        fsync(Path(target))
