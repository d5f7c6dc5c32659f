"""Exchange values between the tests' process and the program's process, as plain data in JSON.

Numbers, texts, bytes, containers, ranges, dates and NumPy's arrays of numbers are copied. If the other process changes
a mutable container, the container changes here too. Any other object stays in its process, and the other process gets a
number for it. A message is never code.

It imports only the standard library.
"""

from __future__ import annotations

import base64
import builtins
import importlib
import json
import operator
import os
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

_INLINE = {type(None), bool, float, str, int}
_LEAST, _MOST = -(1 << 64) + 1, (1 << 64) - 1
_FEW = 100
_FILLED: set[Any] = {list, set, deque, dict, OrderedDict, Counter, defaultdict}
"""Containers that are made empty and filled later: they may hold themselves."""
_FROZEN: set[Any] = {tuple, frozenset, range, slice}
_MAKERS: dict[str, Any] = {kind.__name__: kind for kind in _FILLED | _FROZEN}
_NAMED: dict[tuple[str, str], Callable[[Any], Sequence[Any]]] = {
    ("fractions", "Fraction"): lambda value: (value.numerator, value.denominator),
    ("decimal", "Decimal"): lambda value: (str(value),),
    ("datetime", "date"): lambda value: (value.year, value.month, value.day),
    ("datetime", "timedelta"): lambda value: (value.days, value.seconds, value.microseconds),
    ("datetime", "time"): lambda value: (value.hour, value.minute, value.second, value.microsecond),
    ("datetime", "datetime"): lambda value: (*value.timetuple()[:6], value.microsecond),
}
"""Types of the standard library -> the arguments that make an equal value."""
_ARRAY_KINDS = "biufcSU"

Resolve = Callable[[list[Any]], Any]


class BrokenMessageError(Exception):
    """The other process sent an invalid message, or has ended."""


class Channel:
    """Sends and receives messages over two pipes, one message on each line."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = os.fdopen(reads, "rb"), os.fdopen(writes, "wb", buffering=0)

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[self._writes.write(data) :]

    def receive(self) -> Any:
        """Return the next message. Raises BrokenMessageError if there will be none."""
        try:
            return json.loads(self._reads.readline())
        except (ValueError, RecursionError, MemoryError) as error:
            raise BrokenMessageError(str(error)) from error


def pack(
    roots: Sequence[Any], describe: Callable[[Any], list[Any]], numbers: dict[int, int] | None = None
) -> tuple[dict[str, Any], list[Any]]:
    """Return values as plain data, and their objects in the order of the data's nodes.

    `describe` returns the node of an object that stays in this process. `numbers` maps the `id` of an object that came
    in the other process's message to the number of its node in that message.
    """
    if are_inline(roots):
        return {"nodes": [], "roots": list(roots), "same": []}, []
    places: dict[int, int] = {}
    packed: list[Any] = []
    opened: set[int] = set()
    pending = [(value, False) for value in reversed(roots)]
    while pending:
        value, has_parts = pending.pop()
        if _is_inline(value) or id(value) in places or (id(value) in opened and not has_parts):
            continue
        if type(value) in _FROZEN and not has_parts:  # It comes after the parts that make it.
            opened.add(id(value))
            pending.append((value, True))
        else:
            places[id(value)] = len(packed)
            packed.append(value)
        if not has_parts and not are_inline(parts := _parts(value)):
            pending += [(part, False) for part in reversed(parts)]

    def reference(value: Any) -> Any:
        return value if _is_inline(value) else [places[id(value)]]

    nodes = []
    for value in packed:
        kind = type(value)
        if kind in _FILLED or kind in _FROZEN:
            parts = _parts(value)
            nodes.append([kind.__name__, *(_in_one(parts) or (parts if are_inline(parts) else map(reference, parts)))])
        else:
            nodes.append(_leaf(value) or describe(value))
    same = [(place, numbers[id(value)]) for place, value in enumerate(packed) if numbers and id(value) in numbers]
    return {"nodes": nodes, "roots": [reference(root) for root in roots], "same": same}, packed


def unpack(data: Any, resolve: Resolve, originals: Sequence[Any] = ()) -> tuple[list[Any], list[Any]]:
    """Return the values, and the objects of all nodes. `resolve` returns the object that a node describes.

    Updates objects of `originals` to the state in the data. Raises BrokenMessageError for invalid data.
    """
    try:
        nodes, same = data["nodes"], dict(data["same"])
        for node in nodes:
            if len(node) == 2 and type(node[1]) is dict:
                node[1:] = _out_of_one(**node[1])
        if not nodes and list not in map(type, data["roots"]):
            return data["roots"], []
        objects: list[Any] = [None] * len(nodes)
        for place, (kind, *_) in enumerate(nodes):
            if _MAKERS.get(kind) in _FILLED:
                objects[place] = _original(originals[same[place]], kind) if place in same else _MAKERS[kind]()
                objects[place].clear()

        def found(parts: list[Any]) -> list[Any]:
            if list not in set(map(type, parts)):  # nearly all of a long message
                return parts
            return [objects[part[0]] if isinstance(part, list) else part for part in parts]

        for place, (kind, *parts) in enumerate(nodes):
            if _MAKERS.get(kind) in _FROZEN:
                values = found(parts)
                objects[place] = _MAKERS[kind](values) if kind in ("tuple", "frozenset") else _MAKERS[kind](*values)
            elif kind not in _MAKERS:
                objects[place] = _made(kind, parts, resolve)
                if place in same:
                    original = _original(originals[same[place]], type(objects[place]).__name__)
                    original[... if kind == "ndarray" else slice(None)] = objects[place]
                    objects[place] = original
        for place, (kind, *parts) in enumerate(nodes):
            if _MAKERS.get(kind) in _FILLED:
                _fill(objects[place], found(parts))
        return found(data["roots"]), objects
    except BrokenMessageError:
        raise
    except Exception as error:
        raise BrokenMessageError(f"{type(error).__name__}: {error}") from error


def are_inline(values: Sequence[Any]) -> bool:
    """Return whether values are sent inline: numbers, texts and None, but no integers of more than 64 bits."""
    kinds = set(map(type, values))
    if not kinds <= _INLINE:
        return False
    integers = values if kinds == {int} else [value for value in values if type(value) is int] if int in kinds else ()
    return not integers or _LEAST <= min(integers) <= max(integers) <= _MOST


def _in_one(parts: list[Any]) -> list[Any] | None:
    """Return many numbers of one type as one part; None for other parts."""
    kinds = set(map(type, parts)) if len(parts) > _FEW else ()
    if kinds not in ({float}, {int}):
        return None
    try:
        numbers = array("d" if kinds == {float} else "q", parts)
    except OverflowError:
        return None
    return [{"kind": numbers.typecode, "data": base64.b64encode(numbers.tobytes()).decode()}]


def _out_of_one(kind: str, data: str) -> list[Any]:
    if kind not in ("d", "q"):
        raise BrokenMessageError(f"numbers of kind {kind!r}")
    return array(kind, base64.b64decode(data)).tolist()


def is_as_sent(node: Sequence[Any], value: Any) -> bool:
    """Return whether a list without containers still holds the same parts as its node."""
    return type(value) is list and len(value) == len(node) - 1 and all(map(operator.is_, value, node[1:]))


def is_mutable(value: Any) -> bool:
    return type(value) in _FILLED or type(value) is bytearray or _numpy_kind(value) == "ndarray"


def _original(value: Any, kind: str) -> Any:
    if type(value).__name__ != kind:
        raise BrokenMessageError(f"a {type(value).__name__} became a {kind}")
    return value


def _fill(container: Any, parts: list[Any]) -> None:
    if isinstance(container, dict):
        for key, value in zip(parts[::2], parts[1::2], strict=True):
            container[key] = value
    elif isinstance(container, set):
        container.update(parts)
    else:
        container.extend(parts)


def _is_inline(value: Any) -> bool:
    kind = type(value)
    return kind in _INLINE and (kind is not int or _LEAST <= value <= _MOST)


def _parts(value: Any) -> list[Any]:
    kind = type(value)
    if kind in (range, slice):
        return [value.start, value.stop, value.step]
    if kind in _FILLED and isinstance(value, dict):
        return [part for item in value.items() for part in item]
    return list(value) if kind in _FILLED or kind in _FROZEN else []


def _leaf(value: Any) -> list[Any] | None:
    """Return the message node of a value without parts; None for an object that is not copied."""
    kind = type(value)
    if kind is int:
        return ["int", hex(value)]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind in (bytes, bytearray):
        return [kind.__name__, value.hex()]
    if value is Ellipsis or value is NotImplemented:
        return ["builtin", str(value)]
    if issubclass(kind, type) and getattr(builtins, name := str(value.__name__), None) is value:
        return ["builtin", name]
    if kind is type(os):
        return ["module", str(value.__name__)]
    if (path := (kind.__module__, kind.__qualname__)) in _NAMED and getattr(value, "tzinfo", None) is None:
        return ["named", *path, *_NAMED[path](value)]
    if (numpy_kind := _numpy_kind(value)) is not None:
        return [numpy_kind, value.dtype.str, list(value.shape), _array_data(value)]
    return None


def _array_data(value: Any) -> list[Any]:
    flat = value.reshape(-1).tolist()
    if value.dtype.kind == "c":
        return [[part.real, part.imag] for part in flat]
    return [part.hex() for part in flat] if value.dtype.kind == "S" else flat


def _numpy_kind(value: Any) -> str | None:
    kind = type(value)
    if kind.__module__ != "numpy" or getattr(getattr(value, "dtype", None), "kind", "O") not in _ARRAY_KINDS:
        return None
    if kind.__name__ == "ndarray":
        return "ndarray"
    return "scalar" if value.shape == () else None


def _made(kind: str, parts: list[Any], resolve: Resolve) -> Any:
    """Return the value of a node without parts."""
    if kind == "int":
        return int(parts[0], 16)
    if kind == "complex":
        return complex(*parts)
    if kind in ("bytes", "bytearray"):
        return getattr(builtins, kind).fromhex(parts[0])
    if kind == "builtin":
        value = getattr(builtins, parts[0])
        if isinstance(value, type) or value in (Ellipsis, NotImplemented):
            return value
    if kind == "module" and parts[0] not in ("__main__", "solution"):
        return importlib.import_module(parts[0])
    if kind == "named" and tuple(parts[:2]) in _NAMED:
        return getattr(importlib.import_module(parts[0]), parts[1])(*parts[2:])
    if kind in ("ndarray", "scalar"):
        import numpy

        data, dtype = parts[2], numpy.dtype(parts[0])
        if dtype.kind not in _ARRAY_KINDS:
            raise BrokenMessageError(f"an array of {dtype}")
        if dtype.kind == "c":
            data = [complex(*part) for part in data]
        elif dtype.kind == "S":
            data = [bytes.fromhex(part) for part in data]
        array = numpy.array(data, dtype).reshape(parts[1])
        return array if kind == "ndarray" else array[()]
    return resolve([kind, *parts])
