"""Which datasheet a device's name stands for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forecast_autotune.features.devices import (
    datasheet_device,
    device_spec,
    is_known_device,
    is_measured_device,
    partition_name,
)
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
    result = device_spec(device)
    assert (result.multiprocessors, result.l2_bytes, result.shared_memory_bytes) == (12, 7, 5)


@pytest.mark.parametrize(
    "model", ["mi300x", "mi355x", "rx 7900 xtx", "b200", "rtx 5090", "gpu max 1550", "a100"]
)
def test_a_datasheet_alone_is_no_measurement(model: str) -> None:
    device = datasheet_device(model)
    assert is_known_device(device)
    assert not is_measured_device(device)


def test_a_device_like_no_model_but_of_the_measured_architecture_counts_as_measured() -> None:
    device = Device("null H800", "cuda", "90")
    assert is_measured_device(device)
    assert not is_known_device(device)


def test_an_architecture_says_what_a_multiprocessor_holds() -> None:
    cdna = device_spec(datasheet_device("mi300x"))
    assert (cdna.backend, cdna.warp_size, cdna.registers, cdna.shared_memory_bytes) == (
        "hip",
        64,
        131072,
        65536,
    )
    blackwell, consumer = device_spec(datasheet_device("b200")), device_spec(datasheet_device("rtx 5090"))
    assert blackwell.warp_groups
    assert blackwell.tensor_memory_bytes == 256 * 1024
    assert not consumer.warp_groups
    assert (consumer.threads, consumer.programs, consumer.shared_memory_bytes) == (1536, 24, 99 * 1024)


def test_a_device_of_an_unknown_model_has_the_limits_of_its_target() -> None:
    spec = device_spec(Device("AMD Instinct of tomorrow", "hip", "gfx950"))
    assert (spec.warp_size, spec.shared_memory_bytes) == (64, 160 * 1024)


def test_no_two_models_share_a_directory() -> None:
    models = ("mi300a", "mi300x", "mi325x", "mi355x", "b200", "gb200", "h200", "rtx 5080", "rtx 5090")
    assert len({datasheet_device(model).slug for model in models}) == len(models)


def test_a_model_without_a_datasheet_is_refused_with_those_that_have_one() -> None:
    with pytest.raises(KeyError, match=r"no datasheet of 'voodoo 2': there are .*mi300x"):
        datasheet_device("voodoo 2")


def test_a_partition_has_its_share_of_the_rates_and_a_name_of_its_own() -> None:
    whole = datasheet_device("mi300x")
    part = replace(whole, name=partition_name("AMD Instinct MI300X", 38), multiprocessors=38)
    assert part.name == "AMD Instinct MI300X (38 units)"
    assert partition_name("AMD Instinct MI300X", 304) == "AMD Instinct MI300X"
    assert part.slug != whole.slug
    spec = device_spec(part)
    assert spec.memory_gb_s == pytest.approx(5300 / 8)
    assert spec.tensor_tflops == pytest.approx(1307 / 8)
