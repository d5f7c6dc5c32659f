"""Load a config: a YAML file, its base files, dotted overrides, validation.

Uses no config library, for better errors: each `ConfigError` has the rule, the value, the choices and the fix.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc_grpo.config.checked import checked
from hpc_grpo.config.launch import LaunchConfig
from hpc_grpo.config.rules import check_rules
from hpc_grpo.config.schema import Config
from hpc_grpo.config.yaml_text import read_value, read_yaml, write_yaml
from hpc_grpo.errors import ConfigError, nearest
from hpc_grpo.section import Loading, as_section

CONFIGS_DIR = Path(__file__).resolve().parents[2] / "configs"

_DATA = "name it in data.train.path"
_NO_CONFIGS = {".jsonl": _DATA, ".parquet": _DATA, ".arrow": _DATA, ".py": "name its function in rewards"}
_NAMED = ("task", "environment", "loss", "loss.correction", "loss.advantage", "train.on_step")
"""Sections whose value may be only a name, such as `loss: grpo`."""

_LENGTHS = {"train.total_steps", "train.total_episodes", "train.total_epochs"}
"""A config sets exactly one of these. An override of one removes the others."""


def load_config(name: str, overrides: Iterable[str] = (), environ: Mapping[str, str] = os.environ) -> Config:
    """Load a config by path or by name below `configs/`, apply `key.path=value` overrides and check it.

    `key.path+=[value]` appends to the list from the files and from earlier overrides. Expands `~` and variables of
    `environ` in paths (`section.LocalPath`). Raises ConfigError.
    """
    path = find_config(name)
    return _validated(overridden(read_layers(path), overrides), str(path), Loading(environ))


def load_launch(
    name: str | None, overrides: Iterable[str] = (), environ: Mapping[str, str] = os.environ
) -> LaunchConfig:
    """Load section `launch` of a config, which needs no other section. If `name` is None, begin with the defaults."""
    values = overridden({} if name is None else read_layers(find_config(name)), overrides)
    return checked(LaunchConfig, values.get("launch", {}), name or "This", "launch", loading=Loading(environ))


def load_resolved(path: Path) -> Config:
    """Load a run's config.yaml or its backup. Expands no variables."""
    return _validated(read_yaml(path), str(path))


def with_overrides(config: Config, overrides: Iterable[str], environ: Mapping[str, str] = os.environ) -> Config:
    """Apply `overrides` to a resolved config and check it like `load_config`. Raises ConfigError."""
    values = config.model_dump(mode="json")
    resolved = frozenset(texts_in(values))
    return _validated(overridden(values, overrides), "With these overrides the config", Loading(environ, resolved))


def load_values(
    values: Mapping[str, Any],
    overrides: Iterable[str],
    origin: str,
    base: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """Merge `values` over `base`, apply `overrides`, and check the result. Raises ConfigError with `origin`."""
    return _validated(overridden(_merge(base or {}, values), overrides), origin, Loading(environ))


def to_yaml(config: Config | Mapping[str, Any]) -> str:
    """Write the resolved config, or part of one, as YAML. Loading the YAML gives an equal config."""
    return write_yaml(config.model_dump(mode="json") if isinstance(config, Config) else config)


def overridden(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy of `values` with `overrides`. Does not check the result. Raises ConfigError for a bad override."""
    changed = copy.deepcopy(dict(values))
    for override in overrides:
        _apply_override(changed, override)
    return changed


def shipped_config(name: str) -> Path | None:
    """Return the file of a name below `configs/`; None if it does not exist or the name is a path elsewhere."""
    paths = [Path(os.path.normpath(CONFIGS_DIR / text)) for text in (name, f"{name}.yaml")]
    return next((path for path in paths if path.is_file() and path.is_relative_to(CONFIGS_DIR)), None)


def find_config(name: str) -> Path:
    """Return the file behind a path or a name below `configs/`. Raises ConfigError with the shipped names."""
    if found := Path(name) if Path(name).is_file() else shipped_config(name):
        if found.suffix in _NO_CONFIGS:
            raise ConfigError(f"{name} is no config: {_NO_CONFIGS[found.suffix]} of a config, such as my_run.yaml.")
        return found
    shipped = sorted(str(p.relative_to(CONFIGS_DIR).with_suffix("")) for p in CONFIGS_DIR.rglob("*.yaml"))
    beside = [str(p) for suffix in ("yaml", "yml", "sh") for p in Path(name).parent.glob(f"*.{suffix}") if p.is_file()]
    why = f"there is no such file and no such shipped config{nearest(name, [*beside, *shipped])}"
    if Path(name).is_dir():
        why = "this is a folder. Give a file."
    elif "=" in name.partition("/")[0]:
        why = "KEY=VALUE comes after a CONFIG."
    raise ConfigError(f"No config {name!r}: {why} Shipped configs: {', '.join(shipped)}.")


def read_layers(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a config and merge it over its base files: `base: other.yaml`, or a list.

    `above` are the files whose `base` includes `path`. Raises ConfigError for a missing base, or a cycle of bases.
    """
    values = read_yaml(path)
    if "loss" in values:
        values["loss"] = as_section(values["loss"])
    bases = values.pop("base", None) or []
    bases = bases if isinstance(bases, list) else [bases]
    if wrong := [base for base in bases if not isinstance(base, str)]:
        raise ConfigError(f"{path}: base = {wrong[0]!r} must be a file, or a list of files, such as site.yaml.")
    merged: dict[str, Any] = {}
    for base in bases:
        base_path = path.parent / base
        if not base_path.is_file():
            raise ConfigError(f"{path}: base {base!r} does not exist (looked at {base_path}).")
        if base_path.resolve() in (files := (*above, path.resolve())):
            raise ConfigError(f"{path}: base {base!r} has {path.name} among its own bases. Remove one of the two.")
        merged = _merge(merged, read_layers(base_path, files))
    return _merge(merged, values)


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        under = as_section(merged.get(key)) if isinstance(value, Mapping) else None
        merged[key] = _merge(under, value) if isinstance(under, Mapping) else value
    return merged


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or key != key.strip() or not key[:1].isalpha():
        raise ConfigError(
            f"Override {override!r} must have the form key.path=value, without quotes or signs before the key and "
            f"without spaces, such as train.lr=1e-6."
        )
    value = read_value(text, f"Override {override!r}")
    if key == "loss" and isinstance(value, str):
        key = "loss.name"  # keeps the other keys of `loss`: every loss has them
    *parents, last = key.removesuffix("+").split(".")
    target: Any = values
    for depth, parent in enumerate(parents):
        if isinstance(target, list):
            target = target[_position(target, parent, key)]
            continue
        if ".".join(parents[: depth + 1]) in _NAMED and parent in target:
            target[parent] = as_section(target[parent])
        target = target.setdefault(parent, {})
        if not isinstance(target, dict | list):
            raise ConfigError(f"Override {override!r}: {'.'.join(parents[: depth + 1])} is a value, not a section.")
    if key.endswith("+"):
        items = target.get(last, []) if isinstance(target, dict) else None
        if not isinstance(items, list) or not isinstance(value, list):
            raise ConfigError(
                f"Override {override!r}: += appends a list to a list. Example: launch.setup_lines+=[ulimit -l]."
            )
        value = [*items, *value]
    if isinstance(target, list):
        target[_position(target, last, key)] = value
    else:
        target[last] = value
    if key in _LENGTHS and value is not None:
        for other in _LENGTHS - {key}:
            target.pop(other.removeprefix("train."), None)


def _position(items: list[Any], index: str, key: str) -> int:
    if not index.isdecimal() or int(index) >= len(items):
        raise ConfigError(f"Override {key!r}: {index!r} must be a position from 0 to {len(items) - 1}.")
    return int(index)


def _validated(values: Mapping[str, Any], origin: str, loading: Loading | None = None) -> Config:
    config = checked(Config, values, origin, loading=loading)
    check_rules(config)
    return config


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text in nested mappings and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from texts_in(item)
