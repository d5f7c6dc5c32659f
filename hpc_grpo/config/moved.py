"""Keys that a config had once: each is an error that names the key of today, or what decides instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpc_grpo.config.train import DistillKeys, PpoKeys

_MOVED = {
    **{
        f"{every}_{unit}": (every, f"'{{}} {unit}'")
        for every in ("checkpoint.every", "checkpoint.export_every", "eval.every")
        for unit in ("steps", "epochs", "s")
    },
    **{f"ppo.{key}": (f"task.{key}", "{}") for key in PpoKeys.model_fields},
    **{f"distill.{key}": (f"task.{key}", "{}") for key in DistillKeys.model_fields},
    "sft.batch_size": ("task.batch_size", "{}"),
    "sft.completion_field": ("data.train.answer_field", "{}"),
    "engine.enforce_eager": ("engine.vllm.enforce_eager", "{}"),
    "engine.prefix_caching": ("engine.vllm.enable_prefix_caching", "{}"),
    "engine.async_scheduling": ("engine.vllm.async_scheduling", "{}"),
    "engine.max_num_batched_tokens": ("engine.vllm.max_num_batched_tokens", "{}"),
    "engine.ngram_tokens": ("engine.vllm.speculative_config", "'{{method: ngram, num_speculative_tokens: {}}}'"),
    **{f"metrics.wandb_{key}": (f"metrics.wandb.{key}", "{}") for key in ("project", "entity", "mode")},
    "launch.slurm.min_nodes": ("launch.min_nodes", "{}"),
    "launch.slurm.network": ("launch.slurm.extra.network", "{}"),
    "launch.slurm.num_nodes": ("launch.num_nodes", "{}"),
}
"""Key of before -> key of today, and the form of its value."""

_REMOVED = {
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
    "placement.cpus_per_engine": "0.5",
    "placement.cpus_per_learner": "0.5",
    "train.logprob_chunk_tokens": "1024",
    "train.skip_zero_advantages": "true",
    "weights.bucket_mib": "256",
    "weights.num_buffers": "1",
    "weights.page_lock": "true wherever CUDA can",
    "weights.canary_bound": "0.05, and 1 in bfloat16",
}
"""Key of before -> what it is now."""


def explain_moved(key: str, value: Any) -> Iterator[str]:
    """Yield what became of `key`, or of the keys of such a section as `ppo`; nothing for others."""
    if key in _MOVED:
        new, form = _MOVED[key]
        how = f"set {new}={form.format(_text(value))} instead"
        if value is None:  # the default of checkpoint.every alone is not null
            how = f"set {new}=null, or epochs or seconds alone" if key == "checkpoint.every_steps" else "leave it out"
        yield f"{key} is now {new}: {how}."
    elif key in _REMOVED:
        yield f"{key} is no key any more, but always {_REMOVED[key]}. Leave it out."
    elif isinstance(value, Mapping):
        for inner, own in value.items():
            yield from explain_moved(f"{key}.{inner}", own)


def _text(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value
