"""A dependency-aware hash of a kernel's source that does not change when the kernel moves in its file.

Triton's own `cache_key` contains the line number, so adding a comment above a kernel would make every
measurement stale. This one covers the function, every JIT function it reaches, and the values of the
globals they read.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

from forecast_autotune import python_parser


def innermost(fn: object) -> Any:
    """The JITFunction (or InterpretedFunction) under heuristics and tuners."""
    while hasattr(fn, "fn") and not inspect.isfunction(fn.fn):
        fn = fn.fn
    return fn


def source_of(fn: object) -> str:
    """Source text of a kernel, from its `def` on; empty where Python cannot find it."""
    jit = innermost(fn)
    text = getattr(jit, "src", None)
    if isinstance(text, str):
        return text
    try:
        text = textwrap.dedent(inspect.getsource(getattr(jit, "fn", jit)))
    except (OSError, TypeError):
        return ""
    start = text.find("def ")
    return text[start:] if start >= 0 else text


def source_hash(fn: object) -> str:
    """sha256 over the kernel, what it calls and the globals it reads."""
    jit = innermost(fn)
    parts: list[str] = []
    _collect(jit, parts, set())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def is_jit(value: object) -> bool:
    """Whether it is a JIT function, compiled or interpreted, or a layer over one."""
    inner = innermost(value)
    return isinstance(getattr(inner, "src", None), str) or type(inner).__name__ == "InterpretedFunction"


def function_name(fn: object) -> str:
    """Name of a JIT function with a digest of its source: functions of one name are told apart, here and later."""
    jit = innermost(fn)
    name = getattr(jit, "__name__", None) or getattr(getattr(jit, "fn", jit), "__name__", "function")
    return f"{name}@{source_hash(jit)[:12]}"


def _collect(jit: object, parts: list[str], seen: set[int]) -> None:
    if id(jit) in seen:
        return
    seen.add(id(jit))
    text = source_of(jit)
    parts.append(text)
    python = getattr(jit, "fn", jit)
    scope = scope_of(python)
    try:
        tree = python_parser.parse_module(text)
    except SyntaxError:
        return
    for name, value in sorted(_references(tree, scope).items()):
        if is_jit(value):
            _collect(innermost(value), parts, seen)
        elif type(value).__name__ == "constexpr":
            parts.append(f"{name}={value.value!r}")
        elif isinstance(value, int | float | str | bool | None):
            parts.append(f"{name}={value!r}")


def scope_of(python: object) -> Mapping[str, Any]:
    """The names a function sees that are not its own: globals, and what a closure holds."""
    scope = dict(getattr(python, "__globals__", {}))
    code = getattr(python, "__code__", None)
    for name, cell in zip(
        getattr(code, "co_freevars", ()), getattr(python, "__closure__", None) or (), strict=False
    ):
        try:
            scope[name] = cell.cell_contents
        except ValueError:  # a cell not yet filled: the name is not used before it is
            continue
    return scope


def _references(tree: ast.AST, scope: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    nodes = list(ast.walk(tree))
    # A notebook's global `n` is none of a kernel's business whose argument is called `n`.
    local = {node.arg for node in nodes if isinstance(node, ast.arg)}
    local |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in scope and node.id not in local:
            found[node.id] = scope[node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = None if node.value.id in local else scope.get(node.value.id)
            if inspect.ismodule(owner) and owner.__name__.partition(".")[0] != "triton":
                found[f"{node.value.id}.{node.attr}"] = getattr(owner, node.attr, None)
    return {name: value for name, value in found.items() if not inspect.ismodule(value)}
