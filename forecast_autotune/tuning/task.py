"""What a decision is asked (`TuningTask`), what it remembers with (`TuningStore`), and which forecasts it accepts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, is_dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from forecast_autotune.errors import RecordError
from forecast_autotune.policy import Policy
from forecast_autotune.records import Candidate, Decision, Measurement, Problem, RiskVerdict, digest
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.protocol import Array, Forecasts, Relative

if TYPE_CHECKING:
    from forecast_autotune.llm.advice.record import Advice
    from forecast_autotune.store.misses import Miss
    from forecast_autotune.variants.judgement import SourceJudgement


class TuningStore(Protocol):
    """The part of a store that the tuner uses."""

    def measurements(self, problem: Problem) -> list[Measurement]:
        """Everything measured of a problem."""
        ...

    def relatives(self, problem: Problem, limit: int = 8) -> list[Relative]:
        """The same kernel's other problems, most similar first."""
        ...

    def add(self, problem: Problem, measurement: Measurement) -> None:
        """Commit one measurement; on return a kill cannot lose it."""
        ...

    def add_all(self, problem: Problem, measurements: Sequence[Measurement]) -> None:
        """Commit what belongs together: a kill leaves all of it or none."""
        ...

    def decision(self, problem: Problem) -> Decision | None:
        """The stored decision, if any."""
        ...

    def put_decision(self, problem: Problem, decision: Decision) -> None:
        """Replace the stored decision."""
        ...

    def verdicts(self, problem: Problem) -> list[RiskVerdict]:
        """What became of the risks stated on this problem's device class."""
        ...

    def tuning_lock(self, problem: Problem, timeout_s: float) -> AbstractContextManager[bool]:
        """The right to tune a problem, among processes; yields whether it is held."""
        ...

    def recover(self, problem: Problem) -> list[Measurement]:
        """Record candidates whose launch took a process down."""
        ...

    def sync(self) -> None:
        """Make what was added survive a power cut."""
        ...


@runtime_checkable
class FactStore(Protocol):
    """A store that keeps, beside a problem, what refits read of it (`features.stored_facts`)."""

    def facts(self, problem: Problem) -> Mapping[str, Any] | None:
        """What is kept, if anything."""
        ...

    def put_facts(self, problem: Problem, facts: Mapping[str, Any]) -> None:
        """Keep this instead."""
        ...


@runtime_checkable
class AdviceStore(Protocol):
    """A store that keeps what language models wrote of kernel sources."""

    def advice(self, source_sha256: str) -> Advice | None:
        """The advice on a kernel source, if there is any."""
        ...


@runtime_checkable
class MissStore(Protocol):
    """A store that keeps what was met where nothing could be measured."""

    def add_miss(self, miss: Miss) -> None:
        """Record a miss that is not recorded yet."""
        ...


@dataclass
class TuningTask:
    """One decision to make, as whoever asks for it describes it.

    Nothing but `TaskForecaster` reads its candidates, grids, IR and sources.
    """

    problem: Problem
    candidates: Sequence[Candidate]
    grids: Mapping[Candidate, tuple[int, ...]] = field(default_factory=dict)
    trace: Callable[[Sequence[Candidate]], Mapping[str, str]] | None = None
    """Gives TTIR by assignment key for the candidates asked for; None when there is no IR."""
    fingerprint: str = ""
    """Digest of the candidates; computed when empty."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Source by variant, where it is known."""
    advice: Advice | None = None
    """What a language model wrote of the kernel's source; by default what the store has."""
    judgements: Mapping[str, SourceJudgement] = field(default_factory=dict)
    """What a language model expects of other sources, by variant."""
    hears_failures: bool = False
    """Whether somebody hears of candidates that fail, so that those refused as sure to fail are tried as well."""

    def settings_digest(self, settings: Settings, policy: Policy) -> str:
        """Names everything a stored decision depends on besides the problem."""
        mark = self.fingerprint or fingerprint(self.candidates)
        # A dataclass says all of its limits; of anything else only the name is sure to be stable.
        how = repr(policy) if is_dataclass(policy) else policy.name
        return digest(mark, how, settings.tolerance, settings.risk, repr(settings.budget))


def with_stored_advice(task: TuningTask, store: TuningStore) -> TuningTask:
    """The task with the store's advice on its kernel, if it has none of its own."""
    source = task.problem.kernel.source_sha256
    if task.advice is not None or not source or not isinstance(store, AdviceStore):
        return task
    return replace(task, advice=store.advice(source))


def fingerprint(candidates: Sequence[Candidate]) -> str:
    """One digest for a list of candidates, whatever their order."""
    # One text each, without the detour over JSON: a large list is named on every first call.
    return digest(*sorted(map(_name, candidates)))


def _name(c: Candidate) -> str:
    k = c.config
    return repr((c.variant, k.kwargs, k.num_warps, k.num_stages, k.num_ctas, k.maxnreg, k.ir_override))


def uninformative_forecasts(candidates: Sequence[Candidate], reason: str) -> Forecasts:
    """Forecasts that say nothing: every candidate alike, eightfold either way."""
    n = len(candidates)
    return Forecasts(candidates, np.zeros(n), np.full(n, 3.0), np.full(n, 0.05), None, reason)


def validate_forecasts(forecasts: Forecasts, candidates: Sequence[Candidate]) -> Forecasts:
    """The forecasts, if a decision can be built on them. Raises `RecordError` naming what is wrong.

    A plug-in that answers NaN, for other candidates or in other shapes must be found out here: every
    comparison further on would go wrong in silence. Joint samples that fail later, or are not finite,
    are replaced by independent ones, with a warning.
    """
    n = len(candidates)
    if list(forecasts.candidates) != list(candidates):
        raise RecordError(f"it must answer the {n} candidates of the query, in their order")
    mean, sd, p_fail = (np.asarray(a, float) for a in (forecasts.mean, forecasts.sd, forecasts.p_fail))
    for name, values in (("mean", mean), ("sd", sd), ("p_fail", p_fail)):
        if values.shape != (n,):
            raise RecordError(f"{name} must have shape ({n},), not {values.shape}")
        if not np.isfinite(values).all():
            raise RecordError(
                f"{name} must be finite, but {int((~np.isfinite(values)).sum())} values are not"
            )
    if (sd < 0).any() or (p_fail < 0).any() or (p_fail > 1).any():
        raise RecordError("sd must be at least 0 and p_fail a probability")
    return replace(
        forecasts, mean=mean, sd=sd, p_fail=p_fail, sampler=_guarded_sampler(forecasts.sampler, mean, sd)
    )


_Sampler = Callable[[npt.NDArray[np.intp], int, np.random.Generator], Array]


def _guarded_sampler(sampler: _Sampler | None, mean: Array, sd: Array) -> _Sampler | None:
    if sampler is None:
        return None

    def draw(rows: npt.NDArray[np.intp], count: int, generator: np.random.Generator) -> Array:
        try:
            drawn = np.asarray(sampler(rows, count, generator), float)
            if drawn.shape == (count, len(rows)) and np.isfinite(drawn).all():
                return drawn
            said = f"shape {drawn.shape}, {int((~np.isfinite(drawn)).sum())} values not finite"
        except Exception as error:
            said = repr(error)
        warnings.warn(f"joint samples failed ({said}): drawing independently", stacklevel=2)
        return np.asarray(mean[rows] + sd[rows] * generator.standard_normal((count, len(rows))))

    return draw


def utc_now() -> str:
    """UTC time to the second, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
