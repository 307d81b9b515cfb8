"""`--path`: which way the sources of a search come to the clock, and why."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forecast_autotune.commands.output import CommandError, Output, UsageError

if TYPE_CHECKING:
    from forecast_harness.records import Node, SearchTarget
    from forecast_harness.trials.machine_code.early_start import EarlyStart
    from forecast_harness.trials.machine_code.opening import MachineCodeLanes


_SWITCH_INTERVAL_S = 5e-4
"""For which a thread that has an answer of the device waits for those that forecast; Python's own is ten times that."""


def early_start(options: argparse.Namespace, device: str) -> EarlyStart | None:
    """Workers and runners that start while the target is read; None where no machine code will be judged."""
    if options.path == "host-code" or device != "cuda" or options.ray is not None:
        return None
    from forecast_harness.clocks.devices import visible_devices
    from forecast_harness.trials.judging.devices import verification_plan
    from forecast_harness.trials.machine_code.early_start import EarlyStart

    numbers = visible_devices()
    return EarlyStart([verification_plan(device, n) for n in numbers[: options.lanes or len(numbers)]])


def open_machine_code(
    options: argparse.Namespace,
    output: Output,
    target: SearchTarget,
    seed: Node,
    *,
    device: str,
    lanes: Sequence[int],
    folder: Path,
    early: EarlyStart | None = None,
) -> MachineCodeLanes | None:
    """Lanes that judge through machine code on devices by the driver's numbers; None for those of host code.

    Where `--path auto` finds that machine code does not work here, one line says why. Raises `UsageError` and
    `CommandError` where `--path machine-code` asks for it all the same.
    """
    asked = options.path
    if asked == "host-code" or (asked == "auto" and device != "cuda"):
        return None
    if device != "cuda":
        raise UsageError("--path machine-code needs a CUDA device: the driver knows none, so leave it out")
    from forecast_harness.clocks.runner.health import NoMachineCodePath
    from forecast_harness.trials.judging.devices import verification_plan
    from forecast_harness.trials.machine_code.opening import open_machine_code_lanes

    plans = [verification_plan(device, number) for number in lanes]

    def note(reason: str) -> None:
        output.remark(f"the machine-code path failed, so that a source was judged as host code: {reason}")

    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        return open_machine_code_lanes(
            target,
            seed,
            plans,
            folder=folder,
            early=early,
            insist=asked == "machine-code",
            on_failure=note,
            progress=output.remark if not options.quiet else lambda stage: None,
        )
    except NoMachineCodePath as error:
        if asked == "machine-code":
            raise CommandError(f"--path machine-code does not work here: {error}") from error
        output.remark(f"sources are judged as host code, in a sandbox: {error}")
        return None
