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
def nodes(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a tree: walking takes most of the time."""
    return list(ast.walk(tree))


@cache
def documentation(tree: ast.Module) -> list[ast.Constant]:
    """Docstrings of modules, classes and functions, and texts below a name that say what it is."""
    bodies = (
        getattr(node, "body", None) for node in nodes(tree) if not isinstance(node, ast.Lambda | ast.IfExp)
    )
    values = (s.value for body in bodies for s in body or () if isinstance(s, ast.Expr))
    return [value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]


def identifiers(*trees: ast.AST) -> set[str]:
    """Names of variables, attributes, arguments, functions, classes and modules in parts of the code."""
    fields = ("id", "attr", "arg", "name", "asname", "module")
    found = (getattr(node, field, None) for tree in trees for node in nodes(tree) for field in fields)
    return {part for word in found if isinstance(word, str) for part in word.split(".")}


class Names:
    """Every name of the packages: words of the code, and what modules and classes hold."""

    def __init__(self) -> None:
        self.words = {*dir(builtins), *sys.stdlib_module_names}
        self.roots = {*sys.stdlib_module_names, *FOREIGN_ROOTS}
        """First parts of dotted names that lead outside."""
        self.held: defaultdict[str, set[str]] = defaultdict(set)
        """Names by class, and by every end of a module's dotted name."""
        self.bases: defaultdict[str, set[str]] = defaultdict(set)
        self.variables: dict[str, set[str]] = {}
        """Arguments and variables by module: their attributes are known by word alone."""
        self.texts: set[str] = set()
        """Texts in the code, as groups of entry points are."""
        for module, tree in modules().items():
            self._read(module, tree)

    def _read(self, module: str, tree: ast.Module) -> None:
        parts, variables = module.split("."), self.variables.setdefault(module, set())
        definitions = [s for s in tree.body if isinstance(s, ast.ClassDef | ast.FunctionDef)]
        own = identifiers(*(s for s in tree.body if s not in definitions)) | {s.name for s in definitions}
        for count in range(len(parts)):
            self.held[".".join(parts[count:])] |= own
            self.held[".".join(parts[count:-1])].add(parts[-1])
        prose, texts = {id(text) for text in documentation(tree)}, set[str]()
        for node in nodes(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                texts.add(node.value)
            elif isinstance(node, ast.arg):
                variables.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                variables.add(node.id)
            elif isinstance(node, ast.ImportFrom | ast.Import):
                first = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                self.roots |= {root for root in (str(first).split(".")[0],) if root[:9] != "forecast_"}
            elif isinstance(node, ast.ClassDef):
                self.held[node.name] |= identifiers(*node.body)
                self.bases[node.name] |= {ast.unparse(b).split("[")[0].split(".")[-1] for b in node.bases}
        self.texts |= texts
        self.words |= {*parts, *identifiers(tree), *re.findall(r"\w+", " ".join(texts))}

    def exist(self, name: str, module: str) -> bool:
        """Whether a name is one of them; a dotted one as a member of the module, class or variable that it names."""
        first, *rest = name.split(".")
        if name in FOREIGN or name in self.texts or first in self.roots:
            return True
        if rest and rest[-1] not in FILE_SUFFIXES and first not in self.variables[module]:
            for count in range(len(rest), 0, -1):
                head, member = ".".join([first, *rest[: count - 1]]), rest[count - 1]
                if head in self.held:
                    return self._holds(head, member) and (
                        count == len(rest) or self._holds(member, rest[count])
                    )
        return {first, *rest} - FILE_SUFFIXES <= self.words

    def _holds(self, owner: str, member: str) -> bool:
        """Whether a module or a class, or one of its bases, has a member; a base from outside has all."""
        held = owner not in self.held or member in self.held[owner]
        return held or any(self._holds(base, member) for base in self.bases[owner])


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
