"""From what plug-ins answer to events: booked under what was asked, never trusted to be well formed.

In two steps, so that an answer is on file at once: `ask_plugin` and `judge_answer` wrap it as it came, which takes
microseconds, and `answer_event` makes the event of it, then or when the file is read again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Outcome
from forecast_harness.authors.author import Author
from forecast_harness.records import (
    ConfirmationJob,
    Node,
    NodeJob,
    ProposalRequest,
    Proposed,
    VerificationJob,
)
from forecast_harness.search.history.events import (
    Confirmed,
    Event,
    Finished,
    Forecasted,
    Lost,
    NodeForecastRequest,
    Verified,
)
from forecast_harness.search.interfaces import Forecaster
from forecast_harness.search.planning.scheduler import action_key
from forecast_harness.targets.novelty import node_identity
from forecast_harness.targets.packs.schema import source_problem
from forecast_harness.trials.protocol import ConfirmationEnded, LaneFailure

LaneAction: TypeAlias = NodeJob | VerificationJob | ConfirmationJob
"""The actions that a judge answers."""
AwaitedAction: TypeAlias = ProposalRequest | NodeForecastRequest | LaneAction
"""The actions that somebody answers."""


def ask_plugin(
    action: ProposalRequest | NodeForecastRequest,
    proposers: Mapping[str, Author],
    forecaster: Forecaster | None,
) -> Event:
    """Ask the proposer that the request's arm names, or the forecaster; errors are told in the answer."""
    try:
        if isinstance(action, ProposalRequest):
            return _without_unusable_nodes(proposers[action.arm.partition("/")[0]].propose(action))
        if forecaster is None:
            raise LookupError("there is no forecaster")
        return forecaster.forecast(action)
    except Exception as error:  # whatever a plug-in does, the search goes on
        return failed_answer(action, f"{type(error).__name__}: {error}"[:500])


def _without_unusable_nodes(answer: Proposed) -> Proposed:
    """The answer without sources that cannot be kept in a file or looked at; `problem` says which."""
    refused = {node.id: said for node in answer.nodes if (said := source_problem(node.source))}
    if not refused:
        return answer
    said = "; ".join([*([answer.problem] if answer.problem else []), *dict.fromkeys(refused.values())])
    nodes = tuple(node for node in answer.nodes if node.id not in refused)
    return replace(answer, nodes=nodes, problem=f"{len(refused)} sources were left out: {said}"[:500])


def failed_answer(action: ProposalRequest | NodeForecastRequest, problem: str) -> Event:
    """The answer of a plug-in that has none."""
    if isinstance(action, ProposalRequest):
        return Proposed(action.id, (), problem=problem)
    return Forecasted(action.batch, action.reference.id, {}, problem=problem)


def judge_answer(action: LaneAction, found: Any) -> Event:
    """A judge's answer. Raises `LaneFailure` for `infrastructure`, and for no word on a node that was asked for.

    Where time was limited, a word on the first finalist will do. A verification of that outcome is one of a suspicious
    node, which is done with: a judge tells its own failures by raising.
    """
    if isinstance(action, ConfirmationJob):
        asked = action.nodes if action.seconds is None else action.nodes[:1]
        if left := [n.id for n in asked if n.id not in found]:
            raise LaneFailure(f"the judge says nothing of {', '.join(left)}")
    if isinstance(action, VerificationJob):
        return Verified(action.id, action.node.id, found)
    for judged in [found] if isinstance(action, NodeJob) else found.values():
        if judged.outcome is Outcome.INFRASTRUCTURE:
            raise LaneFailure(judged.feedback or "the harness failed", judged.device)
    if isinstance(action, NodeJob):
        return Finished(action.id, action.node.id, action.batch, found)
    return Confirmed(found)


def answer_event(action: AwaitedAction, answer: Event) -> Event:
    """The event of an answer: under the action's own names, without what was not asked for.

    Raises `RecordError` for an answer to something else.
    """
    if isinstance(action, ProposalRequest) and isinstance(answer, Proposed):
        return replace(
            answer,
            request=action.id,
            batch=action.batch,
            arm=action.arm,
            parent=action.parents[0].id,
            nodes=tuple(_normalized_node(node, action) for node in answer.nodes),
        )
    if isinstance(action, NodeForecastRequest) and isinstance(answer, Forecasted):
        ids = {n.id for n in action.nodes}
        beliefs = {n: b for n, b in answer.beliefs.items() if n in ids}
        return replace(answer, batch=action.batch, reference=action.reference.id, beliefs=beliefs)
    if isinstance(action, NodeJob) and isinstance(answer, Finished):
        judged = replace(answer.judged, against=action.against.id)
        return Finished(action.id, action.node.id, action.batch, judged)
    if isinstance(action, VerificationJob) and isinstance(answer, Verified):
        return Verified(action.id, action.node.id, answer.found)
    if isinstance(action, ConfirmationJob) and isinstance(answer, Confirmed):
        ids = {n.id for n in (*action.nodes, action.seed_node)}
        return Confirmed(
            {n: replace(j, against=action.seed_node.id) for n, j in answer.judged.items() if n in ids}
        )
    raise RecordError(f"a {type(answer).__name__} does not answer a {type(action).__name__}")


def lane_failure_event(action: LaneAction, error: LaneFailure) -> Lost:
    """The event of a failed lane."""
    if isinstance(action, VerificationJob):
        return Lost(action.id, action.node.id, 0, str(error), error.lane, verification=True)
    if isinstance(action, NodeJob):
        return Lost(action.id, action.node.id, action.batch, str(error), error.lane)
    final = isinstance(error, ConfirmationEnded)
    return Lost(action_key(action), "", 0, str(error), error.lane, final=final)


def _normalized_node(node: Node, request: ProposalRequest) -> Node:
    """A proposal as the search books it: by its own text, below parents that it can have."""
    known = {p.id for p in request.parents}
    return replace(
        node,
        id=node_identity(request.target.id, node.language, node.source),
        parents=tuple(p for p in node.parents if p in known) or (request.parents[0].id,),
        arm=request.arm,
        batch=request.batch,
        request=request.id,
    )
