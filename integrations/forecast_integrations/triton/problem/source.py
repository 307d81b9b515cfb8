"""A kernel's source: its text, a hash that does not change when it moves in its file, and a module of its own.

Triton's own `cache_key` contains the line number, so adding a comment above a kernel would make every measurement
stale. `source_hash` covers the function, every function it reaches, and the values of the globals they read, through
modules, classes, containers and closures of any depth.

`standalone_source` is what variants are made of, and what they are checked against: the kernel, the JIT functions it
reaches and the constants they read, with imports of triton alone. Heuristics and tuners above it are not part of it.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import functools
import hashlib
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from functools import cached_property, lru_cache
from types import ModuleType
from typing import Any, TypeAlias

from forecast_autotune import python_parser
from forecast_autotune.errors import RecordError
from forecast_integrations.triton.protocols import JitFunction, KernelFunction


def innermost(fn: object) -> Any:
    """Return the JITFunction (or InterpretedFunction) under heuristics and tuners; Inductor's workers send no `fn`.

    A module is returned as it is: `torch.ops` has members of any name, `torch.classes` raises for them.
    """
    while not isinstance(fn, ModuleType) and (inner := getattr(fn, "fn", None)) is not None:
        if inspect.isfunction(inner):
            break
        fn = inner
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


class KernelText:
    """The texts of a kernel, of what it calls and of the globals that these read, walked once."""

    def __init__(self, fn: object) -> None:
        self._parts: _Parts = []
        _collect(innermost(fn), self._parts, set())

    @cached_property
    def hash(self) -> str:
        """sha256 over all texts."""
        return _digest([text for text, _ in self._parts])

    @cached_property
    def normal_form_hash(self) -> str:
        """sha256 over the texts in a normal form, which changes of style leave alone.

        Without comments, docstrings, formatting, annotations, decorators and unused parameters; local names count by
        the order in which they are assigned. Parameters keep their names: advice and configs go by them.
        """
        return _digest([text if tree is None else _normal_form(tree) for text, tree in self._parts])

    @cached_property
    def has_dot(self) -> bool:
        """Whether the kernel or a function that it calls may multiply matrices by a dot."""
        return any("dot" in text for text, _ in self._parts)


def source_hash(fn: object) -> str:
    """sha256 over the kernel, what it calls and the globals it reads."""
    return KernelText(fn).hash


def normal_form_hash(fn: object) -> str:
    """See `KernelText.normal_form_hash`."""
    return KernelText(fn).normal_form_hash


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


_Parts: TypeAlias = list[tuple[str, ast.Module | None]]
"""Texts of functions with their syntax trees, and texts of values without any."""


def _normal_form(tree: ast.Module) -> str:
    nodes = list(ast.walk(tree))
    parameters = {n.arg for n in nodes if isinstance(n, ast.arg)}
    names = [n for n in nodes if isinstance(n, ast.Name)]
    local = dict.fromkeys(n.id for n in names if isinstance(n.ctx, ast.Store) and n.id not in parameters)
    new_names = {name: f"local_{number}" for number, name in enumerate(local)}
    return ast.unparse(_NormalForm(new_names, {n.id for n in names}).visit(copy.deepcopy(tree)))


class _NormalForm(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str], used_names: Collection[str]) -> None:
        self._new_names, self._used_names = names, used_names

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        parameters, body = node.args, [n for n in node.body if not _is_text(n)]
        parameters.args = [a for a in parameters.args if a.arg in self._used_names]
        parameters.kwonlyargs = [a for a in parameters.kwonlyargs if a.arg in self._used_names]
        # Defaults belong to the last parameters, some of which may be gone: a call's own values count.
        parameters.defaults, parameters.kw_defaults = [], [None] * len(parameters.kwonlyargs)
        node.decorator_list, node.returns, node.body = [], None, body or [ast.Pass()]
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        return None if node.value is None else ast.Assign([node.target], node.value, lineno=node.lineno)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self._new_names.get(node.id, node.id)
        return node


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def import_trouble(module: str, name: str) -> str:
    """Why another process cannot import what a module has under a qualified name; '' where it may."""
    if module in ("", "__main__") or "<locals>" in name:
        return (
            f"{module or '?'}:{name} cannot be imported: define the kernel at the top of a module that can be"
        )
    return ""


def imported(module: str, name: str) -> Any:
    """The object that a module has under a qualified name. Raises what importing it raises."""
    owner: Any = importlib.import_module(module)
    for part in name.split("."):
        owner = getattr(owner, part)
    return owner


def is_jit(value: object) -> bool:
    """Whether a value is a JIT function, compiled or interpreted, or a layer over one."""
    inner = innermost(value)
    return isinstance(getattr(inner, "src", None), str) or type(inner).__name__ == "InterpretedFunction"


def function_name(fn: object) -> str:
    """Name of a JIT function with a digest of its source: functions of one name are told apart, here and later."""
    jit = innermost(fn)
    name = getattr(jit, "__name__", None) or getattr(getattr(jit, "fn", jit), "__name__", "function")
    return f"{name}@{source_hash(jit)[:12]}"


def _collect(function: object, parts: _Parts, visited: set[int]) -> None:
    if id(function) in visited:
        return
    visited.add(id(function))
    text = source_of(function)
    python = getattr(function, "fn", function)
    try:
        tree, paths = _read(text)
    except SyntaxError:
        parts.append((text, None))
        return
    parts.append((text, tree))
    for name, value in sorted(_references(paths, scope_of(python)).items()):
        _note(name, value, parts, visited)
    default_nodes = next((node.args.defaults for node in tree.body if isinstance(node, ast.FunctionDef)), [])
    for node, value in zip(default_nodes, getattr(python, "__defaults__", None) or (), strict=False):
        if not isinstance(node, ast.Constant):  # it was computed when the function was made
            _note("default", value, parts, visited)


def _note(name: str, value: object, parts: _Parts, visited: set[int], within: tuple[int, ...] = ()) -> None:
    """Add a value that code may depend on: constants and functions, also those in containers and classes."""
    value = getattr(value, "value", None) if type(value).__name__ == "constexpr" else value
    if is_jit(value) or (inspect.isfunction(value) and not is_foreign(value)):
        _collect(innermost(value), parts, visited)
        parts += [(str(config), None) for config in getattr(value, "__dict__", {}).get("configs") or ()]
    elif isinstance(value, _CONSTANT_TYPES) or _is_dtype(value):
        parts.append((f"{name}={value!r}", None))
    elif id(value) not in within and id(value) not in visited:
        if _is_callable_object(value):
            visited.add(id(value))
        for place, item in _members(value):
            _note(f"{name}{place}", item, parts, visited, (*within, id(value)))


def _members(value: Any) -> Iterable[tuple[str, object]]:
    """The values that a container, a callable, an enum's member, a data class or a class holds, with their places."""
    if isinstance(value, Mapping):
        return [("" if " at 0x" in str(key) else f"[{key}]", item) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return [("", item) for item in sorted(value, key=repr)]
    if isinstance(value, tuple | list):
        return [(f"[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, Enum):
        return [("", value.value)]
    if dataclasses.is_dataclass(value) and not inspect.isclass(value):
        return [(f".{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    if isinstance(value, functools.partial):
        return [("", value.func), ("", value.args), ("", value.keywords)]
    if inspect.ismethod(value):
        return [("", value.__func__), ("", value.__self__)]
    if isinstance(value, property):
        return [("", value.fget)]
    if type(value).__name__ == "_lru_cache_wrapper":
        return [("", value.__wrapped__)]
    if _is_callable_object(value):
        return [(f".{name}", item) for name, item in [*vars(value).items(), ("", type(value))]]
    if inspect.isclass(value) and not is_foreign(value):
        members = {name: getattr(value, name, None) for name in dir(value)}
        return [(f".{n}", v) for n, v in members.items() if not n.startswith("__") or inspect.isfunction(v)]
    return ()


def _is_callable_object(value: object) -> bool:
    """Whether a value is a callable object of a user's class."""
    return (
        callable(value)
        and not inspect.isclass(value)
        and not is_foreign(type(value))
        and hasattr(value, "__dict__")
    )


def is_foreign(value: object) -> bool:
    """Whether a value's module is Python's own, or one whose version the toolchain's record names."""
    return str(getattr(value, "__module__", "")).partition(".")[0] in _FOREIGN


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


@lru_cache(maxsize=64)
def _read(text: str) -> tuple[ast.Module, set[tuple[str, ...]]]:
    """The tree of a text, and the names in it that are not its own, dotted ones to their end."""
    tree = python_parser.parse_module(text)
    nodes = list(ast.walk(tree))
    # A notebook's global `n` is none of a kernel's business whose argument is called `n`.
    local = {node.arg for node in nodes if isinstance(node, ast.arg)}
    local |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    owners = {node.value for node in nodes if isinstance(node, ast.Attribute)}
    return tree, {path for n in nodes if n not in owners and (path := _dotted(n)) and path[0] not in local}


def _references(paths: Iterable[tuple[str, ...]], scope: Mapping[str, Any]) -> dict[str, Any]:
    """The values of global names, dotted ones to their end: `package.module.NAME`, `Sizes.BLOCK`."""
    references: dict[str, Any] = {}
    for path in (path for path in paths if path[0] in scope):
        value, full_name = scope[path[0]], path[0]
        for attribute in path[1:]:
            if not _has_own_names(value):
                break
            with contextlib.suppress(Exception):  # a property of the user's: the compiler says what is wrong
                value, full_name = getattr(value, attribute, None), f"{full_name}.{attribute}"
        references[full_name] = value
    return references


def _dotted(node: ast.AST) -> tuple[str, ...]:
    """The parts of a name or a dotted name; none for anything else."""
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value)):
        return (*owner, node.attr)
    return (node.id,) if isinstance(node, ast.Name) else ()


def _has_own_names(value: object) -> bool:
    """Whether attributes of a value count by themselves: of modules (not Triton's), classes and users' objects."""
    if isinstance(value, ModuleType):
        return not _is_triton(value)
    whole = is_jit(value) or _is_dtype(value) or type(value).__name__ == "constexpr"
    return not whole and not isinstance(value, (*_CONSTANT_TYPES, Mapping, tuple, list, set, frozenset))


def _is_dtype(value: object) -> bool:
    return type(value).__name__ == "dtype" and hasattr(value, "primitive_bitwidth")


_CONSTANT_TYPES = (int, float, str, bool, type(None))
_FOREIGN = frozenset((*sys.stdlib_module_names, "triton", "torch", "numpy"))
_JIT_OPTIONS = ("do_not_specialize", "do_not_specialize_on_alignment", "noinline", "debug")
"""Attributes of a JIT function that change its code."""


def standalone_source(fn: KernelFunction) -> str:
    """The module of a kernel, with its entry last.

    Raises `RecordError` for a kernel without readable source, or one that reads a global which is neither
    part of triton, nor a JIT function, nor a constant.
    """
    module = _ModuleBuilder()
    module.add(innermost(fn), "")
    return module.text()


class _ModuleBuilder:
    def __init__(self) -> None:
        self._imports = {"import triton": None}
        self._constants: dict[str, str] = {}
        self._functions: dict[str, str] = {}
        self._jit_functions: dict[str, Any] = {}

    def text(self) -> str:
        parts = ["\n".join(sorted(self._imports))]
        if self._constants:
            parts.append("\n".join(f"{name} = {value}" for name, value in self._constants.items()))
        return "\n\n".join(parts) + "\n\n\n" + "\n\n\n".join(self._functions.values()) + "\n"

    def add(self, jit: JitFunction, name: str) -> None:
        """Put a JIT function in, after what it needs. `name` is what its caller calls it."""
        text = source_of(jit)
        if not text:
            raise RecordError(f"the source of {name or jit} cannot be found: define the kernel in a file")
        own = text[4 : text.index("(")].strip()
        name = name or own
        if self._jit_functions.setdefault(name, jit) is not jit:
            raise RecordError(f"two functions are called {name}: rename one, as a variant is one module")
        if name in self._functions:
            return
        self._functions[name] = ""  # a function may call itself
        text = self._resolved(text, jit)
        if name != own:
            text = text.replace(own, name, 1)
        options = [f"{o}={getattr(jit, o)!r}" for o in _JIT_OPTIONS if getattr(jit, o, None)]
        del self._functions[name]
        decorator = f"@triton.jit({', '.join(options)})" if options else "@triton.jit"
        self._functions[name] = f"{decorator}\n{text.rstrip()}"

    def _resolved(self, text: str, jit: JitFunction) -> str:
        """The text with all that it refers to put into the module."""
        references = _references(_read(text)[1], scope_of(getattr(jit, "fn", jit)))
        for whole in sorted(references, key=lambda whole: whole.count(".")):
            # Another module's helper or constant becomes one of this module.
            name = whole.rpartition(".")[2]
            self._put(name, references[whole], jit)
            text = text if name == whole else re.sub(rf"\b{re.escape(whole)}\b", name, text)
        return text

    def _put(self, name: str, value: object, user: JitFunction) -> None:
        if isinstance(value, ModuleType):
            if not _is_triton(value):
                raise self._strange(name, value, user)
            self._imports[_import_of(value.__name__, name)] = None
            return
        inner = innermost(value)
        python = getattr(inner, "fn", inner)
        module = str(getattr(python, "__module__", ""))
        if module.partition(".")[0] == "triton" and type(value).__name__ not in ("constexpr", "dtype"):
            title = getattr(inner, "__name__", name)
            home = _home(module, title, inner)
            self._imports[f"from {home} import {title}" + ("" if title == name else f" as {name}")] = None
        elif hasattr(inner, "src") or type(inner).__name__ == "InterpretedFunction":
            self.add(inner, name)
        elif type(value).__name__ == "constexpr" and isinstance(
            constant := getattr(value, "value", None), _CONSTANT_TYPES
        ):
            self._constant(name, f"triton.language.constexpr({constant!r})", user)
        elif isinstance(value, _CONSTANT_TYPES):
            self._constant(name, f"triton.language.constexpr({value!r})", user)
        elif _is_dtype(value):
            self._constant(name, f"triton.language.{_dtype_name(value)}", user)
        else:
            raise self._strange(name, value, user)

    def _constant(self, name: str, text: str, user: JitFunction) -> None:
        self._imports["import triton.language"] = None
        if self._constants.setdefault(name, text) != text:
            raise RecordError(f"two constants are called {name}: rename one, as a variant is one module")

    def _strange(self, name: str, value: object, user: JitFunction) -> RecordError:
        return RecordError(
            f"{getattr(user, '__name__', user)} reads the global {name}, a {type(value).__name__}: a variant "
            "can hold JIT functions, constants and what is imported of triton. Make it one of these"
        )


def _is_triton(module: ModuleType) -> bool:
    return module.__name__.partition(".")[0] == "triton"


def _home(module: str, title: str, value: object) -> str:
    """The module of triton to import a value from: its own where `triton.language` lacks it, as `libdevice.tanh`."""
    near = "triton.language" if module.startswith("triton.language") else "triton"

    def has(name: str) -> bool:
        return innermost(getattr(sys.modules.get(name), title, None)) is value

    return module if has(module) and not has(near) else near


def _import_of(module: str, alias: str) -> str:
    return f"import {module}" if module == alias else f"import {module} as {alias}"


def _dtype_name(value: object) -> str:
    import triton.language as tl

    names: Mapping[str, Any] = vars(tl)
    for name, dtype in names.items():
        if type(dtype) is type(value) and dtype == value and not inspect.isclass(dtype):
            return name
    raise RecordError(f"{value} is no dtype of triton.language")
