"""Read the files of a user's functions without running their code: a login node must not import them."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path


def wrong_function(file: Path, name: str) -> str:
    """Return why a file cannot have a function `name`; "" if it may have one. Does not run the file."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (OSError, SyntaxError, ValueError) as error:
        return f"{file} is not Python: {error}"
    defs = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    functions = {node.name for node in nodes if isinstance(node, defs)}
    words = {node.id for node in nodes if isinstance(node, ast.Name)}
    imported = {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    if {name, "*", "__getattr__", "globals", "exec", "setattr"} & (functions | words | imported):
        return ""
    return f"{file} has no {name!r}. It has: {', '.join(sorted(functions)) or 'no functions'}"


def signature_in(working_dir: Path, name: str) -> inspect.Signature | None:
    """Return the signature of module:function or path/to/file.py:function; None if only running its file shows it."""
    module, _, function = name.rpartition(":")
    file = working_dir / (module if module.endswith(".py") else f"{module.replace('.', '/')}.py")
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # a built-in, a package's function, or an error of `wrong_function`
        return None
    nodes = list(ast.walk(tree))
    found = [node for node in nodes if function in (getattr(node, "name", None), getattr(node, "asname", None))]
    words = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {word.id for word in words if isinstance(word.ctx, ast.Store) or word.id in ("globals", "exec", "setattr")}
    if len(found) != 1 or found[0] not in tree.body or {function, "globals", "exec", "setattr"} & bound:
        return None
    if not isinstance(node := found[0], ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return None
    given, none = node.args, ast.Constant(None)  # an annotation or a default may be any code
    for each in ast.walk(given):
        if isinstance(each, ast.arg):
            each.annotation = None
    given.defaults = [none for _ in given.defaults]
    given.kw_defaults = [default and none for default in given.kw_defaults]
    alike = ast.fix_missing_locations(ast.Expression(ast.Lambda(given, none)))
    return inspect.signature(eval(compile(alike, str(file), "eval")))


def is_importable(name: str, folders: Sequence[str]) -> bool:
    """Return whether a module is in `folders` or in this Python, without running the module's code.

    A module of one file may create other modules at its import, so modules below it are not checked.
    """
    if name in sys.modules:
        return True
    parts = name.split(".")
    spec = (PathFinder.find_spec(parts[0], [*folders, *sys.path]) or find_spec(parts[0])) if all(parts) else None
    for number, _ in enumerate(parts[1:], start=2):
        if spec is None or spec.submodule_search_locations is None:
            break
        spec = PathFinder.find_spec(".".join(parts[:number]), spec.submodule_search_locations)
    return spec is not None
