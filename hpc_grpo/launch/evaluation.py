"""The config of an eval apart from training: that of a run, or of a model alone, with what training asks for set aside.

Pure functions of configs; `hpc-grpo eval` and `hpc-grpo sample` start an attempt with what comes out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpc_grpo.config import Config, DataConfig, SourceConfig
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.paths import RunDir

_OF_SOURCE = (
    "prompt_field", "answer_field", "messages_field", "rewards", "template", "preprocessing", "prompt_format",
    "system_prompt", "chat_template", "template_args",
)  # fmt: skip
"""Keys of a training source that hold for other data, too, unless these have their own."""

_ANY_NUMBER_OF_TOKENS = 2**31
_NO_TRAINING: dict[str, Any] = {
    "task": "grpo",
    "loss": {"correction": "none"},
    "ppo": None,
    "distill": None,
    "sft": None,
    "train": {"total_steps": 1, "max_tokens_per_microbatch": _ANY_NUMBER_OF_TOKENS},
}
"""Sections whose rules are about training: no learner, critic or teacher is there to break them."""

_NO_JUDGEMENT: dict[str, Any] = {"name": "length", "args": {"most": _ANY_NUMBER_OF_TOKENS, "unit": "characters"}}
"""A reward that asks for no column and says nothing."""


def config_of_model(path: str, data: str) -> Config:
    """Return the config of a model that no run knows: defaults, with one engine on a node."""
    return Config.model_validate(
        {
            "run": {"name": "eval"},
            "model": {"path": path},
            "data": {"train": {"path": data}},
            "engine": {"engines_per_node": 1},
            "train": {"total_steps": 1},
        }
    )


def eval_config(config: Config, folder: RunDir, model: str, data: Sequence[Mapping[str, Any]] = ()) -> Config:
    """Return the config of an eval of `model`, in `folder`, on `data`: sources, or without any the run's own eval sets.

    The engines and the sampling stay those of `config`. Raises ConfigError where there is nothing to evaluate on.
    """
    values = config.model_dump(mode="json")
    if data:
        of_training = _keys_for_others(config.data.sources(for_eval=False)[0][1])
        sources = [{**of_training, **source} for source in data]
        evaluated = sources[0] if len(sources) == 1 else {"mix": sources}
        values["data"] |= {"eval": evaluated, "held_out": None, "eval_sets": {}}
    if not (values["data"]["eval"] or values["data"]["held_out"] or values["data"]["eval_sets"]):
        raise ConfigError("The run has no eval set (data.eval, data.held_out): name a data set with --data PATH.")
    if not values["data"]["held_out"]:  # nothing else is read of data.train, and its rewards are not asked for
        of_sets = [values["data"]["eval"], *values["data"]["eval_sets"].values()]
        first = next(each for each in of_sets if each)
        values["data"]["train"] = {key: value for key, value in first.items() if key not in _OF_SETS}
    values["data"]["cache_dir"] = str(config.cache_path)
    values["run"] |= {"root": str(folder.path.parent), "name": folder.path.name}
    values["model"]["path"] = model
    values |= _NO_TRAINING
    values["rollout"]["overlong_tokens"] = None
    values["rewards"] = values["rewards"] or [{"name": "correctness"}]  # of SFT and distillation, which need none
    values["eval"] |= {"every_steps": 1, "every_epochs": None, "every_s": None}
    names = [reward["name"] for reward in values["rewards"]]
    if config.eval.reward not in names and not _all_have_rewards(DataConfig.model_validate(values["data"])):
        values["eval"]["reward"] = names[0]
    values["launch"]["notify"] = []
    return Config.model_validate(values)


def sample_config(config: Config, folder: RunDir, model: str, prompts: str, source: str | None) -> Config:
    """Return the config that samples the file `prompts` (with the column `prompt`), with the template of a source.

    Without a name that is the first one of data.train. Raises ConfigError where none has that name.
    """
    sources = {each.name or key: each for key, each in config.data.sources(for_eval=False)}
    chosen = source or next(iter(sources))
    if chosen not in sources:
        raise ConfigError(f"--source = {source!r} must be the name of a source of data.train: {', '.join(sources)}.")
    asked = {
        **_keys_for_others(sources[chosen]),
        "path": prompts,
        "prompt_field": "prompt",
        "answer_field": None,
        "messages_field": None,
        "rewards": None,
    }
    of_eval = eval_config(config, folder, model, [asked])
    values = of_eval.model_dump(mode="json")
    values["rewards"] = [_NO_JUDGEMENT]
    values["eval"] |= {"reward": _NO_JUDGEMENT["name"], "pass_k": [1], "num_samples": 1, "metrics": []}
    values["eval"] |= {"temperature": config.rollout.temperature, "top_p": config.rollout.top_p}
    return Config.model_validate(values)


_OF_SETS = ("num_samples", "pass_k", "temperature", "top_p")


def _all_have_rewards(data: DataConfig) -> bool:
    """Tell whether each source of the eval sets has rewards of its own, so that those of the run judge none."""
    sources = data.sources(for_eval=True) + (data.sources(for_eval=False) if data.held_out is not None else [])
    return all(source.rewards is not None for _, source in sources)


def _keys_for_others(source: SourceConfig) -> dict[str, Any]:
    return {key: value for key, value in source.model_dump(mode="json").items() if key in _OF_SOURCE}
