"""Which device nodes the processes of a lane see, and what keeps its device open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forecast_harness.sandbox import server_forks as device_holder
from forecast_harness.sandbox.containment import confine


def test_a_cell_sees_no_node_of_another_device(tmp_path: Path) -> None:
    for minor, uuid in enumerate(("GPU-a", "GPU-b", "GPU-c")):
        (tmp_path / f"0000:0{minor}:00.0").mkdir()
        told = f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
        (tmp_path / f"0000:0{minor}:00.0" / "information").write_text(told)
    assert confine.other_devices("GPU-b", tmp_path) == {"/dev/nvidia0", "/dev/nvidia2"}
    assert confine.other_devices("GPU-d", tmp_path) == set(), "a device that is not listed may be any of them"
    assert confine.other_devices("1", tmp_path) == set(), "a number is CUDA's, not the driver's"
    assert confine.other_devices(None, tmp_path) == set()


MOUNTS = (
    "import sys; from forecast_harness.sandbox import linux;"
    "linux.unshare(linux.NEW_NS); linux.make_private(); linux.tmpfs(sys.argv[1], 1 << 20, 0o755)"
)


def may_mount(folder: Path) -> bool:
    """Whether this system lets a process have mounts of its own; asked without what is tested."""
    return os.geteuid() == 0 and subprocess.run([sys.executable, "-c", MOUNTS, str(folder)]).returncode == 0


def test_hidden_nodes_are_out_of_sight_for_those_who_hid_them_alone(tmp_path: Path) -> None:
    place, folder = tmp_path / "nodes", tmp_path / "view"
    for made in (place, folder, place / "shm"):
        made.mkdir()
    for name in ("own", "other"):
        (place / name).write_text(name)
    (place / "link").symlink_to("own")
    if not may_mount(folder):
        pytest.skip("only root has mounts of its own without another user, and not in every container")
    code = (  # it then removes its folder, as a server does that nobody has told to stop
        "import os, shutil, sys; from forecast_harness.sandbox import confine;"
        "done = confine.hide({sys.argv[1] + '/other'}, sys.argv[2], sys.argv[1]);"
        "open(sys.argv[1] + '/shm/x', 'w').close();"
        "shutil.rmtree(sys.argv[2]);"
        "print(done, sorted(os.listdir(sys.argv[1])), open(sys.argv[1] + '/link').read())"
    )
    asked = [sys.executable, "-c", code, str(place), str(folder)]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert said.strip() == "True ['link', 'own', 'shm'] own"
    assert (place / "other").exists()
    assert (place / "shm" / "x").exists()
    assert not folder.exists()


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
    device_holder._open_device(driver)
    assert driver.opened == opened


def test_nothing_is_hidden_without_reason(tmp_path: Path) -> None:
    assert not confine.hide_nodes(set(), str(tmp_path))
