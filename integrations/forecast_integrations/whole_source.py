"""The text of a kernel as one module: imports, constants, helpers and the kernel itself.

A kernel's own text rarely stands alone: helpers live in other modules, constants in globals. What a variant
is made of has to stand alone, so everything a kernel reaches by name is put into one text. A kernel that
reaches what no text can hold is refused with the reason.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forecast_autotune.errors import VariantError
from forecast_integrations.source import innermost, scope_of, source_of

_KINDS = ("JITFunction", "InterpretedFunction")


def whole_source(fn: Any) -> str:
    """One self-contained module for a kernel (heuristics and tuners around it are left out).

    Raises `VariantError` naming what cannot be carried along: a global that is no constant, a function that
    is not Triton's, a kernel whose text Python cannot find.
    """
    jit = innermost(fn)
    gathered = _Gathered(jit.__name__)
    gathered.add(jit)
    lines = ["import triton", "import triton.language as tl", *gathered.imports.values()]
    constants = [f"{name} = tl.constexpr({text})" for name, text in gathered.constants.items()]
    blocks = ["\n".join(dict.fromkeys(lines)), *(["\n".join(constants)] if constants else [])]
    return "\n\n\n".join([*blocks, *gathered.functions]) + "\n"


@dataclass
class _Gathered:
    kernel: str
    imports: dict[str, str] = field(default_factory=dict)
    """By the name they bind, apart from `triton` and `tl`."""
    constants: dict[str, str] = field(default_factory=dict)
    functions: list[str] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    """Name in the text by the `id` of the function or constant it stands for."""
    kept: list[Any] = field(default_factory=list)
    """Values whose `id` is in `names`: alive, so that no other value gets it."""

    def add(self, jit: Any) -> str:
        """Take in a function and what it reaches; returns its name in the text."""
        if id(jit) in self.names:
            return self.names[id(jit)]
        name = self._name(jit, jit.__name__)
        text = source_of(jit)
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            raise self._refused(f"the text of {name} cannot be read: {error}") from error
        if not tree.body or not isinstance(tree.body[0], ast.FunctionDef):
            raise self._refused(f"Python does not find the text of {name}")
        definition = tree.body[0]
        scope = scope_of(getattr(jit, "fn", jit))
        changed = _plain_annotations(definition) | self._resolve(definition, scope)
        if definition.name != name:
            definition.name, changed = name, True
        shown = ast.unparse(ast.fix_missing_locations(definition)) if changed else text.rstrip()
        self.functions.append(f"{_decorator(jit)}\n{shown}")
        return name

    def _name(self, value: Any, wanted: str) -> str:
        taken = {"triton", "tl", "grid", "CONFIGS", "RESET_TO_ZERO", *self.imports, *self.names.values()}
        name, number = wanted, 2
        while name in taken:
            name, number = f"{wanted}_{number}", number + 1
        self.names[id(value)] = name
        self.kept.append(value)
        return name

    def _resolve(self, definition: ast.FunctionDef, scope: Mapping[str, Any]) -> bool:
        """Point every global name of a function to what stands in the text; whether anything changed."""
        local = {n.arg for n in ast.walk(definition) if isinstance(n, ast.arg)}
        local |= {
            n.id for n in ast.walk(definition) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)
        }
        resolver = _Resolver(self, scope, local)
        resolver.visit(definition)
        return resolver.changed

    def bind(self, name: str, value: Any) -> str | None:
        """The name in the text of what a global name stands for; None to leave it alone."""
        if inspect.ismodule(value):
            return self._module(name, value)
        inner = innermost(value)
        if type(inner).__name__ in _KINDS:
            own = str(getattr(getattr(inner, "fn", inner), "__module__", ""))
            return self._imported(name, own, inner) if own.startswith("triton.") else self.add(inner)
        if id(value) in self.names:
            return self.names[id(value)]
        text = _constant(value)
        if text is None and str(getattr(value, "__module__", "")).startswith("triton."):
            return self._imported(name, value.__module__, value)
        if text is None:
            kind = type(value).__name__
            raise self._refused(f"it uses {name}, a {kind}, which is neither constant nor kernel")
        if self.constants.get(name) == text:
            return name
        given = self._name(value, name)
        self.constants[given] = text
        return given

    def _module(self, name: str, value: Any) -> str | None:
        if value.__name__.partition(".")[0] != "triton":
            raise self._refused(f"it uses the module {value.__name__}")
        if value.__name__ == "triton":
            line = f"import triton as {name}" if name != "triton" else "import triton"
        else:
            line = f"import {value.__name__} as {name}"
        return self._import(name, line)

    def _imported(self, name: str, module: str, value: Any) -> str:
        own = str(value.__name__)
        # Triton's own modules move between releases; what the language exports stays.
        import triton
        import triton.language as tl

        for owner, shown in ((tl, "triton.language"), (triton, "triton")):
            if getattr(owner, own, None) is value:
                module = shown
                break
        return self._import(name, f"from {module} import {own}" + (f" as {name}" if name != own else ""))

    def _import(self, name: str, line: str) -> str:
        known = self.imports.setdefault(name, line)
        if known != line:
            raise self._refused(f"{name} means two things: {known!r} and {line!r}")
        return name

    def _refused(self, reason: str) -> VariantError:
        return VariantError(f"no variants of {self.kernel} can be made: {reason}")

    def unknown(self, name: str) -> VariantError:
        """The error for a name that nothing defines."""
        return self._refused(f"nothing defines {name}, which it uses")


class _Resolver(ast.NodeTransformer):
    """Replaces global names, and attributes of foreign modules, by names in the text."""

    def __init__(self, gathered: _Gathered, scope: Mapping[str, Any], local: set[str]) -> None:
        self._gathered, self._scope, self._local = gathered, scope, local
        self.changed = False

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self._local or not isinstance(node.ctx, ast.Load):
            return node
        if node.id not in self._scope:
            if not hasattr(builtins, node.id):
                raise self._gathered.unknown(node.id)
            return node
        return self._named(node, self._gathered.bind(node.id, self._scope[node.id]))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        owner = self._foreign(node.value)
        if owner is None:
            return self.generic_visit(node)
        if not hasattr(owner, node.attr):
            raise self._gathered.unknown(ast.unparse(node))
        return self._named(node, self._gathered.bind(node.attr, getattr(owner, node.attr)))

    def _foreign(self, node: ast.expr) -> Any:
        """The module other than Triton's that an expression names, if any."""
        if isinstance(node, ast.Name) and node.id not in self._local:
            found = self._scope.get(node.id)
        elif isinstance(node, ast.Attribute):
            owner = self._foreign(node.value)
            found = None if owner is None else getattr(owner, node.attr, None)
        else:
            return None
        return found if inspect.ismodule(found) and found.__name__.partition(".")[0] != "triton" else None

    def _named(self, node: ast.expr, name: str | None) -> ast.AST:
        if name is None or (isinstance(node, ast.Name) and node.id == name):
            return node
        self.changed = True
        return ast.Name(name, ast.Load())


def _plain_annotations(definition: ast.FunctionDef) -> bool:
    """Drop annotations that mean nothing to Triton; whether any was dropped."""
    changed = definition.returns is not None
    definition.returns = None
    for argument in (n for n in ast.walk(definition.args) if isinstance(n, ast.arg)):
        noted = argument.annotation
        if noted is None or isinstance(noted, ast.Constant) or "constexpr" in ast.unparse(noted):
            continue
        if isinstance(noted, ast.Attribute) and ast.unparse(noted).startswith(("tl.", "triton.language.")):
            continue
        argument.annotation, changed = None, True
    return changed


def _decorator(jit: Any) -> str:
    given = []
    for name in ("do_not_specialize", "do_not_specialize_on_alignment"):
        if listed := list(getattr(jit, name, None) or ()):
            given.append(f"{name}={listed!r}")
    if getattr(jit, "noinline", None):
        given.append("noinline=True")
    return f"@triton.jit({', '.join(given)})" if given else "@triton.jit"


def _constant(value: Any) -> str | None:
    """A constant as text; None for what is none."""
    import triton.language as tl

    value = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
    if isinstance(value, tl.dtype):
        names = (n for n in dir(tl) if getattr(tl, n) is value or getattr(tl, n) == value)
        found = next((n for n in names if isinstance(getattr(tl, n), tl.dtype)), None)
        return None if found is None else f"tl.{found}"
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "1e999", -math.inf: "-1e999"}.get(value, "1e999 - 1e999")
    if isinstance(value, tuple):
        parts = [_constant(v) for v in value]
        return None if None in parts else "(" + "".join(f"{p}, " for p in parts) + ")"
    return repr(value) if isinstance(value, int | float | str | bool) or value is None else None
