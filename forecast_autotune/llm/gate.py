"""Whether asking a language model is worth its latency: the value of computation, in seconds of waiting.

An answer is worth the measurements that it is expected to save at equal regret (`LLMCalibration.saved`, from
replays), in the wall seconds that those would have taken; it costs what answers have taken. Where nothing
is measured, it decides the choice itself. A pure function: no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from forecast_autotune.numerics import sparse_count

MIN_CANDIDATES = 16
"""With fewer candidates the first look alone measures a good part: an answer would come too late to matter."""
TIMING_S = 0.05
"""Seconds to time one candidate."""
OVERHEAD_S = 0.02
"""Extra seconds of a decision for two beliefs instead of one, without the model's own (16 ms on recorded ones)."""


@dataclass(frozen=True)
class GateInputs:
    """Inputs of the gate."""

    candidates: int
    """Candidates that are not measured yet."""
    workers: int
    """Compilations at a time."""
    compile_s: float
    """Seconds to compile one candidate; about 0 where the binaries are there."""
    saved: float
    """Share of the measurements that asking is expected to save at equal regret, in [0, 1]."""
    answer_s: float = 0.0
    """Median seconds of the answers that were timed; 0 where none was."""
    once: bool = False
    """Nothing will be measured: the answer is for the choice itself, and any second within the limit is."""
    timeout_s: float = 30.0


@dataclass(frozen=True)
class GateDecision:
    """The gate's verdict."""

    ask: bool
    worth_s: float
    """Wall seconds that an answer is expected to save; nobody should wait longer."""
    reason: str
    """A sentence for users."""


_MEASURED_SHARE = 0.17
"""Share of a list that the default policy measures before its risk is accepted (recorded replays)."""
_LEAST_MEASURED = 8.0
"""Fewest candidates that the default policy measures, however short the list."""


def decide_asking(situation: GateInputs) -> GateDecision:
    """Whether to ask; see the module."""
    s = situation
    if s.saved <= 0.0:
        return GateDecision(False, 0.0, "its answers have not been worth anything on recorded problems")
    if s.once:
        late = f"it would take about {s.answer_s:.1f} s, longer than the limit of {s.timeout_s:g} s"
        in_time = s.answer_s <= s.timeout_s
        reason = "nothing is measured, so its answer decides" if in_time else late
        return GateDecision(in_time, s.timeout_s, reason)
    if s.candidates < MIN_CANDIDATES:
        return GateDecision(False, 0.0, f"{s.candidates} candidates are measured sooner than asked about")
    count = min(float(s.candidates), max(_LEAST_MEASURED, _MEASURED_SHARE * sparse_count(s.candidates)))
    # Candidates compile in parallel and are timed one by one.
    value = s.saved * (count / max(1, s.workers) * s.compile_s + TIMING_S * count)
    reason = f"{s.candidates} candidates: an answer saves about {value:.2f} s and takes {s.answer_s:.2f} s"
    return GateDecision(value > s.answer_s + OVERHEAD_S, value, reason)
