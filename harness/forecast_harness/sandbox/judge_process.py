"""The judge: a fresh process per job that runs the trusted entry and holds the only way to the lane."""

from __future__ import annotations

import importlib
import os
import resource
import secrets
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from forecast_harness.sandbox import wire
from forecast_harness.sandbox.cell import CandidateFault, Cell, ServerConnection, Suspicion
from forecast_harness.sandbox.containment import linux
from forecast_harness.sandbox.containment.levels import ContainmentLevel
from forecast_harness.sandbox.jobs import (
    CellAnswer,
    Fault,
    ResourceLimits,
    TensorArrays,
    WireError,
    check_entry,
)


@dataclass(frozen=True, slots=True)
class JobContext:
    """The argument of a job's entry function."""

    payload: Mapping[str, Any]
    limits: ResourceLimits
    """Limits of each cell, unless `cell` is given others."""
    level: ContainmentLevel
    _link: ServerConnection

    def cell(self, limits: ResourceLimits | None = None, processors: Sequence[int] = ()) -> Cell:
        """Start a fresh cell; it holds the job's files below `files/` and nothing of this process.

        `processors`: those that all of it is bound to, by the kernel's numbers; empty: any. Raises `SandboxError` when
        the server does not give one.
        """
        return Cell(self._link, limits or self.limits, processors)


def run_judge(
    server: socket.socket,
    result: socket.socket,
    place: str,
    limits: ResourceLimits,
    level: ContainmentLevel,
    parent: int,
) -> NoReturn:
    """Become the judge: read one question from the lane, run its entry, write one answer, leave."""
    os.setsid()
    linux.die_with_parent(parent)
    linux.set_dumpable(False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(place)
    code = 1
    try:
        message: dict[str, Any]
        arrays: TensorArrays = {}
        try:
            request, _ = wire.receive(result, wire.TRUSTED_LIMIT, header_limit=wire.TRUSTED_LIMIT)
            _reseed_generators()
            module, function = check_entry(request["entry"])
            work = JobContext(request["payload"], limits, level, ServerConnection(server))
            value = getattr(importlib.import_module(module), function)(work)
            answer = value if isinstance(value, CellAnswer) else CellAnswer(value)
            message, arrays = {"fault": Fault.NONE, "value": answer.value, "detail": ""}, answer.arrays
            wire.encode(message, arrays)
        except CandidateFault as error:
            message, arrays = {"fault": error.fault, "value": None, "detail": error.detail}, {}
        except Suspicion as error:
            message, arrays = {"fault": Fault.REJECTED, "value": None, "detail": str(error)}, {}
        except (Exception, SystemExit, WireError) as error:
            text = "".join(traceback.format_exception(error))[-8000:]
            message, arrays = {"fault": Fault.TRUSTED_ERROR, "value": None, "detail": text}, {}
        wire.send(result, message, arrays)
        code = 0
    finally:
        os._exit(code)


def _reseed_generators() -> None:
    """Draw new seeds: a cell is a fork of the same server and could foresee this process's numbers.

    Python's own generator is reseeded by `os.fork`; numpy's and torch's are not.
    """
    seed = secrets.randbits(63)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
