"""What a launch did: framework operations, kernel launches, compilations. Runs in the cell.

Launches of Triton kernels are counted always, so that the counting tells a candidate nothing. The watch over
framework operations slows a launch down and is on for single launches only; a candidate that looks for it
in its own process can find it and behave for that long. It decides who computes, never what is right.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class KernelCounter:
    """Counts launches and compilations of Triton kernels in this process."""

    def __init__(self) -> None:
        self.launches = 0
        self.compilations = 0
        self.suppressed = False
        """Launches do nothing, so that a result which does not need them shows."""
        from triton import knobs
        from triton.runtime.jit import JITFunction

        knobs.compilation.listener = self._compiled
        self._count(JITFunction, "run")
        if knobs.runtime.interpret:
            interpreter = importlib.import_module("triton.runtime.interpreter")
            self._count(interpreter.GridExecutor, "__call__")

    def _compiled(self, *args: Any, cache_hit: bool = False, **facts: Any) -> None:
        self.compilations += not cache_hit

    def _count(self, place: Any, name: str) -> None:
        original = getattr(place, name)

        def call(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            self.launches += 1
            return None if self.suppressed else original(kernel, *args, **kwargs)

        setattr(place, name, call)


class _OperationRecorder(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, seen: dict[str, int]) -> None:
        super().__init__()
        self._seen = seen

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's own way imports the whole of Dynamo at the first operation: 900 modules in every cell, so as not to
        compile what the mode does, which Dynamo does not do anyway."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        touched = [a for a in (*args, result) if hasattr(a, "numel") and hasattr(a, "is_floating_point")]
        most = max((t.numel() for t in touched if t.is_floating_point()), default=0)
        name = func.name() if hasattr(func, "name") else str(func)
        self._seen[name] = max(self._seen.get(name, 0), most)
        return result


@contextmanager
def watch_launch(mode: str, kernels: KernelCounter | None) -> Iterator[dict[str, int]]:
    """Yield what is seen of framework operations: name -> most elements that one call of it touched.

    mode "": nothing is watched; "operations": framework operations are; "off": Triton kernels do nothing.
    """
    seen: dict[str, int] = {}
    if mode == "operations":
        with _OperationRecorder(seen):
            yield seen
        return
    if kernels is not None:
        kernels.suppressed = mode == "off"
    try:
        yield seen
    finally:
        if kernels is not None:
            kernels.suppressed = False
