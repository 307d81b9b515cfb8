"""Compiles a variant in a cell that never opens the device, while the cell that will launch it does.

Cells open a device one after the other, for seconds where many verify at once, and compiling needs no device: it is
enough to know what to compile for. Like `compile_ahead` it decides nothing. What comes of it are the variant's words
under Triton's own keys, and they reach nobody but the variant's other cell, whose cache was the variant's to write
before, too.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from forecast_harness.sandbox.api import CandidateFault, CellAnswer, JobContext, TensorBytes
from forecast_harness.sandbox.cell_process import load
from forecast_harness.sandbox.jobs import TensorArrays
from forecast_harness.trials.variants.compilation.base_binaries import (
    WRITE_ENTRY,
    architecture_of,
    launchers_among,
    read_cache,
)
from forecast_harness.trials.variants.compilation.compile_ahead import LEAST_WAIT_S, compile_most, compile_one
from forecast_harness.trials.variants.compilation.early_compilation import EarlyCompilation
from forecast_harness.trials.variants.launch_file import VARIANT_FILE

BESIDE_ENTRY = f"{__name__}:compile_beside"
_NICENESS = 10
"""Opening a device waits for every other process that opens it: none is to wait for a processor meanwhile."""


class CompiledCalls(NamedTuple):
    """What came of calls that a variant was to be compiled for."""

    files: TensorArrays
    """For the cache of the cell that launches; none where nothing could be compiled."""
    late: Sequence[int] = ()
    """The numbers of the calls that took too long, see `compile_most`: less than half, of a compilation that did take
    long. More the judge does not believe, as it is the variant's word."""


_NOTHING = CompiledCalls({})


class VariantCompiler:
    """Asks for it. Runs in the judge."""

    def __init__(
        self,
        work: JobContext,
        binaries: TensorArrays,
        *,
        early: EarlyCompilation | None = None,
        architecture: int | None = None,
    ) -> None:
        """`binaries` of the base, as `binaries_as_arrays` gives them, tell what to compile for.

        Where there are none yet, `architecture` does. `early`: what the variant was compiled to before.
        """
        self._work, self._launchers, self._early = work, launchers_among(binaries), early
        self._architecture = architecture_of(binaries) if architecture is None else architecture
        self._builds_launchers = bool(binaries)  # else the base's will do

    def compiled(self, calls: Sequence[Mapping[str, Any]]) -> CompiledCalls:
        """Nothing where the variant cannot be compiled so, or it is not known what for."""
        if self._architecture is None:
            return _NOTHING
        known: dict[str, TensorBytes] = dict(self._launchers)
        if self._early is not None:
            if self._early.is_for(calls):
                return CompiledCalls(self._early.arrays(), self._early.late)
            known |= self._early.arrays()
        payload = {
            "file": VARIANT_FILE,
            "architecture": self._architecture,
            "calls": [dict(call) for call in calls],
            "launchers": self._builds_launchers,
        }
        began = time.monotonic()
        try:
            with self._work.cell() as cell:
                if known:
                    cell.ask(WRITE_ENTRY, {}, known)
                answer = cell.ask(BESIDE_ENTRY, payload)
        except CandidateFault:  # the cell that launches says what is wrong
            return _NOTHING
        told = answer.value.get("late")
        late = {n for n in range(len(calls)) if n in told} if isinstance(told, list) else set()
        believed = time.monotonic() - began >= LEAST_WAIT_S and 2 * len(late) <= len(calls)
        return CompiledCalls(answer.arrays, sorted(late) if believed else ())


def compile_beside(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """Import `file` and compile what `calls` lists, for a device of this `architecture`; the files as `read_cache`
    gives them, and the numbers of those that are `late`. Runs next to the variant. Raises whatever its file raises."""
    from triton.runtime.driver import driver

    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    driver.set_active(_AbsentDevice(int(payload["architecture"])))
    compile_only = load(payload["file"]).compile_only
    each = [partial(compile_one, compile_only, asked) for asked in payload["calls"]]
    late = compile_most(each, builds_launchers=payload["launchers"])
    return CellAnswer({"late": late}, read_cache({}, {}, {}).arrays)


class _AbsentDevice:
    """As much of Triton's driver as compiling asks for."""

    def __init__(self, architecture: int) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.driver import CudaLauncher

        self._target = GPUTarget("cuda", architecture, 32)
        self.launcher_cls = CudaLauncher

    def get_current_target(self) -> Any:
        """What is compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """Always the first."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """The default stream."""
        return 0
