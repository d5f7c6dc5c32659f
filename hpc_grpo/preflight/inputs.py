"""Check a run's inputs, and the disk for its files, before the run starts.

A job with a wrong input would wait in the queue for hours before it fails, and `train` would bring Ray up first.
`submit` and `train` refuse such a run (`refusals`), and the doctor prints findings (`input_findings`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from inspect import Parameter
from itertools import chain, islice
from math import inf
from pathlib import Path
from typing import Any

from hpc_grpo.config import Config, LaunchConfig, SourceConfig
from hpc_grpo.config.resources import check_fits, expects_gpus, node_demand
from hpc_grpo.data import encoder, tokenizer
from hpc_grpo.data.fingerprint import local_fingerprints
from hpc_grpo.data.sources import open_source, read_items
from hpc_grpo.data.stream import reward_fields
from hpc_grpo.episodes.builtin import check_built_in
from hpc_grpo.episodes.workers import first_answer
from hpc_grpo.errors import ConfigError
from hpc_grpo.grading.worker import Call, arguments_of
from hpc_grpo.launch.environment import expand, filtered, job_environ
from hpc_grpo.launch.freeze import is_over, refuse_other_config, refuse_secrets, refuse_sweep, working_dir
from hpc_grpo.launch.place.slurm.partition import refuse_what_cannot_start
from hpc_grpo.metrics.evals import share_interval
from hpc_grpo.plan.disk import DiskBudget, read_disk
from hpc_grpo.plan.fit import plan_of
from hpc_grpo.plan.memory import GH200
from hpc_grpo.preflight.findings import Context, Finding, Findings, failure, guarded, ok, skipped, warning
from hpc_grpo.preflight.prefetch import DATA_FILES, Item, is_generated, is_there, items_of
from hpc_grpo.preflight.user_code import is_importable, signature_in, wrong_function
from hpc_grpo.registry import names_function
from hpc_grpo.rewards import Group
from hpc_grpo.run.adapter import is_adapter, refuse_wrong_lora
from hpc_grpo.run.frozen_config import read_inputs, refuse_changed
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system import hugging_face
from hpc_grpo.system.readable import counted, one_line
from hpc_grpo.system.say import say
from hpc_grpo.types import GIB
from hpc_grpo.weights import contract

MODEL, DATA, INPUTS, DISK, ENVIRONMENTS = "model", "data", "inputs", "disk", "environments"
"""Checks of the doctor."""
_MAX_CHECKED_ROWS = 200_000
"""Checking this many rows takes a second or two, on a login node that other users share."""
_TEXT_ROWS = (".jsonl", ".json")
_FEW_PROMPTS = 8
_HUB_S = 5.0
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_PREFETCH = "hpc-grpo cluster prefetch CONFIG, on a login node"
_MAKE_ROOM = (
    "make room (hpc-grpo disk du, hpc-grpo disk clean RUN), lower checkpoint.keep_last or checkpoint.keep_exports, or "
    "set run.root to a larger file system"
)


def refuse_what_fails(configs: Sequence[Config], *, accepts_changes: bool = False) -> None:
    for error in refusals(configs, accepts_changes=accepts_changes):
        raise error


def refusals(
    configs: Sequence[Config],
    environ: Mapping[str, str] = os.environ,
    *,
    only: str = "",
    accepts_changes: bool = False,
    asks_slurm: bool = True,
) -> Iterator[ConfigError]:
    """Yield the errors that would stop a run at its start, each once. Takes seconds, and runs no code of the user's.

    `configs` are one run's config, or the configs of a sweep, which share `launch` and disk. `only` names one check of
    the doctor; "": all checks. `asks_slurm`: also check the GPUs and the partition of a job to submit.
    """
    # One of each: the runs of a sweep share these inputs.
    unlike = {config.model_dump_json(exclude={"run"}): config for config in configs}
    checks: list[tuple[str, Callable[[], object]]] = []
    for config in configs:
        checks.append(("run folder", RunDir(config.run_path).refuse_unwritable_root))
        checks.append(("run folder", partial(refuse_sweep, config)))
        if (run := RunDir(config.run_path)).has_config():
            # Check this first: relative paths in another run's config start at another folder.
            checks.append(("run folder", partial(refuse_other_config, run, config)))
            checks.append(("run folder", partial(working_dir, run)))
    for config in unlike.values():
        start = start_of(config)
        checks += [
            ("variables", partial(refuse_secrets, config)),
            ("submit options", partial(refuse_missing_python, config.launch)),
            (INPUTS, partial(refuse_missing_environment, config.launch, start)),
            (INPUTS, partial(refuse_missing_notify, config.launch, start)),
            ("paths", partial(refuse_missing_inputs, config, start)),
            ("paths", partial(refuse_offline, config, environ)),
            (MODEL, partial(refuse_unsupported_model, config, start, environ)),
            (INPUTS, partial(refuse_wrong_environments, config)),
            (INPUTS, partial(refuse_unlike_vocabularies, config, start, environ)),
            (INPUTS, partial(refuse_unreadable_data, config, start)),
            (INPUTS, partial(refuse_wrong_share, config, start)),
            (INPUTS, partial(refuse_wrong_rewards, config, start)),
        ]
    checks += [(INPUTS, partial(refuse_changed_inputs, config, accepts_changes)) for config in configs]
    if asks_slurm:
        checks += [(INPUTS, partial(refuse_too_few_gpus, config)) for config in unlike.values()]
        checks.append(("partition", partial(refuse_what_cannot_start, configs[0].launch)))
    checks.append((DISK, partial(refuse_full_disk, configs, environ)))
    checks += [(MODEL, partial(refuse_incomplete_models, config, start_of(config))) for config in unlike.values()]
    said = set()
    for check, refuse in checks:
        try:
            if only in ("", check):
                refuse()
        except ConfigError as error:
            if str(error) not in said:
                said.add(str(error))
                yield error


def input_findings(context: Context) -> Findings:
    """Return the doctor's findings about the job's inputs and its disk."""
    judges: dict[str, Callable[[Config, Context], Finding]] = {
        MODEL: model_finding,
        DATA: data_finding,
        INPUTS: other_inputs_finding,
        ENVIRONMENTS: environments_finding,
        DISK: disk_finding,
    }
    config = context.config
    if config is None:
        return dict.fromkeys(judges, skipped(context.why_no_config))
    slow = {ENVIRONMENTS: 120.0}  # the imports of one alone may take 10 s
    return {check: guarded(partial(judge, config, context), slow.get(check, 12.0)) for check, judge in judges.items()}


def model_finding(config: Config, context: Context) -> Finding:
    """Check that `model.path` is a model's folder, or in the cache that the job will use."""
    environ = context.job_environ
    if missing := _missing_paths(config, "model."):
        return failure(missing, "set model.path to the folder of a model")
    try:
        folder = hugging_face.find_model(config.model.path, environ).absolute()
    except ConfigError:
        return _not_cached(config.model.path, hugging_face.hub_cache(environ), environ)
    if not is_there(Path(config.model.path)) and not (any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))):
        return failure(f"{folder} has a config.json but no weights", _PREFETCH)
    for error in refusals([config], context.environ, only=MODEL):
        return failure(str(error), "correct what the error names")
    return ok(f"{config.model.path} is in {folder}" if str(folder) != config.model.path else f"{folder}")


def data_finding(config: Config, context: Context) -> Finding:
    """Check that the config's data sets are files, folders, or in the job's cache."""
    environ = context.job_environ
    if missing := _missing_paths(config, "data."):
        return failure(missing, "set data.train.path and data.eval.path")
    items = [item for item in items_of(config, Path.cwd()) if item.source is not None]
    if to_fetch := [item.name for item in items if not _is_here(item, environ)]:
        return _not_cached(" and ".join(to_fetch), hugging_face.datasets_cache(environ), environ)
    places = ((Path.cwd() / item.name, item.name) for item in items)
    return ok(", ".join(dict.fromkeys(str(place) if is_there(place) else name for place, name in places)))


def other_inputs_finding(config: Config, context: Context) -> Finding:
    """Check the other reasons for which `submit` would refuse: programs, rows of the data, GPUs of a node."""
    errors = [says for key, says in missing_inputs(config, Path.cwd()) if not key.startswith(("model.", "data."))]
    errors += map(str, refusals([config], context.environ, only=INPUTS))
    return failure("\n".join(errors), "correct what the error names") if errors else ok("nothing is missing")


def environments_finding(config: Config, context: Context) -> Finding:
    """Begin and end an episode of each environment, with the first row of its source."""
    if not config.environments:
        return skipped("the run has none")
    if not _has_this_python(config.launch):
        return skipped("the job has another Python")
    if data_finding(config, context).status != "ok":
        return skipped("fix first: data")
    errors: dict[str, None] = {}
    for key, (source, environment) in config.environments.items():
        try:
            item = next(read_items(source), {})
            encoder.check_item(source, item, 0)
            row = json.loads(encoder.as_json(source, item, 0))
            first_answer(key, environment, reward_fields(row, source.answer_field))
        except ConfigError as error:
            errors[str(error)] = None
    began = ", ".join(dict.fromkeys(environment.name for _, environment in config.environments.values()))
    fix = "correct the environment, environment.args or the row"
    return failure("\n".join(errors), fix) if errors else ok(f"{began}: an episode began")


def disk_finding(config: Config, context: Context) -> Finding:
    """Check that there is room for the run below run.root: a full disk or quota stops a run in the middle of a job."""
    try:
        disk = _disk([config], context.environ)
    except ConfigError as error:
        return failure(str(error), _MAKE_ROOM)
    if disk is None:
        return skipped("the model is not on this machine, or hpc-grpo plan does not support it")
    return judged_disk(disk)


def judged_disk(disk: DiskBudget) -> Finding:
    """Return a failure if the certain part of a run's files does not fit, a warning if the upper estimate does not."""
    room = f"{disk.room.num_bytes / GIB:,.0f} GiB {disk.room.limit} in {disk.folder}"
    says = f"up to {disk.num_bytes / GIB:,.0f} GiB of {room}"
    if disk.is_too_large:
        return failure(f"the run keeps {_sure(disk)}", _MAKE_ROOM)
    if not disk.fits:
        return warning(f"{says}, if completions get long", _MAKE_ROOM)
    if disk.room.num_files is not None and disk.num_files > disk.room.num_files:
        says = f"the run makes about {disk.num_files:,} files, and {disk.room.num_files:,} files are"
        return warning(f"{says} {disk.room.files_limit} in {disk.folder}", _MAKE_ROOM)
    return ok(says)


def refuse_full_disk(configs: Sequence[Config], environ: Mapping[str, str]) -> None:
    """Raise ConfigError if the checkpoints and exports of all runs would not fit on the disk.

    Also raises ConfigError if the disk does not report its free space. Skips runs whose model is not on this machine.
    """
    disk = _disk(configs, environ)
    if disk is not None and disk.is_too_large:
        keep = "the run keeps" if len(configs) == 1 else f"the {len(configs)} runs keep"
        raise ConfigError(f"run.root = {configs[0].run.root}: {keep} {_sure(disk)}. To continue, {_MAKE_ROOM}.")


def _sure(disk: DiskBudget) -> str:
    parts = ", ".join(f"{part.name} {part.num_bytes / GIB:,.0f} GiB ({part.formula})" for part in disk.sure)
    return f"{parts}, and {disk.room.num_bytes / GIB:,.0f} GiB are {disk.room.limit} in {disk.folder}"


def _disk(configs: Sequence[Config], environ: Mapping[str, str]) -> DiskBudget | None:
    """Return the disk budget of all runs that can be planned; None if no run can.

    Raises ConfigError if the disk does not report its free space.
    """
    plans = []
    for config in configs:
        with suppress(ConfigError):  # the check of the model reports the error
            plans.append(plan_of(config, environ, GH200))
    return read_disk(plans) if plans else None


def refuse_missing_python(launch: LaunchConfig) -> None:
    """Raise ConfigError if a job could not start `launch.python`: the job would end without a successor."""
    if launch.python is not None and shutil.which(launch.python) is None:
        raise ConfigError(
            f"launch.python = {launch.python}: must be an executable file, and is none on this machine. "
            f"Give the Python of an installation on a file system that this machine and the nodes see."
        )


def refuse_wrong_environments(config: Config) -> None:
    """Raise ConfigError for a built-in environment that this Python cannot create, if the job uses this Python."""
    if _has_this_python(config.launch):
        for _, environment in config.environments.values():
            check_built_in(environment)


def _has_this_python(launch: LaunchConfig) -> bool:
    return launch.python is None and launch.container is None and launch.stage.environment is None


def refuse_missing_environment(launch: LaunchConfig, working_dir: Path) -> None:
    """Raise ConfigError if `launch.stage.environment` is neither a virtual environment nor a file."""
    named = launch.stage.environment
    path = working_dir / (named or "")
    if named is not None and not path.is_file() and not (path / "bin" / "python").exists():
        raise ConfigError(
            f"launch.stage.environment = {named}: {path} must be the folder of a virtual environment, with bin/python, "
            f"or an image of one (mksquashfs ENVIRONMENT FILE.squashfs). Give one that this machine and the nodes see."
        )


def refuse_missing_notify(launch: LaunchConfig, working_dir: Path) -> None:
    """Raise ConfigError if `launch.notify` names a file that is no program.

    Does not check a name without a folder, or a path with `~`: the nodes may have other programs and another home.
    """
    program = launch.notify[0] if launch.notify else ""
    if "/" in program and not program.startswith("~") and shutil.which(working_dir / program) is None:
        raise ConfigError(
            f"launch.notify = {launch.notify}: {working_dir / program} must be an executable file, and is "
            f"none. Give a program on a file system that the nodes see, or a name that is on their PATH."
        )


def refuse_missing_inputs(config: Config, working_dir: Path, *, only_functions: bool = False) -> None:
    """Raise a ConfigError that lists the config's missing paths. `only_functions`: list only the paths of functions."""
    missing = list(missing_inputs(config, working_dir))
    if listed := "\n".join(f"  {says}" for key, says in missing if not only_functions or key in _functions(config)):
        raise ConfigError(
            f"The run would not find what its config names:\n{listed}\n"
            f"Give paths that exist; relative ones are relative to {working_dir}."
        )


def to_fetch(config: Config, environ: Mapping[str, str]) -> list[Item]:
    """List the models and data sets of the hub that are not in the cache of the job."""
    of_job = job_environ(environ, config.launch.env)
    return [item for item in _items(config, start_of(config)) if not _is_here(item, of_job)]


def refuse_offline(config: Config, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if an offline job would lack a model or a data set.

    Skips the check if the job's cache is unknown here: launch.env uses an unset variable, or launch.setup_lines or
    launch.modules are set.
    """
    of_job = job_environ(environ, config.launch.env)
    launch = config.launch
    values = (expand(value, environ) for value in launch.env.values())
    is_known = not (launch.setup_lines or launch.modules or any("$" in value for value in values))
    if is_known and hugging_face.is_offline(of_job) and (items := to_fetch(config, environ)):
        raise ConfigError(
            f"{', '.join(map(str, items))}: not in the cache {hugging_face.hub_cache(of_job)}, and the job is offline. "
            f"Run {_PREFETCH}, or give paths that exist."
        )


def refuse_unknown_models(config: Config, environ: Mapping[str, str]) -> None:
    """Raise ConfigError for a model that the hub does not know. Skips the check if the hub does not answer."""
    of_job = job_environ(environ, config.launch.env)
    # not this process's HF_HOME
    file = Path(of_job.get("HF_TOKEN_PATH") or hugging_face.home(of_job) / "token").expanduser()
    for item in () if hugging_face.is_offline(of_job) else to_fetch(config, environ):
        if item.source is not None:
            continue
        try:
            from huggingface_hub import HfApi

            token = of_job.get("HF_TOKEN") or (file.read_text().strip() if file.is_file() else None)
            HfApi(of_job.get("HF_ENDPOINT"), token).model_info(item.name, timeout=_HUB_S)
        except Exception as error:  # an unreadable token, or whatever the library's HTTP client raises
            if type(error).__name__ != "RepositoryNotFoundError":
                say(f"{item} is not in the cache, and could not be looked up on the hub: {one_line(str(error), 120)}")
                continue
            raise ConfigError(
                f"{item}: there is no such folder, and the hub has no model of this name, or none for your token. "
                f"Check the spelling. For a private model, export HF_TOKEN or log in with `hf auth login`."
            ) from error


def _is_here(item: Item, environ: Mapping[str, str]) -> bool:
    """Return whether an item is a path, is generated, or is in the cache of `environ`."""
    if item.is_local or item.source is not None:
        return item.is_local or any(map(Path.is_dir, hugging_face.dataset_folders(item.name, environ)))
    with suppress(ConfigError):
        return bool(hugging_face.find_model(item.name, environ))
    return False


def _model_folders(config: Config, working_dir: Path, environ: Mapping[str, str]) -> dict[str, Path]:
    """Map the keys of the models that are on this machine to their folders."""
    found = {}
    for key, path in config.models.items():
        name = str(working_dir / path) if is_there(working_dir / path) else path
        with suppress(ConfigError):
            found[key] = hugging_face.find_model(name, job_environ(environ, config.launch.env))
    return found


def refuse_unsupported_model(config: Config, working_dir: Path, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if learners could not load a model, or not publish its weights to engines.

    Does not check a model that is not on this machine.
    """
    for key, folder in _model_folders(config, working_dir, environ).items():
        path = config.models[key]
        settings = hugging_face.read_settings(folder)
        of_text, source = settings.get("text_config") or settings, f"{key} = {path}"
        contract.refuse_uneven_heads(settings, config.train.sequence_parallel, source)
        contract.refuse_short_context(of_text.get("max_position_embeddings"), config, source)
        contract.refuse_long_rope(of_text, config, source)
        contract.refuse_scaled_logits(of_text, source)
        if key != "model.path":
            continue
        contract.refuse_images(settings, path, config.data.images)
        tokenizer.refuse_missing_processor(config, folder)
        if config.needs.rollouts or config.lora is not None:
            contract.refuse_experts(settings, path, has_adapter=config.lora is not None)
        contract.refuse_wrong_experts(settings, path, config)
        refuse_wrong_lora(config, folder, working_dir)


def refuse_incomplete_models(config: Config, working_dir: Path) -> None:
    """Raise ConfigError for a model's local folder without whole weights or, but for a critic, a tokenizer."""
    for key, path in config.models.items():
        if is_there(folder := working_dir / path):
            if "transformers_weights" not in hugging_face.read_settings(folder):  # it names another file
                hugging_face.check_weights(folder, is_local=True)
            if key != "task.args.critic":
                tokenizer.refuse_missing_tokenizer(key, str(folder))


def refuse_unlike_vocabularies(config: Config, working_dir: Path, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if the tokenizer.json of a reference or teacher has another vocabulary than the model's.

    Does not check models that are not on this machine, and tokenizers in other files. The driver checks them.
    """
    if not config.scoring_models:
        return
    found = {key: tokenizer.read_vocabulary(own) for key, own in _model_folders(config, working_dir, environ).items()}
    for key in config.scoring_models:
        own, others = found.get("model.path"), found.get(key)
        if own is not None and others is not None:
            tokenizer.compare_vocabularies(config, key, own, others)


def refuse_unreadable_data(config: Config, working_dir: Path) -> None:
    """Raise ConfigError for an empty data set, a model's folder, a file or folder without rows, or a bad row.

    Checks rows of .jsonl and .json files, at most `_MAX_CHECKED_ROWS` of a file. The job checks the other rows, and
    lengths in tokens.
    """
    for source, place in _sources(config, working_dir):
        if place is None:
            continue
        if place.is_dir() and hugging_face.weight_files(place):
            raise ConfigError(f"Data set {place} is the folder of a model. Give a file, or the folder of a data set.")
        open_source(source)  # the types of files
        if place.is_file() and place.suffix in _TEXT_ROWS:
            number = -1
            for number, row in enumerate(islice(read_items(source), _MAX_CHECKED_ROWS)):
                encoder.check_item(source, row, number, config.data.images)
                encoder.with_messages(source, row, number)
                if config.needs.labels:
                    encoder.completion_text(source, row, number)
            if number < 0:
                raise ConfigError(f"Data set {place} is empty. It must hold at least one item.")


def refuse_wrong_share(config: Config, working_dir: Path) -> None:
    """Raise ConfigError if evals hold out none or all of the prompts. Does not check data that is not readable here."""
    if hashes := _hashes_to_split(config, working_dir):
        encoder.refuse_share(config.data.held_out or 0.0, hashes)


def small_evals(config: Config) -> Iterator[str]:
    """Yield a warning for each eval set with so few prompts that its pass@1 says little.

    The size is a file's number of rows, or `max_items` of other data. Skips sets of unknown size.
    """
    start, data = start_of(config), config.data
    sizes: dict[str, float] = {}
    for name in data.eval_sources if config.eval.every is not None else ():
        key = f"data.eval_sets.{name}" if name else "data.eval"
        sizes[key] = sum(
            _few(partial(read_items, source)) if has_rows(place) else source.max_items or inf
            for source, place in _sources(config, start, f"{key}.")
        )
    if hashes := _hashes_to_split(config, start):
        below = encoder.held_out_below(data.held_out or 0.0)
        sizes["data.held_out"] = _few(lambda: (each for each in hashes if each < below))
    for key, num_prompts in sizes.items():
        if num_prompts < _FEW_PROMPTS:
            half_solved = ([float(each % 2) for each in range(number)] for number in (int(num_prompts), 100))
            widths = [high - low for low, high in map(share_interval, half_solved)]
            yield (
                f"{key} has {counted(int(num_prompts), 'prompt')}: the 95% interval of its pass@1 can be "
                f"{widths[0]:.2f} wide. With 100 prompts it is at most {widths[1]:.2f}."
            )


def _hashes_to_split(config: Config, working_dir: Path) -> Iterator[int] | None:
    """Return hashes of data.train's prompts if evals hold out a share and all rows can be read here, else None."""
    is_split = config.eval.every is not None and config.data.held_out is not None and config.data.images is None
    sources = [*_sources(config, working_dir, "data.train.")]
    is_known = is_split and all(has_rows(place) for _, place in sources)
    return chain.from_iterable(encoder.prompt_hashes(source) for source, _ in sources) if is_known else None


def has_rows(place: Path | None) -> bool:
    """Return whether `place` is a file whose rows can be read here. A login node may lack pyarrow."""
    suffixes = DATA_FILES if find_spec("pyarrow") else _TEXT_ROWS
    return place is not None and place.suffix in suffixes and place.is_file()


def _few(rows: Callable[[], Iterator[object]]) -> float:
    """Count up to `_FEW_PROMPTS` rows. Return inf for none, and for rows that cannot be read."""
    with suppress(ConfigError):  # another check reports the error
        return sum(1 for _ in islice(rows(), _FEW_PROMPTS)) or inf
    return inf


def refuse_wrong_rewards(config: Config, working_dir: Path) -> None:
    """Raise ConfigError if a user's reward function does not accept the columns of its data. Does not call it.

    If the columns are unknown here, assumes the names of the function's parameters.
    """
    for source, place in _sources(config, working_dir) if config.needs.rollouts else ():
        is_read = place is not None and place.is_file() and place.suffix in _TEXT_ROWS
        row: Mapping[str, Any] | None = next(read_items(source), None) if is_read else None
        try:
            row = row and reward_fields(row, source.answer_field)
        except KeyError:  # `refuse_unreadable_data` names the missing column
            continue
        for reward in config.rewards_of(source):
            if signature := signature_in(working_dir, reward.name):
                if row is None:
                    named = [name for name, each in signature.parameters.items() if each.kind in _BY_NAME]
                    fields: Mapping[str, Any] = dict.fromkeys(named)
                else:
                    fields = {**row, "images": None} if config.data.images else row
                call = Call(reward.name, reward.args, Group("", ("",), fields))
                called = arguments_of(signature, call, are_guessed=row is None)
                if isinstance(called, str):
                    raise ConfigError(f"Reward {reward.name!r} {called}")


def start_of(config: Config) -> Path:
    """Return the folder that relative paths of the config are relative to."""
    run = RunDir(config.run_path)
    with suppress(ConfigError):  # another check reports the error
        if run.has_config() and (folder := working_dir(run)).is_dir():
            return folder
    return Path.cwd()  # like `freeze`


def refuse_changed_inputs(config: Config, accepts_changes: bool) -> None:
    """Raise ConfigError, like the run's driver, if local data or functions changed since the run started."""
    run = RunDir(config.run_path)
    if not (accepts_changes or is_over(run, config)) and read_inputs(run).fingerprints:
        refuse_changed(run, local_fingerprints(config, start_of(config)))


def refuse_too_few_gpus(config: Config) -> None:
    """Raise ConfigError if a node of the job could not hold its learners and engines.

    Does not check GPUs requested by `launch.slurm.extra`, GPUs of whole nodes, and CPUs, which Slurm rounds up to
    cores.
    """
    slurm = config.launch.slurm
    if not expects_gpus(config) or slurm.has_other_gpus:
        return
    demand = node_demand(config, with_gpus=True)
    if slurm.gpus_per_node:
        place = f"launch.slurm.gpus_per_node = {slurm.gpus_per_node}: a node of the job"
        check_fits(config, place, demand, num_gpus=slurm.gpus_per_node, num_cpus=inf)
    elif config.model.device == "cuda":
        raise ConfigError(
            f"model.device = cuda, but launch.slurm.gpus_per_node = 0 asks Slurm for no GPUs. Learners and engines of "
            f"a node need {demand.num_gpus}: set launch.slurm.gpus_per_node to that. If your site gives whole nodes "
            f"with all GPUs, set launch.slurm.extra.exclusive=true. To use CPUs, set model.device=cpu."
        )


def _missing_paths(config: Config, section: str) -> str:
    """Return the missing paths of one section of the config in one line; "" if all exist."""
    return "; ".join(says for key, says in missing_inputs(config, Path.cwd()) if key.startswith(section))


def _not_cached(name: str, cache: Path, environ: Mapping[str, str]) -> Finding:
    says = f"no such path, and not in the cache {cache}: {name}"
    if hugging_face.is_offline(environ):
        return failure(f"{says}, and the job is offline", _PREFETCH)
    return warning(f"{says}: the job will download it", _PREFETCH)


def missing_inputs(config: Config, working_dir: Path) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for each path of the config that is missing below `working_dir`.

    Does not check names on the Hugging Face hub, modules of another Python, and modules if the job's PYTHONPATH uses an
    unset variable.
    """
    for key, name, path in _local_paths(config, working_dir):
        place = working_dir / path
        if not is_there(place):
            is_one = key == "model.path" and is_adapter(f"{place.parent}")
            fix = f": set model.adapter={name}, and model.path to its base" if is_one else ""
            yield key, f"{key} = {name}: there is no {place}{fix}"
        elif place.suffix == ".py" and (wrong := wrong_function(place, name.rpartition(":")[2])):
            yield key, f"{key} = {name}: {wrong}"
    launch = config.launch
    python_path = filtered(os.environ, launch.pass_env, launch.env).get("PYTHONPATH", "")
    if _has_this_python(launch) and "$" not in python_path:
        folders = [str(working_dir / each) for each in ("", *python_path.split(os.pathsep))]
        made = {item.key: item.name for item in _items(config, working_dir) if names_function(item.name)}
        for key, name in (_functions(config) | made).items():
            module, _, _ = name.rpartition(":")
            place = working_dir / f"{module.replace('.', '/')}.py"
            if not module or module.endswith(".py"):
                continue
            if not is_importable(module, folders):
                yield key, f"{key} = {name}: there is no {place}, and no module {module} in {sys.executable}"
            elif place.is_file() and (wrong := wrong_function(place, name.rpartition(":")[2])):
                yield key, f"{key} = {name}: {wrong}"


def _local_paths(config: Config, working_dir: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (key, value, the path that must exist) for each local path of the config."""
    for item in _items(config, working_dir):
        if item.is_local:
            path, _, _ = item.name.rpartition(":") if is_generated(item.name) else (item.name, "", "")
            if path.endswith(".py") or not is_generated(item.name):
                yield item.key, item.name, path if item.source else f"{path}/config.json"
    for key, name in config.data.chat_templates.items():
        yield key, name, name
    for key, name in _functions(config).items():
        file, _, _ = name.rpartition(":")
        if file.endswith(".py"):
            yield key, name, file


def _functions(config: Config) -> dict[str, str]:
    """Map the keys that may name a function of the user's to their values."""
    if not config.needs.rollouts:
        return config.train.functions
    rewards = {f"{key}.name": reward.name for key, reward in config.rewards_by_key.items()}
    of_sections = config.loss.functions | config.eval.functions | config.train.functions
    return rewards | of_sections | config.environment_functions


def _sources(config: Config, working_dir: Path, of: str = "data.") -> Iterator[tuple[SourceConfig, Path | None]]:
    """Yield each source below the key `of` that the run would read, with its file or folder; None if it has none."""
    for item in _items(config, working_dir):
        if (source := item.source) is not None and item.key.startswith(of):
            place = working_dir / item.name
            is_path = item.is_local and is_there(place)
            yield (source.model_copy(update={"path": str(place)}), place) if is_path else (source, None)


def _items(config: Config, working_dir: Path) -> Iterator[Item]:
    """Yield the model and data that the run would read. Leaves out eval data that the run does not use."""
    for item in items_of(config, working_dir):
        if not item.key.startswith(("data.eval.", "data.eval_sets.")) or config.reads_eval_data:
            yield item
