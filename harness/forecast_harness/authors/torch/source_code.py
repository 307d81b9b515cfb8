"""A Python source as a tree: its functions, what its names mean, and copies to edit."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from forecast_harness.authors.triton.analysis.source_unit import (
    EditableSource,
    assigned_names,
    blocks,
    nodes_in_order,
    parse_to_rewrite,
    read_names,
    swap_expressions,
)

TextEdit = tuple[str, str]
"""An edited source; and the change with its reason, in a sentence."""


class ParsedSource(EditableSource):
    """One source of a host's program."""

    @classmethod
    def parse(cls, source: str, entry: str) -> ParsedSource:
        """Read a source. Raises `RecordError` as `parse_to_rewrite` does."""
        return cls(parse_to_rewrite(source), entry)

    def text(self) -> str:
        """The source without assignments that nothing reads, formatted by `ast.unparse`."""
        for function in self.functions:
            _drop_unused_assignments(function)
        self._import_torch()
        return super().text()

    @property
    def functions(self) -> list[ast.FunctionDef]:
        """Functions and methods of the host: kernels that a decorator compiles are not among them."""
        every = [n for n in nodes_in_order(self.tree) if isinstance(n, ast.FunctionDef)]
        return [f for f in every if not any("jit" in ast.unparse(d) for d in f.decorator_list)]

    @property
    def entry_function(self) -> ast.FunctionDef | None:
        """The entry where it is a function, not a class."""
        entries = [n for n in self.tree.body if isinstance(n, ast.FunctionDef) and n.name == self.entry_name]
        return entries[0] if entries else None

    @cached_property
    def modules(self) -> Mapping[str, str]:
        """The modules that imported names stand for: `{"F": "torch.nn.functional"}`."""
        meanings: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                meanings |= {a.asname: a.name for a in node.names if a.asname}
                meanings |= {
                    a.name.partition(".")[0]: a.name.partition(".")[0] for a in node.names if not a.asname
                }
            elif isinstance(node, ast.ImportFrom) and node.module:
                meanings |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        return meanings

    @property
    def uses_autograd(self) -> bool:
        """Whether gradients are taken somewhere: then values must not be overwritten."""
        words = ("requires_grad", "autograd", "backward", "enable_grad")
        return any(isinstance(n, ast.Attribute) and n.attr.rstrip("_") in words for n in ast.walk(self.tree))

    def replaced(
        self, places: Sequence[tuple[ast.expr, ast.expr]], note: str, *, alone: bool = True
    ) -> Iterator[TextEdit]:
        """The source with expressions in place of others: each of them `alone`, and all where there are several."""
        groups = [[place] for place in places] if alone else []
        if places and (not alone or len(places) > 1):
            groups.append(list(places))
        for group in groups:
            draft = self.copy()
            swap_expressions(draft.tree, {id(draft.twin(old)): copy.deepcopy(new) for old, new in group})
            yield draft.text(), note

    def _import_torch(self) -> None:
        uses_torch = any(isinstance(n, ast.Name) and n.id == "torch" for n in ast.walk(self.tree))
        if uses_torch and "torch" not in ParsedSource(self.tree, self.entry_name).modules:
            future = [n for n in self.tree.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
            has_docstring = ast.get_docstring(self.tree) is not None
            at = max(self.tree.body.index(future[-1]) + 1 if future else 0, int(has_docstring))
            self.tree.body.insert(at, ast.Import([ast.alias("torch")]))


@dataclass
class FunctionScope:
    """Facts of the names in one function."""

    code: ParsedSource
    function: ast.FunctionDef

    @cached_property
    def parameters(self) -> set[str]:
        """Names of its parameters."""
        a = self.function.args
        return {x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg)))}

    @cached_property
    def assigned(self) -> Counter[str]:
        """The number of assignments of each name, apart from the call's."""
        return Counter(assigned_names(self.function.body))

    @cached_property
    def mutated(self) -> set[str]:
        """Names whose value is written to in place."""
        names = set()
        for node in ast.walk(self.function):
            target: ast.expr | None = None
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                target = node.value
            elif isinstance(node, ast.AugAssign):
                target = node.target
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr.endswith("_") and not node.func.attr.endswith("__"):
                    target = node.func.value
                names |= {root for k in node.keywords if k.arg == "out" and (root := root_name(k.value))}
            if target is not None and (root := root_name(target)):
                names.add(root)
        return names

    @cached_property
    def definitions(self) -> Mapping[str, ast.expr]:
        """Names that mean one expression throughout: assigned once, of names that never change."""
        expressions = {}
        for node in ast.walk(self.function):
            if (
                isinstance(node, ast.Assign)
                and len(node.targets) == 1
                and isinstance(node.targets[0], ast.Name)
            ):
                name = node.targets[0].id
                if self.is_constant(name) and all(self.is_constant(n) for n in read_names(node.value)):
                    expressions[name] = node.value
        return expressions

    def is_constant(self, name: str) -> bool:
        """Whether a name has one value throughout the function."""
        if name in self.mutated:
            return False
        return self.assigned[name] == (0 if name in self.parameters else min(1, self.assigned[name]))


def root_name(node: ast.expr) -> str:
    """The name at the start of `a[i].b.c(...)`; empty if there is none."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def read_expressions(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """Every expression of a function's body that is read, in the order of the text."""
    for statement in function.body:
        for node in nodes_in_order(statement):
            if isinstance(node, ast.expr) and not isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
                yield node


def is_pure(node: ast.expr) -> bool:
    """Whether leaving an expression out changes nothing but its value."""
    for part in ast.walk(node):
        if isinstance(part, ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr):
            return False
        if isinstance(part, ast.Call):
            if any(k.arg in ("out", "inplace") for k in part.keywords):
                return False
            name = part.func.attr if isinstance(part.func, ast.Attribute) else ""
            builtin = isinstance(part.func, ast.Name) and part.func.id in (
                "slice",
                "range",
                "len",
                "int",
                "float",
            )
            if (not name and not builtin) or (name.endswith("_") and not name.endswith("__")):
                return False
            if name in ("append", "extend", "pop", "grad", "backward", "manual_seed", "synchronize"):
                return False
    return True


def _drop_unused_assignments(function: ast.FunctionDef) -> None:
    for _ in range(8):
        reads = Counter(
            n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
        )
        changed = False
        for block in blocks(function):
            for statement in list(block):
                if (
                    isinstance(statement, ast.Assign)
                    and all(isinstance(t, ast.Name) and not reads[t.id] for t in statement.targets)
                    and is_pure(statement.value)
                    and len(block) > 1
                ):
                    block.remove(statement)
                    changed = True
        if not changed:
            return
