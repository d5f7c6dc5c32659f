"""Parse the tool calls of model families. A malformed call gets an error message for the model."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_FORM = 'Write {"name": ..., "arguments": {...}}.'
_HERMES = re.compile(r"<tool_call>\s*")
_HERMES_END = re.compile(r"\s*(?:</tool_call>|\Z)")
_XML = re.compile(r"<function=([^>\s]+)\s*>(.*?)(?:</function>|\Z)", re.DOTALL)
_XML_PARAMETER = re.compile(r"<parameter=([^>\s]+)\s*>\n?(.*?)\n?(?:</parameter>|(?=<parameter=))", re.DOTALL)
_XML_FORM = "Write <function=...><parameter=...>...</parameter></function>."
_PYTHONIC = re.compile(
    r"<\|python_start\|>(.*?)(?:<\|python_end\|>|\Z)|<function_calls>(.*?)(?:</function_calls>|\Z)"
    r"|\A\s*(\[\s*[A-Za-z][\w.]*\(\s*(?:\)|[A-Za-z]\w*\s*=).*)",
    re.DOTALL,
)
_BARE = re.compile(r'\s*\[?\s*\{\s*"name"\s*:\s*"[^"]*"\s*,\s*"(?:arguments|parameters)"')
"""The beginning of a message that is a call without a marker, even if its JSON is broken."""
_JSON = json.JSONDecoder()
_MARK = re.compile(r"\[TOOL_CALLS\]|<tool_call>|<function=|<function_calls>|<\|python_start\|>|<\|python_tag\|>")
_UNMARKED = re.compile(r'(?:\[\s*)?\{\s*"(?:name|arguments|parameters|type|id)"|\A\s*\[\s*[A-Za-z][\w.]*\(')
"""The beginning of a message's first call, with a marker and without."""


@dataclass(frozen=True)
class Call:
    """A call in a message. `error` says why it is invalid. `has_texts`: numbers and lists may arrive as text."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    has_texts: bool = False


def calls_of(message: str) -> Iterator[Call]:
    """Yield the calls in a message without its thoughts, in the forms that docs/environments.md lists."""
    text = message.rpartition("</think>")[2]
    match, xml = _HERMES.search(text), _XML.search(text)
    if xml and (match is None or xml.start() <= match.end()):
        for found in _XML.finditer(text):
            if beside := _XML_PARAMETER.sub("", found[2]).strip():
                yield Call(error=f"the call cannot be read: {beside[:100]!r} is no parameter. {_XML_FORM}")
            else:
                yield Call(found[1], dict(_XML_PARAMETER.findall(found[2])), has_texts=True)
        return
    if match:
        while match:
            call, end = _read(text, match.end())
            if not call.error and not _HERMES_END.match(text, end):
                call = Call(error=f"the call does not end behind its JSON. {_FORM}")
            yield call
            match = _HERMES.search(text, end)
        return
    if pythonic := _PYTHONIC.search(text):
        yield from _python_calls("".join(filter(None, pythonic.groups())))
        return
    calls, end, is_meant = [], 0, "<|python_tag|>" in text or _BARE.match(text) is not None
    while (start := text.find("{", end)) >= 0:
        call, end = _read(text, start)
        calls.append(call)
        if call.error:
            break
    if is_meant and not calls:
        yield Call(error=f"the call has no JSON. {_FORM}")
    # Objects that are not calls are part of an answer.
    yield from calls if is_meant or not any(call.error for call in calls) else []


def _python_calls(text: str) -> Iterator[Call]:
    try:
        body = ast.parse(text.strip()).body
        values = [statement.value if isinstance(statement, ast.Expr) else None for statement in body]
        calls = [node for value in values for node in (value.elts if isinstance(value, ast.List) else [value])]
        for node in calls or [None]:
            if not isinstance(node, ast.Call) or node.args or not all(each.arg for each in node.keywords):
                raise ValueError("it must have a name, and arguments with names")
            arguments = json.dumps({str(each.arg): _literal(each.value) for each in node.keywords}, ensure_ascii=False)
            arguments.encode()
            yield Call(ast.unparse(node.func), json.loads(arguments))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        yield Call(error=f"the call cannot be read: {error}. Write [name(argument=value)].")


def _literal(node: ast.expr) -> Any:
    """Return a Python literal; JSON's true, false and null are accepted too. Raises ValueError for other syntax."""
    match node:
        case ast.Name(id="true" | "false" | "null" as name):
            return json.loads(name)
        case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            return [_literal(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            return {ast.literal_eval(key or ""): _literal(value) for key, value in zip(keys, values, strict=True)}
        case _:
            return ast.literal_eval(node)


def _read(text: str, start: int) -> tuple[Call, int]:
    """Return the call whose JSON begins at `start`, and the position after this JSON (of broken JSON: a guess)."""
    try:
        value, end = _JSON.raw_decode(text, start)
        arguments = value.get("arguments", value.get("parameters"))
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if isinstance(value["name"], str) and isinstance(arguments, dict):
            json.dumps([value["name"], arguments], ensure_ascii=False).encode()  # raises for a lone surrogate
            return Call(value["name"], arguments), end
        wrong = "name must be a text, and arguments an object"
    except KeyError:
        wrong = "it has no name"
    except AttributeError:
        wrong = "it must be an object"
    except (ValueError, RecursionError) as error:
        wrong, end = str(error), text.find("</tool_call>", start)
    return Call(error=f"the call cannot be read: {wrong}. {_FORM}"), end if end >= 0 else len(text)


def arguments_of(call: Call, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the arguments. A text of a call in XML is parsed as JSON, unless its parameter in `tools` takes a text."""
    if not call.has_texts:
        return call.arguments
    functions = {own.get("name"): own for own in (tool.get("function") or {} for tool in tools)}
    properties = (functions.get(call.name, {}).get("parameters") or {}).get("properties") or {}
    schemas = {key: own for key, own in properties.items() if isinstance(own, Mapping)}  # true is a schema too
    return {key: _typed(text, schemas.get(key, {})) for key, text in call.arguments.items()}


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Parse a text as JSON. Return the text itself if it is no JSON, or if the parameter accepts a text."""
    if text in (schema.get("enum") or ()):
        return text
    types = [each.get("type") for each in (schema, *(schema.get("anyOf") or schema.get("oneOf") or ()))]
    if any("string" in (own if isinstance(own, list) else [own]) for own in types):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def before_calls(message: str) -> str:
    """Return a message's text before its first call, without thoughts.

    >>> before_calls('The set {1, 2} needs adding. {"name": "add", "arguments": {}}')
    'The set {1, 2} needs adding. '
    """
    text = message.rpartition("</think>")[2]
    found = _MARK.search(text) or _UNMARKED.search(text)
    return text[: found.start()] if found else text
