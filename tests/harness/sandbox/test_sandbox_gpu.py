"""Candidates that poison, wedge or fill a real device: their lane survives and the fault is theirs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forecast_harness.sandbox.api import Fault, JobResult, JobStatus, ResourceLimits, SandboxJob, SandboxLane
from tests.harness.lanes import RUN, lane

pytestmark = pytest.mark.gpu

LIMITS = ResourceLimits(wall_s=60, cpu_s=120, memory_bytes=8 << 30, processes=512)
LOST_S = 10.0
SOURCE = Path(__file__).parents[1] / "device_faults.py"


@pytest.fixture(scope="module")
def opened() -> Iterator[SandboxLane]:
    with lane(device="0", warm=("torch", "triton")) as one:
        yield one


def run(opened: SandboxLane, function: str, limits: ResourceLimits = LIMITS) -> JobResult:
    return opened.run(
        SandboxJob(RUN, {"file": "s.py", "function": function}, {"s.py": SOURCE.read_text()}), limits
    )


def test_the_canary_sings_on_the_device(opened: SandboxLane) -> None:
    assert opened.healthy, opened.refused
    assert run(opened, "honest").value["returned"] == 64.0
    assert run(opened, "devices").value["returned"] == 1


def test_cells_begin_with_what_triton_would_have_to_build(opened: SandboxLane) -> None:
    assert any(name.startswith("cuda_utils") for name in run(opened, "toolchain").value["returned"])


FAULTS = {
    "illegal_address": Fault.EXCEPTION,
    "device_assert": Fault.EXCEPTION,
    "hangs": Fault.TIMEOUT,
    "hangs_and_leaves": Fault.EXIT,
}


@pytest.mark.parametrize("function", FAULTS)
def test_a_poisoned_device_is_fit_again_for_the_next(opened: SandboxLane, function: str) -> None:
    limits = replace(LIMITS, wall_s=6) if function == "hangs" else LIMITS
    result = run(opened, function, limits)
    assert (result.fault, result.status) == (FAULTS[function], JobStatus.CANDIDATE_ERROR), result.detail
    assert result.canary == "ok"
    assert run(opened, "honest").status is JobStatus.OK


def test_a_poison_that_is_hushed_up_stays_in_its_cell(opened: SandboxLane) -> None:
    assert run(opened, "poisons_in_silence").value["returned"] == "fine"
    assert run(opened, "honest").value["returned"] == 64.0


@pytest.mark.slow
def test_a_hundred_poisons_and_twenty_hangs_in_a_row(opened: SandboxLane) -> None:
    before = opened.restarts
    for i in range(100):
        result = run(opened, ("illegal_address", "device_assert")[i % 2])
        assert (result.fault, result.is_label) == (Fault.EXCEPTION, True), result.detail
    for _ in range(20):
        result = run(opened, "hangs", replace(LIMITS, wall_s=5))
        assert (result.fault, result.is_label) == (Fault.TIMEOUT, True), result.detail
        assert result.seconds - 5 < LOST_S
    assert opened.restarts == before
    assert run(opened, "honest").status is JobStatus.OK
