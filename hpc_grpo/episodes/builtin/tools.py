"""Built-in environment `tools`: the model calls functions, and sees what they return.

Each call in a message is answered by a message of the role `tool`. A message without a call ends the episode. The
rewards of the config judge this message: the environment gives no reward.

The model sees a tool's ValueError and TypeError. `step` raises any other exception, also for a missed deadline
`call_s`, and this masks the episode. No call starts later than `call_s` after the first call of its message. Otherwise
many slow calls would exceed the environment's deadline, and mask the episode.

The sandbox of the reward `code` runs `python`. A program sees the state of the session's earlier programs: they run
again first, and their output is dropped. Together they have `python_s` of CPU time, and twice this in wall time. A
program that exceeds a limit is discarded. The model caused this, so nothing is masked.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import math
import operator
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from pydantic import TypeAdapter, ValidationError, validate_call
from pydantic.errors import PydanticUserError

from hpc_grpo.episodes import Turn
from hpc_grpo.episodes.calls import Call, arguments_of, calls_of
from hpc_grpo.episodes.host import in_thread
from hpc_grpo.errors import ConfigError
from hpc_grpo.registry import ENVIRONMENTS, Registry
from hpc_grpo.rewards.sandbox.isolation import CELLS, Limits, find_isolation, run_job

TOOLS = Registry("Tool")
_MAX_CALLS = 32
_PARAMETER = re.compile(r"\s+(\w+)\s*(?:\(.*?\))?:\s*(.*)")

_CLOCK = 2.0
"""Wall seconds per CPU second: a busy node gives a program only a part of a core."""

_MAX_BITS, _MAX_EXPRESSION, _MAX_DIGITS = 4096, 1000, 2000
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "max": max, "min": min, "ceil": math.ceil, "floor": math.floor, "sqrt": math.sqrt, "exp": math.exp,
    "log": math.log, "log2": math.log2, "log10": math.log10, "gcd": math.gcd, "lcm": math.lcm, "sin": math.sin,
    "cos": math.cos, "tan": math.tan, "radians": math.radians, "degrees": math.degrees,
    "round": lambda value, digits=None: round(value, digits and max(digits, -_MAX_DIGITS)),
}  # fmt: skip


@ENVIRONMENTS.register("tools")
class Tools:
    """`tools` are names of built-in tools, or the user's functions as `module:function`, sync or async.

    A tool's result is converted by `str`, and cut to `max_chars`.
    """

    def __init__(
        self,
        tools: Sequence[str] = (),
        max_chars: int = 4000,
        call_s: float = 10.0,
        python_s: float = 5.0,
        isolation: str = "strong",
    ) -> None:
        if not tools:
            raise ConfigError("environment.args.tools is empty. List tools: python, calculator, or module:function.")
        self._max_chars, self._call_s = max_chars, call_s
        self._python = Python(python_s, isolation)
        functions = [self._python.python if tool == "python" else TOOLS.find(tool) for tool in tools]
        self.tools = [schema_of(function) for function in functions]
        self._schemas = {schema["function"]["name"]: schema["function"]["parameters"] for schema in self.tools}
        if len(self._schemas) < len(functions):
            raise ConfigError(f"environment.args.tools has two functions of one name: {tools}. Rename one of them.")
        self._functions = dict(zip(self._schemas, map(validate_call, functions), strict=True))
        self.longest_step_s = call_s + max(call_s, _CLOCK * python_s)

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        self._python.programs.clear()

    async def step(self, message: str) -> Turn:
        calls = list(calls_of(message))
        if not calls:
            return Turn(done=True)
        if len(calls) > _MAX_CALLS:
            calls[_MAX_CALLS:] = [Call(error=f"a message has at most {_MAX_CALLS} calls")]
        observation, num_errors, begun = [], 0, time.monotonic()
        for call in calls:
            try:
                if time.monotonic() - begun > self._call_s:
                    raise ValueError("not called: the calls before it took too long")
                text = str(await self._value(call))
            except ValidationError as error:
                wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
                text, num_errors = f"Error: wrong arguments of {call.name}: {'; '.join(wrong)}", num_errors + 1
            except (ValueError, TypeError) as error:
                text, num_errors = f"Error: {error}", num_errors + 1
            observation.append({"role": "tool", "name": call.name, "content": shortened(text, self._max_chars)})
        return Turn(observation, metrics={"tool_calls": len(calls), "tool_errors": num_errors})

    async def _value(self, call: Call) -> Any:
        """Return the result of a tool. ValueError and TypeError are the model's errors, others the tool's."""
        if call.error:
            raise ValueError(call.error)
        if call.name not in self._functions:
            raise ValueError(f"there is no tool {call.name!r}. Tools: {', '.join(self._functions)}")
        function = self._functions[call.name]
        bound = partial(function, **arguments_of(call, self.tools))
        called = asyncio.ensure_future(bound() if inspect.iscoroutinefunction(function) else in_thread(bound))
        try:
            return await asyncio.wait_for(called, None if call.name == "python" else self._call_s)
        except TimeoutError as error:
            if not called.cancelled():  # the tool's own error
                raise
            raise TimeoutError(f"the tool {call.name} did not answer within {self._call_s:g} s") from error


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a tool's JSON schema for chat templates, from the function's signature and docstring.

    Lines `name: text` below `Args:` describe parameters. Raises ConfigError for a function that a model cannot call.
    """
    name = getattr(function, "__name__", "")
    text = inspect.getdoc(function) or ""
    try:
        parameters = TypeAdapter[Any](function).json_schema()  # type: ignore[arg-type]
    except (PydanticUserError, NameError) as error:
        raise ConfigError(f"environment.args.tools: the parameters of {name} have no JSON schema: {error}") from None
    if not text or parameters["type"] != "object":
        raise ConfigError(f"environment.args.tools: {name} must have a docstring, and only named parameters.")
    properties, described = parameters["properties"], None
    for schema in properties.values():
        schema.pop("title", None)
    for line in takewhile(lambda line: not line or line[0].isspace(), text.partition("\nArgs:\n")[2].splitlines()):
        if (match := _PARAMETER.match(line)) and match[1] in properties:
            described = properties[match[1]]
            described["description"] = match[2]
        elif described and line.strip():
            described["description"] += f" {line.strip()}"
    description = re.split(r"\n(?:Args|Returns|Raises):", text)[0].strip()
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def shortened(text: str, most: int) -> str:
    """Return a text of at most `most` characters, and a note about the missing ones.

    >>> shortened("a long answer", 6)
    'a long\\n[7 more characters were cut]'
    """
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= most else f"{text[:most]}\n[{len(text) - most} more characters were cut]"


@TOOLS.register("python")
class Python:
    """The tool `python`, with the programs of its session."""

    def __init__(self, seconds: float, isolation: str) -> None:
        self._limits, self._isolation = Limits(seconds, clock=_CLOCK), isolation
        self.programs: list[str] = []

    def python(self, code: str) -> str:
        """Run a Python program. Returns what it prints, and the value of its last expression.

        Args:
            code: The program. Names that earlier programs defined are there.
        """
        # Sets must keep their order when a program runs again.
        argv = ["/usr/bin/env", "PYTHONHASHSEED=0", sys.executable, "-s", "-P", str(CELLS)]
        job = json.dumps([*self.programs, code])
        [result] = run_job(find_isolation(self._isolation), argv, {}, [job], self._limits)
        if result.ended == "exit 0" and result.verdict == "done":
            self.programs.append(code)
            return result.stdout + result.stderr or "(no output)"
        how = {
            "time": f"it took more than {self._limits.cpu_s:g} s, with the programs before it",
            "memory": f"it took more than {self._limits.memory_mib} MiB",
            "output": f"it printed more than {self._limits.output_kib} KiB",
            "processes": f"it had more than {self._limits.processes} processes",
        }.get(result.ended, f"its process ended ({result.ended})")
        raise ValueError(f"{how}. What this program did is forgotten.\n{result.stdout}{result.stderr}")


@TOOLS.register("calculator")
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % **, parentheses, pi, e, and functions such as sqrt, log, sin, round, max.
    """
    if len(expression) > _MAX_EXPRESSION:
        raise ValueError(f"an expression has at most {_MAX_EXPRESSION} characters")
    try:
        value = _evaluated(ast.parse(expression.strip(), mode="eval").body)
        return f"{value:.12g}" if isinstance(value, float) else str(value)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    except ArithmeticError as error:
        raise ValueError(str(error)) from error


def _evaluated(node: ast.expr) -> Any:
    """Return the number of an expression. Raises ValueError for other syntax, and for integers that are too large."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            pass
        case ast.Name(id="pi" | "e" as name):
            value = getattr(math, name)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub()):
            value = _OPERATORS[type(node.op)](_evaluated(node.operand))
        case ast.BinOp() if type(node.op) in _OPERATORS:
            left, right = _evaluated(node.left), _evaluated(node.right)
            if isinstance(node.op, ast.Pow) and isinstance(left, int) and isinstance(right, int):
                _refuse_bits(left.bit_length() * abs(right))
            value = _OPERATORS[type(node.op)](left, right)
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
            value = _FUNCTIONS[name](*map(_evaluated, node.args))
        case _:
            raise ValueError(f"an expression has numbers, + - * / // % ** and functions, not {ast.unparse(node)!r}")
    if not isinstance(value, int | float):
        raise ValueError(f"{ast.unparse(node)} is no real number")
    _refuse_bits(value.bit_length() if isinstance(value, int) else 0)
    return value


def _refuse_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise ValueError("the number is too large")
