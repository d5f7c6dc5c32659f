"""Saves and restores all state that the learners' next step depends on, and exports the policy.

A checkpoint is DeepSpeed's state on every rank (weights, optimizer, schedule), the random number generators and a
manifest of all files. A resume with the same number of ranks is bit-identical. Staging, loading and exporting are
collectives. A state that is staged in host memory is written while training continues.

A resume with another number of ranks loads DeepSpeed's universal form. This module, run as a program, writes the
universal form beside the checkpoint. The driver removes it after loading.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError, HpcGrpoError, LaunchError
from hpc_grpo.learner.lora import write_adapter
from hpc_grpo.learner.model import PolicyModel, gathered, parameter_specs
from hpc_grpo.learner.staging import deepspeed_globals
from hpc_grpo.run.checkpoint import FileEntry, Manifest, hash_files, problems, read_manifest, write_manifest
from hpc_grpo.run.files import publish_dir, staging_path, start_staging
from hpc_grpo.run.source import own_command
from hpc_grpo.system.hugging_face import find_model
from hpc_grpo.types import ParameterSpec
from hpc_grpo.weights.store import bucket_layout

if TYPE_CHECKING:
    from hpc_grpo.learner.learner import Learner

TAG = "deepspeed"  # DeepSpeed's folder in a checkpoint
_COPIES = 2  # the conversion to the universal form writes every byte twice: first fragments, then complete tensors
_COPIED_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "*processor_config.json", "generation_config.json",
)  # fmt: skip


class CheckpointWriter:
    """One learner's part of a checkpoint. All learners create theirs together, then `write`; one calls `publish`.

    One checkpoint at a time. `write` may run on any thread. Each call raises HpcGrpoError if a file cannot be written.
    Older checkpoints stay; a checkpoint of the same step is replaced only when the new one is complete.
    """

    def __init__(self, learner: Learner, directory: Path, driver_state: dict[str, Any], *, behind: bool) -> None:
        """Stage the current state: in host memory if `behind`, for `write`; otherwise on disk. A collective."""
        self._learner, self._directory, self._begun = learner, directory, time.monotonic()
        staging, stage = learner.files.disk.here(staging_path(directory)), learner.config.train.zero_stage
        self._manifest = Manifest(learner.policy_version, learner.world_size, stage, (), driver_state)
        with _named_errors(directory):
            if learner.rank == 0:
                start_staging(directory)
            dist.barrier()
            if stage == 3:
                # `write_universal` needs the state that AdamW makes in its first step. An optimizer with this state
                # from the beginning would hold its moments twice while a checkpoint is loaded.
                optimizer = learner.ds_engine.optimizer
                for flat in optimizer.fp32_partitioned_groups_flat:
                    if not (state := optimizer.optimizer.state[flat]):
                        moments = {name: torch.zeros_like(flat) for name in ("exp_avg", "exp_avg_sq")}
                        state.update(step=flat.new_zeros(()), **moments)
            with learner.files.new_checkpoint(keeps=behind):
                learner.ds_engine.save_checkpoint(
                    str(staging), tag=TAG, save_latest=False, exclude_frozen_parameters=_is_partly_frozen(learner)
                )
                for part in learner.parts:
                    part.save(staging, learner.files)
                learner.files.save(_rng_state(), staging / f"rng_rank_{learner.rank}.pt")

    def write(self) -> tuple[FileEntry, ...]:
        """Write the remaining staged files to disk; return this learner's files."""
        files = self._learner.files
        with _named_errors(self._directory):
            return tuple(files.disk.settle(files.disk.here(staging_path(self._directory)), files.write()))

    def publish(self, shares: Sequence[Sequence[FileEntry]]) -> float:
        """Complete the checkpoint from the files of all learners; return the seconds since staging began.

        The writers list their files: on a network file system this node may not see the others' files yet.
        """
        staging = staging_path(self._directory)
        with _named_errors(self._directory):
            entries = {entry.name: entry for share in shares for entry in share}
            here = {str(file.relative_to(staging)) for file in staging.rglob("*") if file.is_file()}
            # Add the scripts that DeepSpeed writes: no learner has listed them.
            entries |= {entry.name: entry for entry in hash_files(staging, sorted(here - entries.keys()))}
            files = tuple(entries[name] for name in sorted(entries))
            write_manifest(staging, replace(self._manifest, files=files))
            publish_dir(self._directory)
        return time.monotonic() - self._begun


def _is_partly_frozen(learner: Learner) -> bool:
    """Return whether a part of the policy is frozen. Checkpoints leave out frozen weights: `model.path` has them."""
    return any(not own.requires_grad for own in learner.model.parameters())


@contextmanager
def _named_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise HpcGrpoError(
            f"Checkpoint {directory} could not be written: {error}. Earlier checkpoints are unchanged."
        ) from error


def load_checkpoint(learner: Learner, directory: Path, universal: Path | None = None) -> dict[str, Any]:
    """Restore the checkpoint `directory`; return its driver state.

    If another number of learners wrote the checkpoint, call `write_universal` first; `universal` is its `folder`.
    Raises ConfigError if the checkpoint is missing or damaged, or was written under another ZeRO stage.
    """
    disk, engine = learner.files.disk, learner.ds_engine
    with disk.opened(directory) as here:
        manifest = read_manifest(here)
        if manifest is None:
            raise ConfigError(f"{directory} is no checkpoint: its manifest.json is missing or unreadable.")
        if wrong := problems(here, manifest, check_hashes=False):
            raise ConfigError(f"Checkpoint {directory} is damaged: {'; '.join(wrong)}. Remove it to use an older one.")
        if manifest.zero_stage != learner.config.train.zero_stage:
            raise ConfigError(
                f"Checkpoint {directory} was written with train.zero_stage = {manifest.zero_stage}. Set this value."
            )
        is_resharded = manifest.world_size != learner.world_size
        rewritten = disk.opened(universal or staging_path(_universal(directory)), whole=True)
        with (
            rewritten if is_resharded else nullcontext(here) as folder,
            _universal_loading(engine) if is_resharded else nullcontext(),
        ):
            is_strict = not _is_partly_frozen(learner)
            with settings_of_config(engine):
                found, _ = engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=is_strict)
            if found is None:
                raise ConfigError(f"DeepSpeed found no state in {directory}.")
        for part in learner.parts:
            part.load(here, learner.files)
        _restore_rng(learner.files.load(str(here / f"rng_rank_{learner.rank % manifest.world_size}.pt")))
    return manifest.driver_state


def _universal(checkpoint: Path) -> Path:
    """Return the folder whose staging folder holds the universal form. After a crash, `recover_dirs` removes it."""
    return checkpoint.with_name(f"{checkpoint.name}_universal")


def write_universal(checkpoint: Path, folder: Path | None = None) -> None:
    """Write the universal form of `checkpoint / TAG` into `folder`, by default beside the checkpoint.

    Takes long for a large model, so no learner may wait for it in a collective. Raises LaunchError if disk space is
    missing, or if DeepSpeed's conversion fails.
    """
    source, target = checkpoint / TAG, (folder or start_staging(_universal(checkpoint))) / TAG
    needed = _COPIES * sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        instead = "use as many learners as before" if folder is None else "set TMPDIR to another folder"
        raise LaunchError(
            f"{checkpoint} is rewritten for another number of learners. This needs {needed / 2**30:.1f} GiB in "
            f"{target.parent}, and {free / 2**30:.1f} GiB are free. Free space there, or {instead}."
        )
    # In a separate process: the conversion forks workers, and a learner with threads must not fork.
    command = own_command("-m", "hpc_grpo.learner.checkpoint", "--inject_missing_state")
    command += ["--input_folder", str(source), "--output_folder", str(target)]
    # Each worker holds one rank's optimizer state in memory.
    command += ["--num_extract_workers", "2", "--num_merge_workers", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n  ".join(done.stderr.strip().splitlines()[-5:])
        raise LaunchError(f"DeepSpeed could not rewrite {checkpoint} for another number of learners:\n  {last}")


@contextmanager
def settings_of_config(engine: Any) -> Iterator[None]:
    """Keep the config's settings of optimizer, clipping and schedule while `engine` loads a checkpoint.

    A fork may have other settings than the run that wrote the checkpoint. The learning rate becomes the schedule's
    value at the checkpoint's optimizer step. Loading a universal form would also give all parameter groups the settings
    of the first group.
    """
    optimizer, scheduler = engine.optimizer, engine.lr_scheduler
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    clip, rates = optimizer.clip_grad, scheduler and list(scheduler.base_lrs)
    yield
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    optimizer.clip_grad = clip
    if scheduler is not None:
        scheduler.base_lrs, step = rates, scheduler.last_epoch
        scheduler._last_lr = [rate * of(step) for rate, of in zip(rates, scheduler.lr_lambdas, strict=True)]
        for group, rate in zip(optimizer.param_groups, scheduler._last_lr, strict=True):
            group["lr"] = rate


@contextmanager
def _universal_loading(engine: Any) -> Iterator[None]:
    """Let the engine load a universal form, and repair the optimizer state of DeepSpeed 0.19 under ZeRO-3.

    DeepSpeed gives all states one step counter on the CPU. Every group would advance this counter, and a fused
    optimizer would read it on the wrong device.
    """
    engine._config.load_universal_checkpoint = True
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = False
    for parameter, state in engine.optimizer.optimizer.state.items():
        state["step"] = state["step"].clone().to(parameter.device)


def _rng_state() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (name, [int(key) for key in keys], *rest),
        "python": random.getstate(),
    }


def _restore_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


def export_model(learner: Learner, directory: Path, *, merged: bool = False) -> None:
    """Write the policy on rank 0, atomically, in Hugging Face format for `from_pretrained` and vLLM. A collective.

    Other ranks do not wait for the write, which may take longer than the timeout of a collective; only under ZeRO-3
    with a critic they do. Tied weights are stored once; `from_pretrained` ties them again. With LoRA, writes the
    adapter in PEFT's format, or the merged model if `merged`.
    """
    is_adapter = learner.config.lora is not None and not merged
    specs = parameter_specs(learner.model, learner.config.model.dtype, of_adapter=is_adapter)
    weights = full_weights(learner.model, specs)
    if learner.rank == 0:
        staging = start_staging(directory)
        if is_adapter:
            write_adapter(learner.config, weights, staging)
        else:
            saved = learner.model.language_model.state_dict().keys()
            weights |= {name: own for name, own in learner.model.language_model.named_buffers() if name in saved}
            # transformers refuses to write generation settings that many models come with: their file is copied.
            learner.model.language_model.can_generate = lambda: False
            learner.model.language_model.save_pretrained(staging, state_dict=weights)
        copy_settings(learner.config, staging)
    del weights
    for part in learner.parts:
        part.export(staging_path(directory))
    if learner.rank == 0:
        publish_dir(directory)


def full_weights(model: PolicyModel, specs: Sequence[ParameterSpec]) -> dict[str, Tensor]:
    """Return copies of the parameters in rank 0's host memory; nothing on other ranks. A collective under ZeRO-3."""
    weights: dict[str, Tensor] = {}
    dtypes = {spec.name: getattr(torch, spec.dtype) for spec in specs}
    for bucket in bucket_layout(specs).buckets:
        with gathered(model, bucket.names) as parameters:
            if dist.get_rank() == 0:
                weights |= {name: own.to("cpu", dtypes[name], copy=True) for name, own in parameters.items()}
    return weights


def copy_settings(config: Config, folder: Path) -> None:
    """Copy the files of tokenizer and generation unchanged: loading and saving by their classes may change them.

    A Jinja file that all training data uses (`data.template`) becomes the chat template.
    """
    source = find_model(config.model.path)
    for file in {file for pattern in _COPIED_FILES for file in source.glob(pattern) if file.is_file()}:
        shutil.copyfile(file, folder / file.name)
    used = {own.template or config.data.template for _, own in config.data.sources(for_eval=False)}
    if len(used) == 1 and used <= set(config.data.chat_templates.values()):
        # Wins over tokenizer_config.json. A processor would prefer the old file.
        (folder / "chat_template.jinja").write_bytes(read_template(used.pop()))
        (folder / "chat_template.json").unlink(missing_ok=True)


@cache
def read_template(path: str) -> bytes:
    """Return a Jinja file as this process first read it: an export must not get a later edit."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"data.template = {path} cannot be read ({error.strerror}). Restore the file.") from error


if __name__ in ("__main__", "__mp_main__"):
    # The program of `write_universal`, and its workers. DeepSpeed's own program would run a planted pickle.
    from deepspeed.checkpoint import ds_to_universal

    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # overrides the argument of torch.load
    torch.serialization.add_safe_globals(deepspeed_globals())
    if __name__ == "__main__":
        ds_to_universal.main(ds_to_universal.parse_arguments())
