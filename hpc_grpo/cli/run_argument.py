"""RUN on the command line: a run directory, or the name of a run below the runs root."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpc_grpo.errors import ConfigError
from hpc_grpo.run.paths import RunDir

ROOT_VARIABLE = "HPC_GRPO_RUNS_ROOT"
_DEFAULT_ROOT = Path("runs")


def find_run(argument: str, root: Path | None = None) -> RunDir:
    """The run that `argument` names, with an absolute path.

    A folder that is a run wins over a name. Names are looked up below `root`; without it below
    $HPC_GRPO_RUNS_ROOT, then below ./runs. Raises ConfigError with near matches.
    """
    roots = [root] if root is not None else _roots()
    for path in (Path(argument).expanduser(), *(folder / argument for folder in roots)):
        if _is_run(path):
            return RunDir(path.absolute())
    raise ConfigError(_no_such_run(argument, roots))


def runs_root() -> Path:
    """Where runs are listed: $HPC_GRPO_RUNS_ROOT, else ./runs."""
    return _roots()[0]


def runs_below(root: Path) -> list[RunDir]:
    """The runs directly below `root`, by name; none if there is no such folder."""
    if not root.is_dir():
        return []
    return [RunDir(path.absolute()) for path in sorted(root.iterdir()) if _is_run(path)]


def _roots() -> list[Path]:
    named = os.environ.get(ROOT_VARIABLE)
    return [Path(named).expanduser(), _DEFAULT_ROOT] if named else [_DEFAULT_ROOT]


def _is_run(path: Path) -> bool:
    try:
        return RunDir(path).config.is_file()
    except OSError:  # somebody else's folder, or no name at all
        return False


def _no_such_run(argument: str, roots: Sequence[Path]) -> str:
    looked = " or ".join(f"{root.absolute()}" for root in roots)
    nearest = ", ".join(repr(name) for name in _nearest(argument, roots))
    hint = f" Did you mean {nearest}?" if nearest else ""
    return (
        f"RUN = {argument!r} must be a run directory (a folder with config.yaml) or the name of a run below {looked}."
        f"{hint} `hpc-grpo list --root FOLDER` shows the runs of a folder; {ROOT_VARIABLE} names the one to look in."
    )


def _nearest(argument: str, roots: Sequence[Path]) -> Iterator[str]:
    import difflib

    names = {run.path.name for root in roots for run in runs_below(root)}
    yield from difflib.get_close_matches(Path(argument).name, sorted(names), n=3)
