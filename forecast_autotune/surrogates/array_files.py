"""Arrays of an npz file, read in the time that a new process has for it."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_STORED, ZipFile

import numpy as np
import numpy.typing as npt

_NAME_LENGTHS = 26
"""Where a member's header says how long its name and its extra field are; its data follow those."""


def read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """All arrays by name, without pickles. What is not compressed comes straight from the file, unsummed.

    Numpy itself reads members in pieces and adds up their checksums, in twice the time. Raises `OSError`,
    `ValueError` or `zipfile.BadZipFile` for a file that is none or ends early.
    """
    with ZipFile(path) as archive, path.open("rb") as stream:
        entries = archive.infolist()
        if any(entry.compress_type != ZIP_STORED for entry in entries):
            with np.load(path, allow_pickle=False) as arrays:
                return dict(arrays)
        found = {}
        for entry in entries:
            stream.seek(entry.header_offset + _NAME_LENGTHS)
            stream.seek(sum(struct.unpack("<HH", stream.read(4))), 1)
            found[entry.filename.removesuffix(".npy")] = _read_array(stream)
        return found


def _read_array(stream: IO[bytes]) -> npt.NDArray[Any]:
    """The array that begins here."""
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("an array of another format than numpy's 1.0; save it again with numpy.savez")
    shape, column_major, dtype = np.lib.format.read_array_header_1_0(stream)
    if dtype.hasobject or column_major:
        raise ValueError(f"an array must be plain and row by row, not of {dtype}")
    # A member that was cut has fewer elements than its shape.
    return np.fromfile(stream, dtype, count=math.prod(shape)).reshape(shape)
