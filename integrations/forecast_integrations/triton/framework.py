"""Triton as `forecast_autotune.frameworks.Framework` has it: devices and kernels, told to the core."""

from __future__ import annotations

from forecast_autotune.records import Argument, Config, Device, Kernel
from forecast_integrations import device
from forecast_integrations.device import current_device, has_device, toolchain
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.source import innermost, standalone_source
from forecast_integrations.triton.protocols import KernelFunction, LaunchConfig, NamedArguments

__all__ = [
    "accelerators",
    "arguments_of",
    "config_of",
    "current_device",
    "device_at",
    "has_device",
    "innermost",
    "kernel_record",
    "standalone_source",
    "toolchain",
]


def device_at(index: int) -> Device:
    """The accelerator of this number."""
    return device.cuda_device(index)


def accelerators() -> str:
    """Names of all accelerators, with commas between; empty where there is none."""
    return device.describe_environment().get("accelerator", "")


def kernel_record(fn: KernelFunction) -> Kernel:
    """The record of a kernel function."""
    return describe.kernel_record(fn)


def config_of(config: LaunchConfig) -> Config:
    """A `triton.Config` as a record."""
    return describe.to_config(config)


def arguments_of(fn: KernelFunction, named: NamedArguments) -> tuple[Argument, ...]:
    """Records of a call's arguments, given by name."""
    return tuple(describe.call_arguments(fn, dict(named)))
