"""Tool output for the session: definitions read from the running interpreter's standard library."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path


def source_path(module: str) -> Path:
    """The file of a standard-library module, found without importing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise FileNotFoundError(f"this interpreter has no source file for module {module!r}")
    return Path(spec.origin)


@cache
def _parse(module: str) -> tuple[str, ast.Module]:
    text = source_path(module).read_text(encoding="utf-8")
    return text, ast.parse(text)


def definition(module: str, name: str) -> str:
    """The source text of one function or class; `name` may be dotted (`Queue.put`).

    Read from the file rather than through `inspect`: names such as `bisect.bisect_right` are
    replaced by C versions at import, the Python text is what an agent would read.
    """
    text, tree = _parse(module)
    body = tree.body
    node: ast.stmt | None = None
    for part in name.split("."):
        node = next((item for item in body if getattr(item, "name", None) == part), None)
        if node is None:
            raise LookupError(f"{source_path(module)} defines no {name!r}")
        body = getattr(node, "body", [])
    assert node is not None
    lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
    return "\n".join(lines)


def outline(module: str) -> str:
    """The functions and classes of a module with their line numbers, as `grep -n` prints them."""
    text, tree = _parse(module)
    lines = text.splitlines()
    kinds = (ast.FunctionDef, ast.ClassDef)
    found = [node.lineno for node in tree.body if isinstance(node, kinds)]
    return "\n".join(f"{number}:{lines[number - 1]}" for number in found)


def definitions(module: str) -> dict[str, str]:
    """Source text by name: functions, classes, and methods as `Class.method`."""
    text, tree = _parse(module)
    lines = text.splitlines()
    kinds = (ast.FunctionDef, ast.ClassDef)
    nodes = {node.name: node for node in tree.body if isinstance(node, kinds)}
    for owner in [node for node in nodes.values() if isinstance(node, ast.ClassDef)]:
        methods = [node for node in owner.body if isinstance(node, kinds)]
        nodes |= {f"{owner.name}.{node.name}": node for node in methods}
    return {
        name: "\n".join(lines[node.lineno - 1 : node.end_lineno]) for name, node in nodes.items()
    }
