"""Messages between a process and its remote worker: JSON behind a length, within bounds."""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

MAX_FRAME_BYTES = 1024 * 1024
_HEAD = 9
"""Eight hexadecimal digits and a newline."""


class FrameError(Exception):
    """The other side is gone, too slow, or says what is no message."""


def encode_frame(message: dict[str, Any]) -> bytes:
    """A message as bytes. Raises `FrameError` for one of more than `MAX_FRAME_BYTES`."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(body)} bytes; at most {MAX_FRAME_BYTES} are sent")
    return b"%08x\n" % len(body) + body


def write_frame(descriptor: int, frame: bytes, deadline: float) -> None:
    """Write all of a frame by `deadline` of the monotonic clock. Raises `FrameError`.

    The descriptor does not block.
    """
    view = memoryview(frame)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            if not select.select([], [descriptor], [], max(0.0, deadline - time.monotonic()))[1]:
                raise FrameError("it takes nothing more") from None
        except OSError as error:
            raise FrameError(f"it is gone ({error.strerror})") from error


def read_frame(descriptor: int, deadline: float) -> dict[str, Any]:
    """The next message, by `deadline` of the monotonic clock. Raises `FrameError`."""
    size = _read_exactly(descriptor, _HEAD, deadline)
    try:
        count = int(size, 16)
    except ValueError as error:
        raise FrameError("it does not speak the protocol") from error
    if not 0 < count <= MAX_FRAME_BYTES:
        raise FrameError(f"it sends a message of {count} bytes; at most {MAX_FRAME_BYTES} are read")
    try:
        message = json.loads(_read_exactly(descriptor, count, deadline))
    except (ValueError, RecursionError) as error:
        raise FrameError("it does not speak the protocol") from error
    if not isinstance(message, dict):
        raise FrameError("it does not speak the protocol")
    return message


def _read_exactly(descriptor: int, count: int, deadline: float) -> bytes:
    parts, left = [], count
    while left:
        if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise FrameError("it did not answer in time")
        try:
            part = os.read(descriptor, min(left, 1 << 16))
        except BlockingIOError:
            continue
        except OSError as error:
            raise FrameError(f"it is gone ({error.strerror})") from error
        if not part:
            raise FrameError("it is gone")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
