"""The card of an exported model: what was trained, on what, how well, and the command that repeats the training."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hpc_grpo.config import Config, to_yaml
from hpc_grpo.metrics.evals import rows_of
from hpc_grpo.run.files import digest_of, read_record
from hpc_grpo.run.frozen_config import read_config
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_metrics
from hpc_grpo.system.readable import one_line

CARD, CARD_CONFIG = "README.md", "hpc_grpo.yaml"
_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = (".json", ".jsonl", ".parquet", ".arrow", ".py", ".csv")
_ADDRESS = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"]+")
_NO_ADDRESS = "https://left-out.invalid/v1"
_PATH = re.compile(r"(?<![^\s'\"=:,(])(~[^\s/]*|/[^\s'\"/:]+)(/[^\s'\"/:]+)+/?")
"""A path has two names or more: /score is no file."""
_READ = {"system_prompt", "prompt_format", "stop", "template", "pattern"}


def model_card(run: RunDir, export: Path, step: int, name: str) -> dict[str, str]:
    """Return the texts of README.md and of the config, by file name. `name` is the model's; `step` the export's.

    The config has no `launch` and no `metrics`, which describe the site and its accounts, no folder of this disk and no
    address of a server. Raises ConfigError for a run whose config cannot be read.
    """
    config = read_config(run)
    values = config.model_dump(mode="json", exclude={"launch": True, "metrics": True, "run": {"root"}})
    text = to_yaml(_for_others(values))
    source = read_record(run.source, dict) or {}
    folder = Path(source.get("working_dir", "."))
    is_adapter = (export / "adapter_config.json").is_file()
    head = {
        **({"base_model": config.model.path} if _is_on_hub(config.model.path, folder) else {}),
        "datasets": [path for path in _data(config) if _is_on_hub(path, folder)],
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation" if config.data.images is None else "image-text-to-text",
        "tags": ["hpc-grpo", config.task.name.rpartition(":")[2]],
    }
    parts = [
        f"---\n{yaml.safe_dump({key: value for key, value in head.items() if value}, sort_keys=False)}---",
        f"# {one_line(name)}",
        f"{_code(config.model.path)}, trained by {_code(config.task.name)} for {step} steps with hpc-grpo.",
        "## Evaluation",
        _evals(run, step),
        "## Training",
        _table(("what", "value"), _facts(config, source, step, digest_of(text))),
        "## The same again",
        *_again(source, text),
    ]
    return {CARD: "\n\n".join(parts) + "\n", CARD_CONFIG: text}


def _again(source: Mapping[str, Any], text: str) -> list[str]:
    """Return how to repeat the run whose published config is `text`, unless it is a fork."""
    if fork := source.get("forked_from"):
        return [
            f"The run is a fork of another run at step {fork['step']}. {_code(CARD_CONFIG)} is its config since then."
        ]
    needed = f"With the data and functions that {_code(CARD_CONFIG)} names in the working directory"
    if _NO_ADDRESS in text:
        needed += f", and addresses of your own servers in place of {_code(_NO_ADDRESS)}"
    return [f"{needed}:", f"```bash\nhpc-grpo train {CARD_CONFIG}\n```"]


def _facts(config: Config, source: Mapping[str, Any], step: int, digest: str) -> list[tuple[str, str]]:
    git = source.get("git") or {}
    code = [f"hpc-grpo {source.get('version', '')}".strip()]
    code += [f"commit {git['commit']}{', with changes' if git.get('dirty') else ''}"] if git.get("commit") else []
    rewards = [
        f"{_code(reward.name)}{'' if reward.weight == 1.0 else f' (weight {reward.weight:g})'}"
        for reward in config.rewards_by_key.values()
    ]
    rollout = config.rollout
    size = f"{config.items_per_step} items a step"
    if config.needs.rollouts:
        size = f"{rollout.prompts_per_step} prompts a step, {rollout.group_size} completions each"
        size += f" of at most {rollout.max_new_tokens} tokens"
    facts = {
        "base model": _code(config.model.path),
        "data": ", ".join(map(_code, _data(config))),
        "rewards": ", ".join(dict.fromkeys(rewards)),
        "environment": ", ".join(dict.fromkeys(_code(own.name) for _, own in config.environments.values())),
        "steps": f"{step}; {size}",
        "learning rate": f"{config.train.lr:g}, {config.train.schedule}",
        "adapter": "" if config.lora is None else f"LoRA of rank {config.lora.rank}",
        "seed": str(config.run.seed),
        "config digest": _code(digest),
        "code": ", ".join(code),
    }
    return [(name, value) for name, value in facts.items() if value]


def _evals(run: RunDir, step: int) -> str:
    """Return a table of the run's first eval and of its last one up to `step`, with 95% intervals."""
    lines = {number: values for number, values in read_metrics(run.metrics).items() if number <= step}
    evals = [number for number, values in lines.items() if any(name.startswith("eval/") for name in values)]
    if not evals:
        return "The run had no eval."
    shown = list(dict.fromkeys((evals[0], evals[-1])))
    columns = [{name: value for name, value in lines[number].items() if name.startswith("eval/")} for number in shown]
    rows = [(name.removeprefix("eval/"), *cells) for name, *cells in rows_of(columns)]
    return _table(("metric", *(f"after step {number}" if number else "before training" for number in shown)), rows)


def _data(config: Config) -> list[str]:
    return list(dict.fromkeys(source.path for _, source in config.data.sources(for_eval=False)))


def _is_on_hub(path: str, folder: Path) -> bool:
    """Return whether a path of the config can be a name on the hub: no file, and nothing in the run's `folder`."""
    return _ON_HUB.fullmatch(path) is not None and not path.endswith(_FILES) and not (folder / path).exists()


def _for_others(value: Any) -> Any:
    """Return the values without facts about this site. An absolute path keeps its last part, an address is replaced.

    Texts that the policy or a judge reads stay as they are.
    """
    if isinstance(value, str):
        return _PATH.sub(lambda path: Path(path[0]).name, _ADDRESS.sub(_NO_ADDRESS, value))
    if isinstance(value, Mapping):
        kept = _READ | ({"path", "health_path"} if "url" in value else set())  # paths on a server
        return {key: item if key in kept else _for_others(item) for key, item in value.items()}
    return [_for_others(item) for item in value] if isinstance(value, list) else value


def _code(text: str) -> str:
    """Return a text as inline code that its characters cannot end, without facts about this site."""
    return f"`{one_line(_for_others(text)).replace('`', chr(39)).replace('|', '/')}`"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows))
