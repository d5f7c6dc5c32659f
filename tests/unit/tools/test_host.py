"""What virtual machines need of the host is installed in one go, also where nothing of it was there before."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from tools.virtual_machines import host


def _program(file: Path, text: str = "") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def test_a_program_in_a_folder_that_the_installation_makes_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian keeps PostgreSQL's programs in a folder of their own, which comes with the package."""
    programs, late = tmp_path / "bin", tmp_path / "postgresql" / "15" / "bin"
    for name in ("ip", "nsenter", "unshare", "setsid"):
        _program(programs / name)
    _program(
        programs / "apt-get",
        f"mkdir -p {late} && printf '#!/bin/sh\\n' > {late}/postgres && chmod 755 {late}/postgres",
    )
    monkeypatch.setattr(host, "require_root", lambda: None)
    monkeypatch.setattr(host, "_services_held_back", nullcontext)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    found = host.install(
        ["postgresql"], ["postgres"], lambda: [str(path) for path in (tmp_path / "postgresql").glob("*/bin")]
    )
    assert found == "installed postgresql"
