"""Which datasheet a device's name stands for."""

from __future__ import annotations

import pytest

from forecast_autotune.features.devices import device_spec, is_known_device
from forecast_autotune.records import Device


@pytest.mark.parametrize(
    ("name", "memory_gb_s"),
    [
        ("NVIDIA A40", 696),
        ("NVIDIA RTX A4000", 448),
        ("NVIDIA RTX A6000", 768),
        ("NVIDIA A10", 600),
        ("NVIDIA A100-PCIE-40GB", 1555),
        ("NVIDIA A100-SXM4-80GB", 2039),
        ("NVIDIA H100 PCIe", 2000),
        ("NVIDIA H100 80GB HBM3", 3350),
        ("NVIDIA H200", 4800),
        ("NVIDIA GH200 480GB", 4000),
        ("NVIDIA L40S", 864),
        ("Tesla V100-SXM2-16GB", 900),
        ("AMD Instinct MI250X", 1638),
        ("AMD Instinct MI300X", 5300),
    ],
)
def test_a_model_is_known_by_its_whole_words(name: str, memory_gb_s: float) -> None:
    assert is_known_device(Device(name))
    assert device_spec(Device(name)).memory_gb_s == memory_gb_s


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A4500",
        "NVIDIA A100X",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA TITAN RTX",
        "AMD Radeon PRO W6600",
        "GPU",
        "",
    ],
)
def test_a_model_that_only_looks_alike_is_unknown(name: str) -> None:
    assert not is_known_device(Device(name))
    assert device_spec(Device(name)) == device_spec(Device("nobody knows"))


def test_what_the_driver_reports_replaces_the_datasheet() -> None:
    device = Device("NVIDIA A40", multiprocessors=12, l2_bytes=7, shared_memory_bytes=5)
    found = device_spec(device)
    assert (found.multiprocessors, found.l2_bytes, found.shared_memory_bytes) == (12, 7, 5)
