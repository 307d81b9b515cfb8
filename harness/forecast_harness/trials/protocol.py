"""Questions to a judge of sources and its answers; loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from forecast_harness.records import ConfirmationJob, FullVerification, NodeJob, NodeResult, VerificationJob


class NodeJudge(Protocol):
    """Verifies, tunes and times one node, in a process of its own. Plain data in, plain data out."""

    def judge(self, job: NodeJob) -> NodeResult:
        """Raises `LaneFailure` if the lane failed: then nothing is known of the node.

        Where full verification was left to `verify`, `NodeResult.may_lead` says no.
        """
        ...

    def verify(self, job: VerificationJob) -> FullVerification:
        """Verify a node with fresh hidden seeds, in a fresh process. Raises `LaneFailure`.

        Never asked of a judge whose `judge` verifies in full.
        """
        raise LaneFailure("this judge verifies a node where it judges it")

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        """Time the finalists and the seed again, in a fresh process; every result is against the seed.

        Raises `LaneFailure`, and `ConfirmationEnded` where nothing was shown of the first one in time.
        """
        ...

    def give_up(self) -> None:
        """End the job under way, as far as possible: it raises `LaneFailure`, and the judge is as good as before.

        Called from another thread.
        """
        return

    def close(self) -> None:
        """End all processes."""
        ...


class LaneFailure(Exception):
    """The lane, not the candidate, failed; the text says how, `lane` which."""

    def __init__(self, reason: str, lane: str = "") -> None:
        super().__init__(reason)
        self.lane = lane


class CannotConfirm(LaneFailure):
    """No source of this target can be verified, on any lane: the base kernel accepts nothing that can be drawn."""


class ConfirmationEnded(LaneFailure):
    """A confirmation took far longer than there was time for, and is not tried again."""
