"""Serve `triton.autotune` and torch.compile of this process as soon as they are there: FORECAST_AUTOTUNE=1.

Nothing is loaded early. Triton and torch read their own variables when they are imported, and a program
may set them, or CUDA_VISIBLE_DEVICES, first: so we wait until the program itself imports Triton, or
compiles something with Inductor.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_TRITON_MODULES = ("triton", "triton.runtime.autotuner")
"""The module to wait for, and the attribute that it has then: the patch needs modules that the package imports."""
_INDUCTOR_ENTRY_MODULE = "torch._inductor.compile_fx"
"""The way into Inductor, imported by the first compilation; behind it, all that is hooked can be imported."""


def install(then: Callable[[], None] | None = None) -> bool:
    """Patch Triton and Inductor now if they are loaded, else right after their import.

    `then` is called after the patch of Triton. Does nothing, and returns False, unless FORECAST_AUTOTUNE
    is set to 1. Calling it again changes nothing but adds the new `then`. A variable that breaks its rule
    is a warning here, not an error: this runs while Python starts and while we are imported, and `doctor`
    must be able to say it, too.
    """
    from forecast_autotune.errors import SettingsError
    from forecast_autotune.settings import Settings

    try:
        settings = Settings.from_environment()
    except SettingsError as error:
        _warn(f"neither triton.autotune nor torch.compile is served: {error}")
        return False
    if not settings.enabled:
        return False
    _call_after_import(*_TRITON_MODULES, _serve_triton, then)
    _call_after_import(_INDUCTOR_ENTRY_MODULE, _INDUCTOR_ENTRY_MODULE, _serve_inductor)
    return True


def autoload() -> None:
    """Torch calls this at the end of its own import (entry point `torch.backends`).

    Does what `install` does and never raises: an exception in here would break `import torch`.
    """
    with contextlib.suppress(Exception):
        _check_options(sys.modules["torch"])
    if os.environ.get("FORECAST_AUTOTUNE", "") in ("", "0"):
        return  # reading the settings costs some milliseconds, of every `import torch`
    try:
        install()
    except Exception as error:
        _warn(f"FORECAST_AUTOTUNE=1 has no effect: {error!r}")


def _check_options(torch: Any) -> None:
    """Have `torch.compile(backend="forecast_autotune", options=...)` check options as it does for its own backend.

    torch hands the options of other backends to their function, which is called at the first call of what is compiled.
    """
    wrapper = torch._TorchCompileWrapper
    original = wrapper.__init__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def init(
        self: Any, backend: object, mode: object, options: object, dynamic: object, *more: object
    ) -> None:
        original(self, backend, mode, options, dynamic, *more)
        if "forecast_autotune" in (backend, getattr(backend, "__name__", "")):
            torch._TorchCompileInductorWrapper(mode, options, dynamic)

    wrapper.__init__ = init


@cache  # torch and the program itself may both have us installed
def _warn(text: str) -> None:
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
        # Where warnings are errors (`-W error`), this one would take the program's import down.
        print(text, file=sys.stderr)


def _call_after_import(
    package: str, home: str, serve: Callable[[], None], then: Callable[[], None] | None = None
) -> None:
    """Call `serve`, and then `then`, as soon as `package` is imported and has brought `home` along."""
    if home in sys.modules:
        _PostImportFinder(package, home, serve, then).call()
        return
    waiting = next(
        (f for f in sys.meta_path if isinstance(f, _PostImportFinder) and f.package == package), None
    )
    if waiting is None:
        sys.meta_path.insert(0, _PostImportFinder(package, home, serve, then))
    elif then is not None:
        waiting.then.append(then)


def _serve_triton() -> None:
    from forecast_autotune import patch_triton

    patch_triton()


def _serve_inductor() -> None:
    from forecast_autotune import autoload_torch_compile

    autoload_torch_compile()


class _PostImportFinder(MetaPathFinder):
    """Finds nothing itself: it sees the import of a package coming and adds a step to its end.

    The step follows the whole package, not only the module that is patched: in the middle of its own
    import, the modules that the patch needs are not all there.
    """

    def __init__(
        self, package: str, home: str, serve: Callable[[], None], then: Callable[[], None] | None = None
    ) -> None:
        self.package = package
        self.then = [then] if then is not None else []
        self._home, self._serve = home, serve
        self._asking = threading.local()

    def call(self) -> None:
        """Patch, then tell those who wait for it."""
        try:
            self._serve()
        except Exception as error:
            # A variable of the environment must not cost the program: the host tunes by itself.
            _warn(
                f"FORECAST_AUTOTUNE=1 could not serve {self.package} ({error!r}): it tunes as usual; "
                "`forecast-autotune doctor` says what is wrong"
            )
            return
        for call in self.then:
            call()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The other finders' spec of the package, its loader extended; None for every other module."""
        if fullname != self.package or getattr(self._asking, "on", False):
            return None
        self._asking.on = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking.on = False
        loader = None if spec is None else spec.loader
        if spec is None or loader is None:
            return spec
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # The loader itself stays what it was: whoever asks it for sources later gets them.
            del loader.exec_module
            load(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            if self._home in sys.modules:
                self.call()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
