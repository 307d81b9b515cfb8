"""The Triton kernels of an installed package: every one with a list of configs, or of a source that is asked for."""

from __future__ import annotations

import contextlib
import importlib
import io
import pkgutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from forecast_autotune import frameworks
from forecast_autotune.commands.output import UsageError
from forecast_harness.targets.kernels.user_kernel import UserKernel


@dataclass
class LibraryKernels:
    """What was found in a package, and what could not be read."""

    kernels: list[UserKernel] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Modules and kernels, each with the reason."""


def library_kernels(package: str, sources: Collection[str] = ()) -> LibraryKernels:
    """The kernels of a package and of all modules below it, which are imported.

    Those with a list of configs, and those whose source hash is among `sources`; each source once. A module that
    cannot be imported is skipped. Raises `UsageError` where the package itself cannot.
    """
    if not all(part.isidentifier() for part in package.split(".")):
        raise UsageError(f"--library takes a package's name, and {package} is none: as in `import NAME`")
    found = LibraryKernels()
    best: dict[str, UserKernel] = {}
    for module in _modules(package, found.skipped):
        for name, fn in _kernels_of(module, package):
            try:
                path = Path(getattr(module, "__file__", None) or "")
                target = UserKernel.of_function(path, module, name, fn, partial=True)
            except Exception as error:  # a wrapper of the library's own may be like a kernel and yet none
                found.skipped.append(f"{module.__name__}.{name}: {type(error).__name__}: {error}")
                continue
            source = target.kernel.source_sha256
            known = best.get(source, target)
            if (target.configs or source in sources) and _standing(target) >= _standing(known):
                best[source] = target
    found.kernels = list(best.values())
    return found


def _standing(target: UserKernel) -> tuple[bool, bool]:
    """A tuner says more than its kernel, and the module that defines a kernel may say how it is called."""
    return bool(target.configs), target.kernel.extra.get("module") == target.module.__name__


def _modules(package: str, skipped: list[str]) -> Iterator[ModuleType]:
    try:
        root = _imported(package)
    except Exception as error:
        raise UsageError(
            f"--library {package} cannot be imported ({type(error).__name__}: {error}): install it, or correct the name"
        ) from error
    yield root
    left = list(getattr(root, "__path__", []))
    waiting = [(left, f"{package}.")]
    while waiting:
        folders, prefix = waiting.pop(0)
        for info in pkgutil.iter_modules(folders, prefix):
            if info.name.rpartition(".")[2] == "__main__":
                continue
            try:
                module = _imported(info.name)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                skipped.append(f"{info.name}: {type(error).__name__}: {error}")
                continue
            yield module
            if info.ispkg:
                waiting.append((list(module.__path__), f"{info.name}."))


def _imported(name: str) -> ModuleType:
    with contextlib.redirect_stdout(io.StringIO()):  # stdout is the command's own
        return importlib.import_module(name)


def _kernels_of(module: ModuleType, package: str) -> Iterator[tuple[str, Any]]:
    """What the package itself defines, under the name that the module has for it."""
    triton = frameworks.triton()
    for name, value in sorted(vars(module).items()):
        if not hasattr(value, "arg_names"):
            continue
        home = getattr(getattr(triton.innermost(value), "fn", None), "__module__", None) or ""
        if home == package or home.startswith(f"{package}."):
            yield name, value
