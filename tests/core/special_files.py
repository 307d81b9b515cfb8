"""What may lie where a file belongs: makers of each kind, given the path."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path


def make_socket(path: Path) -> None:
    """A socket that nobody serves any more."""
    with socket.socket(socket.AF_UNIX) as listening:
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's name is short
        try:
            listening.bind(path.name)
        finally:
            os.chdir(here)


def make_sparse(path: Path) -> None:
    """A file of a terabyte that takes no room."""
    with path.open("wb") as stream:
        stream.truncate(1 << 40)


SPECIAL_FILES: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "endless": lambda p: p.symlink_to("/dev/zero"),
    "full": lambda p: p.symlink_to("/dev/full"),
    "loop": lambda p: p.symlink_to(p.name),
    "socket": make_socket,
    "terabyte": make_sparse,
}
