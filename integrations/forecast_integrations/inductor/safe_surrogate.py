"""Asking a surrogate in the middle of a compilation: checked, within a time limit, never raising."""

from __future__ import annotations

import sys
import threading
import warnings
from typing import Any

from forecast_autotune.numerics import single_threaded_blas
from forecast_autotune.surrogates.protocol import Forecasts, Query, Surrogate
from forecast_autotune.tuning.loop import validate_forecasts

_CACHE_SIZE = 256
"""Answers remembered: the layers of a model ask the same question over and over."""


class WarnOnce:
    """Says once that something of ours failed; a compilation is not the place to say it often."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        """Everything that went wrong, for tests and `doctor`."""

    def __call__(self, what: str, error: object) -> None:
        """Note a failure; the first one is issued as a warning."""
        self.messages.append(f"{what}: {error!r}")
        if len(self.messages) > 1:
            return
        text = (
            f"forecast_autotune failed to {what} ({error!r}): Inductor goes on with all of its own "
            "choices. Later failures are not reported"
        )
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        except RuntimeWarning:
            # Where warnings are errors (`-W error`), this one would end the compilation.
            print(text, file=sys.stderr)


class SafeSurrogate:
    """A surrogate that cannot harm: it answers None instead of raising, hanging or talking nonsense.

    One that exceeded its limit is not asked again: every further operation of the model would wait as long.
    """

    def __init__(self, surrogate: Surrogate, limit_s: float, warn_once: WarnOnce) -> None:
        self.surrogate = surrogate
        self.limit_s = limit_s
        self._warn_once = warn_once
        self._hung = False
        self._answers: dict[Any, Forecasts | None] = {}
        self._mutex = threading.Lock()

    @property
    def label(self) -> str:
        """Name and version."""
        return f"{getattr(self.surrogate, 'name', '?')}/{getattr(self.surrogate, 'version', '?')}"

    def __call__(self, query: Query) -> Forecasts | None:
        """Forecasts that `validate_forecasts` accepts, or None."""
        measured = tuple((m.candidate, m.outcome, m.median_ms) for m in query.measured)
        relatives = tuple((r.problem.id, len(r.measurements)) for r in query.relatives)
        # A draft may be answered without what takes long, and must not pass for the answer that follows it.
        draft = query.provisional and not getattr(self.surrogate, "answers_drafts_alike", False)
        key = (query.problem.id, tuple(query.candidates), measured, relatives, draft)
        with self._mutex:
            if key in self._answers:
                return self._answers[key]
        found = self._ask(query)
        with self._mutex:
            if len(self._answers) >= _CACHE_SIZE:
                self._answers.clear()
            self._answers[key] = found
        return found

    def _ask(self, query: Query) -> Forecasts | None:
        if self._hung:
            return None
        found: list[Forecasts] = []
        failed: list[Exception] = []

        def work() -> None:
            try:
                with single_threaded_blas():
                    found.append(validate_forecasts(self.surrogate.forecast(query), query.candidates))
            except Exception as error:
                failed.append(error)

        # A daemon: a thread cannot be stopped, and must not keep the process from ending.
        worker = threading.Thread(target=work, name="forecast", daemon=True)
        worker.start()
        worker.join(self.limit_s)
        if found:
            return found[0]
        if not failed:
            self._hung = True
        why = failed[0] if failed else TimeoutError(f"no answer within {self.limit_s:g} s")
        self._warn_once(f"forecast with {self.label}", why)
        return None
