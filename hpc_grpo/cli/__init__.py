"""The `hpc-grpo` command. Each command imports what it needs, so that `--help` answers at once."""

from __future__ import annotations

from typing import Any

import click

from hpc_grpo import __version__
from hpc_grpo.cli import (
    check,
    demo,
    disk,
    evaluate,
    fleet,
    grpo,
    job,
    places,
    ray,
    replay,
    reward,
    shell,
    simulate,
    status,
    submit,
    train,
)
from hpc_grpo.cli.options import echo
from hpc_grpo.errors import EXIT_CONFIG, HpcGrpoError
from hpc_grpo.run.owner import keep_others_from_writing
from hpc_grpo.system.processes import write_no_core_dumps

click.UsageError.exit_code = EXIT_CONFIG
"""As of every other mistake of the user's: a fleet must not try a wrong command again."""


class _Group(click.Group):
    """Show an HpcGrpoError as one message, and end with its exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HpcGrpoError as error:
            echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hpc-grpo")
def main() -> None:
    """GRPO post-training of language models as a Slurm job that survives."""
    keep_others_from_writing()
    write_no_core_dumps()


_MODULES = (
    *(train, submit, places, ray, grpo, evaluate, replay, job, shell, status),
    *(disk, check, simulate, reward, fleet, demo),
)
for _module in _MODULES:
    for _command in _module.COMMANDS:
        main.add_command(_command)
