"""Inputs of launches: none finds them as an earlier one did, and those of the call can be had back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from forecast_harness.clocks.runner.arena import Placed
from forecast_harness.clocks.runner.call_memory import WorkInputs
from forecast_harness.clocks.runner.driver import CudaDriver
from forecast_harness.clocks.runner.kernels import RunnerKernels

SIZES = {"large": 1 << 17, "odd": (1 << 17) + 2, "small": 256, "ordered": 1 << 17, "updated": 4096}
UNITS = {"large": 2, "odd": 2, "small": 4, "updated": 4}
DATA = {name: random.Random(name).randbytes(size) for name, size in SIZES.items()}


class Inputs:
    """Work buffers and their copies on the fake device."""

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self.copies = {name: driver.allocate(size) for name, size in SIZES.items()}
        self.work = {name: Placed(driver.allocate(size), size) for name, size in SIZES.items()}
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
    assert made.inputs.rotation == {name: rotation.get(name, 0) for name in SIZES}
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
    assert kept > 0.9 * SIZES["large"], "a large one is renewed in part"
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
    made.write("updated", bytes(SIZES["updated"]))
    made.inputs.renew(clean=True)
    assert made.read()["updated"] == DATA["updated"]
