"""Which device nodes the processes of a lane see, and what keeps its device open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forecast_harness.sandbox import server_forks
from forecast_harness.sandbox.containment import confine


def test_a_cell_sees_no_node_of_another_device(tmp_path: Path) -> None:
    for minor, uuid in enumerate(("GPU-a", "GPU-b", "GPU-c")):
        (tmp_path / f"0000:0{minor}:00.0").mkdir()
        data = f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
        (tmp_path / f"0000:0{minor}:00.0" / "information").write_text(data)
    assert confine.other_devices("GPU-b", tmp_path) == {"/dev/nvidia0", "/dev/nvidia2"}
    assert confine.other_devices("GPU-d", tmp_path) == set(), "a device that is not listed may be any of them"
    assert confine.other_devices("1", tmp_path) == set(), "a number is CUDA's, not the driver's"
    assert confine.other_devices(None, tmp_path) == set()


class Driver:
    """Stands in for CUDA's driver, of which a machine without a device has none."""

    def __init__(self, mode: int, initialises: bool = True) -> None:
        self.mode, self.initialises, self.opened = mode, initialises, 0

    def cuInit(self, flags: int) -> int:
        return 0 if self.initialises else 100

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        assert (attribute, device) == (20, 0)
        value._obj.value = self.mode
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        self.opened += 1
        return 0


@pytest.mark.parametrize(
    ("driver", "opened"), [(Driver(0), 1), (Driver(3), 0), (Driver(2), 0), (Driver(0, initialises=False), 0)]
)
def test_a_device_that_serves_one_process_is_left_to_the_candidate(driver: Any, opened: int) -> None:
    server_forks._open_device(driver)
    assert driver.opened == opened
