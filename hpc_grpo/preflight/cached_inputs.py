"""Whether model and data are where an offline job finds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from hpc_grpo.config import Config, DatasetConfig
from hpc_grpo.data.hugging_face import dataset_folders, datasets_cache, find_model, hub_cache
from hpc_grpo.errors import ConfigError
from hpc_grpo.preflight.context import Context
from hpc_grpo.preflight.findings import Finding, failure, ok, skipped, warning
from hpc_grpo.preflight.inputs import missing_inputs

_TRUE = ("1", "on", "yes", "true")
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


_PREFETCH = "hpc-grpo prefetch CONFIG, on a login node"


def is_offline(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name, "").lower() in _TRUE for name in _OFFLINE)


def model_finding(context: Context) -> Finding:
    """Whether `model.path` is a model's folder, or in the cache that the job will use."""
    check, config = "model", context.config
    if config is None:
        return skipped(check, context.why_no_config)
    environ = context.job_environ
    if missing := _missing_paths(config, "model."):
        return failure(check, missing, "set model.path to the folder of a model")
    try:
        folder = find_model(config.model.path, environ)
    except ConfigError:
        return _missing(check, config.model.path, hub_cache(environ), environ)
    has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    if not has_weights:
        return failure(check, f"{folder} has a config.json but no weights", _PREFETCH)
    return ok(check, f"{config.model.path} is in {folder}" if str(folder) != config.model.path else f"{folder}")


def data_finding(context: Context) -> Finding:
    """Whether the data sets of the config are files, folders, or in the cache that the job will use."""
    check, config = "data", context.config
    if config is None:
        return skipped(check, context.why_no_config)
    environ = context.job_environ
    if missing := _missing_paths(config, "data."):
        return failure(check, missing, "set data.train.path and data.eval.path")
    to_fetch = [dataset for dataset in data_sets(config) if not _is_here(dataset, environ)]
    if to_fetch:
        return _missing(check, " and ".join(d.path for d in to_fetch), datasets_cache(environ), environ)
    return ok(check, ", ".join(dict.fromkeys(dataset.path for dataset in data_sets(config))))


def data_sets(config: Config) -> Iterator[DatasetConfig]:
    yield config.data.train
    if config.data.eval is not None:
        yield config.data.eval


def _missing_paths(config: Config, section: str) -> str:
    """Those that do not exist, in words; "" if all do."""
    return "; ".join(str(one) for one in missing_inputs(config, Path.cwd()) if one.key.startswith(section))


def _is_here(dataset: DatasetConfig, environ: Mapping[str, str]) -> bool:
    cached = dataset_folders(dataset.path, environ)
    return Path(dataset.path).exists() or any(folder.is_dir() for folder in cached)


def _missing(check: str, name: str, cache: Path, environ: Mapping[str, str]) -> Finding:
    says = f"no such path, and not in the cache {cache}: {name}"
    if is_offline(environ):
        return failure(check, f"{says}, and the job is offline", _PREFETCH)
    return warning(check, f"{says}: the job will download it", _PREFETCH)
