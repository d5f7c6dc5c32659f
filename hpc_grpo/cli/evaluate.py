"""The commands that look at a model apart from training: its metrics on eval sets, and what it says to a prompt."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_grpo.cli.options import OVERRIDES, SET, echo, find_run, runs_root
from hpc_grpo.errors import ConfigError

if TYPE_CHECKING:
    from hpc_grpo.config import Config
    from hpc_grpo.run.evals import EvalRequest
    from hpc_grpo.run.paths import RunDir

_DRIVER = "hpc_grpo.driver.evaluate"
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
@OVERRIDES
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
    overrides: tuple[str, ...],
    paths: tuple[str, ...],
    max_items: int | None,
    output: Path | None,
    folder: Path | None,
    **options: Any,
) -> None:
    """Evaluate a run's exports, or any model's folder: pass@k with 95% intervals, by source.

    The engines, the sampling and the rewards are those of training. KEY=VALUE changes the config for this eval, such as
    data.eval.prompt_field=problem.
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
    data = [{"path": _absolute(path), "max_items": max_items} for path in paths]
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
@click.argument("prompts", nargs=-1, required=True, metavar="PROMPT...")
@SET
@_CONFIG
@_STEP
@_BASE
@click.option("--num", "num_samples", type=click.IntRange(1), metavar="N", help="Completions of each prompt.")
@click.option("--source", metavar="NAME", help="Take the template of this source of data.train; default: the first.")
@_TEMPERATURE
@_MAX_NEW_TOKENS
@_FOLDER
def sample(
    target: str,
    prompts: tuple[str, ...],
    sets: tuple[str, ...],
    source: str | None,
    folder: Path | None,
    **options: Any,
) -> None:
    """Show what a run's export, or any model, says to each PROMPT.

    A prompt gets the template and the system prompt of training. With --base and --step N: before and after.
    """
    from hpc_grpo.launch.evaluation import sample_config
    from hpc_grpo.run.evals import EvalRequest, new_eval_dir

    subject = find_subject(target, data=("-",), **{key: options.pop(key) for key in ("settings_of", "steps", "base")})
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


@dataclass(frozen=True)
class Subject:
    """What is looked at: models by name, the config to do it by, and the folders to work in and to start from."""

    config: Config
    models: Mapping[str, str]
    folder: Path
    working_dir: Path

    @property
    def first_model(self) -> str:
        return next(iter(self.models.values()))


def find_subject(
    target: str, settings_of: str | None, steps: Sequence[int], base: bool, data: Sequence[str]
) -> Subject:
    """Return what RUN|MODEL names. Raises ConfigError where it is neither, and for options that do not go with it."""
    from hpc_grpo.launch.evaluation import config_of_model

    if not _is_model(target):
        if settings_of is not None:
            raise ConfigError("--config goes with a MODEL: a RUN has its own. Change keys of it by KEY=VALUE.")
        return _of_run(_find_run(target), steps, with_base=base)
    if steps or base:
        raise ConfigError(f"--step and --base go with a RUN, and {target} is a model. Leave them out.")
    if settings_of is not None:
        from hpc_grpo.cli.request import load_request

        config = load_request(settings_of, []).config
    elif data:
        config = config_of_model(target, data[0])
    else:
        raise ConfigError(
            "A MODEL has no eval set: give a data set (--data PATH), or a config that has one (--config CONFIG)."
        )
    return Subject(config, {Path(target).name: _absolute(target)}, runs_root() / "evals", Path.cwd())


def _of_run(run: RunDir, steps: Sequence[int], *, with_base: bool) -> Subject:
    from hpc_grpo.launch.freeze import working_dir
    from hpc_grpo.run.frozen_config import read_config
    from hpc_grpo.run.paths import step_dirs

    config, exports, started_in = read_config(run), step_dirs(run.exports), working_dir(run)
    if missing := [step for step in steps if step not in exports]:
        there = ", ".join(map(str, sorted(exports))) or "none"
        raise ConfigError(
            f"--step = {missing[0]}: run {run.path.name} has exports of these steps: {there}. Of a checkpoint it gets "
            f"one by `hpc-grpo export {run.path} --step N`."
        )
    if not exports and not with_base:
        raise ConfigError(
            f"Run {run.path.name} has no export yet: there is one when it is complete, or as often as "
            f"checkpoint.export_every_steps says. `hpc-grpo export {run.path}` makes one of its newest checkpoint; "
            f"--base looks at the model that it began with."
        )
    chosen = steps or ([] if with_base else [max(exports)])
    base = {"base": _absolute(config.model.path, started_in)} if with_base else {}
    models = base | {f"step_{step}": str(exports[step]) for step in chosen}
    return Subject(config, models, run.evals, started_in if started_in.is_dir() else Path.cwd())


def _find_run(target: str) -> RunDir:
    try:
        return find_run(target)
    except ConfigError as error:
        raise ConfigError(f"{error} Nor is it a model: a folder with config.json, or a name in the cache.") from error


def _is_model(target: str) -> bool:
    from hpc_grpo.data.hugging_face import find_model

    if (Path(target) / "config.json").is_file():
        return True
    try:
        return target.count("/") == 1 and find_model(target, os.environ).is_dir()
    except ConfigError:
        return False


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
        code = run_attempt(folder, _DRIVER)
    if code == 0:
        echo(answer_file(folder).read_text(), nl=False)
    return code


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


def _absolute(path: str, folder: Path | None = None) -> str:
    """Return the path of something on this disk, a function's file included; other names as they are."""
    file, separator, name = path.rpartition(":") if ".py:" in path else (path, "", "")
    place = (folder or Path.cwd()) / file
    return f"{place}{separator}{name}" if place.exists() else path


COMMANDS = (evaluate, sample)
