"""The `hpc-grpo` command. `COMMANDS` says which module has which command: only the one that is called is imported."""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import Any

import click

from hpc_grpo import __version__
from hpc_grpo.cli.options import echo
from hpc_grpo.errors import EXIT_CONFIG, HpcGrpoError
from hpc_grpo.run.owner import keep_others_from_writing
from hpc_grpo.system.processes import write_no_core_dumps

click.UsageError.exit_code = EXIT_CONFIG
"""As of every other mistake of the user's: a fleet must not try a wrong command again."""

COMMANDS = {
    "attempt": ("job.attempt", ""),
    "cancel": ("submit.cancel", "End a run and all its jobs now, without a checkpoint."),
    "clean": ("disk.clean", "Remove older checkpoints and exports of runs."),
    "config": ("check.config", "Print every key of a config, or translate another system's."),
    "demo": ("demo.demo", "Train a small model by GRPO on this machine."),
    "doctor": ("check.doctor", "Check config, Slurm, nodes, network and GPUs before a run."),
    "du": ("disk.du", "Say what runs take on disk."),
    "env": ("check.env", "Show which environment variables reach training, and why."),
    "eval": ("evaluate.evaluate", "Evaluate a run's exports, or any model's folder."),
    "explain": ("status.explain", "Say what became of every attempt of a run."),
    "export": ("replay.export", "Write a checkpoint's model in Hugging Face format."),
    "fleet": ("fleet.fleet", "Train on a fleet of VMs: jobs wait in a database."),
    "grpo": ("grpo.grpo", "Train by GRPO as train_grpo.py does."),
    "host": ("places.host", "Train on hosts that are started by hand."),
    "job-setup": ("job.job_setup", ""),
    "list": ("status.list_runs", "List the runs: name, when they were created, state."),
    "logs": ("status.logs", "Print the end of the driver's log, or of a node's."),
    "plan": ("check.plan", "Add up memory, disk and time of a run before it starts."),
    "pod": ("places.pod", "Train on pods: the same command on each of them."),
    "prefetch": ("check.prefetch", "Fetch model and data on the login node, and verify them."),
    "ray": ("ray.ray", "Run Ray's own command on the Ray of a run."),
    "replay": ("replay.replay", "Train a recorded step again on one learner."),
    "report": ("status.report", "Show what runs have learned: curves, PNG, HTML."),
    "resume": ("submit.resume", "Submit a run again with what its last job asked for."),
    "reward": ("reward.reward", "Try a reward without training."),
    "reward-server": ("reward.reward_server", "Host rewards over HTTP, for the reward `remote`."),
    "sample": ("evaluate.sample", "Show what a run's export, or any model, says to prompts."),
    "shell": ("shell.shell", "Get a shell on a compute node."),
    "simulate": ("simulate.simulate", "Say what a run would take on other nodes."),
    "status": ("status.status", "Say where runs stand: all of them, or those named."),
    "stop": ("submit.stop", "End a run after the step in progress and a checkpoint."),
    "submit": ("submit.submit", "Submit a run as a Slurm job and return."),
    "train": ("train.train", "Train here: on this machine, or in this Slurm allocation."),
    "watch": ("status.watch", "Show a run's progress, alerts, last steps and rollouts."),
}
"""Command -> module and function below this folder, and its line in `hpc-grpo --help`; "" hides it from users."""


class _Group(click.Group):
    """Import a command when it is called. Show an HpcGrpoError as one message, and end with its exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, (_, summary) in COMMANDS.items() if summary]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name][0].partition(".")
        command: click.Command = getattr(import_module(f"hpc_grpo.cli.{module}"), function)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HpcGrpoError as error:
            with contextlib.suppress(OSError):  # a disk that is full changes no exit code
                echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hpc-grpo")
def main() -> None:
    """GRPO post-training of language models as a Slurm job that survives."""
    keep_others_from_writing()
    write_no_core_dumps()
