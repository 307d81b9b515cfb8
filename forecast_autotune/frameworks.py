"""A framework whose kernels are tuned: what its integration answers about devices and kernels.

The core loads neither torch nor triton. It asks the entry `triton` of the group
`forecast_autotune.frameworks`, a module with the functions of `Framework`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from forecast_autotune import plugins
from forecast_autotune.records import Argument, Config, Device, Kernel

GROUP = "forecast_autotune.frameworks"


class Framework(Protocol):
    """The questions to a framework; every function may load it."""

    def has_device(self) -> bool:
        """Whether kernels can be compiled and timed here."""
        ...

    def current_device(self) -> Device:
        """The current accelerator; the host's CPU where there is none."""
        ...

    def device_at(self, index: int) -> Device:
        """The accelerator of this number."""
        ...

    def accelerators(self) -> str:
        """Names of all accelerators, with commas between; empty where there is none."""
        ...

    def toolchain(self) -> dict[str, str]:
        """Versions and code-generation switches that change what a config compiles to."""
        ...

    def kernel_record(self, fn: Any) -> Kernel:
        """The record of a kernel function."""
        ...

    def normal_form_hash(self, fn: Any) -> str:
        """Digest of a kernel and what it calls, which renamed locals, comments and formatting do not change."""
        ...

    def standalone_source(self, fn: Any) -> str:
        """A kernel with all that it uses as one self-contained module's text."""
        ...

    def config_of(self, config: Any) -> Config:
        """The framework's own config object as a record."""
        ...

    def arguments_of(self, fn: Any, named: Mapping[str, Any]) -> tuple[Argument, ...]:
        """Records of a call's arguments, given by name."""
        ...

    def innermost(self, fn: Any) -> Any:
        """The kernel below all tuners and heuristics around it."""
        ...


def triton() -> Framework:
    """Triton's. Raises `PluginError` where its integration is not installed."""
    result: Framework = plugins.load(GROUP, "triton")
    return result
