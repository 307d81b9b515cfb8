"""Triton as `forecast_autotune.frameworks.Framework` has it: devices and kernels, told to the core."""

from __future__ import annotations

from forecast_autotune.records import Argument
from forecast_integrations.device import cuda_device as device_at
from forecast_integrations.device import current_device, describe_environment, has_device, toolchain
from forecast_integrations.triton.problem.describe import call_arguments, kernel_record
from forecast_integrations.triton.problem.describe import to_config as config_of
from forecast_integrations.triton.problem.source import innermost, normal_form_hash, standalone_source
from forecast_integrations.triton.protocols import KernelFunction, NamedArguments

__all__ = [
    "accelerators",
    "arguments_of",
    "config_of",
    "current_device",
    "device_at",
    "has_device",
    "innermost",
    "kernel_record",
    "normal_form_hash",
    "standalone_source",
    "toolchain",
]


def accelerators() -> str:
    """Names of all accelerators, with commas between; empty where there is none."""
    return describe_environment().get("accelerator", "")


def arguments_of(fn: KernelFunction, named: NamedArguments) -> tuple[Argument, ...]:
    """Records of a call's arguments, given by name."""
    return tuple(call_arguments(fn, dict(named)))
