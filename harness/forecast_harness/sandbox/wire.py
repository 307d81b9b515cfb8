"""Framed JSON with binary arrays over a stream socket, and memory that two processes share.

Nothing that is read is ever executed. A frame is `FAT1`, the header's length (4 bytes, big-endian), the header in JSON
`{"value": ..., "arrays": [[name, dtype, shape], ...]}` and the arrays' bytes in that order.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

from forecast_autotune.records.json_fields import parse_finite, refuse_constant
from forecast_harness.sandbox.jobs import TensorArrays, TensorBytes, WireError, byte_size

_MAGIC = b"FAT1"
_PREFIX = struct.Struct(">4sI")
_MOST_HEADER_BYTES = 4 << 20
"""Bytes of JSON from an untrusted side: parsed, it may take thirty times as much."""
TRUSTED_LIMIT = 1 << 40
"""A limit for frames from a trusted side, which only memory bounds."""
_MOST_DIGITS = 40
"""Digits of an integer: more than 128 bits have."""
_LARGE_BYTES = 4 << 20
"""Bytes from which on it pays to receive into memory that nobody has filled before."""
_SOCKET_BUFFER_BYTES = 1 << 20
"""Bytes that a channel holds on their way: enough that its ends seldom wait for each other, and little
enough that what one has written is still in the processor's cache when the other reads it."""

WaitForData = Callable[[], None]
"""Called before each read; returns when there is something to read, or raises."""


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a channel that is quick with hundreds of megabytes, as far as the system permits."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES
        )  # capped by net.core.wmem_max
    return ends


def encode(value: Any, arrays: TensorArrays) -> bytes:
    """The frame up to the arrays' bytes. Raises `WireError` for a value that JSON cannot hold."""
    descriptions = [[name, array.dtype, list(array.shape)] for name, array in arrays.items()]
    try:
        header = json.dumps({"value": value, "arrays": descriptions}, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"the value must be JSON without NaN and infinity: {error}") from error
    return _PREFIX.pack(_MAGIC, len(header)) + header


def send(channel: socket.socket, value: Any, arrays: TensorArrays) -> None:
    """Write one frame. Raises `WireError` before the first byte, `OSError` when the other side is gone."""
    send_encoded(channel, encode(value, arrays), arrays)


def send_encoded(channel: socket.socket, frame: bytes, arrays: TensorArrays) -> None:
    """Write a frame of `encode` and its arrays. Raises `OSError` only."""
    channel.sendall(frame)
    for array in arrays.values():
        channel.sendall(array.data)


def receive(
    channel: socket.socket,
    limit: int,
    wait: WaitForData = lambda: None,
    header_limit: int = _MOST_HEADER_BYTES,
) -> tuple[Any, dict[str, TensorBytes]]:
    """Read one frame of at most `limit` bytes of arrays and `header_limit` bytes of JSON.

    Raises `EOFError` when the other side closed before or within the frame, `WireError` for bytes that are
    none.
    """
    magic, length = _PREFIX.unpack(_read_exactly(channel, _PREFIX.size, wait))
    if magic != _MAGIC or length > header_limit:
        raise WireError(f"no frame: it begins with {magic!r} and a header of {length} bytes")
    try:
        header = _read_json(_read_exactly(channel, length, wait))
        fields = [(str(n), str(d), tuple(s)) for n, d, s in header["arrays"]]
        value = header["value"]
    except (ValueError, KeyError, TypeError, RecursionError, MemoryError) as error:
        raise WireError(f"the header is malformed: {error!r:.200}") from error
    if len({name for name, _, _ in fields}) != len(fields):
        raise WireError("an array is named twice")
    sizes = [byte_size(dtype, shape) for _, dtype, shape in fields]
    if sum(sizes) > limit:
        raise WireError(f"the arrays take {sum(sizes)} bytes, the limit is {limit}")
    arrays = {
        name: TensorBytes(dtype, shape, _read_exactly(channel, size, wait))
        for (name, dtype, shape), size in zip(fields, sizes, strict=True)
    }
    return value, arrays


def _read_json(data: bytearray) -> Any:
    return json.loads(
        data, parse_constant=refuse_constant, parse_int=_bounded_integer, parse_float=parse_finite
    )


def _bounded_integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:  # no float holds it, so that arithmetic with it fails
        raise ValueError(f"an integer has {len(digits)} digits, at most {_MOST_DIGITS} are read")
    return int(digits)


def _read_exactly(channel: socket.socket, count: int, wait: WaitForData) -> bytearray:
    data = _uninitialised_buffer(count)
    have = 0
    while have < count:
        wait()
        with memoryview(data) as view:
            size = channel.recv_into(view[have:])
        if not size:
            raise EOFError("the channel was closed")
        have += size
    return data


def _uninitialised_buffer(count: int) -> bytearray:
    """Room for so many bytes, whose contents are arbitrary: nobody may read it before it is full.

    Large ones take no memory before they are written, so that a length that is only claimed costs nothing.
    """
    if count < _LARGE_BYTES:
        return bytearray(count)
    make = ctypes.pythonapi.PyByteArray_FromStringAndSize  # given no string, it fills nothing in
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)
    data: bytearray = make(None, count)
    return data


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""A shrunken file would kill the reader of its mapping, and a grown one would be counted by no limit."""


class SharedMemory:
    """Bytes in `data` (writable), zeros at first; another process maps them by the descriptor `fd`."""

    def __init__(self, size: int) -> None:
        """Map so many bytes. Raises `OSError` where the system has none to give."""
        self.fd = os.memfd_create("launch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self.data = map_shared(self.fd, size)
        except OSError:
            os.close(self.fd)
            raise
        self.size = size

    def forget_descriptor(self) -> None:
        """Close `fd`, once the other process has mapped the memory."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def map_shared(fd: int, size: int) -> mmap.mmap:
    """The bytes behind a descriptor that another process made."""
    return mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
