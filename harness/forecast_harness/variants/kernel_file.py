"""`KERNEL.py:FN`: a kernel of the user's own, imported as its own programs would import it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from forecast_autotune.errors import SettingsError


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


def find_kernel(module: ModuleType, name: str) -> Any:
    """The kernel or tuner of this name. Raises `SettingsError` listing those that there are."""
    found = getattr(module, name, None)
    if found is not None and hasattr(found, "arg_names"):
        return found
    names = [n for n, value in vars(module).items() if hasattr(value, "arg_names")]
    raise SettingsError(f"{module.__name__} has no kernel {name!r}; it has {', '.join(names) or 'none'}")
