"""Run unit tests on a program: `python -I unit_tests.py TIME_S`, JSON with `program` and `tests` on stdin.

There are two processes. This one runs the tests, and no code of the program. A fork runs the program, and no code of
the tests. The fork is made before the tests are read:

    tests ── call f(x) ──► program        each message is plain data (plain.py)
          ◄─── value ─────

The program may change its builtins, modules and classes. A test only receives the values that it asked for. The tests
use the program's names as usual. An object that is no plain data is a `Remote` here. A remote's attributes, methods
and operators run in the program. A comparison with a value of the tests runs here: an `__eq__` that is always true
would pass every test. The verdict is written when the tests have ended.

It imports only the standard library.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import ctypes
import importlib
import io
import json
import operator
import os
import resource
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
plain = importlib.import_module("plain")

_VERDICT_FD = 3
_PR_SET_DUMPABLE = 4
_MAX_PRINTED = 1 << 18
_SHOWN_NAMES = ("__name__", "__qualname__", "__dict__")
"""Special names of a Remote that the program provides. NumPy looks up others, and would trust them."""

_FIXED = (int, float, complex, str, bytes)
_PLAIN_BASES: tuple[Any, ...] = (*_FIXED, bytearray, tuple, list, dict, set, frozenset)
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_BINARY = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift", "and_", "or_", "xor",
)  # fmt: skip
_SPECIAL: dict[str, Callable[..., Any]] = {
    "bool": bool, "hash": hash, "len": len, "iter": iter, "next": next, "str": str, "repr": repr, "int": int,
    "float": float, "complex": complex, "index": operator.index, "abs": abs, "neg": operator.neg, "pos": operator.pos,
    "invert": operator.invert, "round": round, "format": format, "reversed": reversed, "dir": dir,
    "getitem": operator.getitem, "setitem": operator.setitem, "delitem": operator.delitem,
    "contains": operator.contains, "copy": copy.copy, "deepcopy": lambda value, _: copy.deepcopy(value),
    "enter": lambda value: type(value).__enter__(value),
    "exit": lambda value, *error: type(value).__exit__(value, *error),
    "instancecheck": lambda kind, value: isinstance(value, kind),
    "subclasscheck": lambda kind, value: issubclass(value, kind),
}  # fmt: skip
"""Special methods of a Remote -> what the other process does."""


def _as_plain(value: Any) -> Any:
    """Return an object of a subclass of a plain type as this plain type. Raises TypeError for any other object."""
    for base in _PLAIN_BASES:
        if isinstance(value, base):
            return base(value)
    raise TypeError(f"{type(value).__name__} is no plain data")


def _awaited(coroutine: Any) -> Any:
    import asyncio  # slow, and rarely needed

    return asyncio.run(coroutine)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    **_SPECIAL,
    **{name: getattr(operator, name) for name in (*_COMPARISONS, *_BINARY)},
    "call": lambda function, arguments, named: function(*arguments, **named),
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "as_plain": _as_plain,
    "await": _awaited,
}

_FOR_PROGRAMS = {"getattr", "setattr", "len", "getitem", "contains", "bool", *_COMPARISONS}
"""Operations that a program may do on an object of a class of the tests."""


class Remote:
    # Stands for an object of the other process. It has no docstring: `__doc__` is the object's.
    __slots__ = ("__number", "__peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_Remote__peer", peer)
        object.__setattr__(self, "_Remote__number", number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _SHOWN_NAMES:
            raise AttributeError(name)
        return self.__peer.ask("getattr", self, name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not named and plain.are_inline(arguments):  # nearly all calls, in half of the time
            return self.__peer.ask("call_number", self.__number, *arguments)
        return self.__peer.ask("call", self, arguments, named)

    @property
    def __doc__(self) -> Any:  # type: ignore[override]
        return self.__peer.ask("getattr", self, "__doc__")

    def __exit__(self, kind: Any, *_: Any) -> Any:
        return self.__peer.ask("exit", self, kind, None, None)

    @staticmethod
    def _asking(operation: str) -> Callable[..., Any]:
        return lambda self, *operands: self.__peer.ask(operation, self, *operands)

    @staticmethod
    def _asking_of_two(operation: str) -> Callable[..., Any]:
        """Return a method for two operands. It runs in the other process if both are objects there, else here."""

        def method(self: Remote, other: Any) -> Any:
            if isinstance(other, Remote):
                return self.__peer.ask(operation, self, other)
            try:
                value = self.__peer.as_plain(self)
            except TypeError:
                return NotImplemented
            return _OPERATIONS[operation](value, other)

        return method


for _name in ("setattr", "delattr", *(_SPECIAL.keys() - {"exit"})):
    setattr(Remote, f"__{_name}__", Remote._asking(_name))
for _name in (*_COMPARISONS, *_BINARY):
    setattr(Remote, f"__{_name.strip('_')}__", Remote._asking_of_two(_name))


class Peer:
    """One end of the channel. It keeps its own objects by number, and stand-ins for the other end's objects."""

    def __init__(self, channel: Any, do: Callable[[str, list[Any]], Any]) -> None:
        self._channel, self._do = channel, do
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._stand_ins: dict[int, Any] = {}
        self._numbers_of_stand_ins: dict[int, int] = {}
        self._plain: dict[int, Any] = {}

    def as_plain(self, remote: Remote) -> Any:
        """Return an object of the other process as plain data. Raises TypeError for an object of another type.

        The answer is cached: a later request could get another number, above one bound and below another.
        """
        if id(remote) in self._plain:
            return self._plain[id(remote)]
        value = self.ask("as_plain", remote)
        if isinstance(value, _FIXED):
            self._plain[id(remote)] = value
        return value

    def ask(self, operation: str, *operands: Any) -> Any:
        """Have the other process do something. Returns its value, or raises its error."""
        data, objects = plain.pack(operands, self._describe)
        self._channel.send({"do": operation, "operands": data})
        while "do" in (reply := self._channel.receive()):
            self._answer(reply)
        (value, is_error, *_), _ = plain.unpack(reply["values"], self._resolve, objects)
        sys.stdout.write(reply["printed"])
        if not is_error:
            return value
        error = _error(*value)
        if isinstance(error, StopIteration) and operation != "next":  # a `map` of the tests would end, and pass
            raise RuntimeError("the program raised StopIteration") from error
        raise error

    def serve(self) -> None:
        """Handle the other process's requests until it ends."""
        with contextlib.suppress(plain.BrokenMessageError):
            while True:
                self._answer(self._channel.receive())

    def has(self, value: Any) -> bool:
        """Return whether the other process got a number for this object."""
        return id(value) in self._numbers

    def _answer(self, message: Any) -> None:
        operands, objects = plain.unpack(message["operands"], self._resolve)
        given = {id(each): place for place, each in enumerate(objects) if plain.is_mutable(each)}
        is_error, printed = False, io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                if (operation := message["do"]) == "call_number":
                    operation, operands = "call", [self._objects[operands[0]], operands[1:], {}]
                value = self._do(operation, operands)
        except BaseException as error:  # noqa: BLE001 - the other process raises it again
            is_error, value = True, (type(error), error.args, vars(error), str(error))
        nodes = message["operands"]["nodes"]
        changed = [
            each
            for node, each in zip(nodes, objects, strict=False)
            if id(each) in given and not plain.is_as_sent(node, each)
        ]
        data, _ = plain.pack([value, is_error, *changed], self._describe, given)
        self._channel.send({"values": data, "printed": printed.getvalue()[:_MAX_PRINTED]})

    def _describe(self, value: Any) -> list[Any]:
        """Return the message node of an object that is not copied."""
        if (number := self._numbers_of_stand_ins.get(id(value))) is not None:
            return ["yours", number]
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)  # never freed: another object would get its identity
        number = self._numbers[id(value)]
        if isinstance(value, type) and issubclass(value, BaseException):
            bases = [self._describe(base) for base in value.__bases__ if issubclass(base, BaseException)]
            return ["error", number, value.__module__, value.__name__, bases]
        return ["coroutine" if isinstance(value, types.CoroutineType) else "object", number]

    def _resolve(self, node: list[Any]) -> Any:
        kind, number, *rest = node
        if kind == "yours":
            return self._objects[number]
        if number not in self._stand_ins:
            self._stand_ins[number] = stand_in = self._stand_in(kind, number, rest)
            self._numbers_of_stand_ins[id(stand_in)] = number
        return self._stand_ins[number]

    def _stand_in(self, kind: str, number: int, rest: list[Any]) -> Any:
        if kind == "error":
            return self._error_class(*rest)
        remote = Remote(self, number)
        if kind == "object":
            return remote
        self._numbers_of_stand_ins[id(remote)] = number

        async def awaited() -> Any:
            return self.ask("await", remote)

        return awaited()

    def _error_class(self, module: str, name: str, bases: list[Any]) -> Any:
        """Return the standard library's class of this name, else a new one with the same bases.

        Excludes classes of unittest: a test that raises `SkipTest` would not fail.
        """
        if (top := module.partition(".")[0]) in sys.stdlib_module_names and top != "unittest":
            found = getattr(importlib.import_module(module), name, None)
            if isinstance(found, type) and issubclass(found, BaseException):
                return found
        text = {"__str__": lambda self: self.__dict__.get("_text", "")}
        return type(name, tuple(map(self._resolve, bases)) or (Exception,), text)


def _error(kind: Any, arguments: Any, attributes: Any, text: str) -> BaseException:
    error: BaseException = kind.__new__(kind, *arguments)
    if isinstance(kind.__init__, types.WrapperDescriptorType):  # SystemExit's sets `code`, which vars(error) lacks
        with contextlib.suppress(Exception):
            kind.__init__(error, *arguments)
    error.args = arguments
    vars(error).update(attributes, _text=text)
    return error


def main() -> None:
    for_program, for_tests = os.pipe(), os.pipe()
    sys.set_int_max_str_digits(0)
    # The program must not read the memory of this process, nor interrupt the tests by an error that they catch.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    if os.fork() == 0:
        try:
            _run_program(plain.Channel(for_program[0], for_tests[1]), [0, _VERDICT_FD, for_program[1], for_tests[0]])
        finally:
            os._exit(1)
    os.close(for_program[0])
    os.close(for_tests[1])
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    job = json.load(sys.stdin)
    has_tested = _run_tests(plain.Channel(for_tests[0], for_program[1]), job["program"], job["tests"])
    os.write(_VERDICT_FD, b"passed" if has_tested else b"nothing")
    os._exit(0)


def _run_program(channel: Any, not_its: list[int]) -> None:
    """Serve the program's names. Closes the descriptors `not_its`, such as the verdict's, which the tests write."""
    for descriptor in not_its:
        os.close(descriptor)
    os.open(os.devnull, os.O_RDONLY)  # as 0
    time_s = max(1, round(float(sys.argv[1])))
    resource.setrlimit(resource.RLIMIT_CPU, (time_s, time_s))
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module

    def load(program: str) -> None:
        exec(compile(program, "solution.py", "exec", dont_inherit=True), module.__dict__)

    def lookup(names: tuple[str, ...]) -> dict[str, Any]:
        return {name: vars(module)[name] for name in names if name in vars(module)}

    operations = _OPERATIONS | {"load": load, "lookup": lookup, "names": lambda: list(vars(module))}
    Peer(channel, lambda operation, operands: operations[operation](*operands)).serve()


def _run_tests(channel: Any, program: str, tests: str) -> bool:
    """Run the tests in a namespace with the program's names. Return whether they test anything. Raises their errors.

    Calls the functions that pytest would call, unless the tests call some of them.
    """

    def do(operation: str, operands: list[Any]) -> Any:
        _refuse_to_program(peer, operation, *operands)
        return _OPERATIONS[operation](*operands)

    peer = Peer(channel, do)
    code = ast.parse(tests, "tests.py")
    sys.modules["solution"] = _Solution(peer)
    module = types.ModuleType("tests")
    sys.modules["tests"] = module
    peer.ask("load", program)
    vars(module).update(_names(peer, code))
    results = _watch_unittest() if "unittest" in tests else []
    exec(compile(code, "tests.py", "exec", dont_inherit=True), module.__dict__)
    if "unittest" in tests and not results:
        importlib.import_module("unittest").main()
    if not all(result.wasSuccessful() for result in results):
        raise AssertionError("a test of unittest has failed")
    functions = {  # without fixtures
        name: each
        for name, each in vars(module).items()
        if name[:4] == "test" and isinstance(each, types.FunctionType)
        if each.__code__.co_argcount == len(each.__defaults__ or ())
    }
    if not (acts := _acts(code)) or not functions.keys() & _used(code):
        for function in functions.values():
            if isinstance(found := function(), types.CoroutineType):
                _awaited(found)
    return sum(result.testsRun for result in results) > 0 or bool(functions) or (acts and not results)


def _watch_unittest() -> list[Any]:
    """Make `unittest.main` run the cases of the tests. Return a list that gets every new TestResult."""
    unittest: Any = importlib.import_module("unittest")
    results: list[Any] = []

    begin = unittest.TestResult.__init__

    def watched(self: Any, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        results.append(self)

    unittest.TestResult.__init__ = watched
    program = unittest.TestProgram
    unittest.main = lambda *_, **__: program("tests", argv=["tests"], exit=False)
    return results


def _acts(node: ast.AST) -> bool:
    """Return whether a module asserts, calls or raises anything outside of its functions and classes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):  # it is not "__main__" here
        return False
    return isinstance(node, ast.Assert | ast.Call | ast.Raise) or any(map(_acts, ast.iter_child_nodes(node)))


def _used(tests: ast.Module) -> set[str]:
    return {node.id for node in ast.walk(tests) if isinstance(node, ast.Name) and not node.id.startswith("__")}


def _lookup(peer: Peer, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the program's values of these names, and no others: an answer may contain an unrequested `abs`.

    `names` is a tuple, because a program may change a list that it is given.
    """
    found = peer.ask("lookup", names)
    return {name: found[name] for name in names if name in found}


def _names(peer: Peer, tests: ast.Module) -> dict[str, Any]:
    """Return the program's values of names that the tests use.

    The name of a builtin is Python's builtin: a program could pass with its own `abs`. But if the tests use no other
    name of the program, they test a function of this name, and get the program's.
    """
    used = _used(tests)
    found = _lookup(peer, tuple(used - vars(builtins).keys()))
    bound = {getattr(node, each, None) for node in ast.walk(tests) for each in ("module", "name", "asname", "arg")}
    bound |= {node.id for node in ast.walk(tests) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if found or "solution" in bound or used - bound - vars(builtins).keys():
        return found
    return _lookup(peer, tuple(used & vars(builtins).keys()))


class _Solution(types.ModuleType):
    """The program as a module: `from solution import f`."""

    def __init__(self, peer: Peer) -> None:
        super().__init__("solution")
        self.__peer = peer

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            taken = vars(builtins).keys() | vars(sys.modules["tests"])  # `import *` must not bring another `math`
            return [each for each in self.__peer.ask("names") if not each.startswith("_") and each not in taken]
        found = {} if name.startswith("__") else _lookup(self.__peer, (name,))
        if name not in found:
            raise AttributeError(name)
        return found[name]


def _refuse_to_program(peer: Peer, operation: str, value: Any, *operands: Any) -> None:
    """Raise TypeError for operations on the tests' objects that would let a program find the expected values."""
    if operation in ("call", "iter", "next", "hash") and peer.has(value):
        return
    is_public = operation not in ("getattr", "setattr") or not str(operands[0]).startswith("_")
    if type(value).__module__ == "tests" and operation in _FOR_PROGRAMS and is_public:
        return
    raise TypeError(f"a program may not do {operation!r} to a {type(value).__name__} of its tests")


if __name__ == "__main__":
    main()
