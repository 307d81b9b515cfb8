"""The session that serves torch.compile: settings, surrogate, policy, and the frozen view."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from forecast_autotune.numerics import single_threaded_blas
from forecast_autotune.policy import Policy
from forecast_autotune.records import Decision, Measurement, Plan, Problem, digest
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.protocol import Forecasts, Query, Relative, Surrogate
from forecast_autotune.telemetry.spans import configure, span
from forecast_autotune.tuning.loop import validate_forecasts
from forecast_autotune.version import __version__
from forecast_integrations.inductor.choices.surrogate import default
from forecast_integrations.inductor.policy import default_policy
from forecast_integrations.inductor.summary import TorchCompileSummary

_CLOCK = "short calls as graphs"
"""Name of the clock of choices, which is one of the rules in `identity`."""
FORECAST_LIMIT_S = 10.0
"""Seconds for the forecasts of one operation; they take milliseconds, the first call also its imports."""
_MOST_PLANS = 256
"""Plans that are kept."""
MAX_ROUNDS = 8
"""Plans per operation at most. The policy's cap on measurements ends it sooner."""
_ANSWERS_KEPT = 256
"""Answers of a surrogate that are kept: a model's layers repeat their questions."""
_MAX_RELATIVES = 8
_RELATIVES_READ = 64
"""Related problems read before those that are too new are left out."""


class StoreSnapshot:
    """A store as it was at `until` (UTC, ISO 8601 to the second), plus the rows that this process has added.

    Processes with the same store and the same `until` see the same rows, whatever the others measure meanwhile.
    Only rows before `until` count for related problems, even those of this process: with
    `distributed_max_autotune_gemm`, every rank measures other problems.
    """

    def __init__(self, store: Store, until: str) -> None:
        self.store = store
        self.until = until
        self._mutex = threading.RLock()
        self._rows: dict[str, list[Measurement]] = {}
        self._decisions: dict[str, Decision | None] = {}
        self._relatives: dict[str, list[Relative]] = {}

    def rows(self, problem: Problem) -> list[Measurement]:
        """Measurements of this problem, oldest first."""
        with self._mutex:
            if problem.id not in self._rows:
                rows = self.store.measurements(problem)
                self._rows[problem.id] = [m for m in rows if m.at <= self.until]
            return list(self._rows[problem.id])

    def relatives(self, problem: Problem) -> list[Relative]:
        """Measured problems of the same operation, most similar first."""
        with self._mutex:
            if problem.id not in self._relatives:
                relatives = []
                for relative in self.store.relatives(problem, limit=_RELATIVES_READ):
                    rows = tuple(m for m in relative.measurements if m.at <= self.until)
                    if any(m.ok for m in rows):
                        relatives.append(replace(relative, measurements=rows))
                self._relatives[problem.id] = relatives[:_MAX_RELATIVES]
            return list(self._relatives[problem.id])

    def decision(self, problem: Problem) -> Decision | None:
        """The decision on this problem."""
        with self._mutex:
            if problem.id not in self._decisions:
                decision = self.store.decision(problem)
                is_old = decision is not None and decision.at <= self.until
                self._decisions[problem.id] = decision if is_old else None
            return self._decisions[problem.id]

    def add(self, problem: Problem, measurement: Measurement) -> None:
        """Commit a measurement of this process."""
        with self._mutex:
            self.rows(problem)
            self._rows[problem.id].append(measurement)
        self.store.add(problem, measurement)

    def decide(self, problem: Problem, decision: Decision) -> None:
        """Commit a decision of this process."""
        with self._mutex:
            self._decisions[problem.id] = decision
        self.store.put_decision(problem, decision)
        self.store.sync()


UNTIMED = (Mode.SKIP, Mode.FROZEN, Mode.DETERMINISTIC)
"""Modes without a clock."""
Entry = TypeVar("Entry")


class WarnOnce:
    """Warns once of a failure of ours: a compilation has too many places to repeat it."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        """All failures, for tests and `doctor`."""

    def __call__(self, task: str, error: object, rest: str = "all of its own choices") -> None:
        """Note a failure; the first one is issued as a warning."""
        self.messages.append(f"{task}: {error!r}")
        if len(self.messages) > 1:
            return
        text = (
            f"forecast_autotune failed to {task} ({error!r}): Inductor goes on with {rest}. Later failures are not "
            "reported"
        )
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        except RuntimeWarning:
            # Where warnings are errors (`-W error`), this one would end the compilation.
            print(text, file=sys.stderr)


class SafeSurrogate:
    """A surrogate that returns None where it would raise, hang or return invalid forecasts.

    A surrogate that exceeded its limit is not asked again: every further operation would wait as long.
    """

    def __init__(self, surrogate: Surrogate, limit_s: float, warn_once: WarnOnce) -> None:
        self.surrogate = surrogate
        self.limit_s = limit_s
        self._warn_once = warn_once
        self._is_hung = False
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
        # A draft's answer may lack slow parts, and must not serve as the final answer.
        draft = query.provisional and not getattr(self.surrogate, "answers_drafts_alike", False)
        key = (query.problem.id, tuple(query.candidates), measured, relatives, draft)
        with self._mutex:
            if key in self._answers:
                return self._answers[key]
        forecasts = self._ask(query)
        with self._mutex:
            if len(self._answers) >= _ANSWERS_KEPT:
                self._answers.clear()
            self._answers[key] = forecasts
        return forecasts

    def _ask(self, query: Query) -> Forecasts | None:
        if self._is_hung:
            return None
        answers: list[Forecasts] = []
        errors: list[Exception] = []

        def work() -> None:
            try:
                with single_threaded_blas():
                    answers.append(validate_forecasts(self.surrogate.forecast(query), query.candidates))
            except Exception as error:
                errors.append(error)

        # A daemon: a thread cannot be stopped, and must not keep the process from ending.
        worker = threading.Thread(target=work, name="forecast", daemon=True)
        worker.start()
        worker.join(self.limit_s)
        if answers:
            return answers[0]
        if not errors:
            self._is_hung = True
        why = errors[0] if errors else TimeoutError(f"no answer within {self.limit_s:g} s")
        self._warn_once(f"forecast with {self.label}", why)
        return None


@dataclass
class TuningSession:
    """State of one `enable_torch_compile`; every hook has it, and gives up when it is no longer current."""

    settings: Settings
    snapshot: StoreSnapshot
    safe_surrogate: SafeSurrogate
    warn_once: WarnOnce
    policy: Policy = field(default_factory=default_policy)
    rounds: int = MAX_ROUNDS
    tally: TorchCompileSummary = field(default_factory=TorchCompileSummary)
    not_recordable: set[str] = field(default_factory=set)
    """Choices, with their operation, whose calls cannot be recorded as graphs: that is tried once."""
    externs_ahead: dict[str, tuple[Measurement, ...]] = field(default_factory=dict)
    """Times of the library's kernels before anything was chosen, by problem id."""
    _first_plans: dict[int, tuple[Forecasts, Plan]] = field(default_factory=dict)
    """First plans by the `id` of their forecasts, which are kept alive with them."""

    def __post_init__(self) -> None:
        if self.settings.mode is Mode.BACKGROUND:
            # A compilation has no later launches to time beside: it waits for its choices, as it always does.
            self.settings = self.settings.with_(mode=Mode.TUNE)

    @classmethod
    def of(
        cls,
        settings: Settings,
        surrogate: Surrogate | None,
        store: Store,
        until: str,
        *,
        policy: Policy | None = None,
        rounds: int = MAX_ROUNDS,
        limit_s: float = FORECAST_LIMIT_S,
    ) -> TuningSession:
        """Return a session from the arguments of `enable_torch_compile`."""
        configure(settings.telemetry)
        warn_once = WarnOnce()
        safe_surrogate = SafeSurrogate(surrogate or default(), limit_s, warn_once)
        return cls(
            settings,
            StoreSnapshot(store, until),
            safe_surrogate,
            warn_once,
            policy or default_policy(),
            max(1, rounds),
        )

    @property
    def exhaustive_space(self) -> bool:
        """Enumerate Inductor's EXHAUSTIVE configs for GEMMs; the plan decides what is compiled."""
        return self.prunes and self.settings.inductor_space == "exhaustive"

    def ask(self, query: Query) -> Forecasts | None:
        """Forecasts, or None when the surrogate fails."""
        with span("forecast", kernel=query.problem.kernel.name, candidates=len(query.candidates)):
            return self.safe_surrogate(query)

    def first_plan(self, forecasts: Forecasts) -> Plan | None:
        """The plan that was kept for these forecasts."""
        entry = self._first_plans.get(id(forecasts))
        return None if entry is None else entry[1]

    def keep_first_plan(self, forecasts: Forecasts, plan: Plan) -> None:
        """Keep the plan that these forecasts led to; a graph has its operations once for each of its layers."""
        if len(self._first_plans) >= _MOST_PLANS:
            self._first_plans.clear()
        self._first_plans[id(forecasts)] = (forecasts, plan)

    def add_rows(self, problem: Problem, rows: Sequence[Measurement]) -> None:
        """Put measurements into the store."""
        for m in rows:
            self.snapshot.add(problem, m)
        if rows:
            self.snapshot.store.sync()
            self.tally.count(timings=len(rows))

    @property
    def prunes(self) -> bool:
        """Whether the session removes choices."""
        return self.settings.mode not in (Mode.LISTEN, Mode.EXHAUSTIVE)

    def after_failure(
        self, what: str, error: object, listed: Sequence[Entry], mode: Mode | None = None
    ) -> list[Entry]:
        """Return the choices or configs to go on with after a failure of ours: all, or in a mode without a clock the
        first. `mode`: the session's, if None.
        """
        if (mode or self.settings.mode) in UNTIMED:
            self.warn_once(what, error, "the first of its own choices, as nothing is timed in this mode")
            return list(listed[:1])
        self.warn_once(what, error)
        return list(listed)

    def identity(self) -> str:
        """Return a digest of the rules that choose code; part of the cache keys of compiled graphs.

        The store has no part in it: a graph compiled with fewer rows is still right, and was made by the same rules.
        While listening, code and name are as without us.
        """
        if self.settings.mode is Mode.LISTEN:
            return ""
        s = self.settings
        rules = (str(s.mode), s.tolerance, s.risk, repr(s.budget), s.seed, repr(self.policy), self.rounds)
        label = self.safe_surrogate.label
        return f"forecast_autotune:{digest(__version__, label, rules, self.exhaustive_space, _CLOCK)}"

    def prints_lines(self) -> bool:
        """Whether a line per operation is printed: where Inductor prints its own, or when asked to."""
        if self.settings.summary:
            return True
        from torch._inductor import config, select_algorithm

        shows_choices = getattr(config, "autotune_num_choices_displayed", None) != 0
        return bool(getattr(select_algorithm, "PRINT_AUTOTUNE", True) and shows_choices)


def open_store(store: Store | Path | str | None, settings: Settings) -> Store:
    """The store that was given, at a path, or the user's own."""
    if isinstance(store, Store):
        return store
    return Store.default(Path(store).expanduser() if store is not None else settings.cache_dir)
