"""What can go wrong, by what the caller can do about it."""

import sys
from collections.abc import Callable

EX_UNAVAILABLE = 69  # sysexits.h; tests that need machines skip on it, and only on it


class MachineError(Exception):
    """The machines did not do what was asked."""

    exit_code = 1


class CommandNotFoundError(MachineError):
    """`exec` was given a command that the machine does not have."""

    exit_code = 127  # the shell's


class UnavailableError(MachineError):
    """This host cannot carry the machines: not root, packages missing, namespaces forbidden."""

    exit_code = EX_UNAVAILABLE


def exit_code_of(program: str, run: Callable[[], int]) -> int:
    """Run a program's command and return its exit code; an error is one line under the program's name."""
    try:
        return run()
    except MachineError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
