"""The next actions of a search: `pending_actions` of its state, and nothing else. No clock, no unseeded chance.

A batch is begun when those `depth` before it have ended and the proposals of the one before are all there.
Proposing for it overlaps with measuring the one before. A search begins no more batches when

- the measurements that were chosen, or what else is known to be spent, reach the budget;
- for `patience` batches no node was better (by `MIN_PROGRESS`), or none was new;
- for `depth` batches in a row nothing could be asked or chosen;
- what is left to spend is not worth it: with R measurements left, R times the largest expected improvement
  (log2) of one measurement is below `MIN_EXPECTED_GAIN`. It is the larger one of the best EI in the pool and of what
  new proposals gave lately: (sum of gains in the last `patience` batches + `PRIOR_GAIN`) / (measurements in them + 1),
  0 where the proposers have nothing more. Nothing is concluded from forecasts that abstain or are not there.

A node that seems faster and was not verified in full (`NodeResult.may_lead`) is verified beside the batches: the
fastest that would lead, one at a time. It may be a parent meanwhile, and nothing is timed beside it. A batch knows of
the verifications that were in the log when the batches that it rests on had ended.

Then the best nodes are confirmed against the first seed, and it stops. They are verified in full there, so those that
wait for that may be among them, behind the fastest that has it. The measurement budget is exact and leaves out
confirmations; the other budgets are looked at before each batch, with what that batch may know.
Wall seconds alone depend on a clock: the runner says when they are up (`Expired`), and what is under way then
is given up.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import TypeAlias, TypeVar, cast

from forecast_autotune.errors import SettingsError
from forecast_autotune.records import Outcome, digest
from forecast_harness.records import (
    ConfirmationJob,
    FullVerification,
    Node,
    NodeJob,
    ProposalRequest,
    SearchSettings,
    VerificationJob,
)
from forecast_harness.search.acquisition import (
    PRIOR_GAIN,
    choose_by_forecast,
    choose_first,
    expected_improvement,
)
from forecast_harness.search.events import Action, Chosen, NodeForecastRequest, RecordChoice, StopSearch
from forecast_harness.search.state import MAX_RETRIES, BatchView, SearchState, batch_view

Archive: TypeAlias = Callable[[BatchView, int], list[str]]
"""Gives, for a view and `n`, up to `n` ids of nodes that ran and of which more may be made."""


def open_archive(name: str) -> Archive:
    """The archive of this name. Raises `SettingsError` listing those there are."""
    if name not in ARCHIVES:
        raise SettingsError(f"an archive must be one of {', '.join(ARCHIVES)}, not {name!r}")
    return ARCHIVES[name]


def greedy(view: BatchView, n: int) -> list[str]:
    """The `n` fastest nodes, equal ones by id."""
    nodes = [id for id in view.scores if id in view.nodes and id not in view.exhausted_parents]
    return sorted(nodes, key=lambda id: (view.scores[id], id))[:n]


def puct(view: BatchView, n: int) -> list[str]:
    """The highest `puct_scores` in turn, and never a node together with its ancestor.

    There are fewer than `n` where every other node is an ancestor or a descendant of one selected.
    """
    scores = puct_scores(view)
    order = sorted(scores, key=lambda id: (-scores[id], id))
    ancestors: set[str] = set()
    chosen: list[str] = []
    for id in order:
        if len(chosen) == n:
            break
        lineage = set(_ancestors(view.nodes, id))
        if id in view.exhausted_parents or id in ancestors or lineage & set(chosen):
            continue
        chosen.append(id)
        ancestors |= lineage
    return chosen


_CAPACITY = 1000
"""Nodes in the archive of `puct_scores`, besides the seeds."""
ARCHIVES: Mapping[str, Archive] = {"puct": puct, "greedy": greedy}


def puct_scores(view: BatchView) -> dict[str, float]:
    """PUCT over the lineage tree by the best reward of direct children, after TTT-Discover and GPU Forecasters.

        score(s) = Q(s) + scale * P(s) * sqrt(1 + T) / (1 + n(s))

    The reward of a node is its speed-up over the first seed (not its logarithm). Q is the best reward among
    direct children once s was expanded, before that its own. `scale` is the range of rewards among nodes that
    are no seeds, at least 1e-6. P(s) = (N - rank) / sum(N - rank) with rank 0 for the best of the N nodes in the
    archive: all seeds, and the best thousand of the others. n(s) counts expansions of s and of everything that
    descends from it, T all expansions.

    Where this view of a search makes it differ from the published program:

    - Counts are derived from the number of expansions per node, which includes batches under way: a node that a batch
      before has just expanded loses its bonus although its children are not known yet.
    - An expansion counts whether or not a valid child came of it; there, failed ones count as well.
    - Measured nodes enter the archive, as they do there with as many measurements as places per parent; an
      expanded node of which no child ran keeps its own reward as Q.
    - With several parents, a node descends from the first.
    - Nodes of which nothing more can be made are ranked, and never selected.
    """
    seeds = set(view.seeds)
    ids = [id for id in view.scores if id in view.nodes]
    children = sorted((id for id in ids if id not in seeds), key=lambda id: (view.scores[id], id))
    archive = [id for id in ids if id in seeds] + children[:_CAPACITY]
    rewards = {id: 2.0 ** -view.scores[id] for id in archive}
    child_rewards = [reward for id, reward in rewards.items() if id not in seeds]
    scale = max(1e-6, max(child_rewards) - min(child_rewards)) if child_rewards else 1e-6
    visits: Counter[str] = Counter()
    for id, times in view.expansions.items():
        for node in (id, *_ancestors(view.nodes, id)) if id in view.nodes else ():
            visits[node] += times
    total = sum(times for id, times in view.expansions.items() if id in view.nodes)
    best: dict[str, float] = {}
    for id, reward in rewards.items():
        parent = _parent_of(view.nodes[id])
        best[parent] = max(reward, best.get(parent, 0.0))
    count = len(rewards)
    scores = {}
    for rank, id in enumerate(sorted(rewards, key=lambda id: (-rewards[id], id))):
        value = best.get(id, rewards[id]) if visits[id] else rewards[id]
        prior = (count - rank) / (count * (count + 1) / 2)
        scores[id] = value + scale * prior * math.sqrt(1 + total) / (1 + visits[id])
    return scores


def _parent_of(node: Node) -> str:
    """Id of the node it was derived from; empty for a seed. Other parents only lent parts of their text."""
    return node.parents[0] if node.parents else ""


def _ancestors(nodes: Mapping[str, Node], id: str) -> Iterator[str]:
    """Ids from the parent up to the seed."""
    ids = {id}
    parent = _parent_of(nodes[id])
    while parent in nodes and parent not in ids:
        ids.add(parent)
        yield parent
        parent = _parent_of(nodes[parent])


# --- requests of a batch ---


def allocate(arms: Sequence[str], n: int, seed: object) -> dict[str, int]:
    """The proposals of `n` that each arm is asked for: as many each, and the rest by a draw that a replay repeats."""
    each, rest = divmod(n, max(1, len(arms)))
    more = random.Random(digest("arms", seed)).sample(arms, rest if arms else 0)
    return {arm: count for arm in arms if (count := each + (arm in more))}


T = TypeVar("T")
MAX_FAILURES = 8
"""Failed children told to a proposer, the newest."""
CROSSOVER_PARTNERS = 2
"""Other good nodes given along with a parent, for authors that join them."""


def _memoize(compute: Callable[[SearchState, int], T]) -> Callable[[SearchState, int], T]:
    """Compute a batch's fact once, and keep it in `SearchState.memo` under the function's name; None is no fact yet."""

    @wraps(compute)
    def lookup(state: SearchState, number: int) -> T:
        key = compute.__name__, number
        if key not in state.memo and (value := compute(state, number)) is not None:
            state.memo[key] = value
        return cast("T", state.memo.get(key))

    return lookup


@_memoize
def proposal_requests(state: SearchState, number: int) -> tuple[ProposalRequest, ...]:
    """The requests of a batch to its authors: fixed by its view. Empty where no parent is left."""
    requests = []
    view, s = batch_view(state, number), state.settings
    picks = open_archive(s.archive)(view, s.parents)
    parent_ids = [p for p in dict.fromkeys(picks) if p in view.scores and p not in view.exhausted_parents]
    order = sorted(view.scores, key=lambda n: view.scores[n])
    known = tuple(view.nodes)
    for parent in parent_ids[: s.parents]:
        arms = [a for a in state.context.arms if a not in view.exhausted.get(parent, ())]
        partners = [n for n in (*parent_ids, *order[: CROSSOVER_PARTNERS + 1]) if n != parent]
        failures = _failed_children(view, parent)
        parents = tuple(view.nodes[n] for n in (parent, *list(dict.fromkeys(partners))[:CROSSOVER_PARTNERS]))
        results = {n.id: view.judged[n.id] for n in (*parents, *failures) if n.id in view.judged}
        for arm, n in allocate(arms, s.samples, (s.seed, number, parent)).items():
            name = digest(s.seed, number, [p.id for p in parents], arm)
            requests.append(
                ProposalRequest(
                    id=f"{number:04d}-{name}",
                    batch=number,
                    arm=arm,
                    target=state.target,
                    parents=parents,
                    judged=results,
                    score=view.scores[parent],
                    n=n,
                    seed=int(name[:8], 16),
                    failures=failures,
                    known=known,
                )
            )
    return tuple(requests)


def _failed_children(view: BatchView, parent: str) -> tuple[Node, ...]:
    """Children that were refused or slower than their parent."""
    children = [
        view.nodes[n]
        for n in view.judged
        if view.nodes[n].parents[:1] == (parent,)
        and view.scores.get(n, view.scores[parent] + 1.0) > view.scores[parent]
    ]
    order = {n: i for i, n in enumerate(view.nodes)}
    return tuple(sorted(children, key=lambda n: order[n.id])[-MAX_FAILURES:])


def selectable_nodes(state: SearchState, number: int) -> list[str]:
    """Nodes that a batch may choose, new and deferred, in the order in which they were accepted."""
    return [n for n in state.pool if state.nodes[n].batch <= number]


@_memoize
def forecast_request(state: SearchState, number: int) -> NodeForecastRequest | None:
    """New nodes, and of those deferred before the most promising, twice as many as a batch may propose.

    None where there is nothing to ask about. Fixed from the moment at which the batch before has chosen.
    """
    nodes = selectable_nodes(state, number)
    if not nodes:
        return None
    view, s = batch_view(state, number), state.settings
    fresh = set(state.batch(number).nodes)
    # Nodes that were never forecast come first: nothing is known against them.
    old = sorted((n for n in nodes if n not in fresh), key=lambda n: -state.expected_gains.get(n, math.inf))
    top = set(old[: 2 * s.parents * s.samples])
    return NodeForecastRequest(
        batch=number,
        reference=view.nodes[view.incumbent],
        nodes=tuple(state.nodes[n] for n in nodes if n in fresh or n in top),
        judged=tuple(
            (view.nodes[n], j, view.scores.get(n, view.scores[j.against])) for n, j in view.judged.items()
        ),
        target=state.target,
    )


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


def proposers_problem(state: SearchState) -> str:
    """Why no proposer ever gave a source; empty where one did, or had nothing more to give, or none was asked."""
    answers = state.answers.values()
    if any(a.nodes or a.exhausted or not a.problem for a in answers):
        return ""
    return "; ".join(sorted({a.problem for a in answers}))[:_MAX_PROBLEM_CHARS]


@_memoize
def reason_to_stop(state: SearchState, number: int) -> str | None:
    """Why batch `number` is not to be; empty if it is; None if that is still open. Fixed once it is known."""
    settings = state.settings
    limit, (count, open_count) = settings.budget.measurements, _committed_measurements(state, number)
    if limit is not None and count >= limit:
        return f"measurements {count} of {limit} spent"
    if limit is not None and open_count and count + open_count >= limit:
        return None
    view = batch_view(state, number)
    if reason := replace(settings.budget, measurements=None, wall_seconds=None).exhausted(view.spent):
        return reason
    seconds, each = settings.budget.device_seconds, _mean_device_seconds(view)
    if seconds is not None and view.spent.device_seconds + each > seconds:
        return (
            f"device seconds {view.spent.device_seconds:g} of {seconds:g} spent, a measurement takes {each:g}"
        )
    if view.stalled_batches >= settings.patience:
        return f"no better node in {view.stalled_batches} batches"
    if view.empty_batches >= settings.patience:
        if problem := proposers_problem(state):
            return f"no proposer gave a source in {view.empty_batches} batches: {problem}"
        return f"no new node in {view.empty_batches} batches"
    before = range(number - settings.depth, number)
    if before[0] >= 1 and not any(proposal_requests(state, b) for b in before):
        if any(state.batch(b).chosen is None for b in before):
            return None
        if not any(state.batch(b).nodes or _chosen_count(state, b) for b in before):
            return "the proposers have nothing more"
    return _gain_too_small(state, view)


def _chosen_count(state: SearchState, number: int) -> int:
    chosen = state.batch(number).chosen
    return len(chosen.nodes) if chosen is not None else 0


def _committed_measurements(state: SearchState, number: int) -> tuple[int, int]:
    """Measurements that the batches before chose, and the most that those still to choose may."""
    entry: tuple[int, int] = state.memo.get("committed", (0, 0))
    start, count = entry
    while start < number and state.batch(start).chosen is not None:
        count += _chosen_count(state, start)
        start += 1
        state.memo["committed"] = (start, count)
    if start > number:  # later batches have chosen, too
        return sum(_chosen_count(state, b) for b in range(number)), 0
    return count, sum(batch_limit(state, b) for b in range(start, number))


def batch_limit(state: SearchState, number: int) -> int:
    """The most that a batch measures, whatever is left."""
    return state.settings.k * max(1, len({r.parents[0].id for r in proposal_requests(state, number)}))


def remaining_measurements(state: SearchState, view: BatchView) -> int:
    """Measurements left to this view's knowledge; without a limit, those until patience ends."""
    s = state.settings
    if s.budget.measurements is None:
        return s.k * s.parents * s.patience
    return max(1, s.budget.measurements - view.spent.measurements)


def _gain_too_small(state: SearchState, view: BatchView) -> str:
    """The value of information, see the module. Empty where it is worth going on, or nobody can say."""
    s = state.settings
    last = view.batch - s.depth
    forecast = state.batch(last).forecasted if last >= 1 else None
    has_newer_nodes = any(state.batch(b).nodes for b in range(max(1, last + 1), view.batch))
    if forecast is None or not forecast.beliefs or has_newer_nodes:
        return ""
    beliefs = [b for n, b in forecast.beliefs.items() if n not in view.judged]
    if any(b.abstains for b in beliefs):
        return ""
    gains, count = 0.0, 0
    for number in range(max(1, last - s.patience + 1), last + 1):
        for node in sorted(state.batch(number).finished):
            gains, count = gains + max(0.0, -(view.judged[node].log2_ratio or 0.0)), count + 1
    is_exhausted = all(n in view.exhausted_parents for n in view.scores)  # proposers have nothing more
    mean_gain = 0.0 if is_exhausted else (gains + PRIOR_GAIN) / (count + 1)
    best, rest = max([mean_gain, *map(expected_improvement, beliefs)]), remaining_measurements(state, view)
    if best * rest >= MIN_EXPECTED_GAIN:
        return ""
    return f"{rest} measurements left are expected to gain {2 ** (best * rest) - 1:.2%} in all"


def affordable_measurements(state: SearchState, number: int) -> int:
    """Measurements that the budget has left for a batch; by their mean cost where seconds are limited."""
    budget, view = state.settings.budget, batch_view(state, number)
    count = _committed_measurements(state, number)[0]
    affordable = state.settings.k * state.settings.parents
    if budget.measurements is not None:
        affordable = min(affordable, budget.measurements - count)
    if budget.device_seconds is not None and (each := _mean_device_seconds(view)) > 0.0:
        under_way = (count - view.spent.measurements) * each
        seconds = budget.device_seconds - view.spent.device_seconds - under_way
        affordable = min(affordable, int(seconds / each))
    return max(0, affordable)


def _mean_device_seconds(view: BatchView) -> float:
    """Mean device seconds of a measurement so far."""
    return view.spent.device_seconds / max(1, view.spent.measurements)


FINALISTS = 3
"""Nodes confirmed together."""
LEAST_RESERVE, MOST_RESERVE = 0.25, 0.5
"""Shares of a wall-clock limit that are kept for confirming the best: before it is known what that takes, and at
most."""
UNKNOWN_RESERVE_S = 20.0
"""The most that is kept while no verification has ended."""
CONFIRMATION_VERIFICATIONS, CONFIRMATION_CONTESTS_S = 2, 5.0
"""Time for confirming one node: twice as long as a full verification of one config, for it launches all of them,
and its contests, which are made ready meanwhile."""
LEAST_CONFIRMATION_S = 5.0
"""Seconds for a confirmation that begins when the time is up already."""
MAX_CONFIRMATION_ROUNDS = 3
"""Rounds of confirming at most: another one only where all finalists of the one before were refuted."""


def pending_actions(state: SearchState) -> tuple[Action, ...]:
    """Every action that is due and not answered yet; equal states give equal actions.

    `RecordChoice` and `StopSearch` have nothing to wait for. Where nothing is due, what is under way must be answered
    first; after `Stopped`, nothing ever is.
    """
    if state.stopped is not None:
        return ()
    if state.expired is not None:
        return _final_actions(
            state,
            f"the time is up: {state.expired.seconds:.0f} s went to the search, the rest to confirmation",
        )
    if state.seeds[0] not in state.batch(0).open and (reason := _seed_failure(state)):
        return (StopSearch(reason),)
    if not state.batch(0).ended:
        return tuple(_seed_jobs(state))
    actions: list[Action] = [*_verification_jobs(state)]
    number = oldest_open_batch(state)
    while number - state.settings.depth < oldest_open_batch(state):
        reason_to_end = reason_to_stop(state, number)
        if reason_to_end:
            return (
                tuple(actions) if number > oldest_open_batch(state) else _final_actions(state, reason_to_end)
            )
        if reason_to_end is None:
            break
        requests = [r for r in proposal_requests(state, number) if r.id not in state.answers]
        if requests:
            actions += requests
            break
        state.close(number)
        if state.batch(number).chosen is not None:
            against = batch_view(state, number).incumbent if state.batch(number).open else ""
            actions += [_job(state, state.nodes[n], against, number) for n in state.batch(number).open]
        elif number == 1 or state.batch(number - 1).chosen is not None:
            actions.append(_next_selection_step(state, number))
        number += 1
    return tuple(actions)


def action_key(action: Action) -> str:
    """The key that an action and its answer share; safe as a file name."""
    if isinstance(action, ProposalRequest | NodeJob | VerificationJob):
        return action.id
    if isinstance(action, ConfirmationJob):
        return f"confirm-{digest(action.target.id, [n.id for n in action.nodes])}"
    if isinstance(action, NodeForecastRequest):
        return f"{action.batch:04d}-forecast-{digest(action.reference.id, [n.id for n in action.nodes])}"
    raise TypeError(f"{type(action).__name__} has no answer to wait for")


# --- batch 0 ---


def _seed_jobs(state: SearchState) -> Iterator[NodeJob]:
    """The first seed beside itself, then the others beside it, with the config that suits it best."""
    batch, seeds = state.batch(0), state.seeds
    ready = batch.open[:1] if seeds[0] in batch.open else batch.open
    for node in ready:
        yield _job(state, state.nodes[node], seeds[0], 0)


def _seed_failure(state: SearchState) -> str:
    """Why there is nothing to start from; empty if there is."""
    result = state.judged.get(state.seeds[0])
    if result is None:
        failures = state.batch(0).lost.get(state.seeds[0])
        return f"the first seed could not be judged: {failures[-1].reason}" if failures else "the budget is 0"
    if result.outcome is not Outcome.OK:
        return f"the first seed fails ({result.outcome}): {result.feedback}"
    return ""


# --- a batch ---


def _next_selection_step(state: SearchState, number: int) -> NodeForecastRequest | RecordChoice:
    """The question to the forecaster, or the choice where it is answered or there is nothing to ask."""
    batch = state.batch(number)
    if (
        batch.forecasted is None
        and state.context.surrogate != "none"
        and (request := forecast_request(state, number))
    ):
        return request
    return RecordChoice(_choose_measurements(state, number, selectable_nodes(state, number)))


def _choose_measurements(state: SearchState, number: int, nodes: list[str]) -> Chosen:
    s, batch = state.settings, state.batch(number)
    most, view = (
        min(batch_limit(state, number), affordable_measurements(state, number)),
        batch_view(state, number),
    )
    # By place in the answers first, so that of equal candidates no arm's come before the others'.
    fresh = sorted(batch.nodes, key=lambda n: (_answer_position(state, n), state.nodes[n].request))
    if batch.forecasted is not None and batch.forecasted.beliefs:
        beliefs, new = batch.forecasted.beliefs, set(fresh)
        candidates = [*fresh, *(n for n in nodes if n in beliefs and n not in new)]
        worth = MIN_EXPECTED_GAIN / remaining_measurements(state, view)
        return choose_by_forecast(
            number, candidates, beliefs, slots=most, audit=s.audit, seed=s.seed, worth=worth
        )
    if not fresh:
        return choose_first(number, [nodes], k=most, slots=most)
    groups: dict[str, list[str]] = {}
    for node in fresh:
        groups.setdefault(state.answers[state.nodes[node].request].parent, []).append(node)
    return choose_first(number, [group for _, group in sorted(groups.items())], k=s.k, slots=most)


def _answer_position(state: SearchState, node: str) -> int:
    """The place of a node in the answer that it came with."""
    answer = state.answers[state.nodes[node].request]
    return next(place for place, proposal in enumerate(answer.nodes) if proposal.id == node)


def _job(state: SearchState, node: Node, against: str, number: int) -> NodeJob:
    result, c = state.judged.get(against), state.context
    name = digest("job", state.target.id, c.harness, c.device, dict(c.toolchain), node.id, against)
    failures = len(state.batch(number).lost.get(node.id, ()))
    return NodeJob(
        # Lanes do no id twice, also one without a usable answer: a retry has its own.
        id=f"{name}-{failures}" if failures else name,
        node=node,
        against=state.nodes[against],
        against_config=result.config if result is not None else {},
        target=state.target,
        batch=number,
        trials=state.settings.trials,
        against_score=state.scores.get(against, 0.0),
    )


def _verification_jobs(state: SearchState) -> Iterator[VerificationJob]:
    """The next one. One that is under way is never replaced: the runner begins another when it has ended."""
    if not (node := state.next_to_verify):
        return
    c, config = state.context, state.judged[node].config
    name = digest("verify", state.target.id, c.harness, c.device, dict(c.toolchain), node, dict(config))
    failures = len(state.lost_verifications.get(node, ()))
    yield VerificationJob(
        f"verify-{name}-{failures}" if failures else f"verify-{name}", state.nodes[node], config, state.target
    )


# --- the end ---


def _final_actions(state: SearchState, reason: str) -> tuple[Action, ...]:
    """Confirm the finalists, then stop."""
    proven = any(j.log2_ratio is not None for n, j in state.confirmed.items() if n != state.seeds[0])
    nodes = [n for n, s in state.scores.items() if s < 0.0 and n not in state.confirmed]
    finalists = _ranked_finalists(state, nodes)[:FINALISTS]
    failures = state.lost_confirmations
    failed = len(failures) > MAX_RETRIES or any(f.final for f in failures)
    rounds = MAX_CONFIRMATION_ROUNDS if state.expired is None else 1
    if proven or failed or not finalists or state.confirmations >= rounds:
        return (
            StopSearch(reason + (", unconfirmed: " + state.lost_confirmations[-1].reason if failed else "")),
        )
    seed = state.seeds[0]
    return (
        ConfirmationJob(
            nodes=tuple(state.nodes[n] for n in finalists),
            configs={n: state.judged[n].config for n in (*finalists, seed)},
            seed_node=state.nodes[seed],
            target=state.target,
            seconds=_confirmation_seconds(state),
        ),
    )


def _ranked_finalists(state: SearchState, nodes: Sequence[str]) -> list[str]:
    """The fastest that may lead, which is confirmed however little time there is; then all others by their speed.

    After a confirmation whose lane failed, only those that may lead, if there are any: another may be why.
    """
    order = sorted(nodes, key=lambda n: state.scores[n])
    leaders = [n for n in order if state.judged[n].may_lead]
    if state.lost_confirmations and leaders:
        return leaders
    return [*leaders[:1], *(n for n in order if n not in leaders[:1])]


def _confirmation_seconds(state: SearchState) -> float | None:
    """Wall seconds for confirming, where there is a limit: the rest of it, or what the runner keeps of it."""
    limit = state.settings.budget.wall_seconds
    if limit is None:
        return None
    if state.expired is None:
        return max(LEAST_RESERVE * limit, confirmation_reserve(state, limit))
    return max(LEAST_CONFIRMATION_S, limit - state.expired.seconds)


def confirmation_reserve(state: SearchState, limit: float, least: float = 0.0) -> float:
    """Seconds of a wall-clock limit to keep for confirming the best, by what full verifications took so far.

    `least`: the seconds that one has taken which is still under way.

    Where nodes are verified while they are judged, that is what judging took. While nothing is faster than the seed,
    half of it: it is for what may still be found.
    """
    seconds = [own_seconds(v.found) for v in state.verifications]
    if not seconds:
        seconds = [j.wall_seconds for n, j in state.judged.items() if j.may_lead and n not in state.seeds]
    reserve = (
        CONFIRMATION_CONTESTS_S + CONFIRMATION_VERIFICATIONS * max([*seconds, least])
        if seconds or least
        else min(LEAST_RESERVE * limit, UNKNOWN_RESERVE_S)
    )
    if not any(score < 0.0 for score in state.scores.values()):
        reserve /= 2
    return min(reserve, MOST_RESERVE * limit)


def own_seconds(verification: FullVerification) -> float:
    """The seconds of a verification itself, without its wait for the judge."""
    seconds = verification.facts.get("spent_verifying", {}).get("verify")
    return float(seconds) if isinstance(seconds, int | float) else verification.wall_seconds


NODES_AHEAD = 28
"""Measurements under way at once where kernels are compiled ahead of a device: a choice of now is timed much later,
and neither processors nor device should wait for the slowest source of a batch."""


def paced_ahead(settings: SearchSettings, parents: int | None) -> SearchSettings:
    """Settings of a search whose kernels are compiled ahead of the device that times them.

    `parents`: the number that the user asked for; None: one, since each of small batches is decided on more results. As
    many measurements as before may pass without a better node before the search ends. The first results come before
    that, however small batches are: until then there may be nothing new to develop.
    """
    own = parents or 1
    patience = max(settings.patience, round(settings.patience * SearchSettings().parents / own))
    depth = min(round(NODES_AHEAD / (settings.k * own)), patience - 1)
    return replace(settings, parents=own, depth=max(settings.depth, depth), patience=patience)


def paced_as(settings: SearchSettings, prior: SearchSettings, parents: int | None) -> SearchSettings:
    """Settings of a resumed search: the pace that it began with (`prior`), and its `parents` where that is None."""
    return replace(settings, depth=prior.depth, patience=prior.patience, parents=parents or prior.parents)
