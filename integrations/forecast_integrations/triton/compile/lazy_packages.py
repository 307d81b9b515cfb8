"""Kernels' modules imported without what their packages import besides: a library's models, and theirs.

The file of a package runs only when somebody wants a name that it does not just import from within the package. Other
libraries run theirs at the first use of any name: many are imported only to know whether they are there.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

_UNKNOWN = object()


class _LazyPackage(ModuleType):
    def __getattr__(self, name: str) -> Any:
        state = self.__dict__
        if not state.get("_pending") or (name.startswith("__") and name not in ("__all__", "__version__")):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if "_names" not in state:
            state["_names"] = _names_of(self.__name__, Path(state["__file__"]).read_text(encoding="utf-8"))
        entry = state["_names"].get(name, _UNKNOWN)
        if entry is _UNKNOWN:
            complete(self)
            return getattr(
                sys.modules.get(self.__name__, self), name
            )  # some put another module in their place
        home, original, value = entry
        if home == self.__name__:
            value = importlib.import_module(f"{home}.{original}")
        elif home:
            value = getattr(importlib.import_module(home), original)
        state[name] = value
        return value


def complete(package: ModuleType) -> bool:
    """Run a lazy package's own file; whether that had not been done."""
    pending: Loader | None = vars(package).pop("_pending", None)
    if pending is None:
        return False
    try:
        pending.exec_module(package)
    except BaseException:  # modules that import one another have an order, in which it is tried again
        vars(package)["_pending"] = pending
        raise
    return True


def _names_of(package: str, text: str) -> dict[str, tuple[str, str, Any] | object]:
    """Names that a package's file takes from its own modules (module, name there, None), and its literals."""
    names: dict[str, tuple[str, str, Any] | object] = {}
    for node in ast.parse(text).body:
        entries: list[tuple[str, tuple[str, str, Any] | object]] = []
        if isinstance(node, ast.ImportFrom):
            home = resolve_name("." * node.level + (node.module or ""), package)
            inside = f"{home}.".startswith(f"{package}.")
            entries = [(a.asname or a.name, (home, a.name, None) if inside else _UNKNOWN) for a in node.names]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            entries = [(t.id, ("", "", node.value.value)) for t in node.targets if isinstance(t, ast.Name)]
        else:
            targets = [
                n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            ]
            entries = [(name, _UNKNOWN) for name in (*targets, getattr(node, "name", ""))]
        names.update(entries)
    return names


class _LazyLoader(Loader):
    def __init__(self, loader: SourceFileLoader, entries: dict[str, Any]) -> None:
        self._loader, self._entries = loader, entries

    def __getattr__(self, name: str) -> Any:  # files of the package's that somebody reads
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _LazyPackage(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self._entries, _pending=self._loader)


class _LazyFinder(MetaPathFinder):
    def __init__(self, libraries: Iterable[str]) -> None:
        self._eager = {*sys.stdlib_module_names, "torch", "triton"}
        self._libraries = {*libraries} - self._eager

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        first, _, rest = fullname.partition(".")
        if first in self._eager:
            return None
        if first not in self._libraries and rest:
            if isinstance(package := sys.modules.get(first), _LazyPackage):
                complete(package)
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.submodule_search_locations and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _LazyLoader(spec.loader, {} if first in self._libraries else {"_names": {}})
        return spec


@contextmanager
def lazy_packages(libraries: Iterable[str]) -> Iterator[None]:
    """Import packages of these libraries, by their first names, lazily within the block, and others at their use."""
    finder = _LazyFinder(libraries)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def complete_packages(module: str) -> bool:
    """Complete the packages above a module, and forget it; whether any was lazy, so that it may differ now."""
    parts = module.split(".")
    above = [sys.modules.get(".".join(parts[:count])) for count in range(1, len(parts))]
    changes = [complete(package) for package in above if isinstance(package, _LazyPackage)]
    if any(changes):
        sys.modules.pop(module, None)
    return any(changes)
