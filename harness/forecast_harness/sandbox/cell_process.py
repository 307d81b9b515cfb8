"""Code that runs in the cell, next to the candidate, which may have written all of its answers."""

from __future__ import annotations

import importlib
import importlib.util
import socket
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from forecast_harness.sandbox import wire
from forecast_harness.sandbox.jobs import FILES_FOLDER, CellAnswer, SandboxError, check_entry

CHANNEL = "channel"
"""The key of the socket to the judge in a cell's state."""
NONCE = "nonce"
"""The key of the number of the present question."""


def load(file: str, name: str = "candidate") -> ModuleType:
    """Import one of the candidate's files as module `name`. Raises whatever the file raises.

    The files' folder comes first on `sys.path`, so that they can import each other.
    """
    path = Path.cwd() / FILES_FOLDER / file
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SandboxError(f"{file} is not a Python file; a candidate's entry file ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def receive_descriptor(state: Mapping[str, Any]) -> int:
    """The descriptor that follows the present question, see `Cell.ask`.

    Raises `SandboxError` where none does.
    """
    _, result, _, _ = socket.recv_fds(state[CHANNEL], 1, 1)
    if not result:
        raise SandboxError("no descriptor came with the question")
    return result[0]


def serve(channel: socket.socket) -> None:
    """Answer questions until the judge hangs up."""
    state: dict[str, Any] = {CHANNEL: channel}
    while True:
        try:
            question, arrays = wire.receive(channel, wire.TRUSTED_LIMIT, header_limit=wire.TRUSTED_LIMIT)
        except (EOFError, OSError):
            return
        nonce = state[NONCE] = question["nonce"]
        try:
            module, function = check_entry(question["entry"])
            result = getattr(importlib.import_module(module), function)(question["payload"], arrays, state)
            answer = result if isinstance(result, CellAnswer) else CellAnswer(result)
            size = sum(memoryview(array.data).nbytes for array in answer.arrays.values())
            if size > question["limit"]:  # an error here; the judge would take it for an attack
                raise SandboxError(f"the answer takes {size} bytes, answer_bytes is {question['limit']}")
            frame = wire.encode({"nonce": nonce, "value": answer.value}, answer.arrays)
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: all are the candidate's
            wire.send(channel, {"nonce": nonce, "error": _describe_error(error)}, {})
            continue
        wire.send_encoded(channel, frame, answer.arrays)


def _describe_error(error: BaseException) -> dict[str, str]:
    try:
        text, trace = str(error), "".join(traceback.format_exception(error))
    except BaseException as second:  # an exception whose own __str__ raises
        text, trace = f"(its text raised {type(second).__name__})", ""
    return {"kind": type(error).__name__[:200], "text": text[:4000], "trace": trace[-8000:]}
