"""Names in the backticks of docstrings exist: one that was renamed stays in prose for ever, unless somebody looks."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections import defaultdict
from functools import cache

from tests.test_architecture import modules

QUOTED = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\))?`")
CAMEL_CASE = re.compile(r"[A-Z][a-z0-9]+[A-Z]")
FILE_SUFFIXES = {"csv", "json", "md", "png", "py"}
FOREIGN_ROOTS = {"benchmarks", "kernel_tuner", "T", "libdevice"}
"""Modules that no package imports at its top, and aliases of other projects' modules."""
FOREIGN = {
    *("CONFIG_PROC_CHILDREN", "CU_COMPUTEMODE_DEFAULT", "CU_DEVICE_ATTRIBUTE_COMPUTE_MODE", "sm_90a"),
    *("CUdevice_attribute", "CUfunction_attribute", "ConfigGeneration", "autotuner_fn", "empty_strided_cuda"),
    *("get_config_file_name", "get_default_config", "make_extra", "sock_filter", "static_assert"),
    *(
        "tensordesc_meta",
        "x_row_stride",
        "offs_m",
        "offs_n",
        "metric_table_kernel_autotune.csv",
        "ops_null.py",
        "ChoiceCaller.hash_key",
    ),
}
"""Names of other programs, and of kernels in examples."""


@cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """All nodes of a module: walking takes most of the time."""
    return list(ast.walk(tree))


@cache
def documentation(tree: ast.Module) -> list[ast.Constant]:
    """Docstrings of modules, classes and functions, and texts below a name that say what it is."""
    bodies = (
        getattr(node, "body", None) for node in nodes(tree) if not isinstance(node, ast.Lambda | ast.IfExp)
    )
    values = (s.value for body in bodies for s in body or () if isinstance(s, ast.Expr))
    return [value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]


class Names:
    """Every name of the packages: words of the code, and what modules and classes hold."""

    def __init__(self) -> None:
        self.words = {*dir(builtins), *sys.stdlib_module_names}
        self.roots = {*sys.stdlib_module_names, *FOREIGN_ROOTS}
        """First parts of dotted names that lead outside."""
        self.held: defaultdict[str, set[str]] = defaultdict(set)
        """Names by module."""
        self.homes: defaultdict[str, list[str]] = defaultdict(list)
        """Modules by every end of their dotted names."""
        self.classes: dict[str, tuple[set[str], list[str]]] = {}
        """Attributes and bases by class."""
        self.variables: defaultdict[str, set[str]] = defaultdict(set)
        """Arguments and variables by module: their attributes are known by word alone."""
        self.texts: set[str] = set()
        """Texts in the code, as groups of entry points are."""
        for module, tree in modules().items():
            self._read(module, tree)

    def _read(self, module: str, tree: ast.Module) -> None:
        prose = {id(text) for text in documentation(tree)}
        for count in range(len(parts := module.split("."))):
            self.homes[".".join(parts[count:])].append(module)
        self.words |= {*parts}
        folder, _, name = module.rpartition(".")
        self.held[folder].add(name)
        for node in nodes(tree):
            for field in ("id", "attr", "arg", "name", "asname"):
                if isinstance(word := getattr(node, field, None), str):
                    self.words |= {*word.split(".")}
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                self.words |= {*re.findall(r"\w+", node.value)}
                self.texts.add(node.value)
            elif isinstance(node, ast.arg):
                self.variables[module].add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.variables[module].add(node.id)
            elif isinstance(node, ast.ImportFrom | ast.Import):
                first = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                self.words |= {*str(first).split(".")}
                if not (root := str(first).split(".")[0]).startswith("forecast_"):
                    self.roots.add(root)
            elif isinstance(node, ast.ClassDef):
                self._read_class(node)
        for statement in tree.body:
            self.held[module].add(str(getattr(statement, "name", "")))
            if not isinstance(statement, ast.ClassDef | ast.FunctionDef):
                self.held[module] |= {
                    n.asname or n.name for n in ast.walk(statement) if isinstance(n, ast.alias)
                }
                self.held[module] |= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}

    def _read_class(self, node: ast.ClassDef) -> None:
        own = {str(getattr(x, "name", "")) for x in node.body}
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute):
                own.add(inner.attr)
            elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                own.add(inner.id)
        known, bases = self.classes.get(node.name, (set(), []))
        self.classes[node.name] = known | own, bases + [ast.unparse(base) for base in node.bases]

    def exist(self, name: str, module: str) -> bool:
        """Whether a name is one of them; a dotted one as a member of the module, class or variable that it names."""
        first, *rest = name.split(".")
        if name in FOREIGN or name in self.texts or first in self.roots:
            return True
        if not rest or rest[-1] in FILE_SUFFIXES or first in self.variables[module]:
            return {first, *rest} - FILE_SUFFIXES <= self.words
        for count in range(len(rest), -1, -1):
            head, left = ".".join([first, *rest[:count]]), rest[count:]
            if homes := self.homes[head]:
                members = {member for home in homes for member in self.held[home]}
                return not left or (left[0] in members and self._is_member(left))
        if first in self.classes:
            return self._is_member([first, *rest])
        return {first, *rest} <= self.words

    def _is_member(self, path: list[str]) -> bool:
        if len(path) == 1 or path[0] not in self.classes:
            return True
        attributes, bases = self.classes[path[0]]
        outside = any(base.split("[")[0].split(".")[-1] not in self.classes for base in bases)
        return path[1] in attributes or outside or any(self._is_member([base, path[1]]) for base in bases)


def is_name(text: str) -> bool:
    return "." in text or "_" in text.strip("_") or CAMEL_CASE.match(text) is not None


def test_a_quoted_name_in_a_docstring_exists() -> None:
    names = Names()
    quoted = {
        (name, module)
        for module, tree in modules().items()
        for text in documentation(tree)
        for name in QUOTED.findall(text.value)
        if is_name(name)
    }
    assert len(quoted) > 1000, "the pattern finds nothing"
    assert not sorted(place for place in quoted if not names.exist(*place))
