"""`Device` and toolchain of the running driver."""

from __future__ import annotations

import os
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from forecast_autotune.features.devices import partition_name
from forecast_autotune.records import Device, digest


@cache
def cuda_device(index: int) -> Device:
    """The device torch calls `cuda:index` (ROCm's included)."""
    import torch

    facts = torch.cuda.get_device_properties(index)
    hip = getattr(torch.version, "hip", None) is not None
    arch = str(facts.gcnArchName).split(":")[0] if hip else f"{facts.major}{facts.minor}"
    return Device(
        name=partition_name(facts.name, facts.multi_processor_count) if hip else facts.name,
        backend="hip" if hip else "cuda",
        arch=arch,
        multiprocessors=facts.multi_processor_count,
        shared_memory_bytes=_optin_shared_memory(index, facts),
        registers_per_multiprocessor=int(getattr(facts, "regs_per_multiprocessor", 0)),
        threads_per_multiprocessor=int(getattr(facts, "max_threads_per_multi_processor", 0)),
        l2_bytes=int(getattr(facts, "L2_cache_size", 0)),
        memory_bytes=int(facts.total_memory),
        warp_size=int(getattr(facts, "warp_size", 32)),
    )


def _optin_shared_memory(index: int, facts: Any) -> int:
    from triton.runtime.driver import driver

    try:
        return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])
    except (AttributeError, KeyError, RuntimeError):
        return int(getattr(facts, "shared_memory_per_block_optin", 0))


def _active_null_device() -> Any:
    """The active null device, if there is one; asking must not create a driver."""
    from triton.runtime.driver import driver

    held = vars(driver)  # up to 3.4 there is a proxy under "active", which any other question would resolve
    active = held.get("_active", held.get("active"))
    return active if hasattr(type(active), "forecast_device") else None


def has_device() -> bool:
    """Whether kernels can be compiled and timed here."""
    import torch

    return _active_null_device() is not None or bool(torch.cuda.is_available())


def has_accelerator() -> bool:
    """Whether kernels run on a device with memory of its own: not under a null device."""
    import torch

    return _active_null_device() is None and bool(torch.cuda.is_available())


def device_index() -> int:
    """The number of the current accelerator; 0 where there is none."""
    import torch

    return int(torch.cuda.current_device()) if torch.cuda.is_available() else 0


@cache
def host_device() -> Device:
    """The host's processor; its model's name where Linux tells it. Two hosts with the same model are one device."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return Device(next(models, "") or f"cpu-{platform.machine()}", "cpu", platform.machine())


def current_device() -> Device:
    """The current accelerator; the host's CPU where there is none (the interpreter)."""
    import torch

    if (null := _active_null_device()) is not None:
        return null.forecast_device()
    if torch.cuda.is_available():
        return cuda_device(torch.cuda.current_device())
    return Device(name=f"cpu-{platform.machine()}", backend="cpu")


@cache
def mixed_devices() -> bool:
    """Whether this process sees accelerators of different models: then the device joins the key."""
    import torch

    if not torch.cuda.is_available():
        return False
    return len({cuda_device(i).slug for i in range(torch.cuda.device_count())}) > 1


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@cache
def _versions() -> dict[str, str]:
    import torch
    import triton

    versions = {"triton": triton.__version__, "torch": torch.__version__.split("+")[0]}
    runtime = torch.version.cuda or getattr(torch.version, "hip", None)
    if runtime:
        versions["runtime"] = str(runtime)
    return versions


def toolchain() -> dict[str, str]:
    """Versions and code-generation switches that change what a config compiles to."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    versions = dict(_versions())
    switches = {k: v for k, v in get_cache_invalidating_env_vars().items() if v}
    fusion = os.environ.get("TRITON_DEFAULT_FP_FUSION")
    if fusion is not None:
        switches["TRITON_DEFAULT_FP_FUSION"] = fusion
    if switches:
        versions["switches"] = digest(switches)
    return versions


def describe_environment() -> dict[str, str]:
    """Packages and devices, as `doctor` reports them."""
    environment = {name: _installed(name) for name in ("torch", "triton", "numpy", "pyarrow", "matplotlib")}
    if not environment["torch"]:
        return environment
    import torch

    environment["accelerator"] = (
        ", ".join(cuda_device(i).name for i in range(torch.cuda.device_count()))
        if torch.cuda.is_available()
        else ""
    )
    return environment
