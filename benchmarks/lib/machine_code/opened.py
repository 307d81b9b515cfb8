"""The runner of a benchmark: of a device, or of a driver that runs on the CPU where `--fake` asks for it."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.lib.machine_code.fake_code import build_driver
from forecast_harness.clocks.runner.client import LAUNCH_S, RunnerClient
from forecast_harness.clocks.runner.driver import LIBRARY

FAKE_FLUSH_BYTES = 1 << 20
"""Bytes that a flush writes to the caches that a driver without a device does not have."""


def add_fake_option(parser: argparse.ArgumentParser) -> None:
    """Add `--fake`, whose value is `null`."""
    parser.add_argument(
        "--fake", dest="null", action="store_true", help="a driver without a device; needs g++"
    )


def add_launch_option(parser: argparse.ArgumentParser) -> None:
    """Add `--launch-s`."""
    parser.add_argument(
        "--launch-s", type=float, default=LAUNCH_S, help="seconds of a launch after which it hangs"
    )


@contextmanager
def opened_runner(arguments: argparse.Namespace) -> Iterator[RunnerClient]:
    """A runner as these arguments want it: `null`, and `launch_s` where they have it."""
    with tempfile.TemporaryDirectory() as folder:
        library = str(build_driver(Path(folder))) if arguments.null else LIBRARY
        flush = FAKE_FLUSH_BYTES if arguments.null else 0
        launch_s = getattr(arguments, "launch_s", LAUNCH_S)
        with RunnerClient(library, launch_s=launch_s, flush_bytes=flush) as runner:
            yield runner
