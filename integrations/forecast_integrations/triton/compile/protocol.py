"""What a compile pool gives, and what it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    def submit(self, candidates: Sequence[Candidate]) -> None:
        """Queue candidates not submitted before, in order."""
        ...

    def next(self) -> CompileResult:
        """Wait for the next finished (or given up) compilation."""
        ...

    def done(self) -> list[CompileResult]:
        """Whatever has finished by now, without waiting."""
        ...

    def close(self) -> None:
        """Give up whatever is still queued or running."""
        ...
