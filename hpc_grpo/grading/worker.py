"""The program of a reward worker, in its own process. The grader's side is `pool.py`.

Waits for the next call, and ends with its parent. It imports only the standard library and the registry. It sends no
exceptions and no tensors: the parent might not be able to unpickle an exception, and a tensor would make the parent
import torch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import numbers
import os
import pickle
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from hpc_grpo.data.images import open_image
from hpc_grpo.errors import HpcGrpoError, RewardAwayError, described
from hpc_grpo.registry import REWARDS
from hpc_grpo.rewards import BuiltIn, Group, finished
from hpc_grpo.rewards.scoring import ScoringError, scorer
from hpc_grpo.system.processes import tie_to_parent

_MAX_MESSAGE_CHARACTERS = 2000

_functions: dict[str, Any] = {}


@dataclass(frozen=True)
class Call:
    """One reward over one group. `args` are the settings of a built-in, or the keyword arguments of a user's function.

    The parent ends the call after `group.timeout_s`. A built-in that scores one by one has this time per completion.
    """

    reward: str
    args: Any
    group: Group


@dataclass(frozen=True)
class Preparation:
    """A call of a reward's `prepare`, before training. `is_resume`: the run has called `prepare` before."""

    reward: str
    args: Any
    timeout_s: float
    is_resume: bool


@dataclass(frozen=True)
class CallResult:
    """The result of a call (`scores` and `lost`) or of a preparation (`note`), or an error.

    `scores` has one number per completion. `lost` maps completions that exceeded their budget to the reason. `failure`
    is a temporary error; `timed_out`: the failure was a deadline. `violation` is a permanent break of the contract.
    `away` names a server that does not answer. `note` is a message before training.
    """

    scores: tuple[float, ...] | None = None
    lost: Mapping[int, str] = field(default_factory=dict)
    failure: str | None = None
    timed_out: bool = False
    violation: str | None = None
    away: str | None = None
    note: str | None = None


def main(descriptor: int, parent_pid: int) -> None:
    """Answer the messages that arrive at a socket, one by one, until the parent closes it.

    A message is a `Call`, a `Preparation`, or a tuple of names of rewards to import. An empty answer reports progress:
    a message was received, or a completion was scored. If the worker dies later, that message is the probable cause.
    """
    tie_to_parent(parent_pid, signal.SIGKILL)
    os.set_inheritable(descriptor, False)
    with Connection(descriptor) as connection, contextlib.suppress(EOFError):
        # A reward's child processes must not keep the socket open: its close tells the parent that the worker died.
        os.register_at_fork(after_in_child=connection.close)
        show_progress = functools.partial(connection.send_bytes, b"")
        while True:
            content = connection.recv_bytes()
            show_progress()
            message = pickle.loads(content)
            if isinstance(message, Call):
                connection.send(run(message, show_progress))
            else:
                connection.send(prepare(message) if isinstance(message, Preparation) else load(message))


def load(names: Sequence[str]) -> str | None:
    """Import the rewards and their libraries. Return the error's text if that fails."""
    for name in names:
        try:
            function = REWARDS.find(name)
            if isinstance(function, BuiltIn):
                scorer().load(function)
        except HpcGrpoError as error:
            return f"Reward {name!r}: {_bare(error, name)}"
        _functions[name] = function
    return None


def prepare(asked: Preparation) -> CallResult:
    """Call the reward's `prepare`, if it has one. The result holds its return value as a note, or its error."""
    name, function = asked.reward, _functions[asked.reward]
    if (own := getattr(function, "prepare", None)) is None:
        return CallResult()
    try:
        if isinstance(function, BuiltIn):
            note = finished(own(asked.args, asked.timeout_s, asked.is_resume))
        else:
            wanted = {"timeout_s", "is_resume"} & inspect.signature(own).parameters.keys()
            note = finished(own(**asked.args, **{each: getattr(asked, each) for each in wanted}))
    except RewardAwayError as error:
        return CallResult(away=_shortened(f"Reward {name!r}: {error}"))
    except HpcGrpoError as error:
        return CallResult(violation=_shortened(f"Reward {name!r}: {_bare(error, name)}"))
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything; it becomes a record
        return CallResult(failure=_shortened(f"Reward {name!r} cannot be prepared: {type(error).__name__}: {error}"))
    return CallResult(note=f"Reward {name}: {note}" if note else None)


def run(call: Call, show_progress: Callable[[], object]) -> CallResult:
    """Score one group."""
    function = _functions[call.reward]
    try:
        if isinstance(function, BuiltIn) and function.is_one_by_one:
            scored = scorer().score(function, call.args, call.group, show_progress)
            return replace(_checked(call, scored.scores), lost=scored.lost)
        if isinstance(function, BuiltIn):
            return _checked(call, finished(function(call.group, call.args)))
        arguments = arguments_of(inspect.signature(function), call)
        if isinstance(arguments, str):
            return _violation(call, arguments)
        return _checked(call, finished(function(**arguments)))
    except ScoringError as error:
        return CallResult(failure=_shortened(str(error)), timed_out=isinstance(error, TimeoutError))
    except HpcGrpoError as error:
        return _violation(call, f"refuses: {error}")
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything; it becomes a record
        return CallResult(failure=_shortened(described(error)), timed_out=isinstance(error, TimeoutError))


def arguments_of(signature: inspect.Signature, call: Call, *, are_guessed: bool = False) -> dict[str, Any] | str:
    """Return the keyword arguments of a user's function, or the error if one is missing.

    Columns that the function does not accept are omitted. `args` replace columns of the same name. A parameter `images`
    gets a list of PIL images for each completion. If columns `are_guessed`, the data is not read: the error names none.
    """
    group, count = call.group, len(call.group.completions)
    columns = {name: [value] * count for name, value in group.fields.items()}
    if group.images and "images" in signature.parameters:
        columns["images"] = [[open_image(image) for image in group.images]] * count
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        columns = {name: values for name, values in columns.items() if name in signature.parameters}
    own = {"timeout_s": group.timeout_s} if "timeout_s" in signature.parameters else {}
    texts = {"prompts": [group.prompt] * count, "completions": list(group.completions)}
    arguments = {**columns, **call.args, **own, **texts}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        here = "which are unknown until it is read" if are_guessed else f"here: {', '.join(group.fields) or 'none'}"
        return (
            f"cannot be called: {error}. It gets lists by name: prompts, completions, and the columns of the data set "
            f"(`reward test`: --field NAME=VALUE), {here}. A last parameter **columns takes the others."
        )
    return arguments


def _checked(call: Call, values: Any) -> CallResult:
    count = len(call.group.completions)
    rule = f"must return one finite number for each of the {count} completions"
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        return _violation(call, f"returned {_shown(values)} of type {type(values).__name__}; it {rule}.")
    if len(values) != count:
        return _violation(call, f"returned {len(values)} values, {_shown(values)}; it {rule}.")
    scores = []
    for index, value in enumerate(values):
        value = value.tolist() if hasattr(value, "tolist") else value
        try:
            scores.append(float(value) if isinstance(value, numbers.Real) else math.nan)
        except OverflowError:
            scores.append(math.inf)
        if not math.isfinite(scores[-1]):
            return _violation(call, f"returned {_shown(value)} for completion {index}; it {rule}.")
    return CallResult(scores=tuple(scores))


def _violation(call: Call, message: str) -> CallResult:
    return CallResult(violation=_shortened(f"Reward {call.reward!r} {message}"))


def _shown(value: Any) -> str:
    return _shortened(repr(value), 200)


def _shortened(text: str, most: int = _MAX_MESSAGE_CHARACTERS) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _bare(error: Exception, name: str) -> str:
    """Return an error's text, without the name of the reward at its start."""
    return str(error).removeprefix(f"Reward {name!r}: ")
