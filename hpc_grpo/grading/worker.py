"""The program of a reward worker.

Runs in a process of its own, one per worker of the pool; the grader's side is `slot`. Waits for the next call, and ends
with its parent.

It imports the standard library and the registry, nothing heavy. No exception leaves it: the parent might not be able to
unpickle one, and a tensor among the scores would make the parent import torch.
"""

from __future__ import annotations

import inspect
import math
import numbers
import os
import pickle
import signal
import struct
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_grpo.errors import ConfigError, HpcGrpoError, RewardAwayError, nearest
from hpc_grpo.registry import REWARDS
from hpc_grpo.rewards import RewardFunction
from hpc_grpo.system.processes import tie_to_parent

_MAX_MESSAGE_CHARACTERS = 2000

HEADER = struct.Struct("!Q")
"""In front of each message: its length in bytes."""

_functions: dict[str, RewardFunction] = {}


@dataclass(frozen=True)
class Call:
    """One reward function over one group. `fields` are the item's; every completion sees the same.

    The parent ends it after `timeout_s`; a function that names a parameter of that name is told.
    """

    reward: str
    args: Mapping[str, Any]
    prompt: str
    completions: tuple[str, ...]
    fields: Mapping[str, Any]
    timeout_s: float


@dataclass(frozen=True)
class Preparation:
    """Asks for what a reward does once before training. `is_resume`: it was done before, when the run began."""

    reward: str
    args: Mapping[str, Any]
    timeout_s: float
    is_resume: bool


@dataclass(frozen=True)
class CallResult:
    """The result of a call or a preparation; at most one field is set.

    `scores` has one number per completion. `failure` says what went wrong this time, `violation` how the function
    broke its contract, as it always will; `away`, what it asks in vain. `note` is what it says before training.
    """

    scores: tuple[float, ...] | None = None
    failure: str | None = None
    violation: str | None = None
    away: str | None = None
    note: str | None = None


def framed(message: Any) -> bytes:
    """Return a message as it crosses the socket: its length, then its pickle."""
    content = pickle.dumps(message)
    return HEADER.pack(len(content)) + content


def main(descriptor: int, parent_pid: int) -> None:
    """Answer the messages that arrive at a socket, one by one, until the parent closes it.

    A `Call` is run, a `Preparation` made; a tuple holds the names of rewards to import. An empty frame says that a
    message was taken: a worker that dies after it died of that message.
    """
    tie_to_parent(parent_pid, signal.SIGKILL)
    os.set_inheritable(descriptor, False)
    with open(descriptor, "r+b", buffering=0) as connection:
        # What a reward forks or executes must not keep the socket open: its end tells the parent that the worker died.
        os.register_at_fork(after_in_child=connection.close)
        while header := _read(connection, HEADER.size):
            content = _read(connection, HEADER.unpack(header)[0])
            connection.write(HEADER.pack(0))
            message = pickle.loads(content)
            answer = framed(_answer(message))
            while answer:
                answer = answer[connection.write(answer) :]


def _read(connection: Any, size: int) -> bytes:
    """Return `size` bytes; fewer, or none, when the parent has closed its end."""
    data, received = bytearray(size), 0
    while received < size and (count := connection.readinto(memoryview(data)[received:])):
        received += count
    return bytes(data[:received])


def _answer(message: Any) -> CallResult | str | None:
    if isinstance(message, Call):
        return run(message)
    return prepare(message) if isinstance(message, Preparation) else load(message)


def load(names: Sequence[str]) -> str | None:
    """Import the rewards; returns the error's text where one cannot be imported."""
    for name in names:
        try:
            _functions[name] = REWARDS.find(name)
        except HpcGrpoError as error:
            return str(error)
    return None


def prepare(preparation: Preparation) -> CallResult:
    """Check the arguments of the built-ins, which take columns too and so would swallow a misspelt one; call `prepare`.

    That is an attribute of a reward's function: called with `rewards.N.args`, it raises ConfigError where the reward
    could not work, and returns what the user should know of it, or None.
    """
    name = preparation.reward
    function = _functions[name]
    try:
        if ":" not in name:
            _refuse_unknown(name, function, preparation.args)
        note = _prepared(function, preparation) if hasattr(function, "prepare") else None
    except RewardAwayError as error:
        return CallResult(away=_shortened(f"Reward {name!r}: {error}"))
    except HpcGrpoError as error:
        return CallResult(violation=_shortened(f"Reward {name!r}: {error}"))
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything; it becomes a record
        return CallResult(failure=_shortened(f"Reward {name!r} cannot be prepared: {type(error).__name__}: {error}"))
    return CallResult(note=f"Reward {name}: {note}" if note else None)


def _prepared(function: Any, preparation: Preparation) -> Any:
    wanted = inspect.signature(function.prepare).parameters
    told = {name: getattr(preparation, name) for name in ("timeout_s", "is_resume") if name in wanted}
    return _returned(function.prepare(**preparation.args, **told))


def _refuse_unknown(name: str, function: RewardFunction, args: Mapping[str, Any]) -> None:
    taken = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is not parameter.empty and parameter.name not in ("answer", "timeout_s")
    ]
    for key in args:
        if key not in taken:
            raise ConfigError(f"{name} has no argument {key!r}{nearest(key, taken)} It takes: {', '.join(taken)}.")


def _returned(value: Any) -> Any:
    """Return what a function has returned; one that is `async` is run to its end."""
    if not inspect.isawaitable(value):
        return value
    import asyncio  # here: a worker starts as fast as its imports are few

    async def awaited() -> Any:
        return await value

    return asyncio.run(awaited())


def run(call: Call) -> CallResult:
    """Score one group."""
    function = _functions[call.reward]
    try:
        arguments = _arguments(function, call)
    except TypeError as error:
        columns = ", ".join(call.fields)
        return _violation(call, f"cannot be called: {error}. Columns of the data set: {columns or 'none'}.")
    try:
        values = _returned(function(**arguments))
    except HpcGrpoError as error:
        return _violation(call, f"refuses: {error}")
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything; it becomes a record
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}:{frame.lineno}"
        return CallResult(failure=_shortened(f"{type(error).__name__}: {error} ({place})"))
    return _checked(call, values)


def _arguments(function: RewardFunction, call: Call) -> dict[str, Any]:
    """Return the arguments, without columns that the function does not take. Raises TypeError for one missing."""
    count = len(call.completions)
    columns = {name: [value] * count for name, value in call.fields.items()}
    texts = {"prompts": [call.prompt] * count, "completions": list(call.completions)}
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
        columns = {name: values for name, values in columns.items() if name in signature.parameters}
    told = {"timeout_s": call.timeout_s} if "timeout_s" in signature.parameters else {}
    arguments = {**columns, **call.args, **told, **texts}
    signature.bind(**arguments)
    return arguments


def _checked(call: Call, values: Any) -> CallResult:
    rule = f"must return one finite number for each of the {len(call.completions)} completions"
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        return _violation(call, f"returned {_shown(values)} of type {type(values).__name__}; it {rule}.")
    if len(values) != len(call.completions):
        return _violation(call, f"returned {len(values)} values, {_shown(values)}; it {rule}.")
    for index, value in enumerate(values):
        if not isinstance(value, numbers.Real) or not _is_finite(value):
            return _violation(call, f"returned {_shown(value)} for completion {index}; it {rule}.")
    return CallResult(scores=tuple(float(value) for value in values))


def _is_finite(value: numbers.Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _violation(call: Call, message: str) -> CallResult:
    return CallResult(violation=_shortened(f"Reward {call.reward!r} {message}"))


def _shown(value: Any) -> str:
    return _shortened(repr(value), 200)


def _shortened(text: str, most: int = _MAX_MESSAGE_CHARACTERS) -> str:
    return text if len(text) <= most else f"{text[:most]}…"
