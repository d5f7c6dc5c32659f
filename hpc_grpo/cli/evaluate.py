"""The commands `eval` and `sample`: metrics of a model on eval sets, and its completions of prompts."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from hpc_grpo.cli.chat import converse
from hpc_grpo.cli.options import JSON, SET, echo, echo_json, find_run, runs_root, together
from hpc_grpo.cli.request import load_request
from hpc_grpo.config import Config, SourceConfig, with_overrides
from hpc_grpo.data.sources import open_source
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.freeze import freeze, working_dir
from hpc_grpo.launch.supervisor.attempt import run_attempt
from hpc_grpo.preflight.prefetch import DATA_FILES, is_generated
from hpc_grpo.run import evals
from hpc_grpo.run.adapter import is_adapter
from hpc_grpo.run.contract import EVAL_DRIVER
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.frozen_config import read_config
from hpc_grpo.run.paths import RunDir, step_dirs
from hpc_grpo.system.hugging_face import find_model

_SAID_OTHERWISE = {"run.name": "--root", "run.root": "--root", "model.path": "RUN|MODEL"}

with_options = together(
    click.argument("target", metavar="RUN|MODEL"),
    click.option("--config", "settings_of", metavar="CONFIG", help="With a MODEL: the config to use."),
    click.option(
        "--step", "steps", type=click.IntRange(0), multiple=True, metavar="N",
        help="Use the export of step N; may be repeated. Default: the newest.",
    ),
    click.option("--base", is_flag=True, help="Use the run's initial model; with --step, in addition."),
    click.option("--temperature", type=click.FloatRange(0), metavar="T", help="0: greedy. Default: the config's."),
    click.option(
        "--max-new-tokens", type=click.IntRange(1), metavar="N",
        help="Longest completion, in tokens. Default: the config's.",
    ),
    click.option(
        "--root", "folder", type=click.Path(file_okay=False, path_type=Path),
        help="Write files to this folder instead of the run's.",
    ),
)  # fmt: skip


@click.command("eval")
@with_options
@click.argument("words", nargs=-1, metavar="[RUN|MODEL]... [KEY=VALUE]...")
@click.option(
    "--data", "paths", multiple=True, metavar="PATH",
    help="A data set, as in data.eval.path. Several form a mix. Default: the eval sets of the run.",
)  # fmt: skip
@click.option("--num", "num_samples", type=click.IntRange(1), metavar="N", help="Completions of each prompt.")
@click.option("--max-items", type=click.IntRange(1), metavar="N", help="Only the first N items of each --data.")
@click.option("--out", "output", type=click.Path(dir_okay=False, path_type=Path), help="Write results to FILE as JSON.")
@JSON
def evaluate(
    target: str,
    words: tuple[str, ...],
    paths: tuple[str, ...],
    max_items: int | None,
    output: Path | None,
    as_json: bool,
    folder: Path | None,
    **options: Any,
) -> None:
    """Evaluate a run's exports, or any model's folder: pass@k with 95% intervals, by source.

    The engines, the sampling and the rewards are those of training. KEY=VALUE changes the config for this eval, such as
    data.eval.prompt_field=problem. Further RUN|MODEL use the same config; a RUN stands for its newest export. With
    several models, also shows the difference of each model from the first, on the same prompts.
    """
    output = output and output.absolute()
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--out = {output}: there is no folder {output.parent}. Make it, or name another one.")
    if max_items is not None and not paths:
        raise ConfigError(
            f"--max-items = {max_items} needs --data. To limit the run's own eval set: data.eval.max_items={max_items}."
        )
    subject = find_subject(target, options, data=paths).with_others([word for word in words if "=" not in word])
    data = [{"path": _named_data(path), "max_items": max_items} for path in paths]
    overrides = [word for word in words if "=" in word]
    first = subject.first_model
    eval_dir, code = _evaluate(
        subject, folder, options, overrides, lambda place: evals.eval_config(subject.config, place, first, data)
    )
    if code == 0:
        if as_json:
            echo_json(json.loads((eval_dir.path / evals.RESULT).read_text()))
        else:
            echo((eval_dir.path / evals.ANSWER).read_text(), nl=False)
        if output is not None:
            shutil.copyfile(eval_dir.path / evals.RESULT, output)
        echo(f"Results: {output or eval_dir.path / evals.RESULT}", err=True)
    sys.exit(code)


@click.command()
@with_options
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@SET
@click.option("--num", "num_samples", type=click.IntRange(1), metavar="N", help="Completions of each prompt.")
@click.option(
    "--image", "images", multiple=True, type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    help="An image for every PROMPT; repeat for several images, in order.",
)  # fmt: skip
@click.option("--source", metavar="NAME", help="Use the template of this source of data.train. Default: the first.")
@click.option(
    "--play", type=click.IntRange(1), metavar="N",
    help="Play N episodes in the run's environment, with its first N rows.",
)  # fmt: skip
@click.option("--interactive", is_flag=True, help="Chat in the terminal. This process runs the model, without engines.")
@JSON
def sample(
    target: str,
    prompts: tuple[str, ...],
    sets: tuple[str, ...],
    images: tuple[str, ...],
    source: str | None,
    play: int | None,
    interactive: bool,
    as_json: bool,
    folder: Path | None,
    **options: Any,
) -> None:
    """Show what a run's export, or any model, answers to each PROMPT, or how it plays an environment.

    Prompts get the template and the system prompt of training. --base with --step N shows before and after.
    """
    if [interactive, bool(prompts), play is not None].count(True) != 1:
        raise ConfigError(
            "Give prompts to answer, --interactive for a conversation, or --play N for episodes: one of the three."
        )
    subject = find_subject(target, options, data=("-",))
    if images and not prompts:
        raise ConfigError("--image needs prompts on the command line. Give a PROMPT, or leave --image out.")
    if images and subject.config.data.images is None:
        subject = replace(subject, config=with_overrides(subject.config, ["data.images=image"]))
    column = subject.config.data.images
    if interactive and as_json:
        raise ConfigError("--json does not work with --interactive. Leave one of them out.")
    if interactive and column is not None:
        raise ConfigError("--interactive reads only text. Give prompts on the command line, with --image.")

    def configure(place: RunDir) -> Config:
        file = place.path / "prompts.jsonl"
        if prompts:
            shown = {} if column is None else {column: list(images)}
            file.write_text("".join(json.dumps({**shown, "prompt": prompt}) + "\n" for prompt in prompts))
        return evals.sample_config(subject.config, place, subject.first_model, str(file), source, play)

    if interactive:
        if options["num_samples"] is not None:
            raise ConfigError("--num does not work with --interactive: a conversation continues from one answer.")
        os.chdir(subject.working_dir)
        config = configure(RunDir(subject.folder / "chat"))
        converse(with_overrides(config, [*as_overrides(config, options), *sets]), subject.models)
        return
    eval_dir, code = _evaluate(subject, folder, options, sets, configure, prompts, plays=play is not None)
    if code == 0:
        if as_json:
            said = {model: read_jsonl(evals.completions_file(eval_dir, model)) for model in subject.models}
            echo_json([{"model": model, **line} for model, lines in said.items() for line in lines])
        else:
            echo((eval_dir.path / evals.ANSWER).read_text(), nl=False)
        shutil.rmtree(eval_dir.path)
    sys.exit(code)


@dataclass(frozen=True)
class Subject:
    """What `eval` and `sample` work on: models by name, config, folder for new files, working directory."""

    config: Config
    models: Mapping[str, str]
    folder: Path
    working_dir: Path

    @property
    def first_model(self) -> str:
        return next(iter(self.models.values()))

    def with_others(self, targets: Sequence[str]) -> Subject:
        """Add the models of other RUN|MODEL. A run stands for its newest export."""
        models = dict(self.models)
        for target in targets:
            name, path = Path(target).name, _absolute(target)
            if (run := _run_unless_model(target)) is not None:
                ((step, path),) = _subject_of_run(run, (), with_base=False).models.items()
                name = f"{run.path.name}/{step}"
            models[name if name not in models else f"{name}#{len(models) + 1}"] = path
        return replace(self, models=models)


def find_subject(target: str, options: dict[str, Any], data: Sequence[str]) -> Subject:
    """Return the models that RUN|MODEL names. Removes --config, --step and --base from `options`.

    Raises ConfigError if RUN|MODEL is neither, and for options that do not fit it.
    """
    settings_of, steps, base = (options.pop(key) for key in ("settings_of", "steps", "base"))
    if (run := _run_unless_model(target)) is not None:
        if settings_of is not None:
            raise ConfigError("--config is for a MODEL: a RUN has its own config. Change its keys by KEY=VALUE.")
        return _subject_of_run(run, steps, with_base=base)
    if steps or base:
        raise ConfigError(f"--step and --base are for a RUN, but {target} is a model. Leave them out.")
    if settings_of is not None:
        config = load_request(settings_of, []).config
    elif data:
        config = evals.config_of_model(target, data[0])
    else:
        raise ConfigError(
            "A MODEL has no eval set: give a data set (--data PATH), or a config that has one (--config CONFIG)."
        )
    return Subject(config, {Path(target).name: _absolute(target)}, runs_root() / "evals", Path.cwd())


def _subject_of_run(run: RunDir, steps: Sequence[int], *, with_base: bool) -> Subject:
    config, exports, started_in = read_config(run), step_dirs(run.exports), working_dir(run)
    if missing := [step for step in steps if step not in exports]:
        there = ", ".join(map(str, sorted(exports))) or "none"
        raise ConfigError(
            f"--step = {missing[0]}: run {run.path.name} has exports of these steps: {there}. "
            f"`hpc-grpo model export {run.path} --step N` writes the export of a checkpoint."
        )
    if not exports and not with_base:
        raise ConfigError(
            f"Run {run.path.name} has no export yet. A run writes one when it is complete, and every "
            f"checkpoint.export_every. `hpc-grpo model export {run.path}` writes one from the newest checkpoint. "
            f"--base uses the run's initial model."
        )
    chosen = steps or ([] if with_base else [max(exports)])
    base = {"base": _absolute(config.model.adapter or config.model.path, started_in)} if with_base else {}
    models = base | {f"step_{step}": str(exports[step]) for step in chosen}
    return Subject(config, models, run.evals, started_in if started_in.is_dir() else Path.cwd())


def _run_unless_model(target: str) -> RunDir | None:
    """Return the run that RUN|MODEL names, None for a model. Raises ConfigError if it is neither."""
    is_model = (Path(target) / "config.json").is_file() or is_adapter(target)
    with suppress(ConfigError):
        is_model = is_model or (target.count("/") == 1 and find_model(target).is_dir())
    if is_model:
        return None
    try:
        return find_run(target)
    except ConfigError as error:
        raise ConfigError(f"{error} Nor is it a model: a folder with config.json, or a name in the cache.") from error


def _named_data(path: str) -> str:
    """Return the value of --data for the config. Raises ConfigError for a missing file, or one that is no data set."""
    named = _absolute(path)
    if not is_generated(path) and (path.endswith(DATA_FILES) or path.startswith(("/", ".", "~"))):
        place = Path(os.path.expanduser(path))
        if not place.exists():
            raise ConfigError(f"--data = {path}: there is no {place.absolute()}. Give the path of a data set.")
        named = str(place.absolute())
    if Path(named).is_file():
        open_source(SourceConfig(path=named))  # refuses a file of another type
    return named


def _absolute(path: str, folder: Path | None = None) -> str:
    """Make `path` absolute if it exists, also the file of `file.py:function`. Return other names unchanged."""
    file, separator, name = path.rpartition(":") if ".py:" in path else (path, "", "")
    place = (folder or Path.cwd()) / file
    return f"{place}{separator}{name}" if place.exists() else path


def _evaluate(
    subject: Subject,
    parent: Path | None,
    options: Mapping[str, Any],
    overrides: Sequence[str],
    configure: Callable[[RunDir], Config],
    prompts: Sequence[str] = (),
    *,
    plays: bool = False,
) -> tuple[RunDir, int]:
    """Run an attempt in a new folder, with Ray as for training. Return the folder and the exit code.

    Changes the working directory. The attempt prints to stderr; the caller prints the answer to stdout. Removes the
    folder if the config is refused.
    """
    folder = evals.new_eval_dir(parent or subject.folder)
    os.chdir(subject.working_dir)
    try:
        config = configure(folder)
        for key, instead in _SAID_OTHERWISE.items():
            if any(override.partition("=")[0] == key for override in overrides):
                raise ConfigError(f"{key} cannot be changed for an eval: {instead} sets it. Leave it out.")
        every = [*as_overrides(config, options), *overrides]
        freeze(with_overrides(config, every), sys.argv, every)
    except ConfigError:
        shutil.rmtree(folder.path)
        if parent is None:
            with suppress(OSError):  # other evals are in it
                folder.path.parent.rmdir()
        raise
    evals.EvalRequest(subject.models, prompts, plays).save(folder)
    with redirect_stdout(sys.stderr):
        code = run_attempt(folder, EVAL_DRIVER, comes_back=True)  # the caller then prints the answer
    if code != 0:
        echo(f"The failed attempt's config and its logs: {folder.path}", err=True)
    return folder, code


def as_overrides(config: Config, options: Mapping[str, Any]) -> list[str]:
    """Return the options as overrides, also for eval sets with their own values."""
    values: dict[str, Any] = {
        "eval.num_samples": options.get("num_samples"),
        "eval.temperature": options.get("temperature"),
        "rollout.max_new_tokens": options.get("max_new_tokens"),
    }
    for name, of_set in config.data.eval_sets.items():  # the options also override values of an eval set
        own = of_set.own_settings.keys()
        values |= {f"data.eval_sets.{name}.{key}": options[key] for key in own if options.get(key) not in (None, ())}
    return [f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None]
