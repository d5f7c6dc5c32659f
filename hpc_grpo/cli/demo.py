"""The command that shows the whole on two CPU cores."""

from __future__ import annotations

from pathlib import Path

import click

from hpc_grpo.cli.options import OVERRIDES


@click.command()
@click.option("--long", "is_long", is_flag=True, help="Four harder tasks mixed, for much longer.")
@click.option("--tiny", "is_tiny", is_flag=True, help="A model of 480,000 parameters, made from nothing: two minutes.")
@click.option(
    "--root", "folder", default="demo", type=click.Path(path_type=Path), show_default=True, help="For all it makes."
)
@click.option("--seed", default=0, show_default=True, help="Of what is sampled and shuffled; with --tiny, of all.")
@OVERRIDES
def demo(is_long: bool, is_tiny: bool, folder: Path, seed: int, overrides: tuple[str, ...]) -> None:
    """Train SmolLM2-135M-Instruct by GRPO on this machine, and show what it has learned.

    Begins anew each time. `make demo` installs the model first; --tiny does without it. KEY=VALUE changes a setting.
    """
    if is_long and is_tiny:
        raise click.UsageError("--long and --tiny train different models: give one.")
    from hpc_grpo.demo.run import run_smollm2, run_tiny

    if is_tiny:
        run_tiny(folder, seed, overrides)
    else:
        run_smollm2(folder, "demo_long" if is_long else "demo", seed, overrides)
