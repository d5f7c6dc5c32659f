"""Keep secrets out of a run: its config is kept and shared, and shown by every command that looks at it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.frozen_config import flat
from hpc_grpo.system.secret import assigns_secret, holds_secret, is_secret, is_secret_argument

_KEEPS_CONFIG = "config.yaml is kept and shared"


def refuse_secrets(config: Config) -> None:
    """Raise ConfigError for secrets in the config: by name in launch, by value anywhere."""
    sources = [*config.data.sources(for_eval=False), *config.data.sources(for_eval=True)]
    given = [reward.args for reward in config.rewards_by_key.values()] + [source.args for _, source in sources]
    arguments = [argument for args in given for argument in flat(args).items()]
    if secret := [
        key
        for key, value in arguments
        if any(is_secret_argument(key.rpartition(".")[2], text) for text in _texts(value))
    ]:
        raise ConfigError(
            f"The arguments of a reward or data source must not hold secrets ({', '.join(secret)}): {_KEEPS_CONFIG}. "
            f"Have it read them from the environment, let through by launch.pass_env."
        )
    if secret := [name for name, value in config.launch.env.items() if is_secret(name, value)]:
        raise ConfigError(
            f"launch.env must not hold secrets ({', '.join(secret)}): {_KEEPS_CONFIG}. Export them in "
            f"the environment and, unless their prefix is let through already, name them in launch.pass_env."
        )
    lines = enumerate(config.launch.setup_lines)
    written = [f"launch.setup_lines.{index}" for index, line in lines if assigns_secret(line)]
    values = flat(config.model_dump(mode="json"))
    written += [key for key, value in values.items() if any(map(holds_secret, _texts(value))) and key not in written]
    if written:
        raise ConfigError(
            f"{', '.join(written)} must not hold secrets: {_KEEPS_CONFIG}, and arguments are seen by every user of a "
            f"node. Export them in the environment, or read them from a file of mode 0600 where they are needed, as in "
            f'export TOKEN="$(cat ~/.token)".'
        )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
