"""Backends that say what they are told, and a table to ask about: for what surrounds a model.

The real ones are tested by themselves; what is tested with these is true of any of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.llm.backend import BackendResponse, LLMError, Usage
from forecast_autotune.llm.bins import BINS, AnswerLabel
from forecast_autotune.llm.calibration import BlendWeight, CalibrationScope, LLMCalibration, MonotoneCurve
from forecast_autotune.llm.gate import GateDecision, GateInputs
from forecast_autotune.llm.prompt import FORECAST_VERSION
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.ensemble import EnsembleSurrogate
from forecast_autotune.surrogates.language_model.surrogate import LLMSurrogate
from forecast_autotune.surrogates.protocol import Forecasts, Query
from forecast_autotune.testing import example_table

Array = npt.NDArray[np.float64]
TABLE = example_table((16, 32, 64, 128, 256, 512, 1024), (1, 2, 4, 8, 16))
"""35 candidates, one of which fails: enough for a gate to open."""


class Said:
    """Answers every suffix by a function of its text; can be cold, slow, or broken."""

    def __init__(
        self,
        say: Callable[[str], Array],
        *,
        cold: bool = False,
        error: Exception | None = None,
        hold: threading.Event | None = None,
    ) -> None:
        """`hold`: nothing is answered until it is set."""
        self.name, self._say, self.error, self.hold = "said", say, error, hold
        self._ready = not cold
        self.questions: list[tuple[str, tuple[str, ...]]] = []
        self.prepared = 0

    def forecast(
        self, prefix: str, suffixes: Sequence[str], labels: Sequence[AnswerLabel], *, timeout_s: float
    ) -> BackendResponse:
        self.questions.append((prefix, tuple(suffixes)))
        if self.hold is not None and not self.hold.wait(30.0):
            raise LLMError("nobody let it go")
        if self.error is not None:
            raise self.error
        stated = np.array([self._say(s) for s in suffixes])
        tokens = len(prefix) // 4 + sum(map(len, suffixes)) // 4
        return BackendResponse(stated, np.full(len(stated), 0.9), Usage(1, tokens, 0, 0, 0.01))

    def ready(self) -> bool:
        return self._ready

    def prepare(self) -> None:
        self.prepared += 1
        self._ready = True

    def close(self) -> None:
        """Nothing is held."""


def thinned(table: Table, rows: slice) -> Table:
    """Some candidates of a table, with the IR that they need."""
    measured = table.measurements[rows]
    wanted = {assignment_of(m.candidate) for m in measured}
    ttir = {key: text for key, text in table.problem.ttir.items() if key in wanted}
    return Table(replace(table.problem, ttir=ttir), measured)


def block(suffix: str) -> int:
    """The BLOCK of a candidate's text; 16 where it has none."""
    return int(f"{suffix}BLOCK=16 ".split("BLOCK=")[1].split(" ")[0])


def favours(size: int) -> Callable[[str], Array]:
    """A model that believes in one size, and in a slowdown of 2^0.5 per doubling away from it."""
    return lambda suffix: BINS.soft_targets(0.5 * abs(np.log2(block(suffix) / size)), 0.15)[0]


def same(suffix: str) -> Array:
    """A model that cannot tell candidates apart."""
    return np.asarray(BINS.soft_targets(0.3, 0.5)[0])


def nothing(suffix: str) -> Array:
    """A model whose answers cannot be used."""
    return np.zeros(len(BINS) + 1)


def calibrated(weight: float = 0.6, sd: float = 0.3, *, saved: float = 0.3) -> LLMCalibration:
    """A calibration that vouches for a model on `TABLE`."""
    scope = CalibrationScope((TABLE.problem.device.slug,), (TABLE.problem.kernel.language,), 4000, 0.1)
    return LLMCalibration(
        "said",
        FORECAST_VERSION,
        weight=BlendWeight(weight, sd),
        saved=saved,
        scope=scope,
        ratio=MonotoneCurve(),
    )


def open_gate(situation: GateInputs) -> GateDecision:
    """A gate that always asks, and has time."""
    return GateDecision(True, 1e6, "always")


def ensemble(answer: Said, calibration: LLMCalibration | None = None, **options: Any) -> EnsembleSurrogate:
    plain = DefaultSurrogate(AnalyticSurrogate())
    given = {"patient": True, "gate": open_gate, **options}
    timeout_s = given.pop("timeout_s", 30.0)
    model = LLMSurrogate(answer, calibration or calibrated(), timeout_s=timeout_s)
    return EnsembleSurrogate(plain, model, **given)


def plain(query: Query) -> Forecasts:
    return DefaultSurrogate(AnalyticSurrogate()).forecast(query)


def equal(one: Forecasts, two: Forecasts) -> None:
    np.testing.assert_array_equal(one.mean, two.mean)
    np.testing.assert_array_equal(one.sd, two.sd)
    np.testing.assert_array_equal(one.p_fail, two.p_fail)
    rows = np.arange(len(one))
    np.testing.assert_array_equal(one.samples(rows, 4, 1), two.samples(rows, 4, 1))
