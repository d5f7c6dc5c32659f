"""The `hpc-grpo` command. `COMMANDS` maps each command to its module, which is imported when the command is called."""

from __future__ import annotations

import contextlib
import errno
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import click

from hpc_grpo import __version__
from hpc_grpo.cli.options import PlainGroup, echo
from hpc_grpo.errors import EXIT_CONFIG, HpcGrpoError, nearest
from hpc_grpo.run.owner import keep_others_from_writing
from hpc_grpo.system.processes import write_no_core_dumps

click.UsageError.exit_code = EXIT_CONFIG
"""The exit code of all user errors: a fleet must not retry a wrong command."""
click.IntRange.name = "integer"
"""Help and errors show this word instead of "integer range"."""

SECTIONS = {
    "Run": ("init", "config", "plan", "train", "submit", "fork", "stop"),
    "Watch": ("status", "watch", "logs", "report", "dashboard", "compare"),
    "Models": ("model", "reward"),
    "Cluster": ("cluster",),
    "Places": ("place",),
    "Disk": ("disk",),
}
"""Heading of `hpc-grpo --help` -> its commands. All others are hidden."""

COMMANDS = {
    "init": ("init.init", "Write a config: asks for model, data, reward, GPUs, eval set."),
    "config": ("check.config", "Show a config's keys, what they mean, what is changed."),
    "plan": ("check.plan", "Memory, disk and time, before a run or on other nodes."),
    "train": ("train.train", "Train here: this machine, or this Slurm allocation."),
    "submit": ("submit.submit", "Submit a run as a Slurm job, or resume a run."),
    "fork": ("train.fork", "Begin a new run from a checkpoint, with other values."),
    "stop": ("submit.stop", "End a run after its step; --now: at once."),
    "status": ("status.status", "Where runs stand; --why: how each attempt ended."),
    "watch": ("status.watch", "All runs or one, live: phase, progress, curves, completions."),
    "logs": ("status.logs", "The end of the driver's log, or of a node's."),
    "report": ("status.report", "What runs have learned: curves, and an HTML page."),
    "dashboard": ("status.dashboard", "All runs in the browser, live."),
    "compare": ("status.compare", "Runs side by side: config, results, paired intervals."),
    "model": ("", "eval, sample, serve, export, replay: a run's model."),
    "model eval": ("evaluate.evaluate", "Evaluate a run's exports, or any model's folder."),
    "model sample": ("evaluate.sample", "Show completions of prompts by a run's export, or any model."),
    "model serve": ("serve.serve", "Serve a run's export, or any model, to OpenAI clients."),
    "model export": ("replay.export", "Write a checkpoint's model in Hugging Face format."),
    "model replay": ("replay.replay", "Train a recorded step again on one learner."),
    "reward": ("reward.reward", "test, score, serve: a reward without training."),
    "cluster": ("", "doctor, prefetch, shell, ray: prepare and look inside."),
    "cluster doctor": ("check.doctor", "Check config, Slurm, nodes, network and GPUs before a run."),
    "cluster prefetch": ("check.prefetch", "Fetch model and data on the login node, and verify them."),
    "cluster shell": ("shell.shell", "Get a shell on a compute node."),
    "cluster ray": ("shell.ray", "Run Ray's own command on the Ray of a run."),
    "place": ("", "pod, host, fleet: train on machines without Slurm."),
    "place pod": ("places.pod", "Train on pods: the same command on each of them."),
    "place host": ("places.host", "Train on hosts that are started by hand."),
    "place fleet": ("fleet.fleet", "Train on a fleet of VMs: jobs wait in a database."),
    "disk": ("", "du, clean: show the disk space of runs, and free it."),
    "disk du": ("disk.du", "Show the disk space that runs take."),
    "disk clean": ("disk.clean", "Remove older checkpoints and exports of runs."),
    "demo": ("demo.demo", "Train a small model by GRPO on this machine."),
    "grpo": ("grpo.grpo", "Train by GRPO, like train_grpo.py."),
    "attempt": ("train.attempt", ""),
    "job-setup": ("train.job_setup", ""),
}
"""Words after `hpc-grpo` -> module and function below this folder, "" for a group, and its line in the help."""

MOVED = {
    "cancel": "stop --now",
    "clean": "disk clean",
    "doctor": "cluster doctor",
    "du": "disk du",
    "env": "config --env",
    "eval": "model eval",
    "explain": "status --why",
    "export": "model export",
    "fleet": "place fleet",
    "host": "place host",
    "list": "status",
    "pod": "place pod",
    "prefetch": "cluster prefetch",
    "ray": "cluster ray",
    "replay": "model replay",
    "resume": "submit",
    "reward-server": "reward serve",
    "sample": "model sample",
    "shell": "cluster shell",
    "simulate": "plan",
}
"""Old name -> what to type now. Old names still work for one release."""

_OTHER_WORDS = {
    "chat": "model sample",
    "evaluate": "model eval",
    "generate": "model sample",
    "help": "--help",
    "run": "train",
    "runs": "status",
    "sbatch": "submit",
    "sweep": "submit --sweep",
}
"""Words of other systems -> what to type."""

MOVED_OPTIONS = {"--num-samples": "--num", "--output": "--out", "--folder": "--root", "--lines": "--num"}
_HAD_THEM = ("model eval", "model sample", "logs", "demo", "place fleet logs")


def up_to_date(words: list[str]) -> list[str]:
    """Return the words of a command line with current names. Print the old names that it replaces."""
    name = words[0] if words else ""
    told = [f"{name} is now {MOVED[name]}"] if name in MOVED else []
    new = [*(MOVED[name].split() if name in MOVED else words[:1]), *words[1:]]
    if " ".join(new).startswith(_HAD_THEM):
        for place, (option, *rest) in enumerate(word.partition("=") for word in new):
            if option in MOVED_OPTIONS:
                told.append(f"{option} is now {MOVED_OPTIONS[option]}")
                new[place] = "".join((MOVED_OPTIONS[option], *rest))
    if told:
        echo(f"hpc-grpo {'; '.join(told)}. The next release removes the old name.", err=True)
    return new


class _Group(PlainGroup):
    """A group that imports each command when it is called. `words` are the words before a command's name."""

    def __init__(self, words: str = "", **settings: Any) -> None:
        super().__init__(**settings)
        self.words = f"{words} " if words else ""

    def list_commands(self, ctx: click.Context) -> list[str]:
        own = [name.removeprefix(self.words) for name in COMMANDS if name.startswith(self.words)]
        return [name for name in own if " " not in name]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (name := f"{self.words}{cmd_name}") not in COMMANDS:
            return None
        target, summary = COMMANDS[name]
        if not target and summary:
            return _Group(name, name=cmd_name, help=summary)
        module, _, function = target.partition(".")
        command: click.Command = getattr(import_module(f"hpc_grpo.cli.{module}"), function)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections = {"Commands": self.list_commands(ctx)} if self.words else SECTIONS
        width = max(len(name) for names in sections.values() for name in names)
        for heading, names in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:{width}}", COMMANDS[f"{self.words}{name}"][1]) for name in names])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not self.words:
            args = up_to_date(args)
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            others = {} if self.words else MOVED | _OTHER_WORDS
            ctx.fail(f"No command {args[0]!r}{nearest(args[0], [*self.list_commands(ctx), *others], others)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            raise _without_option(error) from None
        except click.MissingParameter as error:
            said = "`hpc-grpo init` writes a CONFIG." if error.param and error.param.name == "config_name" else None
            raise click.MissingParameter(said, error.ctx, error.param) from None
        except HpcGrpoError as error:
            with contextlib.suppress(OSError):  # a disk that is full changes no exit code
                echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            echo(f"error: {error.filename!r}: the name is too long. Give a shorter one.", err=True)
            ctx.exit(EXIT_CONFIG)


def _without_option(error: click.NoSuchOption) -> click.UsageError:
    """Return the error for an option that a command lacks. It suggests an option, a key or an option of sbatch."""
    written, params = error.option_name, error.ctx.command.params if error.ctx else []
    options = [each for each in params if isinstance(each, click.Option) and not each.hidden]
    if close := get_close_matches(written, [name for each in options for name in each.opts], n=1, cutoff=0.75):
        return click.UsageError(f"No such option {written!r}; did you mean {close[0]!r}?", error.ctx)
    name, said = written.lstrip("-").partition("=")[0], f"No such option {written!r}."
    if any(isinstance(each, click.Argument) and "KEY=VALUE" in (each.metavar or "") for each in params):
        from hpc_grpo.foreign.systems import counterpart

        said += f" CONFIG and keys have no dashes: CONFIG {name if '.' in name else 'train.lr'}=VALUE."
        said += f" {counterpart(name.replace('-', '_'), 1)}".rstrip() + " `hpc-grpo init` writes a CONFIG."
    else:
        said += f" Options: {', '.join(each.opts[-1] for each in options)}."
    if "." not in name and any(each.name == "sbatch" for each in options):
        said += f" Options of sbatch: --sbatch {name if len(name) > 1 else 'KEY'}=VALUE."
    return click.UsageError(said, error.ctx)


def _install_completion(ctx: click.Context, _parameter: click.Parameter, shell: str | None) -> None:
    if shell is not None and not ctx.resilient_parsing:
        from hpc_grpo.cli.completion import install

        try:
            echo(install(shell))
        except HpcGrpoError as error:  # raised before `_Group.invoke`
            raise click.UsageError(str(error), ctx) from error
        ctx.exit()


@click.group(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="New here? `hpc-grpo demo` trains a small model on this machine. `hpc-grpo COMMAND -h` has the options.",
)
@click.version_option(__version__, prog_name="hpc-grpo")
@click.option(
    "--install-completion",
    type=click.Choice(["bash", "zsh"]),
    is_eager=True,
    expose_value=False,
    callback=_install_completion,
    help="Have TAB complete commands, runs, configs and keys.",
)
def main() -> None:
    """GRPO post-training of language models as a Slurm job that survives."""
    keep_others_from_writing()
    write_no_core_dumps()
