"""Judges that answer from what a job says, for tests of lanes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from forecast_autotune.records import Outcome
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.records import (
    ConfirmationJob,
    FullVerification,
    Node,
    NodeJob,
    NodeResult,
    SearchTarget,
    TargetKind,
    VerificationJob,
)
from forecast_harness.trials.protocol import LaneFailure, NodeJudge

TARGET = SearchTarget(TargetKind.PACK, "table", "table-id", "torch", "run", "")
SEED = Node("seed", "", "torch", (), Provenance(Origin.HAND))


def job(name: str, source: str = "") -> NodeJob:
    """`source` is a command for `ScriptedJudge`."""
    node = Node(f"node-{name}", source, "torch", ("seed",), Provenance(Origin.HAND))
    return NodeJob(f"job-{name}", node, SEED, {}, TARGET, 0, 1)


class ScriptedJudge(NodeJudge):
    """Does what a node's source says: `sleep S`, `lose N`.

    `hold` says that it began and waits, for a minute at most, until there is a file `go`, and is lost then if it
    says why.

    Every job that was judged to its end is a line of `folder/ledger`.
    """

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.folder, self.closed = number, folder, False

    def judge(self, job: NodeJob) -> NodeResult:
        assert not self.closed
        word, _, value = job.node.source.partition(" ")
        if word == "sleep":
            time.sleep(float(value))
        elif word == "hold":
            (self.folder / "held").touch()
            end = time.monotonic() + 60
            while not (self.folder / "go").exists() and time.monotonic() < end:
                time.sleep(0.02)
            if value:
                raise LaneFailure(value)
        elif word == "lose" and self._count(job.id) <= int(value):
            raise LaneFailure("the device fell off the bus", f"table-{self.number}")
        with (self.folder / "ledger").open("a") as file:
            file.write(f"{job.id} {self.number}\n")
        return NodeResult(Outcome.OK, job.against.id, 0.5, device=f"table-{self.number}", stage="time")

    def verify(self, job: VerificationJob) -> FullVerification:
        with (self.folder / "ledger").open("a") as file:
            file.write(f"{job.id} {self.number}\n")
        return FullVerification(Outcome.OK, facts={"lane": self.number})

    def give_up(self) -> None:
        (self.folder / "go").touch()

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        with (self.folder / "ledger").open("a") as file:
            file.write(f"confirm {self.number}\n")
        return {n.id: NodeResult(Outcome.OK, confirm.seed_node.id, 0.25) for n in confirm.nodes}

    def close(self) -> None:
        self.closed = True

    def _count(self, name: str) -> int:
        with (self.folder / f"tries-{name}").open("a+") as file:
            file.write("x")
            file.flush()
            file.seek(0)
            return len(file.read())


def judged_jobs(folder: Path) -> list[str]:
    """Ids of jobs in the order in which they ended."""
    file = folder / "ledger"
    return [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []
