"""Every time that Inductor takes goes into the store; times from its own cache do not."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from forecast_autotune.printable import utc_now
from forecast_autotune.records import Measurement, Outcome, Problem
from forecast_integrations.inductor.choice_timing import INDUCTOR_CLOCK, clock_of
from forecast_integrations.inductor.choices.records import candidate_of, problem_of
from forecast_integrations.inductor.pruning import SelectionCall, search_of
from forecast_integrations.inductor.session import TuningSession

if TYPE_CHECKING:
    from torch._inductor.ir import ChoiceCaller

PROTOCOL = INDUCTOR_CLOCK
"""Timing protocol of Inductor's own benchmarker."""
_ERROR_ATTRIBUTE = "forecast_autotune_error"
"""Attribute of a choice that failed: why."""
_MAX_MESSAGE_CHARS = 2000
"""Characters kept of a failure's message."""


PendingTimings: TypeAlias = "dict[ChoiceCaller, float]"
"""Milliseconds (inf for a failure) by choice that Inductor's benchmark gave in one round and no saver has taken yet."""


def note_error(choice: ChoiceCaller, error: BaseException) -> None:
    """Keep with a choice why it failed: type and text of the exception, which itself would keep tensors alive."""
    setattr(choice, _ERROR_ATTRIBUTE, f"{type(error).__name__}: {error}")


_NOT_ITS_FAULT = re.compile(
    r"timeout|timed.out|time.limit|\bkilled\b|signal terminated|sig(kill|term|int|xcpu|xfsz)|signal (2|9|15|24|25)\b"
    r"|(code|status)\W+-(2|9|15|24|25)\b"
    r"|error: terminated|bus error|read.only file|input/output error|stale file|allocation fail"
    r"|memoryerror|bad_alloc|out.?of.?memory|allocate memory|memory exhausted|no space|quota|enospc|enomem|\[errno"
    r"|too many open files|temporarily unavailable|process ?pool|broken ?pipe|connection|eoferror|interrupt",
    re.IGNORECASE,
)
"""A compiler or a clock that was stopped, or lacked memory, space or time, says nothing of a candidate."""


def failure_outcome(message: str) -> Outcome:
    """The outcome of a choice that failed, by its exception's type and text; a failure without one is no label."""
    if any(word in message for word in ("OutOfResources", "out of resource")):
        return Outcome.OUT_OF_RESOURCES
    if not message or _NOT_ITS_FAULT.search(message):
        return Outcome.INFRASTRUCTURE
    if any(word in message for word in ("CompilationError", "CompileError", "PTXASError", "InductorError")):
        return Outcome.COMPILE_ERROR
    return Outcome.RUNTIME_ERROR


def make_measurement(
    problem: Problem,
    choice: ChoiceCaller,
    ms: float,
    compile_s: float | None = None,
    outcome: Outcome | None = None,
) -> Measurement:
    """One timing in milliseconds, or one failure (an infinite time), as a record.

    A failure's `outcome` follows from what `note_error` kept with the choice unless it is given.
    """
    extra: dict[str, Any] = {"choice": str(getattr(choice, "name", ""))}
    clock = clock_of(choice, ms)
    if clock is not None and clock.host_bound:
        extra["host_bound"] = True
    protocol = PROTOCOL if clock is None else clock.protocol
    common: dict[str, Any] = {"protocol": protocol, "at": utc_now(), "extra": extra}
    candidate = candidate_of(choice)
    # A clock that says zero has not measured anything.
    if math.isfinite(ms) and ms > 0:
        seconds = compile_s if compile_s is not None and 0 <= compile_s < math.inf else None
        return Measurement(problem.id, candidate, Outcome.OK, ms, compile_s=seconds, **common)
    if message := str(getattr(choice, _ERROR_ATTRIBUTE, "")):
        extra["message"] = message[:_MAX_MESSAGE_CHARS]
    if math.isfinite(ms):
        outcome = Outcome.INFRASTRUCTURE
    return Measurement(problem.id, candidate, outcome or failure_outcome(message), **common)


def save_timings(
    session: TuningSession,
    pending: PendingTimings,
    timings: Mapping[ChoiceCaller, float],
    operation: SelectionCall,
    compile_s: Mapping[ChoiceCaller, float],
    *,
    all_measured: bool = False,
) -> None:
    """File the measured ones of these times, which are the `pending` ones, and tell the search all of them.

    A time that somebody has altered since the clock gave it is obeyed like any other, and not filed.
    """
    choices = list(timings)
    search = search_of(choices)
    if search is not None:
        problem = search.problem
    else:
        problem = problem_of(operation.name, operation.input_nodes, operation.layout)
    fresh: list[Measurement] = []
    replays: list[Measurement] = []
    for choice, ms in timings.items():
        is_measured = all_measured or _is_unchanged(pending.get(choice), ms)
        if search is not None and choice in pending and not is_measured:
            search.altered = True
        is_measured = is_measured and not (search is not None and search.disturbed)
        m = make_measurement(problem, choice, ms, compile_s.get(choice))
        (fresh if is_measured else replays).append(m)
        pending.pop(choice, None)
    if search is not None:
        search.compile_s += sum(compile_s.get(choice, 0.0) for choice in choices)
        search.compiled.update(m.candidate for m in fresh)
        search.add_measurements(fresh)
        search.add_measurements(replays, replayed=True)
    session.add_rows(problem, fresh)


def _is_unchanged(clock_ms: float | None, ms: float) -> bool:
    """Whether what Inductor was told is what the clock gave."""
    return clock_ms is not None and (clock_ms == ms or (math.isnan(clock_ms) and math.isnan(ms)))


def save_failures(session: TuningSession, pending: PendingTimings, choices: Sequence[ChoiceCaller]) -> None:
    """File what failed in a round that Inductor reports no times of.

    It leaves choices that do not compile out of its timings, and reports none at all when nothing ran.
    """
    search = search_of(choices)
    if search is None:
        return
    rows = []
    for choice in choices:
        if getattr(choice, "failed", False):
            guess = failure_outcome(str(getattr(choice, _ERROR_ATTRIBUTE, "")))
            outcome = Outcome.COMPILE_ERROR if guess is Outcome.RUNTIME_ERROR else guess
            rows.append(make_measurement(search.problem, choice, math.inf, None, outcome))
        elif math.isinf(pending.pop(choice, 0.0)):
            rows.append(make_measurement(search.problem, choice, math.inf))
    rows = [m for m in rows if m.candidate not in search.tried]
    search.add_measurements(rows)
    session.add_rows(search.problem, rows)
