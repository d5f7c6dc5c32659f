"""Options that several commands share."""

from __future__ import annotations

import click

from hpc_grpo.launch import DEFAULT_DRIVER

CONFIG = click.argument("config_name", metavar="CONFIG")
OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
SET = click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a key of the config, such as train.lr=1e-6."
)
DRIVER = click.option("--driver", hidden=True, default=DEFAULT_DRIVER, help="Module or .py file; for tests.")
