"""The span of one decision, and what is counted of it."""

from __future__ import annotations

from types import TracebackType

from forecast_autotune.errors import FrozenMissError
from forecast_autotune.records import Decision, Evidence, Problem
from forecast_autotune.settings import Settings
from forecast_autotune.telemetry.spans import configure, count, span


class DecisionSpan:
    """Enter it around whatever decides a problem, and say inside what was decided."""

    def __init__(self, problem: Problem, settings: Settings, *, met_now: bool = True) -> None:
        """Exporters are those of the settings. Unless a key is `met_now`, it was counted when it was."""
        configure(settings.telemetry, settings.trace)
        self._met_now = met_now
        self._labels = {"kernel": problem.kernel.name, "mode": str(settings.mode)}
        self._span = span("decide", **self._labels, key=" ".join(problem.key), device=problem.device.name)

    def conclude(self, decision: Decision) -> Decision:
        """Show and count the decision, and return it.

        What was saved is what the summary line says: it is said of decisions that were made now, and of no others.
        """
        told = {name: getattr(decision, name) for name in _SHOWN}
        self._span.set(**told, outcome="decided", why="; ".join(decision.rounds[-1:]) or decision.reason)
        fresh = decision.evidence is Evidence.FORECAST or decision.measured > 0
        if self._met_now:
            count("misses" if fresh else "hits", 1, **self._labels)
        if not fresh:
            return decision
        self._span.set(seconds_saved=decision.saved_s)
        count("measured", decision.measured, **self._labels)
        count("seconds_saved", decision.saved_s, **self._labels)
        return decision

    def __enter__(self) -> DecisionSpan:
        self._span.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, FrozenMissError):
            count("misses", 1, **self._labels)
        self._span.__exit__(kind, error, trace)


_SHOWN = (
    *("evidence", "candidates", "measured", "known", "trusted", "refused"),
    *("chosen", "median_ms", "stated_risk"),
)
