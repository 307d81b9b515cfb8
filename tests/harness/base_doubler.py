"""Stands in for the cell of a base kernel that doubles a vector."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from forecast_autotune.records import Argument, Config
from forecast_harness.trials.variants.base_runner import BaseKernelRun, TensorMemory


class BaseDoubler:
    """Gives twice `x` as `out`."""

    def __init__(self) -> None:
        self.ran: list[Config] = []
        self.began = threading.Event()
        self.unable: dict[Hashable, Exception] = {}

    def open(self) -> None:
        """As `BaseKernelRunner.open`."""

    def run(
        self,
        arguments: Sequence[Argument],
        scalars: Mapping[str, Any],
        memory: TensorMemory,
        grid: Sequence[int],
        config: Config,
    ) -> BaseKernelRun:
        """As `BaseKernelRunner.run`."""
        self.ran.append(config)
        self.began.set()
        return BaseKernelRun({**memory, "out": 2 * memory["x"]}, ("out",), 0, 0.0)

    def compile_ahead(self, calls: Sequence[Mapping[str, Any]]) -> None:
        """All is compiled."""
