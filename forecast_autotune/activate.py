"""Serve every `triton.autotune` of this process as soon as there is one: FORECAST_AUTOTUNE=1.

Nothing is loaded early. Triton reads its own variables when it is imported, and a program may set
them, or CUDA_VISIBLE_DEVICES, first: so the patch waits until the program itself imports Triton.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from forecast_autotune.errors import SettingsError
from forecast_autotune.settings import Settings

_PACKAGE = "triton"
_HOME = "triton.runtime.autotuner"


def install(then: Callable[[], None] | None = None) -> bool:
    """Patch Triton now if it is loaded, else right after its import; `then` is called after the patch.

    Does nothing, and returns False, unless FORECAST_AUTOTUNE is set to 1. Calling it again changes
    nothing but adds the new `then`. A variable that breaks its rule is a warning here, not an error:
    this runs while Python starts and while we are imported, and `doctor` must be able to say it, too.
    """
    try:
        if not Settings.from_environment().enabled:
            return False
    except SettingsError as error:
        warnings.warn(f"triton.autotune is not served: {error}", RuntimeWarning, stacklevel=2)
        return False
    if _HOME in sys.modules:
        _patch([then] if then else [])
        return True
    waiting = next((f for f in sys.meta_path if isinstance(f, _Hook)), None)
    if waiting is None:
        waiting = _Hook()
        sys.meta_path.insert(0, waiting)
    if then is not None:
        waiting.then.append(then)
    return True


def _patch(then: Sequence[Callable[[], None]]) -> None:
    try:
        from forecast_autotune import patch_triton

        patch_triton()
    except Exception as error:
        # Whoever only set a variable must not lose the program over it: Triton tunes by itself.
        warnings.warn(
            f"FORECAST_AUTOTUNE=1 could not serve triton.autotune ({error!r}): Triton tunes as usual; "
            "`forecast-autotune doctor` says what is wrong",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    for call in then:
        call()


class _Hook(MetaPathFinder):
    """Finds nothing itself: it sees the import of Triton coming and adds a step to its end.

    The step follows the whole package, not only `triton.runtime.autotuner`: in the middle of its own
    import, the modules that the patch needs are not all there.
    """

    def __init__(self) -> None:
        self.then: list[Callable[[], None]] = []
        self._asking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The other finders' spec of Triton, its loader extended; None for every other module."""
        if fullname != _PACKAGE or getattr(self._asking, "on", False):
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
            if _HOME in sys.modules:
                _patch(self.then)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
