"""Keep secrets out of a run: its config is kept and shared, and shown by every command that looks at it."""

from __future__ import annotations

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.system.secret import secret_keys


def refuse_secrets(config: Config) -> None:
    """Raise ConfigError that names the keys whose texts hold a secret."""
    if found := secret_keys(config.model_dump(mode="json")):
        raise ConfigError(
            f"The config must not hold secrets, and these keys do: {', '.join(found)}. config.yaml is kept and shared, "
            f"and every user of a node sees the arguments of a command. Export the secret, and name its variable: in "
            f"launch.pass_env, in api_key_env of a reward, or as $NAME in a shell line."
        )
