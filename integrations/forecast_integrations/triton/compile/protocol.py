"""What a compile pool gives, and what it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from forecast_autotune.records import Candidate, Outcome


@dataclass
class CompileResult:
    """One finished compilation: a binary (in memory or in Triton's cache), or an outcome."""

    candidate: Candidate
    seconds: float = 0.0
    outcome: Outcome | None = None
    """None when it compiled."""
    message: str = ""
    error: BaseException | None = None
    """An error that is the caller's rather than the config's; to be raised."""
    cpu_seconds: float | None = None
    """Of a child and the assembler that it ran; None where that is not known."""
    began_s: float | None = None
    """When it began, by `time.perf_counter`; None where it was not compiled now."""
    raised: bool = False
    """Whether the compiler raised an exception, which another compilation would raise again; else it hung or died."""


class CompilePool(Protocol):
    """What the measurer asks of either kind of pool."""

    quiet: bool
    """Whether timing is undisturbed while compilations run."""
    compile_s: float
    finished: int
    while_waiting: Callable[[], object]
    """Called in `next` about four times a second, where that disturbs no compilation; does nothing unless set."""

    def schedule(self, candidates: Sequence[Candidate]) -> None:
        """Compile these next, in this order, as far as they have not been; whatever else was queued is forgotten.

        What compiles now and is not among them is given up where one of them needs its worker, if it can be.
        """
        ...

    def compiling(self) -> Mapping[Candidate, float]:
        """What compiles now, with the seconds that it has been at it."""
        ...

    def next(self, within_s: float | None = None) -> CompileResult | None:
        """Wait for the next finished (or given up) compilation; None if there is none within so many seconds."""
        ...

    def done(self) -> list[CompileResult]:
        """Whatever has finished by now, without waiting."""
        ...

    def close(self) -> None:
        """Give up whatever is still queued or running."""
        ...
