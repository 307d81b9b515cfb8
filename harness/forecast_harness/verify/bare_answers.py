"""Answers as fast as a process can give them: what nobody who is asked can do without.

Runs in a trusted cell. A candidate may replace all of the code that serves its own cell by something lighter;
what that could gain is the difference between a usual window and one of this cell.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any, NoReturn

from forecast_harness.sandbox import wire
from forecast_harness.sandbox.cell_process import CHANNEL, NONCE
from forecast_harness.sandbox.jobs import TensorBytes

_NONCE_CHARACTERS = 32
_MESSAGE_BYTES = 1 << 20


def serve(payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]) -> NoReturn:
    """Answer this question and all that come, with nothing, until the judge hangs up."""
    channel: socket.socket = state[CHANNEL]
    unknown = "?" * _NONCE_CHARACTERS
    before, _, behind = wire.encode({"nonce": unknown, "value": {}}, {}).partition(unknown.encode())
    mark = b'"nonce": "'
    channel.sendall(before + state[NONCE].encode() + behind)
    while question := channel.recv(_MESSAGE_BYTES):
        at = question.find(mark) + len(mark)
        channel.sendall(before + question[at : at + _NONCE_CHARACTERS] + behind)
    os._exit(0)
