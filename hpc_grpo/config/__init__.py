"""Configuration: the typed schema, loading with overrides, cross-field rules and the printed reference."""

from hpc_grpo.config.load import load_config, load_resolved, to_yaml
from hpc_grpo.config.schema import Config

__all__ = ["Config", "load_config", "load_resolved", "to_yaml"]
