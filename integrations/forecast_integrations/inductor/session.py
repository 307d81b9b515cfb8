"""What is in force while torch.compile is served: settings, surrogate, policy, and the frozen view."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.numerics import fast_median
from forecast_autotune.policy import Policy, RiskBounded, TuningState
from forecast_autotune.records import Measurement, Plan, Problem, digest
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.protocol import Array, Forecasts, Query, Surrogate
from forecast_autotune.telemetry.spans import configure, span
from forecast_autotune.version import __version__
from forecast_integrations.inductor import language_model
from forecast_integrations.inductor.choices.graph_position import GraphPosition
from forecast_integrations.inductor.inductor_seconds import compile_workers
from forecast_integrations.inductor.safe_surrogate import SafeSurrogate, WarnOnce
from forecast_integrations.inductor.snapshot import StoreSnapshot
from forecast_integrations.inductor.summary import TorchCompileSummary

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_CLOCK = "short calls as graphs"
"""How choices are timed: a rule, too."""
FORECAST_LIMIT_S = 10.0
"""Seconds for the forecasts of one operation; they take milliseconds, the first call also its imports."""
_MOST_PLANS = 256
"""That are kept."""
MAX_ROUNDS = 8
"""Plans per operation at most. The policy's cap on measurements ends it sooner."""
FIRST_SHARE, MAX_SHARE = 0.085, 0.12
"""Shares of an operation's choices in its first round, and at most. Inductor compiles those of a round side
by side, in one or two seconds for as many as there are cores, and times one in 0.02 s (torch 2.11, H200): it
is rounds that cost. So there are few and wide ones."""
SHORT_LIST_FIRST, SHORT_LIST_SHARE = 8, 0.35
"""Of short lists, so many choices go into the first round, but no more than that share. Inductor compiles
them while it lowers the rest of the graph; a second round has to be waited for, 0.3 to 1.3 s each: 11 of the
13 s that a ConvNet of 30 operations took to tune (H200). Where all choices of a list are no more than that, and no more
than there are workers, there is one round."""


LIKELY_BEST_RISK = 0.5
"""Where the library's kernel is known, and no choice is said to be as likely as this to be faster by more than the
tolerance, no choice is compiled, or the policy's least number where one could also compute what follows. In all of 29
operations of whole models where that was so, no choice was faster by more."""
LIBRARY_BEST_RISK = 1 / 31
"""What is stated then on a device that forecasts have measurements of: after none of 29, by the rule of succession."""
FUSION_SHARE = 0.25
"""Of the time of the library's kernel, which a pass over its result takes by its bytes: from there on a choice that is
slower alone may be faster with what follows. The best of those choices take 1.11 times as long as the library in the
median and 1.25 in one of six, and a part of such a pass is in the cache."""
SMALL_RISK = 0.05
"""Whoever accepts less has small operations measured like others."""
ROUND_GAIN = 0.03
"""The least product of an operation's share of its graph and of the risk of stopping that is worth to wait for
another round: what is faster is so by some 7 %, so that 0.2 % of the graph's time is expected of it."""


LONG_COMPILATION = 3.0
"""Times as long as half of a round's choices are expected to compile: then a choice is left for later. A round ends
with its last compilation, and what takes so long while others wait is given up anyway (`hooks.precompilation`)."""


MIN_BATCH, LONG_LIST, MAX_BATCH = 4, 100, 16
"""Candidates of a further round; among more than so many, one for each compile worker, up to the last number.
Inductor compiles them in parallel and then times them, so that what the policy would only compile ahead costs
no more than its timing."""


@dataclass(frozen=True)
class FewRoundsPolicy(RiskBounded):
    """Few choices, most of them in one round; those that compile long have to promise more."""

    first: float = FIRST_SHARE
    share: float = MAX_SHARE
    likely: float = LIKELY_BEST_RISK
    longest: float = LONG_COMPILATION
    fusion: float = FUSION_SHARE
    gain: float = ROUND_GAIN

    def plan(self, state: TuningState) -> Plan:
        """As otherwise, without the choices that would hold up a round; one of the best promise is kept."""
        found = super().plan(state)
        if state.compile_s is None:
            return found
        row = CandidateList.of(state.forecasts.candidates).row_of
        seconds = {c: float(state.compile_s[row[c]]) for c in (*found.measure, *found.prefetch)}
        most = self.longest * statistics.median(seconds.values()) if seconds else 0.0
        quick = {c for c, s in seconds.items() if s <= most}
        kept = tuple(c for c in found.measure if c in quick or c == found.measure[0])
        return replace(found, measure=kept, prefetch=tuple(c for c in found.prefetch if c in quick))

    def trusts_library(
        self, first: Plan, stated: float, risk: float, library_ms: float, position: GraphPosition
    ) -> bool:
        """Whether the library's kernel is taken and no choice compiled: `first` is the plan that knows its time.

        `stated` is the risk that would be stated, `risk` what is accepted.
        """
        return first.risk < self.likely and stated <= risk and not self.may_fuse(library_ms, position)

    def may_fuse(self, library_ms: float, position: GraphPosition) -> bool:
        """Whether a choice that is slower alone may be faster with what is fused to it."""
        return position.fusion_ms >= self.fusion * library_ms

    def is_small(self, risk: float, library_ms: float, position: GraphPosition) -> bool:
        """Whether an operation is not worth a compilation: its graph hardly takes longer for it."""
        return risk >= SMALL_RISK and position.is_small(library_ms)

    def is_worth_waiting(self, stated: float, risk: float, best_ms: float, position: GraphPosition) -> bool:
        """Whether a further round is: what it may gain of the graph's time, where `stated` is the risk without it."""
        share = position.share(best_ms)
        return risk < SMALL_RISK or share >= 1.0 or share * stated >= self.gain

    def of(self, share: float, candidates: int) -> int:
        """As otherwise, but for short lists."""
        few = min(SHORT_LIST_FIRST, math.ceil(SHORT_LIST_SHARE * candidates))
        return max(few, super().of(share, candidates))

    def batch(self, state: TuningState, seen: int, risk: float) -> int:
        """As otherwise, but for a first round that a known time makes small, and for lists that fit one wave."""
        if state.new:
            return super().batch(state, seen, risk)
        if seen and risk < self.likely:
            return self.least
        total = len(state.forecasts)
        return total if total <= min(SHORT_LIST_FIRST, compile_workers()) else super().batch(state, 0, risk)

    def weights(self, state: TuningState, rows: npt.NDArray[np.intp]) -> Array:
        """As otherwise, by the seconds that each is expected to compile."""
        usual = super().weights(state, rows)
        if state.compile_s is None:
            return usual
        seconds = state.compile_s[rows]
        return usual * fast_median(seconds, axis=0) / seconds


def batch_size(count: int) -> int:
    """Candidates of a further round, of so many."""
    return MIN_BATCH if count <= LONG_LIST else max(MIN_BATCH, min(MAX_BATCH, compile_workers()))


def default_policy() -> FewRoundsPolicy:
    """The policy for Inductor's own choices."""
    return FewRoundsPolicy()


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
    """Choices, by operation, whose calls cannot be recorded as graphs: that is tried once."""
    externs_ahead: dict[str, tuple[Measurement, ...]] = field(default_factory=dict)
    """Times of the library's kernels that were taken before anything was chosen, by problem id."""
    _first_plans: dict[int, tuple[Forecasts, Plan]] = field(default_factory=dict)
    """Plans of operations of which nothing was measured for them yet, by the identity of their forecasts, which are
    kept for it."""
    uses_language_model: bool = False
    """Whether the settings' language model is heard, where they name one."""

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
        """Put together what `enable_torch_compile` was given; without a surrogate, the settings say which."""
        configure(settings.telemetry)
        warn_once = WarnOnce()
        own = surrogate is None
        surrogate = surrogate or language_model.surrogate_for_operations(settings, until, limit_s)
        safe_surrogate = SafeSurrogate(surrogate, limit_s, warn_once)
        chosen = policy or default_policy()
        return cls(
            settings,
            StoreSnapshot(store, until),
            safe_surrogate,
            warn_once,
            chosen,
            max(1, rounds),
            uses_language_model=own,
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
        known = self._first_plans.get(id(forecasts))
        return None if known is None else known[1]

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
            self.tally.stored(len(rows))

    @property
    def prunes(self) -> bool:
        """Whether choices are taken away at all."""
        return self.settings.mode not in (Mode.LISTEN, Mode.EXHAUSTIVE)

    def identity(self) -> str:
        """Names what decides over the compiled code; part of the cache keys of compiled graphs.

        The store is not in it: a graph that was compiled knowing less is still right, and was made by
        the same rules. While listening, code is what it is without us, and so is its name.
        """
        if self.settings.mode is Mode.LISTEN:
            return ""
        s = self.settings
        rules = (str(s.mode), s.tolerance, s.risk, repr(s.budget), s.seed, repr(self.policy), self.rounds)
        more = (self.exhaustive_space, s.inductor_dynamic, _CLOCK)
        model = language_model.model_cache_key(s) if self.uses_language_model else ""
        return f"forecast_autotune:{digest(__version__, self.safe_surrogate.label, rules, more, model)}"

    def prints_lines(self) -> bool:
        """Whether a line per operation is printed: where Inductor prints its own, or when asked to."""
        if self.settings.summary:
            return True
        from torch._inductor import config, select_algorithm

        shown = getattr(config, "autotune_num_choices_displayed", None) != 0
        return bool(getattr(select_algorithm, "PRINT_AUTOTUNE", True) and shown)


def open_store(store: Store | Path | str | None, settings: Settings) -> Store:
    """The store that was given, at a path, or the user's own."""
    if isinstance(store, Store):
        return store
    return Store.default(Path(store).expanduser() if store is not None else settings.cache_dir)
