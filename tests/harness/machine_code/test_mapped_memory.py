"""Memory of the arena: kept for sizes that come again, and out of everybody's reach until then."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.machine_code import fake_code as code
from benchmarks.lib.machine_code.fake_code import addition, honest
from benchmarks.lib.machine_code.sums import COUNT, SumCall, objection
from forecast_harness.clocks.runner import client as process
from forecast_harness.clocks.runner.arena import PAGE_BYTES, CanaryArena, MappedMemory
from forecast_harness.clocks.runner.client import RunnerClient
from forecast_harness.clocks.runner.driver import OUT_OF_MEMORY, CudaDriver, DriverError
from forecast_harness.clocks.runner.kernels import RunnerKernels
from forecast_harness.clocks.runner.messages import RunnerFaultKind

SUM = 2
MIB = 1 << 20
SIZES = [{"x": 1 * MIB, "y": 1000}, {"x": 5 * MIB}, {"x": 9 * MIB, "y": 17}]
"""Of placements: shifts make no page more or less of any."""
REFUSED = ["mapping", "cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]


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
        found, self.calls = Counter(self.calls), []
        return found


@pytest.fixture
def driver(fake_driver: Path, tmp_path: Path) -> NotingDriver:
    """One that no other test shares the device with: another file is loaded anew."""
    return NotingDriver(str(shutil.copy(fake_driver, tmp_path / "libowncuda.so")))


@pytest.fixture
def arena(driver: NotingDriver) -> CanaryArena:
    found = CanaryArena(driver, RunnerKernels(driver))
    driver.counts()
    return found


def is_addressable(driver: CudaDriver, address: int) -> bool:
    try:
        driver.download(address, 1)
    except DriverError:
        return False
    return True


def test_sizes_that_take_turns_are_created_once(driver: NotingDriver, arena: CanaryArena) -> None:
    for number in range(12):
        arena.place(SIZES[number % len(SIZES)])
        assert not arena.broken_canaries()
    noted = list(driver.calls)
    counts = driver.counts()
    assert counts["cuMemCreate"] == len(SIZES)
    assert counts["cuMemMap"] == 12
    assert counts["cuMemUnmap"] == counts["cuMemAddressFree"] == 11
    assert not counts["cuMemAlloc_v2"] + counts["cuMemFree_v2"] + counts["cuMemRelease"]
    before = {noted[n - 1] for n, name in enumerate(noted) if name == "cuMemUnmap"}
    assert before == {"cuCtxSynchronize"}, "nothing on the device uses what is unmapped"


def test_every_byte_beside_buffers_is_a_canary(driver: NotingDriver, arena: CanaryArena) -> None:
    """Near them and a megabyte away: what was written there is counted, and nothing once it is undone."""
    places = arena.place({"x": MIB // 2, "y": 1000})
    memory = arena._memory
    inside = {n for p in places.values() for n in range(p.address, p.address + p.size)}
    beside = [n for n in range(memory.address, memory.address + memory.size, 65521) if n not in inside]
    beside += [p.address + p.size for p in places.values()] + [p.address - 1 for p in places.values()]
    beside += [memory.address, memory.address + memory.size - 1]
    assert len(beside) > 20
    for address in beside:
        (was,) = bytes(driver.download(address, 1))
        driver.upload(address, bytes([was ^ 1]))
        assert arena.broken_canaries() == 1
        driver.upload(address, bytes([was]))
    assert arena.broken_canaries() == 0


def test_canaries_differ_from_placement_to_placement(driver: NotingDriver, arena: CanaryArena) -> None:
    found = set()
    for _ in range(4):
        arena.place({"x": 1000})
        found.add(bytes(driver.download(arena._memory.address + arena._memory.size - 4, 4)))
    assert len(found) == 4


def test_the_same_size_stays_mapped(driver: NotingDriver, arena: CanaryArena) -> None:
    for _ in range(4):
        arena.place(SIZES[0])
    counts = driver.counts()
    assert (counts["cuMemMap"], counts["cuMemUnmap"]) == (1, 0)


def test_a_placement_holds_nothing_of_earlier_ones(driver: NotingDriver, arena: CanaryArena) -> None:
    for number in range(8):
        sizes = SIZES[number % len(SIZES)]
        for name, placed in arena.place(sizes).items():
            assert bytes(driver.download(placed.address, placed.size)) == bytes(sizes[name])
            driver.upload(placed.address, b"\xaa" * placed.size)
    assert driver.counts()["cuMemCreate"] == len(SIZES)


def test_only_what_is_in_use_can_be_addressed(driver: NotingDriver) -> None:
    memory = MappedMemory(driver)
    memory.reserve(64 * MIB)
    far = memory.address + 32 * MIB
    assert is_addressable(driver, far)
    memory.reserve(4 * MIB)
    assert is_addressable(driver, memory.address + memory.size - 1)
    assert not is_addressable(driver, far)
    assert not is_addressable(driver, memory.address + memory.size)
    memory.reserve(64 * MIB)
    assert is_addressable(driver, memory.address + memory.size - 1)
    assert driver.counts()["cuMemCreate"] == 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("offset", [24 * MIB, -24 * MIB])
def test_who_writes_where_a_larger_call_had_its_buffers_is_blamed(runner: RunnerClient, offset: int) -> None:
    large, small = SumCall(1, 4 * MIB), SumCall()
    right, right_large = (addition("right", honest(), one.count) for one in (small, large))
    evil = addition("evil", [*honest(), code.store(SUM, offset, 16, 1)], COUNT)
    for _ in range(2):
        assert objection(runner, right_large, large) == ""
        assert objection(runner, evil, small) == str(RunnerFaultKind.DEVICE_ERROR)
        assert runner.faults[-1].candidate == "evil"
        assert objection(runner, right, small) == ""


@pytest.mark.parametrize("used", [3, 4])
def test_memory_of_one_page_more_is_taken_and_no_larger(driver: NotingDriver, used: int) -> None:
    memory = MappedMemory(driver)
    memory.reserve(used * PAGE_BYTES)
    memory.reserve(20 * PAGE_BYTES)
    driver.counts()
    memory.reserve(2 * PAGE_BYTES + 1)
    assert memory.size == used * PAGE_BYTES
    memory.reserve(20 * PAGE_BYTES)
    assert not driver.counts()["cuMemCreate"]
    for other in (used - 2, used + 1):
        memory.reserve(other * PAGE_BYTES)
        assert memory.size == other * PAGE_BYTES
        memory.reserve(20 * PAGE_BYTES)
    assert driver.counts()["cuMemCreate"] == 2


@pytest.mark.parametrize("limits", [{"most_blocks": 3}, {"most_bytes": 40 * MIB}])
def test_the_least_recently_used_is_released_first(driver: NotingDriver, limits: dict[str, int]) -> None:
    memory = MappedMemory(driver, **limits)
    for size in (8, 12, 16, 8):
        memory.reserve(size * MIB)
    assert not driver.counts()["cuMemRelease"]
    memory.reserve(4 * MIB if "most_blocks" in limits else 20 * MIB)
    counts = driver.counts()
    assert counts["cuMemRelease"] == (1 if "most_blocks" in limits else 2)
    memory.reserve(8 * MIB)
    assert not driver.counts()["cuMemCreate"]
    memory.reserve(12 * MIB)
    assert driver.counts()["cuMemCreate"] == 1


def test_one_that_is_larger_than_all_that_may_be_kept_is_had(driver: NotingDriver) -> None:
    memory = MappedMemory(driver, most_bytes=16 * MIB)
    for size in (4, 64, 4, 64):
        memory.reserve(size * MIB)
        assert memory.size == size * MIB
    assert driver.counts()["cuMemRelease"] >= 3


def test_what_is_kept_makes_way_where_memory_is_wanting(driver: NotingDriver) -> None:
    memory = MappedMemory(driver)
    memory.reserve(400 * MIB)
    memory.reserve(500 * MIB)
    driver.counts()
    memory.reserve(700 * MIB)  # of 1 GiB
    assert driver.counts()["cuMemRelease"] == 2
    memory.reserve(200 * MIB)
    driver.counts()
    driver.free(driver.allocate(600 * MIB))
    assert driver.counts()["cuMemRelease"] == 1
    assert is_addressable(driver, memory.address), "what is in use is not released"
    with pytest.raises(DriverError) as caught:
        memory.reserve(2 << 30)
    assert (caught.value.code, caught.value.sticky) == (OUT_OF_MEMORY, False)
    assert driver.on_want_of_memory() is False, "all was released"
    memory.reserve(700 * MIB)
    assert is_addressable(driver, memory.address)
    assert not driver.counts()["cuMemAlloc_v2"], "that memory is wanting is no reason to map none"


@pytest.mark.parametrize("refused", REFUSED)
def test_a_device_that_cannot_map_has_its_memory_allocated(
    fake_driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    monkeypatch.setenv("FAKE_CUDA_REFUSES", refused)
    driver = NotingDriver(str(shutil.copy(fake_driver, tmp_path / "libowncuda.so")))
    arena = CanaryArena(driver, RunnerKernels(driver))
    driver.counts()
    for number in range(4):
        for name, placed in arena.place(SIZES[number % 2]).items():
            assert bytes(driver.download(placed.address, placed.size)) == bytes(SIZES[number % 2][name])
            driver.upload(placed.address, b"\xaa" * placed.size)
        assert not arena.broken_canaries()
    counts = driver.counts()
    assert (counts["cuMemAlloc_v2"], counts["cuMemFree_v2"]) == (4, 3)
    assert counts["cuMemCreate"] == (refused != "mapping"), "it is tried once"
    # Nothing is left of the attempt.
    assert counts["cuMemRelease"] == (refused not in ("mapping", "cuMemCreate"))
    assert counts["cuMemAddressFree"] == (refused in ("cuMemMap", "cuMemSetAccess"))
    assert counts["cuMemUnmap"] == (refused == "cuMemSetAccess")


def test_a_runner_judges_on_a_device_that_cannot_map(
    fake_driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_REFUSES", "mapping")
    monkeypatch.setattr(process, "_ENVIRONMENT", (*process._ENVIRONMENT, "FAKE_CUDA_REFUSES"))
    call = SumCall()
    with RunnerClient(str(fake_driver), launch_s=60.0, flush_bytes=1 << 20) as runner:
        assert objection(runner, addition("right", honest(), COUNT), call) == ""
        evil = addition("evil", [*honest(), code.store(SUM, 24 * MIB, 16, 1)], COUNT)
        assert objection(runner, evil, call) == str(RunnerFaultKind.DEVICE_ERROR)
