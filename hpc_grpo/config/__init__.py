"""Configuration: its sections, loading with overrides, rules across sections, and resources of a node.

Other rooms import a section's class from here for type hints. Most code only reads `config.section.key`.
"""

from hpc_grpo.config.data import CurriculumConfig, DataConfig, SourceConfig
from hpc_grpo.config.launch import LaunchConfig, SlurmConfig
from hpc_grpo.config.load import load_config, load_launch, load_resolved, to_yaml, with_overrides
from hpc_grpo.config.rollout import RewardConfig
from hpc_grpo.config.run import EvalConfig, MetricsConfig
from hpc_grpo.config.schema import Config

__all__ = [
    "Config",
    "CurriculumConfig",
    "DataConfig",
    "EvalConfig",
    "LaunchConfig",
    "MetricsConfig",
    "RewardConfig",
    "SlurmConfig",
    "SourceConfig",
    "load_config",
    "load_launch",
    "load_resolved",
    "to_yaml",
    "with_overrides",
]
