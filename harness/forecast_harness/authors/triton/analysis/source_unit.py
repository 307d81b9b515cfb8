"""A variant's source as a tree: its functions, what their names mean, and copies to edit.

Everything here reads the text only. A name counts as Triton's when an import of the module says so.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self, TypeVar, cast

from forecast_autotune import python_parser
from forecast_autotune.errors import RecordError
from forecast_autotune.variants.contract import filled_in_parameters

MAX_NODES = 10_000
"""Syntax nodes of a source that is rewritten: several times the longest kernel's, and every edit copies all."""
MAX_EDITS = 128
"""Most texts that one rewrite makes of one source: each is a copy of all of it."""

Node = TypeVar("Node", bound=ast.AST | list[ast.stmt])
Tree = TypeVar("Tree", bound=ast.AST)
Function = ast.FunctionDef
Block = list[ast.stmt]

_ATOMIC = re.compile(r"atomic_\w+")
_EFFECTS = {
    "load": "load",
    "load_tensor_descriptor": "load",
    "gather": "load",
    "store": "store",
    "store_tensor_descriptor": "store",
    "scatter": "store",
    "debug_barrier": "other",
    "device_print": "other",
    "device_assert": "other",
    "inline_asm_elementwise": "other",
}
_BUILTINS = frozenset(("abs", "bool", "float", "int", "isinstance", "len", "max", "min", "print", "range"))


def parse_to_rewrite(source: str) -> ast.Module:
    """A source as a tree. Raises `RecordError` if it is not Python, or has more than `MAX_NODES` syntax nodes."""
    try:
        tree = python_parser.parse_module(source)
    except SyntaxError as error:
        raise RecordError(f"the source is not Python: {error}") from error
    if (size := sum(1 for _ in ast.walk(tree))) > MAX_NODES:
        raise RecordError(f"the source has {size} syntax nodes; at most {MAX_NODES} are rewritten")
    return tree


@dataclass
class EditableSource:
    """A parsed source, of which copies are edited."""

    tree: ast.Module
    entry_name: str
    _twins: dict[int, Any] = field(default_factory=dict, repr=False)

    def copy(self) -> Self:
        """A copy to edit; `twin` finds a node of this one in it."""
        memo: dict[int, Any] = {}
        return type(self)(copy.deepcopy(self.tree, memo), self.entry_name, memo)

    def twin(self, node: Node) -> Node:
        """The copy of a node, or of a list of statements, of the source that this one was copied from."""
        return cast("Node", self._twins[id(node)])

    def text(self) -> str:
        """The source, formatted by `ast.unparse`; ends in a newline."""
        return ast.unparse(ast.fix_missing_locations(self.tree)) + "\n"


class SourceUnit(EditableSource):
    """One self-contained source of a kernel."""

    @classmethod
    def parse(cls, source: str, entry: str) -> SourceUnit:
        """Read a source. Raises `RecordError` as `parse_to_rewrite` does, and if it has no such function."""
        unit = cls(parse_to_rewrite(source), entry)
        if entry not in unit.functions:
            raise RecordError(
                f"the source must define {entry!r} at its top level; it defines "
                f"{', '.join(unit.functions) or 'nothing'}"
            )
        return unit

    @cached_property
    def functions(self) -> dict[str, Function]:
        """Functions at the top level by name."""
        return {n.name: n for n in self.tree.body if isinstance(n, ast.FunctionDef)}

    @property
    def entry(self) -> Function:
        """The kernel."""
        return self.functions[self.entry_name]

    @cached_property
    def kernels(self) -> list[Function]:
        """The entry, then the functions it reaches by name."""
        functions = [self.entry]
        for function in functions:
            callees = read_names(function) & set(self.functions)
            functions += [self.functions[n] for n in sorted(callees) if self.functions[n] not in functions]
        return functions

    @cached_property
    def _names(self) -> tuple[frozenset[str], dict[str, str], frozenset[str]]:
        """Names of `triton.language`, bare names from it, and other imported modules."""
        language, bare, modules = set(), {}, set()
        for node in self.tree.body:
            if isinstance(node, ast.Import):
                for a in node.names:
                    if a.name == "triton.language":
                        language.add(a.asname or a.name)
                    else:
                        modules.add(a.asname or a.name.partition(".")[0])
            elif isinstance(node, ast.ImportFrom):
                for a in node.names:
                    name = a.asname or a.name
                    if node.module == "triton" and a.name == "language":
                        language.add(name)
                    elif node.module == "triton.language":
                        bare[name] = a.name
                    else:
                        modules.add(name)
        return frozenset(language), bare, frozenset(modules)

    @property
    def tl(self) -> str:
        """The name of `triton.language` in the source; empty if it never imports it."""
        return min(self._names[0], default="")

    def callee_name(self, node: ast.AST) -> str:
        """Name in `triton.language` of the function that a call calls; `range` for the builtin; else empty."""
        if not isinstance(node, ast.Call):
            return ""
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in self._names[0]:
            return node.func.attr
        if isinstance(node.func, ast.Name):
            name = node.func.id
            return self._names[1].get(name, name if name in _BUILTINS else "")
        return ""

    def method_name(self, node: ast.AST) -> str:
        """Name of the method that a call calls on a value; empty for other calls."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return ""
        owner = ast.unparse(node.func.value)
        first = owner.partition(".")[0]
        return "" if owner in self._names[0] or first in self._names[2] else node.func.attr

    def calls(self, node: ast.AST | Sequence[ast.AST], *names: str) -> list[ast.Call]:
        """Calls of these functions of `triton.language` in a tree, in the order of the text."""
        roots = node if isinstance(node, Sequence) else [node]
        results = [n for root in roots for n in nodes_in_order(root) if self.callee_name(n) in names]
        return [n for n in results if isinstance(n, ast.Call)]

    def effects(self, node: ast.AST | Sequence[ast.AST], _helpers: frozenset[str] = frozenset()) -> set[str]:
        """The effects of a tree on memory: `load`, `store`, `atomic`, `other`; helpers are followed."""
        calls = [n for n in every_node(node) if isinstance(n, ast.Call)]
        return set().union(*(self.effect(call, _helpers) for call in calls))

    def is_library_call(self, node: ast.AST) -> bool:
        """Whether a call calls what is imported from elsewhere in Triton, as `libdevice.tanh`: arithmetic."""
        if not isinstance(node, ast.Call) or self.callee_name(node):
            return False
        return ast.unparse(node.func).partition(".")[0] in self._names[2]

    def effect(self, call: ast.Call, _helpers: frozenset[str] = frozenset()) -> set[str]:
        """The effect of a call itself on memory, apart from its arguments."""
        name = self.callee_name(call) or self.method_name(call)
        if _ATOMIC.fullmatch(name):
            return {"atomic"}
        if name in _EFFECTS:
            return {_EFFECTS[name]}
        if name or not isinstance(call.func, ast.Name) or self.is_library_call(call):
            return set()
        helper = self.functions.get(call.func.id)
        if helper is None:
            return {"load", "store", "other"}  # unknown: anything
        return set() if helper.name in _helpers else self.effects(helper.body, _helpers | {helper.name})

    def helper_calls(self, node: ast.AST) -> list[ast.Call]:
        """Calls of the source's own functions."""
        return [
            n
            for n in nodes_in_order(node)
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in self.functions
        ]

    def constexprs(self, function: Function) -> set[str]:
        """Names of a function that are compile-time constants: parameters, annotated locals, globals."""
        constants = {a.arg for a in arguments(function) if "constexpr" in _annotation(a.annotation)}
        for node in ast.walk(function):
            if isinstance(node, ast.AnnAssign) and "constexpr" in _annotation(node.annotation):
                constants |= set(assigned_names(node))
        for top in self.tree.body:
            if isinstance(top, ast.Assign) and self.callee_name(top.value) == "constexpr":
                constants |= {t.id for t in top.targets if isinstance(t, ast.Name)}
        return constants

    def runtime_parameters(self) -> list[str]:
        """The entry's runtime parameters in order, without what the launcher fills in."""
        filled_in = filled_in_parameters(self.functions)
        constant = self.constexprs(self.entry)
        return [a.arg for a in arguments(self.entry) if a.arg not in constant and a.arg not in filled_in]

    def language_call(self, name: str, *operands: ast.expr, **keywords: ast.expr) -> ast.Call:
        """A call of `triton.language.<name>`."""
        function = ast.Attribute(ast.Name(self.tl, ast.Load()), name, ast.Load())
        return ast.Call(function, list(operands), [ast.keyword(k, v) for k, v in keywords.items()])


def _annotation(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


def arguments(function: Function) -> list[ast.arg]:
    """Parameters in the order of the signature."""
    a = function.args
    return [*a.posonlyargs, *a.args, *a.kwonlyargs]


def nodes_in_order(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a tree, in the order of the text."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from nodes_in_order(child)


def every_node(node: ast.AST | Sequence[ast.AST]) -> Iterator[ast.AST]:
    """All nodes of a tree, or of several, outer ones first."""
    for root in node if isinstance(node, Sequence) else [node]:
        yield from ast.walk(root)


def blocks(node: ast.AST) -> Iterator[Block]:
    """Every list of statements in a function, or in a module, outermost first."""
    for owner in ast.walk(node):
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(owner, name, None)
            if isinstance(inner, list) and inner and isinstance(inner[0], ast.stmt):
                yield inner


def assigned_names(node: ast.AST | Sequence[ast.AST]) -> list[str]:
    """Names that a tree assigns, once for each assignment; loop targets included."""
    return [n.id for n in every_node(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


def read_names(node: ast.AST | Sequence[ast.AST]) -> set[str]:
    """Names that a tree reads; the target of an augmented assignment counts."""
    read = set()
    for n in every_node(node):
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load):
            read.add(n.id)
        elif isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name):
            read.add(n.target.id)
    return read


def names(node: ast.AST | Sequence[ast.AST]) -> set[str]:
    """Every name in a tree, read or assigned, parameters included."""
    every = list(every_node(node))
    return {n.id for n in every if isinstance(n, ast.Name)} | {n.arg for n in every if isinstance(n, ast.arg)}


def fresh_name(stem: str, existing: set[str]) -> str:
    """A name that does not exist yet, `stem` if possible; it is among `existing` afterwards."""
    name, number = stem, 2
    while name in existing:
        name, number = f"{stem}_{number}", number + 1
    existing.add(name)
    return name


def with_own_names(block: Block, variables: set[str], existing: set[str]) -> Block:
    """The block with other names in place of these, which begin with their values."""
    own = {name: fresh_name(f"{name}_here", existing) for name in sorted(variables)}
    for n in every_node(block):
        if isinstance(n, ast.Name) and n.id in own:
            n.id = own[n.id]
    return [*parse_statements("\n".join(f"{new} = {name}" for name, new in own.items())), *block]


def parse_statements(text: str) -> Block:
    """Statements from their text."""
    return python_parser.parse_module(text).body


def replace_statement(block: Block, old: ast.stmt, new: Sequence[ast.stmt]) -> None:
    """Put statements in the place of one of a block."""
    at = next(i for i, s in enumerate(block) if s is old)
    block[at : at + 1] = new


class _ExpressionSwap(ast.NodeTransformer):
    def __init__(self, replacements: Mapping[int, ast.expr]) -> None:
        self._replacements = replacements

    def visit(self, node: ast.AST) -> ast.AST:
        replacement = self._replacements.get(id(node))
        return self.generic_visit(node) if replacement is None else replacement


def swap_expressions(root: Tree, replacements: Mapping[int, ast.expr]) -> Tree:
    """Replace expressions in place, by the `id` of their nodes; returns the root."""
    return cast("Tree", _ExpressionSwap(replacements).visit(root))


def docstring_length(body: Block) -> int:
    """The number of statements of a body that are its docstring: 0 or 1."""
    first = body[0]
    return int(isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant))
