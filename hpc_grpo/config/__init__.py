"""Configuration: one file per section, loading with overrides, cross-field rules and the printed reference."""

from hpc_grpo.config.data import DataConfig, DatasetConfig
from hpc_grpo.config.eval import EvalConfig, MetricsConfig
from hpc_grpo.config.launch import LaunchConfig, PlacementConfig, SlurmConfig
from hpc_grpo.config.load import load_config, load_launch, load_resolved, load_resolved_launch, to_yaml, with_overrides
from hpc_grpo.config.loss import LossConfig
from hpc_grpo.config.model import ModelConfig
from hpc_grpo.config.rewards import GradingConfig, RewardConfig
from hpc_grpo.config.rollout import EngineConfig, RolloutConfig, WeightsConfig
from hpc_grpo.config.run import CheckpointConfig, DeadlinesConfig, RunConfig
from hpc_grpo.config.schema import Config
from hpc_grpo.config.train import SftConfig, TrainConfig

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DatasetConfig",
    "DeadlinesConfig",
    "EngineConfig",
    "EvalConfig",
    "GradingConfig",
    "LaunchConfig",
    "LossConfig",
    "MetricsConfig",
    "ModelConfig",
    "PlacementConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SftConfig",
    "SlurmConfig",
    "TrainConfig",
    "WeightsConfig",
    "load_config",
    "load_launch",
    "load_resolved",
    "load_resolved_launch",
    "to_yaml",
    "with_overrides",
]
