"""Error texts for removed keys. Each text names the new key, or the fixed value that replaced the key."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hpc_grpo.config.run import Every
from hpc_grpo.config.train import DistillArgs, OwnArgs, PpoArgs

_UNITS = {"steps": "steps", "epochs": "epochs", "s": "seconds"}
_INTERVALS = {"checkpoint.every": Every(steps=50), "checkpoint.export_every": None, "eval.every": None}
_EVERY = {f"{every}_{unit}": (every, default) for every, default in _INTERVALS.items() for unit in _UNITS}
"""Removed key -> (new key, default of the new key). The default fills in units that the user did not give."""

_MOVED = {
    **{f"ppo.{key}": (f"task.args.{key}", "{}") for key in PpoArgs.model_fields},
    **{f"distill.{key}": (f"task.args.{key}", "{}") for key in DistillArgs.model_fields},
    **{f"task.{key}": (f"args.{key}", "{}") for key in OwnArgs.model_fields},
    "data.chat_template": ("data.template", "{}"),
    "data.held_out.fraction": ("data.held_out", "{}"),
    "sft.batch_size": ("task.args.batch_size", "{}"),
    "sft.completion_field": ("data.train.answer_field", "{}"),
    **{
        f"engine.{key}": (f"engine.vllm.{key}", "{}")
        for key in ("enforce_eager", "async_scheduling", "max_num_batched_tokens", "max_num_seqs")
    },
    "engine.gpu_memory_utilization": ("engine.vllm.gpu_memory_utilization", "{}"),
    "engine.prefix_caching": ("engine.vllm.enable_prefix_caching", "{}"),
    "engine.ngram_tokens": ("engine.vllm.speculative_config", "'{{method: ngram, num_speculative_tokens: {}}}'"),
    **{f"metrics.wandb_{key}": (f"metrics.wandb.{key}", "{}") for key in ("project", "entity", "mode")},
    "environment.tools": ("args.tools", "'{}'"),
    **{
        f"{section}.{key}": (f"args.{key}", "{}")
        for section, keys in {
            "loss": "dual_clip temperature_positive temperature_negative fraction kl_coef low high",
            "loss.advantage": "unbiased_std eps discount k",
            "loss.correction": "cap low",
            "rewards": "completion_s",
        }.items()
        for key in keys.split()
    },
    **{f"train.{key}": (f"train.adamw.{key}", "'{}'") for key in ("betas", "eps", "weight_decay")},
    "launch.reward_server.deadline_s": ("launch.bringup_deadline_s", "{}"),
    "launch.slurm.exclusive": ("launch.slurm.extra.exclusive", "{}"),
    "launch.slurm.min_nodes": ("launch.min_nodes", "{}"),
    "launch.slurm.network": ("launch.slurm.extra.network", "{}"),
    "launch.slurm.num_nodes": ("launch.num_nodes", "{}"),
}
"""Old key -> new key, and the form of its value. A new key `args.KEY` is in the section of the old key."""

_REMOVED = {
    "data.held_out.max_items": "all that data.held_out holds out",
    "eval.pass_k": "the powers of two up to eval.num_samples, and eval.num_samples",
    "engine.max_restarts": "3",
    "grading.max_restarts": "3",
    "deadlines.resume_s": "8 times deadlines.start_s",
    "deadlines.eval_s": "8 times deadlines.start_s",
    "deadlines.generate_wait_s": "4 times deadlines.start_s",
    "deadlines.train_s": "4 times deadlines.start_s",
    "deadlines.checkpoint_s": "2 times deadlines.start_s",
    "deadlines.late_s": "5 times deadlines.silent_s",
    "deadlines.late_factor": "10",
    "launch.join_s": "15 times launch.rejoin_s, and at least 1800",
    "launch.max_stalled_restarts": "1 in a job",
    "launch.scheduler_query_min_s": "60",
    "launch.keep_compiled": "true",
    "launch.templates": "true",
    "placement.bind_cores": "true",
    "placement.cpus_per_engine": "0.5",
    "placement.cpus_per_learner": "0.5",
    "distill.coef": "1: task.args.reward_coef weighs the rewards beside it",
    "task.coef": "1: task.args.reward_coef weighs the rewards beside it",
    "task.normalize_advantages": "true",
    "placement.gpus": "decided by model.device: with cpu no GPUs are reserved",
    "train.on_step.timeout_s": "deadlines.silent_s",
    "train.logprob_chunk_tokens": "1024",
    "train.skip_zero_advantages": "true",
    "weights.bucket_mib": "256",
    "weights.num_buffers": "1",
    "weights.page_lock": "true wherever CUDA can",
    "weights.canary_every": "1",
    "weights.deadline_s": "2 times deadlines.silent_s",
    "weights.canary_bound": "0.05, and 1 in bfloat16",
}
"""Removed key -> its fixed value today."""


def explain_moved(key: str, value: Any, beside: Mapping[str, Any], valid: Collection[str] = ()) -> Iterator[str]:
    """Yield an error text for a removed `key`, or for each key of a removed section such as `ppo`; else nothing.

    `beside` holds the values of the key's section: keys for steps, epochs and seconds became one key. `valid` are the
    keys of a chosen variant, if any. A key that moved to `args` yields nothing if `valid` lacks the new key.
    """
    section = key.rpartition(".")[0]
    # Each data source may have the sections `environment` and `rewards` too.
    general = re.sub(r"^(?:data\..+\.)?(environment|rewards)\.(?:\d+\.)?", r"\1.", key)
    if key in _EVERY:
        yield _explain_every(*_EVERY[key], beside)
    elif general in _MOVED:
        new, form = _MOVED[general]
        if new.startswith("args."):
            if valid and new not in valid:
                return
            new = f"{section}.{new}"
        how = "leave it out" if value is None else f"set {new}={form.format(_text(value))} instead"
        yield f"{key} is now {new}: {how}."
    elif general in _REMOVED:
        yield f"{key} was removed. Its fixed value is {_REMOVED[general]}. Leave it out."
    elif isinstance(value, Mapping):
        for inner, own in value.items():
            yield from explain_moved(f"{key}.{inner}", own, value, valid)


def _explain_every(new: str, default: Every | None, beside: Mapping[str, Any]) -> str:
    """Return the error text, with a value for key `new`: the given units, others from its present value or default."""
    section, _, name = new.rpartition(".")
    given = {unit: beside[f"{name}_{unit}"] for unit in _UNITS if f"{name}_{unit}" in beside}
    try:
        held = Every.read(beside.get(name, default))
    except ValueError:  # the wrong value gets another error
        held = default
    spans = {unit: getattr(held, field, None) for unit, field in _UNITS.items()} | given
    text = ", ".join(f"{count} {unit}" for unit, count in spans.items() if count is not None)
    value = f"'{text}'" if text else "null"
    old = " and ".join(f"{section}.{name}_{unit}" for unit in given)
    return f"{old} {'is' if len(given) == 1 else 'are'} now {new}: set {new}={value} instead."


def _text(value: Any) -> Any:
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else value
