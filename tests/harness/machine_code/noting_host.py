"""The judge of host code, where only that it is asked matters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forecast_autotune.records import Outcome
from forecast_harness.search.history.events import ConfirmationJob, NodeJob
from forecast_harness.search.judging.lane_judge import FullVerification
from forecast_harness.search.records import Node, NodeResult


class NotingHost:
    """Stands for the judge of host code: notes what it is asked."""

    def __init__(self, wrong: Mapping[str, str]) -> None:
        self.asked: list[str] = []
        self.verified: list[str] = []
        self.closed = self.prepared = False
        self._wrong = wrong

    def judge(self, job: NodeJob) -> NodeResult:
        self.asked.append(job.node.id)
        return NodeResult(Outcome.OK, log2_ratio=0.5, stage="time")

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        self.asked += [n.id for n in confirm.nodes]
        return {n.id: NodeResult(Outcome.OK, log2_ratio=0.0, stage="confirm") for n in confirm.nodes}

    def verify_in_full(self, node: Node, config: Mapping[str, Any]) -> FullVerification:
        self.verified.append(node.id)
        wrong = self._wrong.get(node.id, "")
        return FullVerification(Outcome.INCORRECT if wrong else Outcome.OK, wrong, {"launches": 9})

    def prepare_confirmation(self) -> None:
        self.prepared = True

    def close(self) -> None:
        self.closed = True
