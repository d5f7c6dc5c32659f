"""Apptainer, which Debian has in unstable alone: unpacked beside the system, with a C library of its own."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

FOLDER = Path("/usr/local/lib/hpc-grpo-apptainer")
PROGRAM = Path("/usr/local/bin/apptainer")
_PACKAGES = ("apptainer", "libc6", "libseccomp2", "libsqlite3-0")
_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_LIBRARIES = FOLDER / "usr" / "lib" / f"{os.uname().machine}-linux-gnu"


def install() -> str:
    """Install Apptainer from the mirror that apt uses; return what there is, or why there is none."""
    if not PROGRAM.exists():
        try:
            _install()
        except subprocess.CalledProcessError as error:
            return f"no Apptainer: {error.cmd[0]} ended with {error.returncode}: {error.stderr.strip()[-300:]}"
    return _run(PROGRAM, "--version").strip()


def _install() -> None:
    uris = _run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages").split()
    mirror = next((uri for uri in uris if uri.rstrip("/").endswith("/debian")), "")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "lists" / "partial").mkdir(parents=True)
        source = Path(folder) / "unstable.list"
        source.write_text(f"deb [signed-by={_KEYS}] {mirror} unstable main\n")
        own = {"Dir::Etc::sourcelist": source, "Dir::Etc::sourceparts": "-", "Dir::State::lists": f"{folder}/lists"}
        options = [word for name, value in own.items() for word in ("-o", f"{name}={value}")]
        _run("apt-get", *options, "update")
        _run("apt-get", *options, "-o", "APT::Sandbox::User=root", "download", *_PACKAGES, cwd=folder)
        for package in Path(folder).glob("*.deb"):
            _run("dpkg-deb", "-x", package, FOLDER)
    for program in (FOLDER / "usr" / "bin" / "apptainer", _LIBRARIES / "apptainer" / "bin" / "starter"):
        interpreter = next(_LIBRARIES.glob("ld-linux*"))
        _run("patchelf", "--set-interpreter", interpreter, "--force-rpath", "--set-rpath", _LIBRARIES, program)
    # It looks for its own folders beside its program.
    (FOLDER / "etc").rename(FOLDER / "usr" / "etc")
    (FOLDER / "usr" / "lib" / "var" / "lib" / "apptainer" / "mnt" / "session").mkdir(parents=True)
    PROGRAM.symlink_to(FOLDER / "usr" / "bin" / "apptainer")


def _run(*argv: str | Path, cwd: str | None = None) -> str:
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True, check=True).stdout
