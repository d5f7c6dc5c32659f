"""Read and write YAML as users mean it: 1e-6 is a number, 24:00:00 is text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from hpc_grpo.errors import ConfigError

_SHORT_FLOAT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$")
"""1e-6. YAML 1.1 reads it as text (it wants 1.0e-6). YAML 1.2 and users mean a number."""

_CLOCK = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?$")
"""24:00:00. YAML 1.1 reads it as 86400, in base 60. Users mean a walltime."""

_MERGE = "tag:yaml.org,2002:merge"
"""YAML's merge key <<, which a section may have several times."""


_INVALID = (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError)
"""Errors of PyYAML. It raises those of Python for a date or a number that does not exist, and for deep nesting."""

_FIXES = {
    "'\\t'": " Indent with spaces instead of tabs.",
    "found '<block mapping start>'": " Indent all keys of a section by the same number of spaces.",
    "found '<scalar>'": " Quotes must be around the whole text; write ' inside of '…' twice.",
    "mapping values are not allowed": (
        " Indent all keys of a section by the same number of spaces. A key needs one colon and a space. Put a text "
        "with a colon in quotes."
    ),
}
"""Part of YAML's message -> what to change."""


class _Loader(yaml.SafeLoader):
    """Reads 1e-6 as a number, and '1e-6' and 24:00:00 as text. Refuses a key that a section has twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        written: set[str] = set()
        for key in (each for each, _ in node.value if isinstance(each.value, str)):  # PyYAML refuses lists as keys
            if key.value in written and key.tag != _MERGE:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} occurs twice", problem_mark=key.start_mark)
            written.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _SHORT_FLOAT, list("-+0123456789"))
    for _first in "-+0123456789":  # before the resolvers of YAML
        _kind.yaml_implicit_resolvers[_first].insert(0, ("tag:yaml.org,2002:str", _CLOCK))


def read_value(text: str, origin: str) -> Any:
    """Read a value as the text of a key in YAML. Raises ConfigError."""
    try:
        return yaml.load(text, _Loader)
    except _INVALID as error:
        raise ConfigError(f"{origin}: the value is not valid YAML: {error}\nPut a text in quotes.") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a file of key: value pairs. Raises ConfigError."""
    try:
        values = yaml.load(path.read_text(), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Config {path} cannot be read: {error}") from error
    except _INVALID as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        says = getattr(error, "problem", error)
        fix = next((fix for part, fix in _FIXES.items() if part in f"{says}"), "" if mark else " Put a text in quotes.")
        raise ConfigError(f"Config {path}{where} is not valid YAML: {says}.{fix}") from error
    if not isinstance(values, dict):
        found = {type(None): "is empty", list: "holds a list"}.get(type(values), "holds text")
        raise ConfigError(f"Config {path} {found}; it must hold sections, such as run: {{name: my-run}}.")
    return values


def write_yaml(values: Any) -> str:
    """Write values as YAML that reads back equal, in the same order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)
