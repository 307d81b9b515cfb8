"""Whether asking a language model is worth its latency: the value of computation, in seconds of waiting.

An answer is worth the measurements that it is expected to save at equal regret (`LLMCalibration.saved`, from
replays), in the wall seconds that those would have taken; it costs what its answers have taken. Where nothing
is measured, it decides the choice itself. A pure function: no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from forecast_autotune.numerics import sparse_count

MIN_CANDIDATES = 16
"""With fewer candidates the first look alone measures a good part: an answer would come too late to matter."""
TIMING_S = 0.05
"""Seconds to time one candidate."""
TYPICAL_PREFIX_TOKENS, TYPICAL_SUFFIX_TOKENS = 1500, 65
"""Tokens of a prompt, where they have not been counted: what all candidates share, and of each."""
DEFAULT_LOAD_S = 15.0
"""Until the first answer of a model that has never been loaded here."""
DEFAULT_PER_TOKEN_S = 1e-4
"""Seconds per token of a model that has never been asked here: a small one on a GPU takes a tenth."""
OVERHEAD_S = 0.02
"""Seconds that two beliefs instead of one take in a decision, whatever the model takes (16 ms on recorded ones)."""
MARGIN = 2.0
"""An answer is waited for before anything else where it is worth so many times what it costs."""


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
    asked: int
    """Candidates that would be asked about."""
    per_token_s: float = DEFAULT_PER_TOKEN_S
    load_s: float = DEFAULT_LOAD_S
    """Until the model could begin to answer; 0 for a warm one."""
    once: bool = False
    """Nothing will be measured: the answer is for the choice itself, and any second within the limit is."""
    timeout_s: float = 30.0
    answer_s: float | None = None
    """Median seconds of the answers that were timed; None where none was: estimated by tokens."""

    @property
    def latency_s(self) -> float:
        """Seconds of the answer itself, once the model is loaded: as measured, else as estimated."""
        if self.answer_s is not None:
            return self.answer_s
        return self.per_token_s * (TYPICAL_PREFIX_TOKENS + TYPICAL_SUFFIX_TOKENS * self.asked)


@dataclass(frozen=True)
class GateDecision:
    """The gate's verdict."""

    ask: bool
    worth_s: float
    """Wall seconds that an answer is expected to save; nobody should wait longer."""
    cost_s: float
    """Wall seconds until the answer, if it is asked for now."""
    reason: str
    """A sentence for users."""

    @property
    def should_wait(self) -> bool:
        """Whether to wait for it before anything else: it costs next to nothing."""
        return self.ask and self.cost_s <= self.worth_s / MARGIN


_MEASURED_SHARE = 0.17
"""Share of a list that the default policy measures before its risk is accepted (recorded replays)."""
_LEAST_MEASURED = 8.0
"""Fewest candidates that the default policy measures, however short the list."""


def expected_measurements(candidates: int) -> float:
    """How many of so many candidates the default policy measures, as recorded replays say."""
    return min(float(candidates), max(_LEAST_MEASURED, _MEASURED_SHARE * sparse_count(candidates)))


def _expected_measuring_s(situation: GateInputs) -> float:
    """Wall seconds of measuring what the default policy would: compiled in parallel, timed one by one."""
    count = expected_measurements(situation.candidates)
    return count / max(1, situation.workers) * situation.compile_s + TIMING_S * count


def decide_asking(situation: GateInputs) -> GateDecision:
    """Whether to ask; see the module."""
    s = situation
    cost = s.load_s + s.latency_s
    if s.saved <= 0.0:
        return GateDecision(False, 0.0, cost, "its answers have not been worth anything on recorded problems")
    if s.once:
        late = f"it would take about {cost:.1f} s, longer than the limit of {s.timeout_s:g} s"
        in_time = cost <= s.timeout_s
        reason = "nothing is measured, so its answer decides" if in_time else late
        return GateDecision(in_time, s.timeout_s, cost, reason)
    if s.candidates < MIN_CANDIDATES:
        return GateDecision(
            False, 0.0, cost, f"{s.candidates} candidates are measured sooner than asked about"
        )
    value = s.saved * _expected_measuring_s(s)
    reason = f"{s.candidates} candidates: an answer saves about {value:.2f} s and takes {s.latency_s:.2f} s"
    # Loading is paid once by a process and goes on beside the compilations: it only delays the answer.
    return GateDecision(value > s.latency_s + OVERHEAD_S, value, cost, reason)
