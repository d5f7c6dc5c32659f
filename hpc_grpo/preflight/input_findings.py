"""Tell whether the model and the data of a config are where a job finds them, which may be offline: for the doctor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.preflight.findings import Context, Finding, failure, ok, skipped, warning
from hpc_grpo.preflight.inputs import missing_inputs, refuse_unsupported_model
from hpc_grpo.preflight.prefetch.items import is_generated
from hpc_grpo.system.hugging_face import dataset_folders, datasets_cache, find_model, hub_cache, is_offline

_PREFETCH = "hpc-grpo prefetch CONFIG, on a login node"


def model_finding(context: Context) -> Finding:
    """Check that `model.path` is a model's folder, or in the cache that the job will use."""
    check, config = "model", context.config
    if config is None:
        return skipped(check, context.why_no_config)
    environ = context.job_environ
    if missing := _missing_paths(config, "model."):
        return failure(check, missing, "set model.path to the folder of a model")
    try:
        folder = find_model(config.model.path, environ)
    except ConfigError:
        return _not_cached(check, config.model.path, hub_cache(environ), environ)
    has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    if not has_weights:
        return failure(check, f"{folder} has a config.json but no weights", _PREFETCH)
    try:
        refuse_unsupported_model(config, Path.cwd())
    except ConfigError as error:
        return failure(check, str(error), "set model.path to a dense decoder")
    return ok(check, f"{config.model.path} is in {folder}" if str(folder) != config.model.path else f"{folder}")


def data_finding(context: Context) -> Finding:
    """Check that the data sets of the config are files, folders, or in the cache that the job will use."""
    check, config = "data", context.config
    if config is None:
        return skipped(check, context.why_no_config)
    environ = context.job_environ
    if missing := _missing_paths(config, "data."):
        return failure(check, missing, "set data.train.path and data.eval.path")
    sources = [*config.data.sources(for_eval=False), *config.data.sources(for_eval=True)]
    paths = [source.path for _, source in sources]
    if to_fetch := [path for path in paths if not _is_data_here(path, environ)]:
        return _not_cached(check, " and ".join(to_fetch), datasets_cache(environ), environ)
    return ok(check, ", ".join(dict.fromkeys(paths)))


def _missing_paths(config: Config, section: str) -> str:
    """Return the missing paths of one section of the config in one line; "" if all exist."""
    return "; ".join(says for key, says in missing_inputs(config, Path.cwd()) if key.startswith(section))


def _is_data_here(path: str, environ: Mapping[str, str]) -> bool:
    return (
        is_generated(path) or Path(path).exists() or any(folder.is_dir() for folder in dataset_folders(path, environ))
    )


def _not_cached(check: str, name: str, cache: Path, environ: Mapping[str, str]) -> Finding:
    says = f"no such path, and not in the cache {cache}: {name}"
    if is_offline(environ):
        return failure(check, f"{says}, and the job is offline", _PREFETCH)
    return warning(check, f"{says}: the job will download it", _PREFETCH)
