"""What a search does next: `pending_actions` of its state, and nothing else. No clock, no chance that is not seeded.

A batch is begun when those `depth` before it have ended and the proposals of the one before are all there.
Proposing for it overlaps with measuring the one before. A search begins no more batches when

- the measurements that were chosen, or what else is known to be spent, reach the budget;
- for `patience` batches no node was better (by `STEP`), or none was new;
- for `depth` batches in a row nothing could be asked or chosen;
- what is left to spend is not worth it: with R measurements left, R times the largest expected improvement
  (log2) of one measurement is below `MIN_EXPECTED_GAIN`. It is the larger one of the best EI in the pool and of what
  new proposals gave lately: (sum of gains in the last `patience` batches + HOPE) / (measurements in them + 1),
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

from collections.abc import Iterator, Sequence

from forecast_autotune.records import Outcome, digest
from forecast_harness.records import (
    ConfirmationJob,
    FullVerification,
    Node,
    NodeJob,
    ProposalRequest,
    VerificationJob,
)
from forecast_harness.search.history.batch_view import batch_view
from forecast_harness.search.history.batches import MAX_RETRIES
from forecast_harness.search.history.events import (
    Action,
    Chosen,
    NodeForecastRequest,
    RecordChoice,
    StopSearch,
)
from forecast_harness.search.history.state import SearchState
from forecast_harness.search.planning.acquisition import choose_by_forecast, choose_first
from forecast_harness.search.planning.batch_requests import (
    forecast_request,
    proposal_requests,
    selectable_nodes,
)
from forecast_harness.search.planning.stopping import (
    MIN_EXPECTED_GAIN,
    affordable_measurements,
    batch_limit,
    oldest_open_batch,
    reason_to_stop,
    remaining_measurements,
)

FINALISTS = 3
"""Nodes confirmed together."""
LEAST_RESERVE, MOST_RESERVE = 0.25, 0.5
"""Shares of a wall-clock limit that are kept for confirming the best: before it is known what that takes, and at
most."""
UNKNOWN_RESERVE_S = 20.0
"""The most that is kept while no verification has ended."""
CONFIRMATION_VERIFICATIONS, CONFIRMATION_CONTESTS_S = 2, 5.0
"""What confirming one node takes: twice as long as a full verification of one config, for it launches all of them,
and its contests, which are made ready meanwhile."""
LEAST_CONFIRMATION_S = 5.0
"""For a confirmation that begins when the time is up already."""
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
        return _final_actions(state, f"the time is up: {state.expired.seconds:.0f} s")
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
        asked = [r for r in proposal_requests(state, number) if r.id not in state.answers]
        if asked:
            actions += asked
            break
        state.close(number)
        if state.batch(number).chosen is not None:
            actions += _jobs(state, number)
        elif number == 1 or state.batch(number - 1).chosen is not None:
            actions.append(_next_selection_step(state, number))
        number += 1
    return tuple(actions)


def action_key(action: Action) -> str:
    """What the action and its answer have in common; safe as a file name."""
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
    judged = state.judged.get(state.seeds[0])
    if judged is None:
        lost = state.batch(0).lost.get(state.seeds[0])
        return f"the first seed could not be judged: {lost[-1].reason}" if lost else "the budget is 0"
    if judged.outcome is not Outcome.OK:
        return f"the first seed fails ({judged.outcome}): {judged.feedback}"
    return ""


# --- a batch ---


def _next_selection_step(state: SearchState, number: int) -> NodeForecastRequest | RecordChoice:
    """The question to the forecaster, or the choice where it is answered or there is nothing to ask."""
    batch = state.batch(number)
    if (
        batch.forecasted is None
        and state.context.surrogate != "none"
        and (asked := forecast_request(state, number))
    ):
        return asked
    return RecordChoice(_choose_measurements(state, number, selectable_nodes(state, number)))


def _choose_measurements(state: SearchState, number: int, nodes: list[str]) -> Chosen:
    s, batch = state.settings, state.batch(number)
    most, seen = (
        min(batch_limit(state, number), affordable_measurements(state, number)),
        batch_view(state, number),
    )
    # By place in the answers first, so that of equal candidates no arm's come before the others'.
    fresh = sorted(batch.nodes, key=lambda n: (_answer_position(state, n), state.nodes[n].request))
    if batch.forecasted is not None and batch.forecasted.beliefs:
        beliefs, new = batch.forecasted.beliefs, set(fresh)
        asked = [*fresh, *(n for n in nodes if n in beliefs and n not in new)]
        worth = MIN_EXPECTED_GAIN / remaining_measurements(state, seen)
        return choose_by_forecast(number, asked, beliefs, slots=most, audit=s.audit, seed=s.seed, worth=worth)
    if not fresh:
        return choose_first(number, [nodes], k=most, slots=most)
    groups: dict[str, list[str]] = {}
    for node in fresh:
        groups.setdefault(state.answers[state.nodes[node].request].parent, []).append(node)
    return choose_first(number, [group for _, group in sorted(groups.items())], k=s.k, slots=most)


def _answer_position(state: SearchState, node: str) -> int:
    """Where a node stands in the answer that it came with."""
    answer = state.answers[state.nodes[node].request]
    return next(place for place, one in enumerate(answer.nodes) if one.id == node)


def _jobs(state: SearchState, number: int) -> Iterator[NodeJob]:
    against = batch_view(state, number).incumbent if state.batch(number).open else ""
    for node in state.batch(number).open:
        yield _job(state, state.nodes[node], against, number)


def _job(state: SearchState, node: Node, against: str, number: int) -> NodeJob:
    beside, c = state.judged.get(against), state.context
    name = digest("job", state.target.id, c.harness, c.device, dict(c.toolchain), node.id, against)
    lost = len(state.batch(number).lost.get(node.id, ()))
    return NodeJob(
        # Lanes do nothing twice that has one id, also what they gave no usable answer to.
        id=f"{name}-{lost}" if lost else name,
        node=node,
        against=state.nodes[against],
        against_config=beside.config if beside is not None else {},
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
    lost = len(state.lost_verifications.get(node, ()))
    yield VerificationJob(
        f"verify-{name}-{lost}" if lost else f"verify-{name}", state.nodes[node], config, state.target
    )


# --- the end ---


def _final_actions(state: SearchState, reason: str) -> tuple[Action, ...]:
    """Confirm the finalists, then stop."""
    proven = any(j.log2_ratio is not None for n, j in state.confirmed.items() if n != state.seeds[0])
    left = [n for n, s in state.scores.items() if s < 0.0 and n not in state.confirmed]
    finalists = _ranked_finalists(state, left)[:FINALISTS]
    failures = state.lost_confirmations
    lost = len(failures) > MAX_RETRIES or any(f.final for f in failures)
    rounds = MAX_CONFIRMATION_ROUNDS if state.expired is None else 1
    if proven or lost or not finalists or state.confirmations >= rounds:
        return (
            StopSearch(reason + (", unconfirmed: " + state.lost_confirmations[-1].reason if lost else "")),
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
    ranked = sorted(nodes, key=lambda n: state.scores[n])
    able = [n for n in ranked if state.judged[n].may_lead]
    if state.lost_confirmations and able:
        return able
    return [*able[:1], *(n for n in ranked if n not in able[:1])]


def _confirmation_seconds(state: SearchState) -> float | None:
    """Wall seconds for confirming, where there is a limit: the rest of it, or what the runner keeps of it."""
    limit = state.settings.budget.wall_seconds
    if limit is None:
        return None
    if state.expired is None:
        return max(LEAST_RESERVE * limit, confirmation_reserve(state, limit))
    return max(LEAST_CONFIRMATION_S, limit - state.expired.seconds)


def confirmation_reserve(state: SearchState, limit: float) -> float:
    """Seconds of a wall-clock limit to keep for confirming the best, by what full verifications took so far.

    Where nodes are verified while they are judged, that is what judging took. While nothing is faster than the seed,
    half of it: it is for what may still be found.
    """
    taken = [own_seconds(v.found) for v in state.verifications]
    if not taken:
        taken = [j.wall_seconds for n, j in state.judged.items() if j.may_lead and n not in state.seeds]
    wanted = (
        CONFIRMATION_CONTESTS_S + CONFIRMATION_VERIFICATIONS * max(taken)
        if taken
        else min(LEAST_RESERVE * limit, UNKNOWN_RESERVE_S)
    )
    if not any(score < 0.0 for score in state.scores.values()):
        wanted /= 2
    return min(wanted, MOST_RESERVE * limit)


def own_seconds(found: FullVerification) -> float:
    """What a verification took itself, without its wait for the judge."""
    told = found.facts.get("spent_verifying", {}).get("verify")
    return float(told) if isinstance(told, int | float) else found.wall_seconds
