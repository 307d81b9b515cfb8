"""What is known of accelerators before anything was measured on them; the one place that says so.

`architectures` has what one multiprocessor holds, `datasheets` what a model does per second, and
`launch_options` what a backend's compiler takes besides warps and stages.
"""

from forecast_autotune.features.devices.architectures import Architecture, architecture_of
from forecast_autotune.features.devices.datasheets import (
    DeviceSpec,
    datasheet_device,
    device_spec,
    is_known_device,
    is_measured_device,
    partition_name,
)
from forecast_autotune.features.devices.launch_options import (
    BACKEND_OPTIONS,
    COMPILE_OPTIONS,
    LaunchOption,
    register_limits,
)

__all__ = [
    "BACKEND_OPTIONS",
    "COMPILE_OPTIONS",
    "Architecture",
    "DeviceSpec",
    "LaunchOption",
    "architecture_of",
    "datasheet_device",
    "device_spec",
    "is_known_device",
    "is_measured_device",
    "partition_name",
    "register_limits",
]
