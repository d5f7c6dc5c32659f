"""Start hpc-grpo from a run's copy of it. This file is the copy's `__main__.py`: `python RUN/source ARGUMENTS`.

`python RUN/source -m MODULE` starts a module of the copy, `python RUN/source FILE.py` a file that uses it. Python puts
the copy first on its search path. For other arguments, the copy is checked first, before the package is imported.
"""

import hashlib
import runpy
import sys
from pathlib import Path

_EXIT_CONFIG = 78


def main() -> None:
    del sys.argv[0]
    if sys.argv[:1] == ["-m"]:
        del sys.argv[0]
        sys.path.append(str(Path.cwd()))  # finds a user's own driver, like `python -m`
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif sys.argv[:1] and sys.argv[0].endswith(".py"):
        sys.path.append(str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        refuse_damage(Path(__file__).resolve().parent)
        sys.argv.insert(0, "hpc-grpo")
        runpy.run_module("hpc_grpo.cli", run_name="__main__")


def refuse_damage(folder: Path) -> None:
    """Print the first file that is missing or differs from SHA256SUMS, and exit with 78. Return if there is none."""
    sums = folder / "SHA256SUMS"
    lines = sums.read_text(errors="replace").splitlines() if sums.is_file() else []
    for line in lines or [""]:
        digest, _, name = line.partition("  ")
        file = folder / name if name else sums
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            print(
                f"error: {file} is missing or damaged: the run runs from its own copy of hpc-grpo.\n"
                "  The command that started the run, with --accept-changes, copies the installed one and records it.",
                file=sys.stderr,
            )
            sys.exit(_EXIT_CONFIG)


if __name__ == "__main__":
    main()
