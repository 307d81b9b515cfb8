"""What lanes are asked while variants are verified on a device, which is not there: lanes and jobs are stood in for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from forecast_autotune.commands.output import Output
from forecast_autotune.errors import VariantError
from forecast_autotune.variants import Check, Variant
from forecast_harness.commands import variant_verification
from forecast_harness.commands.variant_verification import VariantWork
from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.sandbox.lane_pools import LanePool
from forecast_harness.targets.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.trials.variants.verify import LaneJobs, VariantVerification
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.verdict import SolutionVerdict
from tests.harness.variant_kernels import CONFIGS, DOUBLE, subject, variant, vector_call

KINDS = [subject(DOUBLE, vector_call(dtype=dtype)) for dtype in ("float32", "float16")]
VARIANTS = [variant(DOUBLE), variant(f"# Twin.\n{DOUBLE}")]


class Lane:
    """Notes what it is asked, in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __enter__(self) -> Lane:
        return self

    def give_up(self) -> None:
        """Nothing is under way for long."""

    def give_up_opening(self, waiting: int) -> None:
        """It is open at once."""

    def close(self) -> None:
        """Nothing is open."""


def verified(
    monkeypatch: pytest.MonkeyPatch, device: str, broken: int | None = None
) -> tuple[list[Lane], list[tuple[Variant, VariantVerification]], list[Check]]:
    """The lanes, the verdicts in their order, and all checks that were kept; the survey of kind `broken` fails."""
    made: list[Lane] = []
    kept: list[Check] = []

    def opened() -> SandboxLane:
        made.append(Lane())
        return cast("SandboxLane", made[-1])

    def survey(kind: BaseKernel, lane: Any, **options: Any) -> KernelSurvey:
        lane.asked.append("survey")
        if broken is not None and kind is KINDS[broken]:
            raise VariantError("it cannot be run")
        return KernelSurvey(("out",), (), CONFIGS[0], True, signature=str(KINDS.index(kind)))

    def verify(
        one: Variant, kind: Any, known: KernelSurvey, lane: Any, **options: Any
    ) -> VariantVerification:
        lane.asked.append("verify")
        check = Check(device, known.signature, True, "", "2026-01-01")
        return VariantVerification(SolutionVerdict(kind.kernel, one.name, ()), (check,))

    monkeypatch.setattr(variant_verification, "survey", survey)
    monkeypatch.setattr(variant_verification, "verify_variant", verify)

    def left(kind: BaseKernel, signatures: Sequence[str]) -> list[Variant]:
        return VARIANTS

    with LanePool(opened, 3) as lanes:
        plan = VerificationPlan(device=device)
        work = VariantWork(Output(as_json=True), lanes, plan, device)
        try:
            found = work.verify(KINDS, left, lambda one, checks: kept.extend(checks))
        except VariantError:
            found = []
    return made, found, kept


class UsedLane(Lane):
    """Notes who uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.closed = 0, False

    def close(self) -> None:
        self.closed = True


def done(lanes: LanePool, items: Iterable[int], do: Callable[[int, Any], int]) -> list[tuple[int, int]]:
    jobs = LaneJobs(lanes, do)
    jobs.add(items)
    try:
        return list(jobs.results())
    finally:
        jobs.close()


def test_lanes_are_used_by_one_at_a_time_and_closed() -> None:
    made: list[UsedLane] = []
    both = threading.Barrier(2, timeout=60)

    def opened() -> SandboxLane:
        made.append(UsedLane())
        return cast("SandboxLane", made[-1])

    def do(item: int, lane: Any) -> int:
        lane.users += 1
        assert lane.users == 1
        if item < 2:
            both.wait()  # two are under way at once
        lane.users -= 1
        return item * item

    with LanePool(opened, 2) as lanes:
        assert dict(done(lanes, range(6), do)) == {n: n * n for n in range(6)}
        assert len(made) == 2
    assert all(lane.closed for lane in made)


def test_what_is_added_while_others_are_done_is_done_too_and_told_once() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def do(item: int, lane: Any) -> int:
        begun.set()
        assert may_end.wait(60)
        return item

    with LanePool(lambda: cast("SandboxLane", UsedLane()), 2) as lanes:
        jobs = LaneJobs(lanes, do)
        jobs.add([1])
        assert begun.wait(60)
        jobs.add([2, 3])
        may_end.set()
        assert sorted(jobs.results()) == [(1, 1), (2, 2), (3, 3)]
        jobs.add([4])
        assert list(jobs.results()) == [(4, 4)]
        jobs.close()


def test_lanes_open_side_by_side_before_they_are_needed() -> None:
    all_opening = threading.Barrier(3, timeout=60)

    class SlowLane(UsedLane):
        def __enter__(self) -> UsedLane:
            all_opening.wait()  # none of them is open before all are being opened
            return super().__enter__()

    made: list[UsedLane] = []

    def opened() -> SandboxLane:
        made.append(SlowLane())
        return cast("SandboxLane", made[-1])

    with LanePool(opened, 3) as lanes:
        lanes.open_ahead(5)
        lanes.open_ahead(2)
        with lanes.borrowed() as lane:
            assert lane in made
    assert [lane.closed for lane in made] == [True] * 3
