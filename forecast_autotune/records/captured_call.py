"""One launch of a program: arguments, contents, grid, and the launches of its tuner's other configs.

Integrations write it, verifications read it. A tensor's contents lie beside the record as bytes, by their digest;
where they were not kept, its record describes their distribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forecast_autotune.records.candidate import Config
from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.json_fields import SCHEMA, Extra, read_name, to_scalar
from forecast_autotune.records.problem import Argument, Device, Kernel


@dataclass(frozen=True)
class TensorContents(Record, label="contents"):
    """The memory of a tensor before the launch, from its first element to its last."""

    digest: str = ""
    """sha256 of its bytes, and the name of their file; empty: only the numbers below are kept."""
    seed: int = 0
    mean: float = 0.0
    deviation: float = 0.0
    least: float = 0.0
    """As the other three, of the finite numbers; all are 0 where there are none."""
    most: float = 0.0


def _read_meta(value: Any) -> dict[str, Any]:
    return {str(name): to_scalar(v) for name, v in dict(value).items()}


@dataclass(frozen=True)
class CapturedLaunch(Record, label="launch"):
    """The launch that one config of the tuner's would have had."""

    meta: Mapping[str, Any] = field(metadata=json_option(read=_read_meta))
    grid: tuple[int, ...]
    computed: Mapping[str, Any] = field(default_factory=dict, metadata=json_option(read=_read_meta))
    """The values that `@heuristics` under the tuner gave, by argument."""


@dataclass(frozen=True)
class CapturedCall(Record, tag="captured_call", schema=SCHEMA, lenient=True):
    """A call. Arguments that the config or heuristics supply are none of `arguments`."""

    id: str = field(metadata=json_option(read=read_name))
    kernel: Kernel
    """`extra` has `module` and `qualname`."""
    arguments: tuple[Argument, ...]
    grid: tuple[int, ...]
    config: Config
    """The config of this launch."""
    device: Device
    configs: tuple[Config, ...] = ()
    """The tuner's configs after its own pruning; none for a kernel without a tuner."""
    launches: tuple[CapturedLaunch, ...] = ()
    contents: Mapping[str, TensorContents] = field(default_factory=dict)
    zeroed: tuple[str, ...] = ()
    """Tensors that the tuner zeroes before it times."""
    shared: tuple[tuple[str, ...], ...] = ()
    """Groups of tensors that overlap in memory."""
    source: str = field(default="", repr=False)
    """The kernel's self-contained module; empty where none can be made."""
    at: str = ""
    extra: Extra = field(default_factory=dict, compare=False, repr=False)
