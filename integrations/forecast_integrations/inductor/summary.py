"""Sums over this process's decisions, for the line per operation and the one at exit."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields

from forecast_autotune.records import Decision
from forecast_autotune.report.summary import summary_line

LISTENERS: list[Callable[[str, Decision], None]] = []
"""Called with the operation and its decision, as `forecast_integrations.triton.publication.LISTENERS`."""


@dataclass
class TorchCompileSummary:
    """Sums over the operations of this process."""

    graphs: int = 0
    """Graphs that were to be compiled, those found in a cache included."""
    operations: int = 0
    considered: int = 0
    compiled: int = 0
    """Choices that were measured now."""
    trusted: int = 0
    known: int = 0
    """Operations answered without the clock."""
    later_s: float = 0.0
    """Seconds of later launches in which configs of generated kernels were timed."""
    timings: int = 0
    """Measurements stored, of runs in which we only listened, too."""
    _mutex: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add_decision(self, label: str, decision: Decision, say: bool) -> None:
        """Count a decision, tell the listeners, and print its line if wanted."""
        self.count(
            operations=1,
            considered=decision.candidates,
            compiled=decision.measured,
            trusted=decision.trusted + decision.refused,
            known=int(not decision.measured),
        )
        for listener in list(LISTENERS):
            listener(label, decision)
        if say:
            print(summary_line(label, decision), file=sys.stderr)

    def count(self, **more: float) -> None:
        """Add to these sums."""
        with self._mutex:
            for name, number in more.items():
                setattr(self, name, getattr(self, name) + number)

    @classmethod
    def total(cls, tallies: Iterable[TorchCompileSummary]) -> TorchCompileSummary:
        """The sum of several."""
        total = cls()
        for tally in tallies:
            sums = {f.name: getattr(tally, f.name) for f in fields(cls)}
            total.count(**{name: n for name, n in sums.items() if isinstance(n, int | float)})
        return total

    def line(self) -> str:
        """The summary at exit."""
        later = ""
        if self.later_s >= 0.05:
            later = f"; {self.later_s:.1f} s of later launches, at most 10 % of any second, timed generated kernels"
        if not self.operations and not self.timings and not later:
            return (
                f"forecast_autotune torch.compile: nothing to choose in {self.graphs} graphs: no operation had several "
                "choices, or the graphs were in a cache. Inductor lists choices with mode='max-autotune', on a CPU "
                "those of layers with torch._inductor.config.freezing alone"
            )
        if not self.operations:
            return f"forecast_autotune torch.compile: {self.timings} timings stored{later}"
        parts = [
            f"{self.operations} operations, {self.known} of them known",
            f"{self.considered} choices considered",
            f"{self.compiled} compiled and timed",
            f"{self.trusted} trusted",
        ]
        return f"forecast_autotune torch.compile: {', '.join(parts)}; {self.timings} timings stored{later}"
