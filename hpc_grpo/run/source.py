"""`source/` of a run: its copy of this package and of the user's functions. All processes of the run use the copy.

    source/__main__.py     python RUN/source ARGUMENTS runs hpc-grpo; python RUN/source -m MODULE runs a module of it
    source/hpc_grpo/       the package as it was when the run was submitted
    source/functions/      the user's reward, loss and advantage files, with files that they import from their folder
    source/SHA256SUMS      checksums of all these files
    source/git.diff        uncommitted changes of the package's checkout, for the record

Python puts the folder that it is started with first on its search path, before the working folder, PYTHONPATH and
installed packages. So an edit of the checkout between two jobs changes nothing.
"""

from __future__ import annotations

import ast
import base64
import functools
import hashlib
import io
import os
import shutil
import stat
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpc_grpo.config import Config
from hpc_grpo.errors import HpcGrpoError
from hpc_grpo.registry import copied_as, names_function
from hpc_grpo.run.files import publish_dir, start_staging, write_atomic
from hpc_grpo.run.paths import RunDir

PACKAGE = Path(__file__).resolve().parents[1]
SUMS = "SHA256SUMS"
DIFF = "git.diff"
_COPY_OR_INSTALLED = f"""import os, sys
copy, *words = sys.argv[1:]
found = [copy] if os.path.isfile(os.path.join(copy, {SUMS!r})) else []
os.execv(sys.executable, [sys.executable, "-E", *found, *words])"""
_ENTRY = PACKAGE / "run" / "copied_main.py"


def own_command(*words: str, flags: Sequence[str] = (), python: str = sys.executable) -> list[str]:
    """Return the command that starts `-m MODULE` or a .py file with the package of this process."""
    return [python, *flags, *([str(PACKAGE.parent)] if runs_from_copy() else []), *words]


def command_anywhere(*words: str) -> list[str]:
    """Return `own_command` for a node that may not see the run's copy. It then uses the installed package."""
    start = ["-c", _COPY_OR_INSTALLED, str(PACKAGE.parent)] if runs_from_copy() else []
    return [sys.executable, "-E", *start, *words]


def runs_from_copy() -> bool:
    """Return whether this process runs from the copy of a run."""
    return (PACKAGE.parent / SUMS).is_file()


def entry(run: RunDir) -> list[str]:
    """Return the arguments that start hpc-grpo from the run's copy; without a copy, from the installed package."""
    has_copy = run.source_dir.is_dir() or not run.has_config()  # A new run gets its copy when its job starts.
    return [str(run.source_dir)] if has_copy else ["-m", "hpc_grpo.cli"]


def become_copy(run: RunDir, words: Sequence[str]) -> None:
    """Replace this process by the run's copy with arguments `words`. Return if there is none, or this runs from it."""
    if (run.source_dir / SUMS).is_file() and PACKAGE.parent != run.source_dir.resolve():
        flags = ["-E"] if sys.flags.ignore_environment else []
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *flags, str(run.source_dir), *words])


def copy_source(run: RunDir, functions: Mapping[str, Path], diff: str) -> str:
    """Write or replace the run's copy. Return `sums_digest`. `functions` maps names in the config to users' files."""
    staging = start_staging(run.source_dir)
    shutil.copytree(PACKAGE, staging / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    for copied in (staging / PACKAGE.name, *(staging / PACKAGE.name).rglob("*")):
        # Otherwise the copy of a read-only installation could not be removed.
        copied.chmod(copied.stat().st_mode | stat.S_IWUSR)
    shutil.copy(_ENTRY, staging / "__main__.py")
    for file, target in _copies(functions, staging):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    write_atomic(staging / DIFF, diff)
    sums = sums_of(staging)
    write_atomic(staging / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    publish_dir(run.source_dir)
    return sums_digest(run)


@functools.cache
def packed_source(run: RunDir) -> str:
    """Return the run's copy packed as text, for a node that does not see it; "" for a run without a copy."""
    if not (run.source_dir / SUMS).is_file():
        return ""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as archive:
        for name in [SUMS, *written_sums(run)]:
            archive.add(run.source_dir / name, name)
    return base64.b64encode(packed.getvalue()).decode()


def unpack_source(run: RunDir, packed: str, digest: str) -> None:
    """Unpack the run's copy on this node, unless it is there already. Raises HpcGrpoError if it arrives damaged.

    `packed` is from `packed_source`, `digest` from `sums_digest`.
    """
    if not copy_problems(run, digest):
        return
    staging = start_staging(run.source_dir)
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed)), mode="r:gz") as archive:
        archive.extractall(staging, filter="data")
    publish_dir(run.source_dir)
    if wrong := copy_problems(run, digest):
        raise HpcGrpoError(f"{run.source_dir} is damaged after its transfer: {wrong[0]}. Resume the run to resend it.")


def sums_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below `folder`, by name. Leaves out SHA256SUMS, git.diff and __pycache__."""
    files = (file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {str(file.relative_to(folder)): _sha256(file) for file in sorted(files) if file.name not in (SUMS, DIFF)}


def written_sums(run: RunDir) -> dict[str, str]:
    """Return the run's SHA256SUMS by name; {} if it is missing or damaged."""
    path = run.source_dir / SUMS
    if not path.is_file():
        return {}
    pairs = (line.split("  ", 1) for line in path.read_bytes().decode(errors="replace").splitlines())
    return {pair[1]: pair[0] for pair in pairs if len(pair) == 2}


def sums_digest(run: RunDir) -> str:
    """Return the SHA-256 of SHA256SUMS, "" if there is none."""
    path = run.source_dir / SUMS
    return _sha256(path) if path.is_file() else ""


def copy_problems(run: RunDir, digest: str) -> list[str]:
    """List the files of the run's source copy that changed since SHA256SUMS had this digest; [] for none."""
    if sums_digest(run) != digest:
        return [f"{SUMS} is {'changed' if (run.source_dir / SUMS).is_file() else 'missing'}"]
    written, there = written_sums(run), sums_of(run.source_dir)
    return [
        f"{name} is {'missing' if name not in there else 'changed' if name in written else 'new'}"
        for name in sorted({*written, *there})
        if written.get(name) != there.get(name)
    ]


def functions_of(config: Config) -> dict[str, str]:
    """Return the names of the user's functions, by config key, without built-ins."""
    named = {f"{key}.name": reward.name for key, reward in config.rewards_by_key.items()}
    named |= config.loss.functions | config.eval.functions | config.train.functions | config.environment_functions
    named |= {f"{key}.path": source.path for key, source in config.data.sources() if names_function(source.path)}
    return {key: name for key, name in named.items() if ":" in name}


def used_file(name: str, folder: Path) -> Path | None:
    """Return the file of `module:function` that this process would import: from the run's copy, else below `folder`.

    Returns None for an installed module: its package has a version.
    """
    module = name.rpartition(":")[0]
    path = folder.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    if module.endswith(".py"):
        files = (PACKAGE.parent / copied_as(module), folder / module)
    return next((file for file in files if file.is_file()), None)


def copyable(config: Config, folder: Path) -> dict[str, Path]:
    """Return the user's files that a run copies, by their name in the config.

    Leaves out a file that uses `__file__` or imports a file that does: a copy would miss what it reads beside it.
    Leaves out functions named `module:function`.
    """
    modules = {name.rpartition(":")[0] for name in functions_of(config).values()}
    files = {module: folder / module for module in modules if module.endswith(".py") and (folder / module).is_file()}
    return {
        module: file
        for module, file in files.items()
        if not any(b"__file__" in imported.read_bytes() for imported in imported_files(file))
    }


def changed_functions(run: RunDir, config: Config, folder: Path) -> list[str]:
    """Return the user's files that differ from the run's copies of them."""
    pairs = _copies(copyable(config, folder), run.source_dir)
    return [str(file) for file, copy in pairs if not copy.is_file() or copy.read_bytes() != file.read_bytes()]


def _copies(functions: Mapping[str, Path], source_dir: Path) -> Iterator[tuple[Path, Path]]:
    """Yield each file of the user's `functions`, by name in the config, with the path of its copy in `source_dir`."""
    for name, file in functions.items():
        folder = (source_dir / copied_as(name)).parent
        for imported in imported_files(file):
            yield imported, folder / imported.relative_to(file.parent)


def imported_files(file: Path) -> list[Path]:
    """Return a Python file and the files of its folder that it imports, directly or indirectly; packages completely."""
    found = [file]
    for waiting in found:  # the list grows in the loop
        try:
            nodes = list(ast.walk(ast.parse(waiting.read_bytes())))
        except (SyntaxError, ValueError):  # no Python
            continue
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
        for name in dict.fromkeys(name.split(".")[0] for name in names):
            beside = [file.parent / f"{name}.py", *sorted((file.parent / name).rglob("*.py"))]
            found += [path for path in beside if path.is_file() and path not in found]
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
