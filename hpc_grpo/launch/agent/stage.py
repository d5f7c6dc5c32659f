"""Copy to the node's own disk, before Ray starts there: the environment, a model's weights, what engines have compiled.

A shared file system gives each of many processes on many nodes thousands of small files of torch and vLLM slowly; and
compile caches must not be on one. Copies lie in folders that this user's agents on the node share (folders.py), under
names that tell what is in them: what engines compile remembers the paths of Python's files and of its own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.agent.folders import SharedDir, shared_dir, shared_dir_path
from hpc_grpo.launch.agent.protocol import NodeSpec, Stage
from hpc_grpo.launch.environment.rules import expand
from hpc_grpo.run.compiled import CACHES, unpack
from hpc_grpo.run.contract import COMPILED_ARCHIVE_VARIABLE, COMPILED_DIR_VARIABLE, WEIGHTS_DIR_VARIABLE
from hpc_grpo.system.hugging_face import weight_files
from hpc_grpo.system.processes import die_with_parent
from hpc_grpo.system.say import say

_MAX_OTHER_FILE_BYTES = 64 << 20
"""Of what lies beside a model's weights, larger files are other forms of the same weights."""
_TOLD_BYTES = 500


@dataclass(frozen=True)
class Staged:
    """Where a node has its copies; None: nothing of that kind is copied."""

    environment: Path | None
    weights: Path | None
    compiled: Path | None

    @property
    def python(self) -> str:
        """The Python that Ray and training run on this node."""
        return str(self.environment / "bin" / "python") if self.environment else sys.executable


def local_dir(spec: NodeSpec, environ: Mapping[str, str]) -> Path:
    """Return the node-local folder that a run's own are made in: launch.local_dir, else /tmp.

    So it is where launch.local_dir has a variable that this node does not have.
    """
    parent = expand(spec.local_dir, environ) if spec.local_dir else "/tmp"
    return Path("/tmp" if "$" in parent else parent)


def version_of(*sources: Path) -> str:
    """Return a text that changes with environments and models, as far as the times of their outermost files tell."""
    times = []
    for source in sources:
        inside = [source / "pyvenv.cfg", *source.glob("lib/python*/site-packages"), *source.glob("*.safetensors")]
        times += [path.stat().st_mtime_ns for path in [source, *sorted(inside)] if path.exists()]
    return " ".join(map(str, times))


def staged(stage: Stage, parent: Path) -> Staged:
    """Return where a node has its copies, once they are made: folders below `parent`."""

    def path(kind: str, source: str, version: str = "") -> Path | None:
        return shared_dir_path(parent, f"{kind} {source} {version}") if source else None

    environment = path("environment", stage.environment, stage.version)
    return Staged(environment, path("weights", stage.weights, stage.version), path("compiled", stage.compiled))


def staged_environment(stage: Stage, parent: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that lead to the copies; a cache that is `given` another place has that."""
    copies, variables = staged(stage, parent), {}
    if copies.weights:
        variables[WEIGHTS_DIR_VARIABLE] = str(copies.weights)
    if copies.compiled:
        caches = {name: str(copies.compiled / folder) for name, folder in CACHES.items() if name not in given}
        variables |= caches
        variables |= {COMPILED_DIR_VARIABLE: str(copies.compiled), COMPILED_ARCHIVE_VARIABLE: stage.compiled}
    return variables


def make_copies(
    spec: NodeSpec, environ: Mapping[str, str], goes_on: Callable[[], bool]
) -> tuple[NodeSpec, list[SharedDir]]:
    """Make the copies; return the folders, and the spec without those that are not worth the run.

    Stops where `goes_on`, which waits a moment, is False. Raises LaunchError where a copy cannot be made.
    """
    stage, copies, folders = spec.stage, staged(spec.stage, local_dir(spec, environ)), []

    def copy(path: Path | None, fill: Callable[[Path], bool]) -> None:
        begun = time.monotonic()
        if path is not None and (folder := shared_dir(path, fill)) is not None:
            folders.append(folder)
            say(f"{path} has its copy after {time.monotonic() - begun:.1f} s", sys.stderr)

    def unpack_here(folder: Path) -> bool:
        unpack(Path(stage.compiled), folder, environ)
        return True

    try:
        copy(copies.environment, lambda folder: _copy_environment(Path(stage.environment), folder, goes_on))
        copy(copies.weights, lambda folder: _copy_weights(Path(stage.weights), folder, goes_on))
    except (LaunchError, OSError) as error:
        for folder in folders:
            folder.leave()
        raise LaunchError(f"launch.stage on node {spec.node}: {error}") from error
    try:
        copy(copies.compiled, unpack_here)
    except (LaunchError, OSError) as error:
        say(f"Engines compile where they like: {error}", sys.stderr)
        spec = replace(spec, stage=replace(stage, compiled=""))
    return spec, folders


def _copy_environment(source: Path, folder: Path, goes_on: Callable[[], bool]) -> bool:
    if source.is_dir():
        command = ["cp", "--archive", f"{source}/.", str(folder)]
    else:
        command = ["unsquashfs", "-no-progress", "-no-xattrs", "-force", "-dest", str(folder), str(source)]
    if not _run(command, f"environment = {source}", goes_on):
        return False
    if not (folder / "bin" / "python").exists():
        raise LaunchError(
            f"environment = {source} has no bin/python. Give the folder of a virtual environment, or an image of it "
            f"(mksquashfs ENVIRONMENT FILE.squashfs)."
        )
    return True


def _copy_weights(source: Path, folder: Path, goes_on: Callable[[], bool]) -> bool:
    weights = weight_files(source)
    rest = [file for file in source.iterdir() if file.is_file() and file.stat().st_size < _MAX_OTHER_FILE_BYTES]
    files = [str(file) for file in dict.fromkeys([*weights, *rest])]
    command = ["cp", "--dereference", "--preserve=timestamps", "--target-directory", str(folder), *files]
    return _run(command, f"model = true: {source}", goes_on)


def _run(command: Sequence[str], what: str, goes_on: Callable[[], bool]) -> bool:
    """Run a copying program; False where it was ended. Raises LaunchError with its last words."""
    with tempfile.TemporaryFile() as said:
        try:
            options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": said}
            program = subprocess.Popen(command, preexec_fn=die_with_parent(), **options)  # type: ignore[call-overload]
        except FileNotFoundError:
            raise LaunchError(f"{what}: {command[0]} is not installed there. Give a folder instead.") from None
        with program:
            while program.poll() is None:
                if not goes_on():
                    program.kill()
                    return False
        if program.returncode == 0:
            return True
        said.seek(0)
        words = said.read()[-_TOLD_BYTES:].decode(errors="replace").strip()
    raise LaunchError(
        f"{what} was not copied by {command[0]} (exit code {program.returncode}): {words}. Set launch.local_dir to a "
        f"folder with room for it on every node, or leave launch.stage out."
    )
