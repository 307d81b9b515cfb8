"""How a real device's launches are timed: recorded where that can be done, and what cannot be recorded."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

from forecast_harness.clocks import devices
from forecast_harness.clocks.devices import ReplayBuffers
from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.targets.packs import load_pack, make_solution
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.run import verify


class Vector(ReplayBuffers):
    """An input that is doubled by whoever is timed."""

    def __init__(self) -> None:
        self.x = torch.empty(1 << 16, device="cuda")
        self.restore(None)

    def clear(self) -> None:
        self.x.zero_()

    def restore(self, result: Any) -> None:
        if result is not None:
            result.fill_(float("nan"))
        torch.arange(1 << 16, out=self.x)

    def output_copies(self, result: Any) -> list[Any]:
        return [result.clone().view(torch.uint8)]


@pytest.fixture
def timed() -> tuple[devices.DeviceTimer, Vector]:
    return devices.DeviceTimer(torch), Vector()


def wanted() -> Any:
    return 2 * torch.arange(1 << 16, device="cuda", dtype=torch.float32)


def test_a_short_launch_is_replayed_and_right(timed: tuple[devices.DeviceTimer, Vector]) -> None:
    timer, vector = timed
    for _ in range(5):
        taken = timer.time(lambda: vector.x * 2, vector)
        assert torch.equal(taken.result, wanted())
        assert 0 < taken.seconds <= taken.total_seconds
    assert taken.protocol == devices.GRAPH_PROTOCOL
    assert taken.total_seconds > 10 * taken.seconds
    timer.idle(vector, None)
    plain = timer.time(lambda: vector.x * 2, vector, protocol=devices.EVENTS_PROTOCOL)
    assert plain.protocol == devices.EVENTS_PROTOCOL
    assert plain.result.equal(wanted())
    assert plain.seconds > taken.seconds


def test_what_waits_for_the_device_is_launched(timed: tuple[devices.DeviceTimer, Vector]) -> None:
    timer, vector = timed

    def waits() -> Any:
        return vector.x * (2 if float(vector.x[1]) == 1 else 3)

    for _ in range(3):
        taken = timer.time(waits, vector)
        assert torch.equal(taken.result, wanted())
        assert taken.protocol == devices.EVENTS_PROTOCOL
    assert torch.equal(timer.time(lambda: vector.x * 2, vector, "another").result, wanted())


def test_work_on_a_stream_of_its_own_gains_nothing(timed: tuple[devices.DeviceTimer, Vector]) -> None:
    """While it is recorded, the inputs hold nothing that could be computed ahead."""
    timer, vector = timed
    other = torch.cuda.Stream()

    def aside() -> Any:
        with torch.cuda.stream(other):
            result = vector.x * 2
        return result.clone()

    for _ in range(4):
        taken = timer.time(aside, vector)
        torch.cuda.synchronize()
    assert taken.protocol == devices.EVENTS_PROTOCOL or not torch.equal(taken.result, wanted())


HONEST = {
    "plain": "import torch\n\n\ndef run(x):\n    return torch.softmax(x, -1)\n",
    "waits": "import torch\n\n\ndef run(x):\n    torch.cuda.synchronize()\n    return torch.softmax(x, -1)\n",
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_solution_is_accepted_however_it_is_timed(name: str) -> None:
    pack = load_pack("softmax")
    solution = make_solution(name, HONEST[name], pack.definition.format)
    called, uuid = devices.identity(0)
    plan = VerificationPlan(device="cuda", peaks=devices.device_peaks(called), uuid=uuid)
    with SandboxLane(device="0") as lane:
        verdict = verify(pack, solution, lane, plan=plan)
    assert verdict.accepted, verdict.reasons
