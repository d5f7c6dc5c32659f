"""Prepare a node's own disk before Ray starts: the run directory, and copies of environment, weights and caches.

A shared file system reads the many small files of torch and vLLM slowly for many nodes. Compile caches must not be on
a shared file system. This user's agents on the node share the copies (folders.py). A folder's name is a hash of the
source's path and version. So the name is the same in every job: compiled kernels contain paths.

A node checks by the digest of Ray's token whether it sees the head's disk. The head writes a new token whenever it
starts Ray, so a node that reads this token sees the disk.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, Popen

from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.agent.folders import SharedDir, shared_dir, shared_dir_path
from hpc_grpo.launch.agent.protocol import NodeSpec, OwnDisk, Stage
from hpc_grpo.launch.environment import expand
from hpc_grpo.run import contract
from hpc_grpo.run.compiled import CACHES, unpack
from hpc_grpo.run.files import digest_of, write_atomic
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.source import unpack_source
from hpc_grpo.system.hugging_face import weight_files
from hpc_grpo.system.processes import die_with_parent
from hpc_grpo.system.say import say

_MAX_OTHER_FILE_BYTES = 64 << 20
"""Larger files beside a model's weights are other formats of the same weights."""
_TOLD_BYTES = 500
_SHOWS_UP_S = 90.0  # a network file system may show an outdated file for a minute
ATTEMPT_NAME = "attempt"
"""The folder in which a node with its own disk keeps the attempt's files until they are sent."""


def local_dir(spec: NodeSpec, environ: Mapping[str, str]) -> Path:
    """Return launch.local_dir of this node; /tmp without one, or if it uses a variable that this node lacks."""
    parent = expand(spec.local_dir, environ) if spec.local_dir else "/tmp"
    return Path("/tmp" if "$" in parent else parent)


def version_of(*sources: Path) -> str:
    """Return the modification times of environments or models, and of their outermost files, as one text."""
    times = []
    for source in sources:
        inside = [source / "pyvenv.cfg", *source.glob("lib/python*/site-packages"), *source.glob("*.safetensors")]
        times += [path.stat().st_mtime_ns for path in [source, *sorted(inside)] if path.exists()]
    return " ".join(map(str, times))


def staged(stage: Stage, parent: Path) -> dict[str, Path]:
    """Return the paths of a node's copies below `parent`, by their fields in `stage`. The copies may not exist yet."""
    versions = {"environment": stage.version, "weights": stage.version, "compiled": ""}
    sources = {kind: getattr(stage, kind) for kind in versions}
    return {
        kind: shared_dir_path(parent, f"{kind} {source} {versions[kind]}") for kind, source in sources.items() if source
    }


def staged_environment(stage: Stage, parent: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that point to the copies, except caches whose place is already `given`."""
    copies, variables = staged(stage, parent), {}
    if weights := copies.get("weights"):
        variables[contract.WEIGHTS_DIR_VARIABLE] = str(weights)
    if compiled := copies.get("compiled"):
        variables |= {name: str(compiled / folder) for name, folder in CACHES.items() if name not in given}
        variables[contract.COMPILED_DIR_VARIABLE] = str(compiled)
        variables[contract.COMPILED_ARCHIVE_VARIABLE] = stage.compiled
    return variables


def make_copies(
    spec: NodeSpec, environ: Mapping[str, str], goes_on: Callable[[], bool]
) -> tuple[NodeSpec, list[SharedDir]]:
    """Make the copies. Return the spec, without compiled kernels if their copy failed, and the folders.

    Stops once `goes_on`, which waits a moment, returns False. Raises LaunchError if another copy fails.
    """
    stage, copies, folders = spec.stage, staged(spec.stage, local_dir(spec, environ)), []

    def copy(kind: str, fill: Callable[[Path], bool]) -> None:
        begun, path = time.monotonic(), copies.get(kind)
        if path is not None and (folder := shared_dir(path, fill)) is not None:
            folders.append(folder)
            say(f"copied to {path} in {time.monotonic() - begun:.1f} s", sys.stderr)

    def unpack_here(folder: Path) -> bool:
        unpack(Path(stage.compiled), folder, environ)
        return True

    try:
        copy("environment", lambda folder: _copy_environment(Path(stage.environment), folder, goes_on))
        copy("weights", lambda folder: _copy_weights(Path(stage.weights), folder, goes_on))
    except (LaunchError, OSError) as error:
        for folder in folders:
            folder.leave()
        raise LaunchError(f"launch.stage on node {spec.node}: {error}") from error
    try:
        copy("compiled", unpack_here)
    except (LaunchError, OSError) as error:
        say(f"Engines compile without the cache of earlier jobs: {error}", sys.stderr)
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
    """Run a program that copies. Return False if `goes_on` ended it. Raises LaunchError with the end of its stderr."""
    with tempfile.TemporaryFile() as said:
        try:
            program = Popen(command, stdin=DEVNULL, stdout=DEVNULL, stderr=said, preexec_fn=die_with_parent())
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


def take_run(spec: NodeSpec, own_dir: Path, goes_on: Callable[[], bool], shows_up_s: float = _SHOWS_UP_S) -> NodeSpec:
    """Return the spec with this node's paths. On a node with its own disk, write the data that the head sent.

    `own_dir` is the agent's folder. `goes_on` waits a moment, and returns False once the supervisor ended the agent.
    Raises LaunchError if the head's disk must be visible and is not after `shows_up_s`. Raises LaunchError if the
    node's own disk lacks a file, and ConfigError for a folder that others may write.
    """

    def sees_head() -> bool:
        try:
            return digest_of(Path(spec.token_path).read_text()) == spec.token_digest
        except (OSError, UnicodeDecodeError):
            return False

    if not spec.token_digest or sees_head():
        told = {name: value for name, value in spec.contract_env.items() if name != contract.DISKS_VARIABLE}
        return replace(spec, own_disk=None, contract_env=told)
    if spec.own_disk is not None:
        return _with_own_disk(spec, spec.own_disk, own_dir)
    deadline = time.monotonic() + shows_up_s
    while time.monotonic() < deadline:
        if sees_head() or not goes_on():
            return spec
    found = "another file is" if Path(spec.token_path).exists() else "nothing is"
    raise LaunchError(
        f"launch.disks = shared, but node {spec.node} does not see the head's run directory: {found} at "
        f"{spec.token_path} there. Put run.root on a file system that all nodes see; or, if each node has its own "
        f"disk, set launch.disks=private."
    )


def _with_own_disk(spec: NodeSpec, disk: OwnDisk, own_dir: Path) -> NodeSpec:
    if missing := [f"{key} = {path}" for key, path in disk.needs.items() if not Path(path).exists()]:
        raise LaunchError(
            f"The disk of node {spec.node} lacks files that the head node has: {'; '.join(missing)}. Copy them to "
            f"the same path on {spec.node}, or put them on a shared file system. A cache that a reward fills may be an "
            f"empty folder."
        )
    run, attempt_dir = RunDir(Path(disk.run_dir)), own_dir / ATTEMPT_NAME
    run.create()
    if disk.source:
        unpack_source(run, disk.source, disk.source_digest)
    token = own_dir / "token"
    write_atomic(token, disk.token, mode=0o600)
    log_dir = attempt_dir / "nodes" / spec.node
    log_dir.mkdir(parents=True)
    has_folder = Path(spec.working_dir).is_dir()
    return replace(
        spec,
        token_path=str(token),
        log_dir=str(log_dir),
        working_dir=spec.working_dir if has_folder else str(run.path),
        contract_env={**spec.contract_env, contract.ATTEMPT_DIR_VARIABLE: str(attempt_dir)},
        templates_of="",  # templates read the run's config, which is on the head's disk
    )
