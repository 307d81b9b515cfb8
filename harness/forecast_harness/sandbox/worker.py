"""The judge: a fresh process per job that runs the trusted entry and holds the only way to the lane."""

from __future__ import annotations

import importlib
import os
import resource
import secrets
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from forecast_harness.sandbox import linux, wire
from forecast_harness.sandbox.cell import CandidateFault, Cell, Link, Suspicion
from forecast_harness.sandbox.jobs import (
    Answer,
    Arrays,
    Fault,
    Limits,
    WireError,
    check_entry,
)
from forecast_harness.sandbox.levels import Level


@dataclass(frozen=True, slots=True)
class Work:
    """What a job's entry function is given."""

    payload: Mapping[str, Any]
    limits: Limits
    """Of each cell, unless `cell` is told otherwise."""
    level: Level
    _link: Link

    def cell(self, limits: Limits | None = None) -> Cell:
        """Start a fresh cell; it holds the job's files below `files/` and nothing of this process.

        Raises `SandboxError` when the server does not give one.
        """
        return Cell(self._link, limits or self.limits)


def run_file(work: Work) -> Answer:
    """A ready-made job entry: in one cell, import the payload's `file` and call its `function`.

    The value is what the function returned (JSON), `seconds` the judge's clock. It judges nothing.
    """
    with work.cell() as cell:
        answer = cell.ask("forecast_harness.sandbox.inside:run_file", work.payload)
    return Answer({"returned": answer.value, "seconds": answer.seconds})


def judge(
    server: socket.socket,
    result: socket.socket,
    place: str,
    limits: Limits,
    level: Level,
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
        said: dict[str, Any]
        arrays: Arrays = {}
        try:
            asked, _ = wire.receive(result, wire.TRUSTED, header_limit=wire.TRUSTED)
            _unlike_the_server()
            module, function = check_entry(asked["entry"])
            work = Work(asked["payload"], limits, level, Link(server))
            given = getattr(importlib.import_module(module), function)(work)
            answer = given if isinstance(given, Answer) else Answer(given)
            said, arrays = {"fault": Fault.NONE, "value": answer.value, "detail": ""}, answer.arrays
            wire.encode(said, arrays)
        except CandidateFault as error:
            said, arrays = {"fault": error.fault, "value": None, "detail": error.detail}, {}
        except Suspicion as error:
            said, arrays = {"fault": Fault.REJECTED, "value": None, "detail": str(error)}, {}
        except (Exception, SystemExit, WireError) as error:
            text = "".join(traceback.format_exception(error))[-8000:]
            said, arrays = {"fault": Fault.TRUSTED_ERROR, "value": None, "detail": text}, {}
        wire.send(result, said, arrays)
        code = 0
    finally:
        os._exit(code)


def _unlike_the_server() -> None:
    """Draw new seeds: a cell is a fork of the same server and could foresee this process's numbers.

    Python's own generator is reseeded by `os.fork`; numpy's and torch's are not.
    """
    seed = secrets.randbits(63)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
