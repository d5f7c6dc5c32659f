"""The commands `replay` and `export`: load a checkpoint into one learner in this process, without Ray.

`export` writes into the run's folder of exports. Otherwise the run does not change.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_grpo.cli.hub import HubRepository, copy_export
from hpc_grpo.cli.options import JSON, OVERRIDES, RUN, echo, find_run, show
from hpc_grpo.config import Config, with_overrides
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.freeze import working_dir
from hpc_grpo.metrics.reductions import merge
from hpc_grpo.report.card import model_card
from hpc_grpo.run.checkpoint import Checkpoint, valid_checkpoints
from hpc_grpo.run.files import write_atomic, writing
from hpc_grpo.run.frozen_config import read_config
from hpc_grpo.run.paths import RunDir, step_dirs
from hpc_grpo.run.progress import read_metrics, read_state
from hpc_grpo.system.readable import UNKNOWN, table
from hpc_grpo.template.environment import learner_environment, uses_cuda

if TYPE_CHECKING:
    from hpc_grpo.learner.learner import Learner

_OF_THE_STEP = (
    "loss.", "task.args.critic", "task.args.discount", "task.args.gae_lambda", "task.args.value_clip",
    "model.", "train.max_tokens_per_microbatch", "train.share_prompts", "train.attention",
    "train.gradient_checkpointing", "train.num_threads", "run.root", "run.name", "placement.",
)  # fmt: skip
"""Keys whose change has an effect on the replay of a step."""


@click.command("replay")
@RUN
@OVERRIDES
@click.option("--step", type=click.IntRange(1), required=True, metavar="N", help="The step to train again.")
@JSON
def replay(run_name: str, overrides: tuple[str, ...], step: int, as_json: bool) -> None:
    """Train a recorded step again on one learner, without engines, and compare its metrics with those of the run.

    Needs checkpoint.keep_batches in the run. KEY=VALUE changes keys for this step. Another loss, such as
    loss.name=dapo, gets its defaults; loss.kl, loss.entropy_coef and loss.proximal stay. The run does not change.
    """
    run = find_run(run_name)
    config, changed = _prepared(run, overrides, "a replay")
    with redirect_stdout(sys.stderr):  # libraries print to stdout when they are imported or start
        result = train_again(run, step, config, changed)
    show(asdict(result), shown(result, step), as_json)


@click.command()
@RUN
@OVERRIDES
@click.option("--step", type=click.IntRange(0), metavar="N", help="Step of the checkpoint. Default: the newest.")
@click.option("--merged", is_flag=True, help="With lora: write the full model with the merged adapter.")
@click.option(
    "--out",
    "output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Also write the model and its card to this new folder.",
)
@click.option(
    "--push-to-hub", "repository", metavar="ORG/NAME", help="Upload model and card. A new repository is private."
)
@click.option("--public", "is_public", is_flag=True, help="Make a new repository of --push-to-hub public.")
def export(
    run_name: str, overrides: tuple[str, ...], step: int | None, merged: bool, output: Path | None, **hub: Any
) -> None:
    """Write a checkpoint's model in Hugging Face format into the run's folder of exports.

    With lora, writes the adapter in PEFT's format. --out and --push-to-hub add a model card: base model, data, rewards,
    evals, and the command to train the model again. Both options use an existing export of the step.
    The hub's token comes from HF_TOKEN or `hf auth login`.

    KEY=VALUE adapts the config to this machine, such as model.device=cpu.
    """
    run, repository = find_run(run_name), None
    if output is not None and output.exists() and any(output.iterdir()):
        raise ConfigError(f"--out = {output}: the folder must be new or empty. Name another one.")
    if output is not None:
        with writing(output, "Name another folder: --out FOLDER."):
            output.mkdir(parents=True, exist_ok=True)
    if hub["is_public"] and hub["repository"] is None:
        raise ConfigError("--public needs --push-to-hub ORG/NAME. Give both, or leave --public out.")
    if hub["repository"] is not None:
        repository = HubRepository(hub["repository"], is_public=hub["is_public"])
    output = output and output.absolute()
    _, config = _prepared(run, overrides, "an export")
    if merged and config.lora is None:
        raise ConfigError(f"--merged merges the adapter of a run with lora. Run {run.name} has none: leave it out.")
    folder = _export_there(run, step, merged=merged) if output or repository else None
    if folder is None:
        run.refuse_read_only()
        with redirect_stdout(sys.stderr):
            folder = export_checkpoint(run, step, config, merged=merged)
    number = int(folder.name.removeprefix("step_"))
    if output is not None:
        copy_export(folder, output)
        for name, text in model_card(run, folder, number, output.name).items():
            write_atomic(output / name, text)
    if repository is not None:
        card = model_card(run, folder, number, hub["repository"].partition("/")[2])
        echo(repository.upload(folder, card, f"Step {number} of {run.name}"))
    else:
        echo(folder if output is None else output)


def _export_there(run: RunDir, step: int | None, *, merged: bool) -> Path | None:
    """Return an existing export; None if it must be written. Default of `step`: the newest checkpoint or export."""
    exports = step_dirs(run.exports)
    steps = [*exports, *(each.step for each in valid_checkpoints(run, check_hashes=False))]
    folder = exports.get(max(steps, default=0) if step is None else step)
    if folder is None or read_config(run).lora is None:
        return folder
    is_merged = not (folder / "adapter_config.json").is_file()
    return folder if is_merged == merged else None


def _prepared(run: RunDir, overrides: Sequence[str], what: str) -> tuple[Config, Config]:
    """Return the run's config without and with `overrides`. Raises ConfigError for keys without effect in `what`.

    Sets a learner's environment variables, which change numbers: call this before torch is imported. Changes to the
    folder where the run was started, if that folder exists: relative paths in the config start there.
    """
    # The one learner here computes complete rows, also if several learners shared each row.
    config = with_overrides(read_config(run), ["train.sequence_parallel=1"])
    for key, _, _ in (override.partition("=") for override in overrides):
        if key.startswith("loss.advantage"):
            raise ConfigError(
                f"{key} cannot change in {what}: the advantages are in the step's record, because the driver "
                f"computes them before learners get the step. Leave it out."
            )
        if not key.startswith(_OF_THE_STEP):
            raise ConfigError(
                f"{key} cannot change in {what}: it has no effect there. Choose "
                f"{', '.join(f'{key}*' if key[-1] == '.' else key for key in _OF_THE_STEP)}."
            )
    changed = with_overrides(config, _as_in_papers(config, overrides))
    if (started_in := working_dir(run)).is_dir():
        os.chdir(started_in)
    os.environ.update(learner_environment(changed, os.environ, on_gpu=uses_cuda(changed)))
    return config, changed


def _as_in_papers(config: Config, overrides: Sequence[str]) -> list[str]:
    """Return the overrides. Another loss or correction gets its defaults, and keeps the `shared` keys of the run."""
    named = [override.replace("loss.correction.name=", "loss.correction=") for override in overrides]
    names = [override.partition("=")[2] for override in named if override.startswith("loss.name=")]
    if not names:
        return named
    loss = config.model_dump(mode="json")["loss"]
    shared = {key: loss[key] for key in ("proximal", "entropy_coef", "advantage", "kl") if key in loss}
    return [f"loss={json.dumps({'name': names[-1], **shared})}", *named]


@dataclass(frozen=True)
class Replay:
    """The learners' metrics of a step by name: recorded by the run, and replayed by this process.

    In the run, `num_learners` shared the step. The replay began after step `first_step`.
    """

    recorded: Mapping[str, float]
    replayed: Mapping[str, float]
    num_learners: int
    first_step: int


def train_again(run: RunDir, step: int, config: Config, changed: Config) -> Replay:
    """Train `step` again with `changed`. Trains the steps since the last checkpoint before it with `config`.

    Raises ConfigError if the run has no record of one of these steps.
    """
    from hpc_grpo.learner.learner import Learner
    from hpc_grpo.learner.record import read_batches

    start = next((each for each in valid_checkpoints(run, check_hashes=False) if each.step < step), None)
    first_step = start.step if start else 0
    steps = range(first_step + 1, step + 1)
    if missing := [number for number in steps if not run.batches(number).is_dir()]:
        there = ", ".join(map(str, sorted(step_dirs(run.batches(step).parent)))) or "none"
        raise ConfigError(
            f"The batch of step {missing[0]} of run {run.name} was not kept. Kept steps: {there}. To train "
            f"step {step} again, all from step {steps[0]} on are needed: set checkpoint.keep_batches."
        )
    records = {number: read_batches(run.batches(number)) for number in steps}
    recorded = read_metrics(run.metrics).get(step)
    if recorded is None:
        raise ConfigError(f"{run.metrics} has no line of step {step}: there is nothing to compare with.")
    state = read_state(run)
    total_steps = config.optimizer_steps(state.total_steps if state else step)
    learner = Learner(changed, total_optimizer_steps=total_steps)
    if start is not None:
        load_here(learner, start)
    learner.train_by(config)
    for number in steps[:-1]:
        learner.train_step(records[number][0])
    learner.train_by(changed)
    minibatches, num_learners = records[step]
    replayed = merge([learner.train_step(minibatches)])
    return Replay({name: recorded[name] for name in replayed if name in recorded}, replayed, num_learners, first_step)


def export_checkpoint(run: RunDir, step: int | None, config: Config, *, merged: bool = False) -> Path:
    """Write the export of a checkpoint, by default of the newest. Raises ConfigError if `step` has no checkpoint."""
    from hpc_grpo.learner.checkpoint import export_model
    from hpc_grpo.learner.learner import Learner

    found = {each.step: each for each in valid_checkpoints(run, check_hashes=False)}
    if not found:
        raise ConfigError(f"Run {run.name} has no valid checkpoint. A run writes its first one after its first step.")
    if step is not None and step not in found:
        there = ", ".join(map(str, sorted(found)))
        raise ConfigError(f"--step = {step}: run {run.name} has valid checkpoints of these steps: {there}.")
    checkpoint = found[max(found) if step is None else step]
    learner = Learner(config, total_optimizer_steps=1)
    if checkpoint.manifest.world_size > 1 and config.needs.critic:
        if (critic := run.export(checkpoint.step) / "critic").is_dir():
            raise ConfigError(f"{critic} exists, and one learner cannot write it again. Use this export: --out FOLDER.")
        echo(f"The critic is left out: one learner cannot load that of {checkpoint.manifest.world_size}.", err=True)
        learner.parts = [part for part in learner.parts if not part.ds_engines]
    load_here(learner, checkpoint)
    export_model(learner, run.export(checkpoint.step), merged=merged)
    return run.export(checkpoint.step)


def load_here(learner: Learner, checkpoint: Checkpoint) -> None:
    """Load a checkpoint of any number of learners. Converts it in a temporary folder if needed."""
    from hpc_grpo.learner.checkpoint import load_checkpoint, write_universal

    if checkpoint.manifest.world_size == 1:
        load_checkpoint(learner, checkpoint.path)
        return
    with tempfile.TemporaryDirectory(prefix="hpc-grpo-") as folder:
        write_universal(checkpoint.path, Path(folder))
        load_checkpoint(learner, checkpoint.path, Path(folder))


def shown(result: Replay, step: int) -> str:
    """Return a table of the metrics, and a sentence on how far they are apart."""
    rows = [
        (name, f"{result.recorded[name]:.9g}", f"{value:.9g}", f"{value - result.recorded[name]:.3g}")
        if name in result.recorded
        else (name, UNKNOWN, f"{value:.9g}", UNKNOWN)
        for name, value in result.replayed.items()
    ]
    lines = [table(("METRIC", "RECORDED", "REPLAYED", "DIFFERENCE"), rows)]
    if all(result.replayed[name] == value for name, value in result.recorded.items()):
        lines.append(f"Step {step}: all {len(result.recorded)} metrics equal those of the run, to the last bit.")
    elif result.num_learners > 1:
        lines.append(f"The run shared the step among {result.num_learners} learners, which sum in another order.")
    return "\n".join(lines)
