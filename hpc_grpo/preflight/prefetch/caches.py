"""The environment that fetching and verifying need, so that they use the caches of the job."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_grpo.config import LaunchConfig
from hpc_grpo.data import hugging_face
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.environment.rules import expand

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

_CACHE_VARIABLES = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "HF_DATASETS_CACHE",
    "HF_MODULES_CACHE",
    "XDG_CACHE_HOME",
    "HOME",
)


def fetching_environment(environ: Mapping[str, str], launch: LaunchConfig) -> dict[str, str]:
    """`environ` with the job's cache folders, and with the network on whatever the job will have.

    Raises ConfigError for a cache folder that is named by a variable which does not exist here.
    """
    caches = {name: expand(value, environ) for name, value in launch.env.items() if name in _CACHE_VARIABLES}
    for name, value in caches.items():
        if "$" in value:
            raise ConfigError(
                f"launch.env.{name} = {launch.env[name]} cannot be resolved here: it names a variable that is not set "
                f"on this machine. Export it as it is in the job, or name a folder that all nodes share."
            )
    # `hf auth login` in the user's shell wrote there, wherever the job keeps its cache.
    token = {"HF_TOKEN_PATH": environ.get("HF_TOKEN_PATH") or str(hugging_face.home(environ) / "token")}
    return {name: value for name, value in {**environ, **caches, **token}.items() if name not in OFFLINE}


def verifying_environment(fetching: Mapping[str, str]) -> dict[str, str]:
    """The same caches, without the network."""
    return {**fetching, **OFFLINE}
