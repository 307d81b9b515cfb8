"""`KERNEL.py:FN` or `package.module:FN`: a kernel, imported as the programs that use it would import it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from forecast_autotune.errors import SettingsError

KERNEL_PLACE = re.compile(
    r"^(?P<where>.+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*)$", re.DOTALL
)
"""A file or an importable module, and the name of a kernel in it."""


def import_place(where: str) -> tuple[ModuleType, Path]:
    """Import what stands before the colon of a `KERNEL_PLACE`; the module and its file.

    Raises `SettingsError` for what is no Python file and no module, and whatever the code raises.
    """
    if where.endswith(".py"):
        return import_file(Path(where)), Path(where)
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise  # a module that this one needs
        raise SettingsError(
            f"no module {where!r} can be imported (there is no {error.name!r}): give package.module:FN of an "
            "installed package, or KERNEL.py:FN"
        ) from error
    file = Path(getattr(module, "__file__", None) or "")
    if file.suffix != ".py":
        raise SettingsError(f"{where} has no Python source: its file is {str(file) or 'not told'}")
    return module, file


def import_file(path: Path) -> ModuleType:
    """Import a user's file: as a module of its package, or with its folder on `sys.path`.

    Raises `SettingsError` for what is no Python file, and whatever the file raises.
    """
    path = path.absolute()
    if path.suffix != ".py" or not path.is_file():
        raise SettingsError(f"{path} is no Python file: give KERNEL.py:FN")
    root, name = path.parent, path.stem
    while (root / "__init__.py").is_file():
        name, root = f"{root.name}.{name}", root.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if "." in name:
        # Its siblings may import it by this name, too.
        with _without_others(name.partition(".")[0], root):
            return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise
    return module


@contextlib.contextmanager
def _without_others(package: str, root: Path) -> Iterator[None]:
    """Set a loaded package of this name aside that does not lie in `root`: an installed one may be called `kernels`.

    It has its name back afterwards; what was imported meanwhile is known to its own modules alone.
    """
    loaded = sys.modules.get(package)
    if loaded is None or any(Path(p).parent == root for p in getattr(loaded, "__path__", ())):
        yield
        return

    def taken() -> dict[str, ModuleType]:
        return {n: m for n, m in sys.modules.items() if n == package or n.startswith(f"{package}.")}

    others = taken()
    for name in others:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in taken():
            del sys.modules[name]
        sys.modules.update(others)


def find_kernel(module: ModuleType, name: str) -> Any:
    """The kernel or tuner of this name. Raises `SettingsError` listing those that there are."""
    found = getattr(module, name, None)
    if found is not None and hasattr(found, "arg_names"):
        return found
    names = [n for n, value in vars(module).items() if hasattr(value, "arg_names")]
    raise SettingsError(f"{module.__name__} has no kernel {name!r}; it has {', '.join(names) or 'none'}")
