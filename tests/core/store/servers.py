"""Servers for tests of remote stores."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.lib.fleet import servers
from benchmarks.lib.fleet.servers import MISBEHAVIOUR, free_port, misbehaving_server, wait_for_port

__all__ = ["MISBEHAVIOUR", "free_port", "misbehaving_server", "redis_server", "wait_for_port"]


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """A Redis server of this test alone; yields its address."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    with servers.redis_server(folder) as address:
        yield address
