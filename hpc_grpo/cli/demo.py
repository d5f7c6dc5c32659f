"""The command `demo`: train a small model on two CPU cores and show the result."""

from __future__ import annotations

from pathlib import Path

import click

from hpc_grpo.cli.options import OVERRIDES


@click.command()
@click.option("--long", "is_long", is_flag=True, help="Train on a mix of four harder tasks, for much longer.")
@click.option("--tiny", "is_tiny", is_flag=True, help="Train a new model of 480,000 parameters. Takes two minutes.")
@click.option(
    "--root", "folder", default="demo", type=click.Path(path_type=Path), show_default=True, help="Folder for all files."
)
@click.option(
    "--seed", default=0, show_default=True, help="Seed of sampling and shuffling; with --tiny, also of model and data."
)
@OVERRIDES
def demo(is_long: bool, is_tiny: bool, folder: Path, seed: int, overrides: tuple[str, ...]) -> None:
    """Train SmolLM2-135M-Instruct by GRPO on this machine, and show what it has learned.

    Deletes the demo's earlier run. `make demo` installs the model first; --tiny needs no model. KEY=VALUE overrides
    a key.
    """
    if is_long and is_tiny:
        raise click.UsageError("--long and --tiny train different models: give one.")
    from hpc_grpo.demo.run import run_smollm2, run_tiny

    if is_tiny:
        run_tiny(folder, seed, overrides)
    else:
        run_smollm2(folder, "demo_long" if is_long else "demo", seed, overrides)
