"""Whether another batch is worth it. See `decide` for the rules."""

from __future__ import annotations

from dataclasses import replace

from forecast_harness.search.history.batch_view import BatchView, batch_view
from forecast_harness.search.history.state import SearchState
from forecast_harness.search.planning.acquisition import expected_improvement
from forecast_harness.search.planning.bandit import PRIOR_GAIN
from forecast_harness.search.planning.batch_requests import proposal_requests

MIN_EXPECTED_GAIN = 0.001
"""Expected total gain (log2: 0.07 %) below which what is left of a budget is not spent."""
_MAX_PROBLEM_CHARS = 500


def oldest_open_batch(state: SearchState) -> int:
    """The first batch after the seeds that has not ended."""
    number: int = state.memo.get("oldest", 1)
    while (batch := state.batches.get(number)) is not None and batch.ended:
        number += 1
    state.memo["oldest"] = number
    return number


def reason_to_stop(state: SearchState, number: int) -> str | None:
    """Why batch `number` is not to be; empty if it is; None if that is still open. Fixed once it is known."""
    name = ("ending", number)
    if name not in state.memo:
        found = _find_reason_to_stop(state, number)
        if found is None:
            return None
        state.memo[name] = found
    known: str = state.memo[name]
    return known


def proposers_problem(state: SearchState) -> str:
    """Why no proposer ever gave a source; empty where one did, or had nothing more to give, or none was asked."""
    answers = state.answers.values()
    if any(a.nodes or a.exhausted or not a.problem for a in answers):
        return ""
    return "; ".join(sorted({a.problem for a in answers}))[:_MAX_PROBLEM_CHARS]


def _find_reason_to_stop(state: SearchState, number: int) -> str | None:
    settings = state.settings
    limit, (chosen, open_) = settings.budget.measurements, _committed_measurements(state, number)
    if limit is not None and chosen >= limit:
        return f"measurements {chosen} of {limit} spent"
    if limit is not None and open_ and chosen + open_ >= limit:
        return None
    seen = batch_view(state, number)
    if spent := replace(settings.budget, measurements=None, wall_seconds=None).exhausted(seen.spent):
        return spent
    seconds, each = settings.budget.device_seconds, _mean_device_seconds(seen)
    if seconds is not None and seen.spent.device_seconds + each > seconds:
        return (
            f"device seconds {seen.spent.device_seconds:g} of {seconds:g} spent, a measurement takes {each:g}"
        )
    if seen.stalled_batches >= settings.patience:
        return f"no better node in {seen.stalled_batches} batches"
    if seen.empty_batches >= settings.patience:
        if problem := proposers_problem(state):
            return f"no proposer gave a source in {seen.empty_batches} batches: {problem}"
        return f"no new node in {seen.empty_batches} batches"
    before = range(number - settings.depth, number)
    if before[0] >= 1 and not any(proposal_requests(state, b) for b in before):
        if any(state.batch(b).chosen is None for b in before):
            return None
        if not any(state.batch(b).nodes or _chosen_count(state, b) for b in before):
            return "the proposers have nothing more"
    return _gain_too_small(state, seen)


def _chosen_count(state: SearchState, number: int) -> int:
    chosen = state.batch(number).chosen
    return len(chosen.nodes) if chosen is not None else 0


def _committed_measurements(state: SearchState, number: int) -> tuple[int, int]:
    """Measurements that the batches before chose, and the most that those still to choose may."""
    done: tuple[int, int] = state.memo.get("committed", (0, 0))
    start, chosen = done
    while start < number and state.batch(start).chosen is not None:
        chosen += _chosen_count(state, start)
        start += 1
        state.memo["committed"] = (start, chosen)
    if start > number:  # more is known by now than this batch asks for
        return sum(_chosen_count(state, b) for b in range(number)), 0
    return chosen, sum(batch_limit(state, b) for b in range(start, number))


def batch_limit(state: SearchState, number: int) -> int:
    """The most that a batch measures, whatever is left."""
    return state.settings.k * max(1, len({r.parents[0].id for r in proposal_requests(state, number)}))


def remaining_measurements(state: SearchState, seen: BatchView) -> int:
    """Measurements left to this view's knowledge; without a limit, those until patience ends."""
    s = state.settings
    if s.budget.measurements is None:
        return s.k * s.parents * s.patience
    return max(1, s.budget.measurements - seen.spent.measurements)


def _gain_too_small(state: SearchState, seen: BatchView) -> str:
    """The value of information, see `decide`. Empty where it is worth going on, or nobody can say."""
    s = state.settings
    last = seen.batch - s.depth
    forecasted = state.batch(last).forecasted if last >= 1 else None
    unasked = any(state.batch(b).nodes for b in range(max(1, last + 1), seen.batch))
    if forecasted is None or not forecasted.beliefs or unasked:
        return ""
    beliefs = [b for n, b in forecasted.beliefs.items() if n not in seen.judged]
    if any(b.abstains for b in beliefs):
        return ""
    gains, count = 0.0, 0
    for number in range(max(1, last - s.patience + 1), last + 1):
        for node in sorted(state.batch(number).finished):
            gains, count = gains + max(0.0, -(seen.judged[node].log2_ratio or 0.0)), count + 1
    news = 0.0 if _proposers_exhausted(seen) else (gains + PRIOR_GAIN) / (count + 1)
    best, left = max([news, *map(expected_improvement, beliefs)]), remaining_measurements(state, seen)
    if best * left >= MIN_EXPECTED_GAIN:
        return ""
    return f"{left} measurements left are expected to gain {2 ** (best * left) - 1:.2%} in all"


def _proposers_exhausted(seen: BatchView) -> bool:
    """Whether the proposers have nothing more for any node that ran."""
    return all(n in seen.exhausted_parents for n in seen.scores)


def affordable_measurements(state: SearchState, number: int) -> int:
    """Measurements that the budget has left for a batch; by their mean cost where seconds are limited."""
    budget, seen = state.settings.budget, batch_view(state, number)
    chosen = _committed_measurements(state, number)[0]
    found = state.settings.k * state.settings.parents
    if budget.measurements is not None:
        found = min(found, budget.measurements - chosen)
    if budget.device_seconds is not None and (each := _mean_device_seconds(seen)) > 0.0:
        under_way = (chosen - seen.spent.measurements) * each
        left = budget.device_seconds - seen.spent.device_seconds - under_way
        found = min(found, int(left / each))
    return max(0, found)


def _mean_device_seconds(seen: BatchView) -> float:
    """Mean device seconds of a measurement so far."""
    return seen.spent.device_seconds / max(1, seen.spent.measurements)
