"""Names in the backticks of docstrings exist: one that was renamed stays in prose for ever, unless somebody looks."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections import defaultdict
from collections.abc import Iterator

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
    ),
}
"""Names of other programs, and of kernels in examples."""


def documentation(tree: ast.Module) -> Iterator[ast.Constant]:
    """Docstrings of modules, classes and functions, and texts below a name that say what it is."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value


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
        self.words |= {*module.split(".")}
        for count in range(len(parts := module.split("."))):
            self.homes[".".join(parts[count:])].append(module)
        folder, _, name = module.rpartition(".")
        self.held[folder].add(name)
        for node in ast.walk(tree):
            for field in ("id", "attr", "arg", "name", "asname", "module"):
                self.words |= {*str(getattr(node, field, "")).split(".")}
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                self.words |= {*re.findall(r"\w+", node.value)}
                self.texts.add(node.value)
            elif isinstance(node, ast.arg) or (
                isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            ):
                self.variables[module].add(node.arg if isinstance(node, ast.arg) else node.id)
            elif isinstance(node, ast.ImportFrom | ast.Import):
                first = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                self.roots |= {
                    root for root in [str(first).split(".")[0]] if not root.startswith("forecast_")
                }
            elif isinstance(node, ast.ClassDef):
                own = {str(getattr(x, "name", "")) for x in node.body}
                own |= {
                    x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)
                }
                own |= {x.attr for x in ast.walk(node) if isinstance(x, ast.Attribute)}
                known, bases = self.classes.get(node.name, (set(), []))
                self.classes[node.name] = known | own, bases + [ast.unparse(base) for base in node.bases]
        for statement in tree.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.alias):
                    self.held[module].add(node.asname or node.name)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    self.held[module].add(node.id)
            self.held[module].add(str(getattr(statement, "name", "")))

    def exist(self, name: str, module: str) -> bool:
        """Whether a name is one of them; a dotted one as a member of the module, class or variable that it names."""
        first, *rest = name.split(".")
        if name in FOREIGN | self.texts or first in self.roots:
            return True
        if not rest or rest[-1] in FILE_SUFFIXES or first in self.variables[module]:
            return {first, *rest} <= self.words | FILE_SUFFIXES
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
