"""The commands that take a checkpoint up without Ray: to train a recorded step again, or to export its model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from hpc_grpo.cli.options import OVERRIDES, RUN, echo, find_run
from hpc_grpo.errors import ConfigError

if TYPE_CHECKING:
    from hpc_grpo.config import Config
    from hpc_grpo.learner.replay import Replay
    from hpc_grpo.run.paths import RunDir

_OF_THE_STEP = (
    "loss.", "ppo.", "model.", "train.max_tokens_per_microbatch", "train.skip_zero_advantages", "train.share_prompts",
    "train.logprob_chunk_tokens", "train.attention",
    "train.gradient_checkpointing", "train.num_threads", "run.root", "run.name", "placement.",
)  # fmt: skip
_DECIDED_BEFORE = ("loss.advantage",)
_OF_EVERY_LOSS = ("proximal", "entropy_coef", "advantage", "kl")


@click.command("replay")
@RUN
@OVERRIDES
@click.option("--step", type=click.IntRange(1), required=True, metavar="N", help="The step to train again.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: recorded, replayed.")
def replay(run_name: str, overrides: tuple[str, ...], step: int, as_json: bool) -> None:
    """Train a recorded step again on one learner, without engines, and compare its metrics with those of the run.

    Needs checkpoint.keep_batches in the run. KEY=VALUE changes what this step is trained by, such as loss.name=dapo,
    with the settings of its paper. The run stays as it is.
    """
    from hpc_grpo.config import with_overrides
    from hpc_grpo.run.frozen_config import read_config

    run = find_run(run_name)
    config = read_config(run)
    _refuse_others(override.partition("=")[0] for override in overrides)
    changed = with_overrides(config, _as_in_papers(config, overrides))
    _prepare_process(run, changed)
    with redirect_stdout(sys.stderr):  # libraries report there when they are imported, and when they start
        from hpc_grpo.learner.replay import replay as train_again

        result = train_again(run, step, config, changed)
    echo(json.dumps(asdict(result), indent=2) if as_json else shown(result, step))


@click.command()
@RUN
@OVERRIDES
@click.option("--step", type=click.IntRange(0), metavar="N", help="Default: the newest checkpoint.")
def export(run_name: str, overrides: tuple[str, ...], step: int | None) -> None:
    """Write a checkpoint's model in Hugging Face format into the run's folder of exports.

    KEY=VALUE says what differs on this machine, such as model.device=cpu.
    """
    from hpc_grpo.config import with_overrides
    from hpc_grpo.run.frozen_config import read_config

    run = find_run(run_name)
    _refuse_others(override.partition("=")[0] for override in overrides)
    config = with_overrides(read_config(run), overrides)
    _prepare_process(run, config)
    with redirect_stdout(sys.stderr):
        from hpc_grpo.learner.replay import export_checkpoint

        folder = export_checkpoint(run, step, config)
    echo(folder)


def shown(result: Replay, step: int) -> str:
    """Return a table of the metrics, and a sentence on how far they are apart."""
    from hpc_grpo.system.readable import UNKNOWN, table

    rows = []
    for name, value in result.replayed.items():
        recorded = result.recorded.get(name)
        difference = UNKNOWN if recorded is None else f"{value - recorded:.3g}"
        rows.append((name, UNKNOWN if recorded is None else f"{recorded:.9g}", f"{value:.9g}", difference))
    lines = [table(("METRIC", "RECORDED", "REPLAYED", "DIFFERENCE"), rows)]
    if not result.differences:
        lines.append(f"Step {step}: all {len(result.recorded)} metrics are those of the run, to the last bit.")
    elif result.num_learners > 1:
        lines.append(f"The run shared the step among {result.num_learners} learners, which add up in another order.")
    return "\n".join(lines)


def _as_in_papers(config: Config, overrides: Sequence[str]) -> list[str]:
    """Return the overrides, with the settings of another loss or correction from its paper, not from the one before."""
    named = [override.replace("loss.correction.name=", "loss.correction=") for override in overrides]
    names = [override.partition("=")[2] for override in named if override.startswith("loss.name=")]
    if not names:
        return named
    written = config.model_dump(mode="json")["loss"]
    loss = {key: value for key, value in written.items() if key in _OF_EVERY_LOSS}
    return [f"loss={json.dumps({'name': names[-1], **loss})}", *named]


def _refuse_others(changed: Iterable[str]) -> None:
    """Raise ConfigError for keys whose change the replay of a step would not show."""
    for key in changed:
        if key.startswith(_DECIDED_BEFORE):
            raise ConfigError(
                f"{key} cannot change in a replay: the advantages of a step are decided before learners see it, and "
                f"are in its record. Leave it out."
            )
        if not key.startswith(_OF_THE_STEP):
            raise ConfigError(
                f"{key} cannot change in a replay: it would change nothing in a step whose batch and optimizer state "
                f"are recorded. What may: {', '.join(f'{key}*' if key[-1] == '.' else key for key in _OF_THE_STEP)}."
            )


def _prepare_process(run: RunDir, config: Config) -> None:
    """Give this process the folder and the variables of a learner's, before torch is imported: numbers depend on them.

    Relative paths of the config are relative to the folder that the run was started in, while that is there.
    """
    from hpc_grpo.driver.processes import learner_environment, uses_cuda
    from hpc_grpo.launch.freeze import working_dir

    if (started_in := working_dir(run)).is_dir():
        os.chdir(started_in)
    os.environ.update(learner_environment(config, os.environ, on_gpu=uses_cuda(config)))


COMMANDS = (replay, export)
