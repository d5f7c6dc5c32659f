"""Errors meant for the user, and the exit code of each kind.

The exit code and the run directory are the complete contract between launching and training. The code alone says
whether repeating the same command can help.

    code     meaning                                                    the same command again
    -------  ---------------------------------------------------------  ------------------------------------
    0        complete                                                   has nothing to do
    1        a crash, or an end without a checkpoint                    may help
    69       the machine lacks something: a node, a GPU, a package      may help, once the machine has it
    73       another attempt holds the run                              helps, once that attempt has ended
    75       stopped early with a checkpoint                            resumes
    78       the user must change something                             ends in the same way
    128 + n  the driver was ended by signal n                           may help
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable, Mapping, Sequence

EXIT_COMPLETE = 0
EXIT_CRASH = 1
EXIT_UNAVAILABLE = 69
EXIT_HELD = 73
EXIT_RESUMABLE = 75
EXIT_CONFIG = 78

_MOST_CHARACTERS = 1000
"""Limit for the text of an error that a user's function raised."""


class HpcGrpoError(Exception):
    """An error whose message is meant for the user; shown without a traceback."""

    exit_code = EXIT_CRASH


class ConfigError(HpcGrpoError):
    """The configuration, a path or the data is wrong. The message gives the rule, the value and the fix."""

    exit_code = EXIT_CONFIG


class RewardError(HpcGrpoError):
    """A reward function broke its contract or failed too often. Carries the function's own error."""

    exit_code = EXIT_CONFIG


class RewardAwayError(HpcGrpoError):
    """At a resume, a reward is late, or its server is away. It worked at an earlier start, so the run is retried."""


class PromptError(HpcGrpoError):
    """An engine refuses a prompt, as every engine would, or no prompt is left to sample. The learners are unchanged."""

    exit_code = EXIT_CONFIG


class WeightSyncError(HpcGrpoError):
    """A publish failed: a checksum, a deadline, or an engine that answered with an error."""


class LaunchError(HpcGrpoError):
    """Nodes, Ray or a process of the run did not come up, or died."""


class EngineLostError(LaunchError):
    """An engine failed more than 3 times in an attempt. The learners are unchanged."""


class GraderLostError(LaunchError):
    """A grader died more than 3 times in a row. The learners are unchanged."""


class EnvironmentLateError(LaunchError):
    """The import of an environment took too long, though it may have been fast before. The learners are unchanged."""


class JobInDoubtError(LaunchError):
    """A command of the scheduler failed, so its queue may hold a job of the run."""


class RunHeldError(LaunchError):
    """Another attempt is training this run."""

    exit_code = EXIT_HELD


class NodesUnavailableError(LaunchError):
    """Nodes or GPUs did not join before the deadline, or were lost; `nodes` names them if known."""

    def __init__(self, message: str, nodes: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.nodes = tuple(nodes)

    exit_code = EXIT_UNAVAILABLE


class EndAskedError(LaunchError):
    """A stop was requested while the run could not write a checkpoint: it waited for nodes, a server or disk space.

    `step` is the step of the newest checkpoint, from which another attempt resumes. 0: none, and the exit code is 1.
    """

    exit_code = EXIT_RESUMABLE

    def __init__(self, awaited: str, step: int) -> None:
        carries_on = f"; start the run again to resume from the checkpoint of step {step}" if step else ""
        super().__init__(f"A stop was requested while waiting: {awaited}{carries_on}.")
        if not step:
            self.exit_code = EXIT_CRASH


def described(error: BaseException) -> str:
    """Describe an error of a user's function: its type, the start of its text, and the place that raised it."""
    text = f"{type(error).__name__}: {str(error)[:_MOST_CHARACTERS]}"
    if isinstance(error, SyntaxError):  # its text names the place; its traceback shows only Python's import
        return text
    [*_, (frame, line)] = traceback.walk_tb(error.__traceback__)  # not extract_tb, which reads the source files
    return f"{text} ({frame.f_code.co_filename}:{line})"


def nearest(name: str, valid: Iterable[str], shown: Mapping[str, str] | None = None) -> str:
    """Return the end of a sentence about an unknown name: the valid name closest to it, where one is close.

    `shown` maps valid names to what the sentence shows in their place.

    >>> nearest("corectness", ["correctness", "strict_format"])
    "; did you mean 'correctness'?"
    >>> nearest("gpro", ["gspo", "grpo"])
    "; did you mean 'grpo'?"
    >>> nearest("zero", ["zero_stage"]), nearest("ppo", ["sapo", "gspo"])
    ("; did you mean 'zero_stage'?", '.')
    """
    # Among equally close names, prefer the one with the same letters: two letters were swapped.
    names = list(valid)
    close = difflib.get_close_matches(name, names, n=5, cutoff=0.58)
    close.sort(key=lambda other: sorted(other) != sorted(name))
    close = close or [other for other in names if len(name) > 2 and other.startswith(name)]
    return f"; did you mean {(shown or {}).get(close[0], close[0])!r}?" if close else "."
