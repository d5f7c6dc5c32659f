"""Config and folder of an eval outside of training, for the driver of `hpc-grpo model eval` and `sample`.

The config is a run's config without training keys, or a config for a model without a run. The folder has the layout of
a run directory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_grpo.config import Config, SourceConfig
from hpc_grpo.config.data import DatasetConfig, EvalSetConfig
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.adapter import with_model
from hpc_grpo.run.files import write_json_atomic
from hpc_grpo.run.owner import PRIVATE_DIR_MODE
from hpc_grpo.run.paths import RunDir, tokenized_data

REQUEST, RESULT, ANSWER = "request.json", "result.json", "answer.txt"
"""Files of the folder that a run directory does not have. ANSWER has the command's output."""

_OF_SOURCE = (
    "prompt_field", "answer_field", "messages_field", "rewards", "environment", "template", "preprocessing",
    "prompt_format", "system_prompt", "template_args",
)  # fmt: skip
"""Keys that other data take from the first training source, unless they set their own."""

_MANY = 2**31
_NO_TRAINING: dict[str, Any] = {
    "task": "grpo",
    "loss": {"correction": "none"},
    "train": {"total_steps": 1, "max_tokens_per_microbatch": _MANY},
}
"""Sections whose rules concern training. An eval has no learner, critic or teacher."""

_NO_JUDGEMENT: dict[str, Any] = {"name": "length", "args": {"most": _MANY, "unit": "characters"}}
"""A placeholder reward that needs no column and always gives the same score."""


@dataclass(frozen=True)
class EvalRequest:
    """`models` maps labels to folders or names. `prompts`: the eval returns only completions; `plays`: episodes."""

    models: Mapping[str, str]
    prompts: Sequence[str] = ()
    plays: bool = False

    def save(self, folder: RunDir) -> None:
        write_json_atomic(folder.path / REQUEST, asdict(self))


def read_request(folder: RunDir) -> EvalRequest:
    """Read the request. Raises ConfigError if it is not there, or damaged."""
    path = folder.path / REQUEST
    try:
        return EvalRequest(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} does not say what to evaluate ({error}): run hpc-grpo model eval.") from error


def completions_file(folder: RunDir, model: str, eval_set: str = "") -> Path:
    """Return the path of a model's graded completions. The set "" is `data.eval` or `data.held_out`."""
    name = f"eval_{eval_set}.jsonl" if eval_set else "eval.jsonl"
    return folder.path / "completions" / model.replace("/", "_") / name


def new_eval_dir(parent: Path) -> RunDir:
    """Make the folder of the next eval below `parent`. Raises ConfigError when it cannot be written."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        number = max((int(path.name) for path in parent.glob("*") if path.name.isdigit()), default=0) + 1
        while True:
            folder = RunDir(parent.absolute() / str(number))
            try:
                folder.path.mkdir(mode=PRIVATE_DIR_MODE)
            except FileExistsError:
                number += 1  # another eval that began at the same time
            else:
                return folder
    except OSError as error:
        raise ConfigError(
            f"{parent} cannot be written ({error.strerror}). Work in another folder: --root FOLDER."
        ) from error


def config_of_model(path: str, data: str) -> Config:
    """Return a config for a model without a run: the defaults, with one engine on a node."""
    sections = {"run": {"name": "eval"}, "model": {"path": path}, "data": {"train": {"path": data}}}
    return Config.model_validate({**sections, "engine": {"engines_per_node": 1}, "train": {"total_steps": 1}})


def eval_config(config: Config, folder: RunDir, model: str, data: Sequence[Mapping[str, Any]] = ()) -> Config:
    """Return the config of an eval of `model`, in `folder`, on the sources in `data`, or on the run's eval sets.

    Keeps the engines and the sampling of `config`. Raises ConfigError if there is no data to evaluate on.
    """
    evaluated_model = with_model(config, model)
    values = evaluated_model.model_dump(mode="json")
    if evaluated_model.lora is not None:  # The values of a run without rollouts lack `lora.publish`.
        values["lora"] = evaluated_model.lora.model_dump(mode="json")
    of_data = values["data"]
    if data:
        of_training = _keys_for_others(config.data.sources(for_eval=False)[0][1])
        named = [{**of_training, **source} for source in data]
        evaluated = named[0] if len(named) == 1 else {"mix": named}
        of_data |= {"eval": evaluated, "held_out": None, "eval_sets": {}}
    sets = [each for each in (of_data["eval"], *of_data["eval_sets"].values()) if each]
    if not sets and not of_data["held_out"]:
        raise ConfigError("The run has no eval set (data.eval, data.held_out): name a data set with --data PATH.")
    if not of_data["held_out"]:  # The eval then does not read data.train: put an eval set in its place.
        own_settings = EvalSetConfig.model_fields.keys() - DatasetConfig.model_fields.keys()
        of_data["train"] = {key: value for key, value in sets[0].items() if key not in own_settings}
    of_data["cache_dir"] = str(tokenized_data(config))
    values |= _NO_TRAINING
    values["run"] |= {"root": str(folder.path.parent), "name": folder.path.name}
    values["rollout"]["overlong_tokens"] = None
    if not (values["rewards"] or config.environments):  # SFT and distillation need none
        values["rewards"] = [{"name": "correctness"}]
    values["eval"] |= {"every": 1}
    values["launch"]["notify"] = []
    return Config.model_validate(values)


def sample_config(
    config: Config, folder: RunDir, model: str, prompts: str, source: str | None, num_played: int | None = None
) -> Config:
    """Return the config that samples the file `prompts` (with the column `prompt`), with the template of a source.

    With `num_played`, play this number of the source's rows in its environment instead. The default source is the first
    of data.train. Raises ConfigError if no source has the given name, or the source has no environment.
    """
    sources = {each.name or key: each for key, each in config.data.sources(for_eval=False)}
    chosen = source or next(iter(sources))
    if chosen not in sources:
        raise ConfigError(f"--source = {source!r} must be the name of a source of data.train: {', '.join(sources)}.")
    if num_played is not None:
        if (sources[chosen].environment or config.environment) is None:
            raise ConfigError(f"--play = {num_played}: {chosen} has no environment. Give prompts instead.")
        rows = sources[chosen].model_dump(mode="json", exclude={"weight", "count"})
        asked = {**rows, "max_items": num_played}
    else:
        of_others = dict.fromkeys(("answer_field", "messages_field", "rewards", "environment"))
        asked = {**_keys_for_others(sources[chosen]), "path": prompts, "prompt_field": "prompt", **of_others}
    values = eval_config(config, folder, model, [asked]).model_dump(mode="json")
    if num_played is None:
        values["rewards"], values["environment"] = [_NO_JUDGEMENT], None
    values["eval"] |= {"reward": None, "num_samples": 1, "metrics": []}
    values["eval"] |= {"temperature": config.rollout.temperature, "top_p": config.rollout.top_p}
    return Config.model_validate(values)


def _keys_for_others(source: SourceConfig) -> dict[str, Any]:
    return source.model_dump(mode="json", include=set(_OF_SOURCE))
