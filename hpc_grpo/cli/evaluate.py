"""The commands that look at a model apart from training: its metrics on eval sets, and what it says to a prompt."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_grpo.cli.options import SET, echo
from hpc_grpo.cli.subject import Subject, absolute, find_subject, with_others
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.contract import EVAL_DRIVER

if TYPE_CHECKING:
    from hpc_grpo.config import Config
    from hpc_grpo.run.evals import EvalRequest
    from hpc_grpo.run.paths import RunDir

_SAID_OTHERWISE = {"run.name": "--folder", "run.root": "--folder", "model.path": "RUN|MODEL"}

_TARGET = click.argument("target", metavar="RUN|MODEL")
_CONFIG = click.option("--config", "settings_of", metavar="CONFIG", help="For a MODEL: take the settings of a config.")
_STEP = click.option(
    "--step", "steps", type=click.IntRange(0), multiple=True, metavar="N", help="The export of step N; default: newest."
)
_BASE = click.option("--base", is_flag=True, help="The model that the run began with; with --step: that one too.")
_MAX_NEW_TOKENS = click.option("--max-new-tokens", type=click.IntRange(1), metavar="N", help="Longest completion.")
_TEMPERATURE = click.option("--temperature", type=click.FloatRange(0), metavar="T", help="0: greedy.")
_FOLDER = click.option(
    "--folder", type=click.Path(file_okay=False, path_type=Path), help="Work below this folder, not in the run's."
)


@click.command("eval")
@_TARGET
@click.argument("words", nargs=-1, metavar="[RUN|MODEL]... [KEY=VALUE]...")
@click.option(
    "--data", "paths", multiple=True, metavar="PATH",
    help="A data set, as data.eval.path; several: a mix. Default: the eval sets of the run.",
)  # fmt: skip
@_CONFIG
@_STEP
@_BASE
@click.option("--num-samples", type=click.IntRange(1), metavar="N", help="Completions of each prompt.")
@click.option("--pass-k", type=click.IntRange(1), multiple=True, metavar="K", help="Report pass@K too.")
@click.option("--max-items", type=click.IntRange(1), metavar="N", help="Only the first N items of each --data.")
@_TEMPERATURE
@_MAX_NEW_TOKENS
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Put the results there, as JSON.")
@_FOLDER
def evaluate(
    target: str,
    words: tuple[str, ...],
    paths: tuple[str, ...],
    max_items: int | None,
    output: Path | None,
    folder: Path | None,
    **options: Any,
) -> None:
    """Evaluate a run's exports, or any model's folder: pass@k with 95% intervals, by source.

    The engines, the sampling and the rewards are those of training. KEY=VALUE changes the config for this eval, such as
    data.eval.prompt_field=problem. Further RUN|MODEL are evaluated by the same config, a run's newest export; then, and
    with --base or several --step, each one's difference from the first on the same prompts is given too.
    """
    from hpc_grpo.launch.evaluation import eval_config
    from hpc_grpo.run.evals import EvalRequest, new_eval_dir, result_file

    output = output and output.absolute()
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output = {output}: there is no folder {output.parent}. Make it, or name another one.")
    if max_items is not None and not paths:
        raise ConfigError(
            f"--max-items = {max_items} is about --data, and none is given. Of the run's own sets: "
            f"data.eval.max_items={max_items}."
        )
    subject = find_subject(target, data=paths, **{key: options.pop(key) for key in ("settings_of", "steps", "base")})
    subject = with_others(subject, [word for word in words if "=" not in word])
    overrides = [word for word in words if "=" in word]
    data = [{"path": _named_data(path), "max_items": max_items} for path in paths]
    eval_dir = new_eval_dir(folder or subject.folder)
    os.chdir(subject.working_dir)
    with _removed_if_refused(eval_dir):
        config = eval_config(subject.config, eval_dir, subject.first_model, data)
        _freeze(config, [*_as_overrides(config, options), *overrides])
    code = _run(eval_dir, EvalRequest(subject.models))
    if code == 0:
        if output is not None:
            shutil.copyfile(result_file(eval_dir), output)
        echo(f"Results: {output or result_file(eval_dir)}", err=True)
    sys.exit(code)


@click.command()
@_TARGET
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@SET
@_CONFIG
@_STEP
@_BASE
@click.option("--num", "num_samples", type=click.IntRange(1), metavar="N", help="Completions of each prompt.")
@click.option("--source", metavar="NAME", help="Take the template of this source of data.train; default: the first.")
@click.option(
    "--interactive", is_flag=True, help="Take prompts from the terminal, and answer in this process, without engines."
)
@_TEMPERATURE
@_MAX_NEW_TOKENS
@_FOLDER
def sample(
    target: str,
    prompts: tuple[str, ...],
    sets: tuple[str, ...],
    source: str | None,
    interactive: bool,
    folder: Path | None,
    **options: Any,
) -> None:
    """Show what a run's export, or any model, says to each PROMPT.

    A prompt gets the template and the system prompt of training. With --base and --step N: before and after.
    """
    from hpc_grpo.launch.evaluation import sample_config
    from hpc_grpo.run.evals import EvalRequest, new_eval_dir

    if interactive == bool(prompts):
        raise ConfigError("Give prompts to answer, or --interactive for a conversation: one of the two.")
    subject = find_subject(target, data=("-",), **{key: options.pop(key) for key in ("settings_of", "steps", "base")})
    if interactive:
        _converse(subject, source, [*sets], options)
        return
    eval_dir = new_eval_dir(folder or subject.folder)
    file = eval_dir.path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    os.chdir(subject.working_dir)
    with _removed_if_refused(eval_dir):
        config = sample_config(subject.config, eval_dir, subject.first_model, str(file), source)
        _freeze(config, [*_as_overrides(config, options), *sets])
    code = _run(eval_dir, EvalRequest(subject.models, prompts))
    if code == 0:
        shutil.rmtree(eval_dir.path)
    sys.exit(code)


def _converse(subject: Subject, source: str | None, overrides: Sequence[str], options: Mapping[str, Any]) -> None:
    """Answer prompts from the terminal. Raises ConfigError for options that an eval alone has."""
    from hpc_grpo.cli.chat import converse
    from hpc_grpo.config import with_overrides
    from hpc_grpo.launch.evaluation import sample_config
    from hpc_grpo.run.paths import RunDir

    if options.get("num_samples") is not None:
        raise ConfigError("--num is about prompts on the command line: a conversation goes on from one answer.")
    os.chdir(subject.working_dir)
    nowhere = RunDir(subject.folder / "chat")
    config = sample_config(subject.config, nowhere, subject.first_model, "prompts.jsonl", source)
    converse(with_overrides(config, [*_as_overrides(config, options), *overrides]), subject.models)


@contextmanager
def _removed_if_refused(folder: RunDir) -> Iterator[None]:
    """Leave no folder of an eval that was refused before anything began in it."""
    try:
        yield
    except ConfigError:
        shutil.rmtree(folder.path)
        raise


def _freeze(config: Config, overrides: Sequence[str]) -> None:
    from hpc_grpo.config import with_overrides
    from hpc_grpo.launch.freeze import freeze

    for key, instead in _SAID_OTHERWISE.items():
        if any(override.partition("=")[0] == key for override in overrides):
            raise ConfigError(f"{key} cannot be changed for an eval: {instead} says it. Leave it out.")
    freeze(with_overrides(config, overrides), sys.argv, overrides)


def _run(folder: RunDir, request: EvalRequest) -> int:
    """Run an attempt in `folder`, with Ray as for training, and print the answer; return the exit code.

    Stdout gets the answer alone, so that it can be piped; what the attempt has to say goes to stderr.
    """
    from hpc_grpo.launch.supervisor.attempt import run_attempt
    from hpc_grpo.run.evals import answer_file

    request.save(folder)
    with redirect_stdout(sys.stderr):
        code = run_attempt(folder, EVAL_DRIVER, comes_back=True)  # to print the answer
    if code == 0:
        echo(answer_file(folder).read_text(), nl=False)
    else:
        echo(f"What it was to do, and its logs: {folder.path}", err=True)
    return code


def _named_data(path: str) -> str:
    """Return the value of --data for the config. Raises ConfigError for a file or a folder that is not there."""
    from hpc_grpo.preflight.prefetch.items import DATA_FILES, is_generated

    if not is_generated(path) and (path.endswith(DATA_FILES) or path.startswith(("/", ".", "~"))):
        place = Path(path).expanduser()
        if not place.exists():
            raise ConfigError(f"--data = {path}: there is no {place.absolute()}. Give the path of a data set.")
        return str(place.absolute())
    return absolute(path)


def _as_overrides(config: Config, options: Mapping[str, Any]) -> list[str]:
    """Return the options as overrides; of the config's own k, those stay that the number of samples allows."""
    num_samples = options.get("num_samples") or config.eval.num_samples
    pass_k = list(options.get("pass_k") or [k for k in config.eval.pass_k if k <= num_samples])
    values: dict[str, Any] = {
        "eval.num_samples": options.get("num_samples"),
        "eval.pass_k": pass_k,
        "eval.temperature": options.get("temperature"),
        "rollout.max_new_tokens": options.get("max_new_tokens"),
    }
    for name, of_set in config.data.eval_sets.items():  # the options hold for sets with values of their own, too
        own = of_set.own_settings.keys()
        values |= {f"data.eval_sets.{name}.{key}": options[key] for key in own if options.get(key) not in (None, ())}
        if "pass_k" in own and options.get("num_samples") and not options.get("pass_k"):
            values[f"data.eval_sets.{name}.pass_k"] = [k for k in of_set.pass_k or () if k <= num_samples]
    return [f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None]


COMMANDS = (evaluate, sample)
