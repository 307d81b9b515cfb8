"""Attributes replaced on foreign classes and modules, and put back exactly as they were."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

AnyFunction: TypeAlias = Callable[..., Any]
"""A function of Inductor's: what it takes and gives differs from release to release."""


class PatchSet:
    """What has been replaced, in order.

    Replacements are class-level or module-level: in torch 2.13 the configuration and the handler of
    choices are thread-local, and a backward pass is compiled in a thread of its own.
    """

    def __init__(self) -> None:
        self.missing: list[str] = []
        """Names that this release of torch does not have."""
        self._replaced: list[tuple[type | ModuleType, str, object, object]] = []
        self._listed: list[tuple[list[AnyFunction], AnyFunction]] = []

    def replace(
        self, owner: type | ModuleType, name: str, wrap: Callable[[AnyFunction], AnyFunction]
    ) -> None:
        """Put `wrap(original)` in place of an attribute of a class or module, if it has it.

        For a class method the wrapper gets the class first, as the original does.
        """
        if name not in vars(owner):
            self.missing.append(f"{getattr(owner, '__name__', owner)}.{name}")
            return
        original = vars(owner)[name]
        kind = type(original) if isinstance(original, classmethod | staticmethod) else None
        function = original if kind is None else original.__func__
        wrapped: Any = functools.wraps(function)(wrap(function))
        ours = wrapped if kind is None else kind(wrapped)
        setattr(owner, name, ours)
        self._replaced.append((owner, name, original, ours))

    def append(self, entries: list[AnyFunction], entry: AnyFunction) -> None:
        """Add an entry to a foreign list."""
        entries.append(entry)
        self._listed.append((entries, entry))

    def restore(self) -> None:
        """Undo everything, the latest first. What others have put on top of ours since stays."""
        for owner, name, original, ours in reversed(self._replaced):
            if vars(owner).get(name) is ours:
                setattr(owner, name, original)
        for entries, entry in reversed(self._listed):
            entries[:] = [other for other in entries if other is not entry]
        self._replaced.clear()
        self._listed.clear()
