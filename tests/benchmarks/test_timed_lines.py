"""Lines of a process with their seconds."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.lib.processes.timed_lines import TimedLines

PROGRAM = "import time; print('one', flush=True); time.sleep(0.3); print('two'); print('three')"


def test_lines_come_in_order_and_when_they_were_printed() -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    printed = TimedLines(process.stdout)
    assert process.wait() == 0
    (first, one), (second, two), (third, three) = printed.all()
    assert (one, two, three) == ("one", "two", "three")
    assert first + 0.2 < second <= third <= printed.seconds


def test_a_stream_that_is_not_there_has_no_lines() -> None:
    assert TimedLines(None).all() == []
