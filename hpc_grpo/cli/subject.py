"""Find what `eval` and `sample` look at: the models that RUN|MODEL and its options name, and the config to do it by."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_grpo.cli.options import find_run, runs_root
from hpc_grpo.errors import ConfigError

if TYPE_CHECKING:
    from hpc_grpo.config import Config
    from hpc_grpo.run.paths import RunDir


@dataclass(frozen=True)
class Subject:
    """Holds models by name, the config to look at them by, and the folders to work in and to start from."""

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
    return Subject(config, {Path(target).name: absolute(target)}, runs_root() / "evals", Path.cwd())


def with_others(subject: Subject, targets: Sequence[str]) -> Subject:
    """Add the models of other RUN|MODEL, of a run its newest export, to be looked at by the same config."""
    models = dict(subject.models)
    for target in targets:
        if _is_model(target):
            name, path = Path(target).name, absolute(target)
        else:
            run = _find_run(target)
            ((step, path),) = _of_run(run, (), with_base=False).models.items()
            name = f"{run.path.name}/{step}"
        models[name if name not in models else f"{name}#{len(models) + 1}"] = path
    return replace(subject, models=models)


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
    base = {"base": absolute(config.model.path, started_in)} if with_base else {}
    models = base | {f"step_{step}": str(exports[step]) for step in chosen}
    return Subject(config, models, run.evals, started_in if started_in.is_dir() else Path.cwd())


def _find_run(target: str) -> RunDir:
    try:
        return find_run(target)
    except ConfigError as error:
        raise ConfigError(f"{error} Nor is it a model: a folder with config.json, or a name in the cache.") from error


def _is_model(target: str) -> bool:
    from hpc_grpo.system.hugging_face import find_model

    if (Path(target) / "config.json").is_file():
        return True
    try:
        return target.count("/") == 1 and find_model(target, os.environ).is_dir()
    except ConfigError:
        return False


def absolute(path: str, folder: Path | None = None) -> str:
    """Return the path of something on this disk, a function's file included; other names as they are."""
    file, separator, name = path.rpartition(":") if ".py:" in path else (path, "", "")
    place = (folder or Path.cwd()) / file
    return f"{place}{separator}{name}" if place.exists() else path
