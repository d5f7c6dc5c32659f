"""Slurm's programs as shell scripts, for tests of what is asked of them and how often."""

from __future__ import annotations

from pathlib import Path

PROGRAMS = ("squeue", "sacct", "scontrol", "sinfo", "sbatch", "scancel", "srun", "salloc", "sstat", "sacctmgr")


class SlurmPrograms:
    """Write the programs into `folder`, to be put first on PATH; `calls` holds the command lines so far.

    Each prints nothing and ends with 0 until `answer` says otherwise.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self._calls = folder, folder / "calls"
        for name in PROGRAMS:
            self.answer(name, "")

    def answer(self, name: str, stdout: str, *, stderr: str = "", code: int = 0) -> None:
        """Have a program print this, and end with `code`."""
        program, out, err = (self.folder / f"{name}{suffix}" for suffix in ("", ".out", ".err"))
        out.write_text(stdout)
        err.write_text(stderr)
        remembers = f'echo {name} "$@" >> {self._calls}\n/usr/bin/env > {program}.environ\n'
        program.write_text(f"#!/bin/sh\n{remembers}/bin/cat {out}\n/bin/cat {err} >&2\nexit {code}\n")
        program.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines() if self._calls.exists() else []

    def environ(self, name: str) -> dict[str, str]:
        """Return the environment that a program was last called with."""
        pairs = (line.partition("=") for line in (self.folder / f"{name}.environ").read_text().splitlines())
        return {name: value for name, _, value in pairs}
