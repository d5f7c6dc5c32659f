"""`hpc-grpo init`: write a config from the answers to five questions, or from options."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from math import ceil, inf
from pathlib import Path
from typing import Any

import click

from hpc_grpo.cli.options import echo
from hpc_grpo.config import SourceConfig
from hpc_grpo.config.load import load_values
from hpc_grpo.config.yaml_text import write_yaml
from hpc_grpo.data.encoder import held_out_below, prompt_hashes
from hpc_grpo.data.sources import open_source, read_items
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.place.local import LocalPlace
from hpc_grpo.plan.fit import Plan, plan_of
from hpc_grpo.plan.memory import HARDWARE
from hpc_grpo.plan.model import FAMILY, family_model, read_model
from hpc_grpo.preflight.inputs import has_rows, missing_inputs
from hpc_grpo.registry import REWARDS
from hpc_grpo.run.files import write_atomic, writing
from hpc_grpo.system.readable import counted

_PROMPTS = ("question", "prompt", "problem", "instruction", "input", "query")
_ANSWERS = ("answer", "solution", "target", "output", "response", "label")
_COMPARING = ("correctness", "math", "accuracy_reward", "exact", "gsm8k", "multiple_choice", "string_f1")
_BILLIONS = re.compile(r"(\d+(?:\.\d+)?)\s*[bB](?![a-z])")
_EVAL_PROMPTS, _LEAST_STEPS, _MANY_STEPS, _MOST_READ = 8, 20, 100, 10_000
_CPU_MICROBATCH = 1024  # tokens; the longest sequence of a config for CPUs has 640
_SHOWN = """\
# Written by `hpc-grpo init`. `hpc-grpo config {file}` has every key and what it means.
# Evals count a completion as solved if the reward below gives it 1.0 (eval.solved_at) or more.
{yaml}"""


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), default="my_run.yaml", metavar="[FILE]")
@click.option("--model", help="A Hugging Face folder or name, such as Qwen/Qwen2.5-0.5B-Instruct.")
@click.option("--data", help="A .jsonl, .json or .parquet file, or a name on the Hugging Face hub.")
@click.option("--prompt-field", metavar="COLUMN", help="Column of the prompt, if it has no usual name.")
@click.option("--answer-field", metavar="COLUMN", help="Column of the answer, if it has no usual name.")
@click.option("--reward", help="A built-in reward, or your function: my_rewards.py:function. Default: correctness.")
@click.option("--gpus", type=click.IntRange(0), metavar="N", help="GPUs of a node; 0: CPUs. Default: this machine's.")
@click.option("--eval", "eval_set", metavar="FILE|SHARE", help="An eval set, or the share of --data to hold out.")
def init(file: Path, **given: Any) -> None:
    """Write a config, FILE or my_run.yaml: model, data, reward, GPUs and an eval set.

    Asks for missing options. Without a terminal, --model and --data are required.
    """
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"FILE = {file}: the name must end in .yaml or .yml, such as my_run.yaml.")
    if file.exists():
        raise ConfigError(f"{file} exists already. Name another file: hpc-grpo init FILE.")
    missing = [f"--{name}" for name in ("model", "data") if given[name] is None]
    asks = is_asked()
    if missing and not asks:
        raise ConfigError(f"{' and '.join(missing)} must be given: there is no terminal to ask on.")

    def answer(name: str, question: str, default: str | None, kind: Any = str) -> str:
        said = default if given[name] is None else given[name]
        if given[name] is None and asks:
            said = click.prompt(question, default=default, type=kind, err=True)
        # No shell expands the answer to a question, or the ~ of --data=~/rows.jsonl.
        return os.path.expandvars(os.path.expanduser(str(said)))

    model = answer("model", "Model (a Hugging Face folder or name)", "Qwen/Qwen2.5-0.5B-Instruct")
    data = answer("data", "Data (a file, or a name on the hub)", None)
    fields = _fields(data, given["prompt_field"], given["answer_field"])
    hashes = (
        sorted({*islice(prompt_hashes(SourceConfig(path=data, **fields)), _MOST_READ)}) if has_rows(Path(data)) else []
    )
    reward = answer("reward", "Reward (a built-in, or my_rewards.py:function)", "correctness")
    if fields.get("answer_field", "") is None and reward in _COMPARING:
        raise ConfigError(
            f"{data} has no column with the name of an answer ({', '.join(_ANSWERS)}), with which {reward} compares. "
            f"Name it with --answer-field."
        )
    here = str(LocalPlace().node_resources().num_gpus)
    gpus = int(answer("gpus", "GPUs of a node (0: CPUs)", here, click.IntRange(0)))
    eval_set = answer("eval_set", "Eval set (a file, or the share of the data to hold out)", _share(hashes))
    values = _values(file.stem.replace("_", "-"), model, data, fields, reward, eval_set)
    if gpus == 0:
        values["rollout"] = {"prompts_per_step": 8, "group_size": 4, "max_new_tokens": 128}
    values, plan = _fitting(values | _length(values, hashes), gpus)
    REWARDS.check(reward)
    config = load_values(values, (), "This config")  # first: an invalid file would stay
    name = shlex.quote(str(file))
    with writing(file):
        write_atomic(file, _SHOWN.format(file=name, yaml=write_yaml(values)))
    echo(f"Wrote {file}: {_as_text(gpus, values)}")
    if plan is not None and not plan.fits:
        echo(f"The run does not fit: {'; '.join(plan.problems)}. `hpc-grpo plan {name}` says what to change.", err=True)
    for _, says in missing_inputs(config, Path.cwd()):
        echo(f"Not there yet: {says}.", err=True)
    echo(f"Next: hpc-grpo plan {name}; then hpc-grpo train {name}, or hpc-grpo submit {name} on Slurm.")


def is_asked() -> bool:
    return sys.stdin.isatty()


def _values(name: str, model: str, data: str, fields: dict[str, Any], reward: str, eval_set: str) -> dict[str, Any]:
    """Return the config without its length and placement. Raises ConfigError for a number that is no share."""
    try:
        share = float(eval_set.removesuffix("%"))
    except ValueError:
        evals: dict[str, Any] = {"eval": {"path": eval_set, **fields}}
    else:
        if not 0.0 < share < 1.0 or "%" in eval_set:
            raise ConfigError(f"--eval = {eval_set} must be a file, or a share above 0 and below 1, such as 0.05.")
        evals = {"held_out": share}
    return {
        "run": {"name": name},
        "model": {"path": model},
        "data": {"train": {"path": data, **fields}, **evals},
        "rewards": [{"name": reward}],
        "rollout": {"prompts_per_step": 16, "group_size": 8, "max_new_tokens": 512},
    }


def _fields(data: str, prompt: str | None, answer: str | None) -> dict[str, Any]:
    """Return the keys of the columns: those given, else by the first row of a file. Raises ConfigError."""
    source = SourceConfig(path=data)
    open_source(source)  # refuses a file of another type
    if not has_rows(Path(data)):
        return {name: column for name, column in (("prompt_field", prompt), ("answer_field", answer)) if column}
    row: Mapping[str, Any] | None = next(read_items(source), None)
    if row is None:
        raise ConfigError(f"Data set {data} is empty. It must hold at least one item.")
    answer = answer or next((name for name in _ANSWERS if name in row), None)
    if "messages" in row and prompt is None:
        return {"messages_field": "messages", "answer_field": answer}
    prompt = prompt or next((name for name in _PROMPTS if name in row), None)
    if prompt is None:
        raise ConfigError(
            f"{data} has the columns {', '.join(row) or 'none'}, and none has the name of a prompt column "
            f"({', '.join(_PROMPTS)}, messages). Name it with --prompt-field, and the answer's with --answer-field."
        )
    return {"prompt_field": prompt, "answer_field": answer}


def _share(hashes: Sequence[int]) -> str:
    """Return the share that holds out 8 prompts, or a quarter of a tiny set; at least 0.05."""
    last = min(_EVAL_PROMPTS, max(1, len(hashes) // 4)) - 1
    if len(hashes) < 2 or hashes[last] < held_out_below(0.05):
        return "0.05"
    low, high = (number / 2**64 for number in hashes[last : last + 2])
    return str(next(share for digits in range(2, 20) if low < (share := round((low + high) / 2, digits)) < high))


def _length(values: Mapping[str, Any], hashes: Sequence[int]) -> dict[str, Any]:
    """Return the keys of a run's length. A small file gets at least 20 steps and a higher lr. Raises ConfigError."""
    share = values["data"].get("held_out", 0.0)
    num_held = sum(number < held_out_below(share) for number in hashes)
    if share and hashes and not 0 < num_held < len(hashes):
        raise ConfigError(
            f"Evals would hold out {share:g} of {counted(len(hashes), 'prompt')}, which is none of them or all. "
            f"Give a file: --eval FILE. With two or more prompts, another share may work: --eval SHARE."
        )
    steps = (len(hashes) - num_held or inf) / values["rollout"]["prompts_per_step"]
    epochs = max(1, ceil(_LEAST_STEPS / steps))
    lr, every = (1e-6, 20) if epochs * steps >= _MANY_STEPS else (5e-6, 5)
    return {"train": {"total_epochs": epochs, "lr": lr}, "eval": {"every": f"{every} steps"}}


def _fitting(values: dict[str, Any], gpus: int) -> tuple[dict[str, Any], Plan | None]:
    """Add the numbers of learners and engines: the fewest learners that fit the model. One GPU is shared."""
    if gpus == 0:
        model = {**values["model"], "device": "cpu", "dtype": "float32"}
        train = {**values["train"], "max_tokens_per_microbatch": _CPU_MICROBATCH}
        return {**values, "model": model, "train": train, **node_split(1, 1)}, None
    size = _known_size(values["model"]["path"])
    for learners in range(1, max(gpus, 2)):
        chosen = {**values, **node_split(learners, max(1, gpus - learners), colocated=gpus == 1)}
        chosen["launch"] = {"slurm": {"gpus_per_node": gpus}}
        config, plan = load_values(chosen, (), "This config"), None
        with suppress(ConfigError):
            plan = plan_of(config, os.environ, HARDWARE["h100-sxm"], size=size)
        if plan is None or plan.fits:
            break
    return chosen, plan


def node_split(learners: int, engines: int, *, colocated: bool = False) -> dict[str, Any]:
    """Return the config sections of learners and engines. `colocated`: they take turns on one GPU."""
    # The learner's states stay on the GPU, so the engine gets less memory than its default.
    engine = {"engines_per_node": engines, **({"vllm": {"gpu_memory_utilization": 0.4}} if colocated else {})}
    return {"engine": engine, "placement": {"learners_per_node": learners, "colocate": colocated}}


def _known_size(model: str) -> str | None:
    """Return the Qwen2.5 size to plan with for a model that is not on disk, by the billions in its name; else None."""
    with suppress(ConfigError):
        read_model(model, os.environ)
        return None
    found = _BILLIONS.search(model.rpartition("/")[2])
    wanted = float(found[1]) * 1e9 if found else 0.0
    return next((size for size in FAMILY if family_model(size).num_parameters >= 0.9 * wanted), [*FAMILY][-1])


def _as_text(gpus: int, values: Mapping[str, Any]) -> str:
    learners, engines = values["placement"]["learners_per_node"], values["engine"]["engines_per_node"]
    if gpus == 1:
        return "a learner and an engine take turns on the GPU."
    where = f"{gpus} GPUs of a node, planned for 80 GB each" if gpus else "CPUs"
    return f"{counted(learners, 'learner')} and {counted(engines, 'engine')} on {where}."
