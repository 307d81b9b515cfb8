"""Which device nodes the processes of a lane see."""

from __future__ import annotations

from pathlib import Path

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
