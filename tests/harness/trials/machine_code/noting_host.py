"""The judge of host code, where only that it is asked matters."""

from __future__ import annotations

from collections.abc import Mapping

from forecast_autotune.records import Outcome
from forecast_harness.records import ConfirmationJob, FullVerification, NodeJob, NodeResult, VerificationJob


class NotingHost:
    """Stands for the judge of host code: notes what it is asked."""

    def __init__(self, wrong: Mapping[str, str]) -> None:
        self.asked: list[str] = []
        self.verified: list[str] = []
        self.closed = self.prepared = False
        self.given_up = 0
        self._wrong = wrong

    def judge(self, job: NodeJob) -> NodeResult:
        self.asked.append(job.node.id)
        return NodeResult(Outcome.OK, log2_ratio=0.5, stage="time")

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        self.asked += [n.id for n in confirm.nodes]
        return {n.id: NodeResult(Outcome.OK, log2_ratio=0.0, stage="confirm") for n in confirm.nodes}

    def verify(self, job: VerificationJob) -> FullVerification:
        self.verified.append(job.node.id)
        wrong = self._wrong.get(job.node.id, "")
        return FullVerification(Outcome.INCORRECT if wrong else Outcome.OK, wrong, {"launches": 9})

    def prepare_confirmation(self) -> None:
        self.prepared = True

    def give_up(self) -> None:
        self.given_up += 1

    def close(self) -> None:
        self.closed = True


class ReadyHost:
    """Opens a host that is there already."""

    def __init__(self, host: NotingHost) -> None:
        self._host = host

    def __call__(self) -> NotingHost:
        return self._host

    def give_up(self) -> None:
        """Nothing is under way."""
