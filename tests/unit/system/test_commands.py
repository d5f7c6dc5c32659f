"""Asking the machine's own commands."""

from __future__ import annotations

from pathlib import Path

from hpc_grpo.system.commands import run_command


def test_a_command_that_hangs_or_is_no_program_is_an_answer(tmp_path: Path) -> None:
    assert run_command(["sleep", "30"], deadline_s=0.2).error == "sleep gave no answer within 0 s"
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\x00\x01")
    garbage.chmod(0o755)
    assert "could not be run" in run_command([str(garbage)]).error
    absent = run_command(["no-such-command-anywhere"])
    assert (absent.is_absent, absent.error) == (True, "no no-such-command-anywhere on PATH")
