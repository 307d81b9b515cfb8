"""The arena: canaries on every byte beside buffers, and no more memory than these need."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.machine_code import fake_code as code
from benchmarks.lib.machine_code.fake_code import addition, honest
from benchmarks.lib.machine_code.sums import COUNT, SumCall, objection
from forecast_harness.clocks.runner.client import RunnerClient
from forecast_harness.clocks.runner.driver import CudaDriver, DriverError
from forecast_harness.clocks.runner.kernels import RunnerKernels
from forecast_harness.clocks.runner.memory import CanaryArena, Placed, WorkInputs
from forecast_harness.clocks.runner.messages import RunnerFaultKind

OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""
SUM = 2
MIB = 1 << 20
SIZES = [{"x": 1 * MIB, "y": 1000}, {"x": 5 * MIB}, {"x": 9 * MIB, "y": 17}]
"""Of placements: shifts make no page more or less of any."""


class NotingDriver(CudaDriver):
    """Notes its calls, those that fail too."""

    def __init__(self, library: str) -> None:
        self.calls: list[str] = []
        super().__init__(library)

    def _call(self, name: str, *arguments: Any) -> None:
        self.calls.append(name)
        super()._call(name, *arguments)

    def counts(self) -> Counter[str]:
        """Of calls since the last time; they are forgotten."""
        result, self.calls = Counter(self.calls), []
        return result


@pytest.fixture
def driver(fake_driver: Path, tmp_path: Path) -> NotingDriver:
    """One that no other test shares the device with: another file is loaded anew."""
    return NotingDriver(str(shutil.copy(fake_driver, tmp_path / "libowncuda.so")))


@pytest.fixture
def arena(driver: NotingDriver) -> CanaryArena:
    result = CanaryArena(driver, RunnerKernels(driver))
    driver.counts()
    return result


def test_every_byte_beside_buffers_is_a_canary(driver: NotingDriver, arena: CanaryArena) -> None:
    """Near them and a megabyte away: what was written there is counted, and nothing once it is undone."""
    places = arena.place({"x": MIB // 2, "y": 1000})
    inside = {n for p in places.values() for n in range(p.address, p.address + p.size)}
    beside = [n for n in range(arena.address, arena.address + arena.size, 131071) if n not in inside]
    beside += [p.address + p.size for p in places.values()] + [p.address - 1 for p in places.values()]
    beside += [arena.address, arena.address + arena.size - 1]
    assert len(beside) > 15
    for address in beside:
        (was,) = bytes(driver.download(address, 1))
        driver.upload(address, bytes([was ^ 1]))
        assert arena.broken_canaries() == 1
        driver.upload(address, bytes([was]))
    assert arena.broken_canaries() == 0


def test_canaries_differ_from_placement_to_placement(driver: NotingDriver, arena: CanaryArena) -> None:
    result = set()
    for _ in range(4):
        arena.place({"x": 1000})
        result.add(bytes(driver.download(arena.address + arena.size - 4, 4)))
    assert len(result) == 4


def test_a_placement_holds_nothing_of_earlier_ones(driver: NotingDriver, arena: CanaryArena) -> None:
    for number in range(8):
        sizes = SIZES[number % len(SIZES)]
        for name, placed in arena.place(sizes).items():
            assert bytes(driver.download(placed.address, placed.size)) == bytes(sizes[name])
            driver.upload(placed.address, b"\xaa" * placed.size)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("offset", [6 * MIB, -6 * MIB])
def test_who_writes_where_a_larger_call_had_its_buffers_is_blamed(runner: RunnerClient, offset: int) -> None:
    large, small = SumCall(1, MIB), SumCall()
    right, right_large = (addition("right", honest(), one.count) for one in (small, large))
    evil = addition("evil", [*honest(), code.store(SUM, offset, 16, 1)], COUNT)
    for _ in range(2):
        assert objection(runner, right_large, large) == ""
        assert objection(runner, evil, small) == str(RunnerFaultKind.DEVICE_ERROR)
        assert runner.faults[-1].candidate == "evil"
        assert objection(runner, right, small) == ""


def test_too_little_memory_is_no_error_of_the_context(driver: NotingDriver, arena: CanaryArena) -> None:
    arena.place(SIZES[0])
    with pytest.raises(DriverError) as caught:
        arena.place({"x": 2 << 30})
    assert (caught.value.code, caught.value.sticky) == (OUT_OF_MEMORY, False)
    arena.place(SIZES[0])
    assert not arena.broken_canaries()


# --- inputs of launches ---


INPUT_SIZES = {"large": 1 << 17, "odd": (1 << 17) + 2, "small": 256, "ordered": 1 << 17, "updated": 4096}
UNITS = {"large": 2, "odd": 2, "small": 4, "updated": 4}
DATA = {name: random.Random(name).randbytes(size) for name, size in INPUT_SIZES.items()}


class Inputs:
    """Work buffers and their copies on the fake device."""

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self.copies = {name: driver.allocate(size) for name, size in INPUT_SIZES.items()}
        self.work = {name: Placed(driver.allocate(size), size) for name, size in INPUT_SIZES.items()}
        for name, data in DATA.items():
            driver.upload(self.copies[name], data)
        self.inputs = WorkInputs(driver, RunnerKernels(driver))
        self.inputs.place(self.work, self.copies, UNITS, ("updated",))

    def read(self) -> dict[str, bytes]:
        return {n: bytes(self.driver.download(p.address, p.size)) for n, p in self.work.items()}

    def write(self, name: str, data: bytes) -> None:
        self.driver.upload(self.work[name].address, data)


@pytest.fixture
def made(fake_driver: Path) -> Inputs:
    return Inputs(CudaDriver(str(fake_driver)))


def test_copies_are_rotated_as_asked(made: Inputs) -> None:
    rotation = made.inputs.random_rotation()
    made.inputs.copy(rotation)
    assert rotation.keys() == UNITS.keys()
    assert made.inputs.rotation == {name: rotation.get(name, 0) for name in INPUT_SIZES}
    assert made.read() == {n: d[(t := rotation.get(n, 0)) :] + d[:t] for n, d in DATA.items()}


def test_every_renewal_gives_other_inputs_and_a_clean_one_those_of_the_call(made: Inputs) -> None:
    seen = [dict(DATA)]
    for _ in range(4):
        made.inputs.renew(clean=False)
        seen.append(made.read())
    for name in UNITS:
        assert len({one[name] for one in seen}) >= len(seen) - 1, "a small one is at times rotated back"
    assert {one["ordered"] for one in seen} == {DATA["ordered"]}
    kept = sum(a == b for a, b in zip(seen[-1]["large"], DATA["large"], strict=True))
    assert kept > 0.9 * INPUT_SIZES["large"], "a large one is renewed in part"
    made.inputs.renew(clean=True)
    assert made.read() == DATA
    assert not any(made.inputs.rotation.values())


def test_what_a_launch_wrote_into_an_input_is_still_there_after_restoring(made: Inputs) -> None:
    made.inputs.renew(clean=False)
    made.write("ordered", b"spoilt")
    made.inputs.renew(clean=False)
    made.inputs.restore()
    result = made.read()
    assert result["large"] == DATA["large"]
    assert result["ordered"][:6] == b"spoilt"


def test_what_is_updated_is_copied_for_every_launch(made: Inputs) -> None:
    made.inputs.renew(clean=True)
    made.write("updated", bytes(INPUT_SIZES["updated"]))
    made.inputs.renew(clean=True)
    assert made.read()["updated"] == DATA["updated"]
