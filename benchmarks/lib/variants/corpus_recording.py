"""Recording a pool of sources on the GPUs of a machine: one process compiles, one per GPU times.

Kernels are compiled in the order of the pool, always on all cores; whichever GPU is free takes the next one
that is ready. Lines are on disk as they come, and whole: what the end of the time cuts off is missing, and
the same command goes on there. A source that hangs or breaks the device's context is recorded as that and
costs its process; another one goes on with the rest.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from benchmarks.lib.environment import environment
from benchmarks.lib.processes import child_processes
from benchmarks.lib.processes.kernel_processes import RESTARTS, append_line, read_lines
from benchmarks.lib.result_files import say
from benchmarks.lib.variants.corpus_preparing import PreparedKernel, read_pool
from benchmarks.lib.variants.corpus_timing import least_times

SILENT_PROCESSES = 3
"""Processes in a row of one GPU that end before they were ready, after which the GPU is left alone."""


def pool_digest(path: Path) -> str:
    """sha256 of a pool's lines, its beginning."""
    return hashlib.sha256(gzip.decompress(path.read_bytes())).hexdigest()[:16]


class Recording:
    """The file, and what is left to be recorded."""

    def __init__(
        self, a: Namespace, pool: list[PreparedKernel], out: TextIO, lines: list[dict[str, Any]]
    ) -> None:
        self._out, self._lock = out, threading.Lock()
        self._pool = {one.kernel: one for one in pool}
        self._lines: dict[str, list[dict[str, Any]]] = {}
        done: dict[str, set[str]] = {}
        for line in lines:
            self._lines.setdefault(line.get("case", ""), []).append(line)
            if "outcome" in line:
                done.setdefault(line["case"], set()).add(line["source"])
        self.left = {
            one.kernel: [s.name for s in one.sources if s.name not in done.get(one.kernel, ())]
            for one in pool
        }
        self.left = {kernel: names for kernel, names in self.left.items() if names}
        self.deadline = time.monotonic() + float(a.seconds)
        self.ended = 0
        self.timings = 0

    def late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self.deadline

    def keep(self, line: dict[str, Any]) -> None:
        """Put a line of a timing process on disk; it is one kernel's."""
        kernel = line["case"]
        with self._lock:
            if self.late():
                return  # the file may be on its way already
            append_line(self._out, line)
            self._lines.setdefault(kernel, []).append(line)
            self.timings += sum(isinstance(cell, list) for cell in line.get("ms", ()))
            if "outcome" in line:
                self.left[kernel].remove(line["source"])
                self.ended += 1

    def order(self, kernel: str, ahead: Path) -> dict[str, Any]:
        """What a timing process is told of a kernel."""
        best = least_times(self._pool[kernel], self._lines.get(kernel, []))
        return {"kernel": kernel, "ahead": str(ahead), "sources": self.left[kernel], "best": best}


@dataclass
class LineProcess:
    """A child whose lines are awaited, each for a while, and never beyond the end of the recording."""

    process: subprocess.Popen[str]
    arrived: queue.Queue[str | None] = field(default_factory=queue.Queue)

    @classmethod
    def start(cls, command: list[str], variables: Mapping[str, str]) -> LineProcess:
        """Start one; its errors go to ours."""
        one = cls(
            subprocess.Popen(
                command,
                env=dict(variables),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
        )
        threading.Thread(target=one._listen, daemon=True).start()
        return one

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            self.arrived.put(text)
        self.arrived.put(None)

    def tell(self, order: Mapping[str, Any]) -> bool:
        """Write a line to it; false where it has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except OSError:
            return False
        return True

    def next_line(self, limit_s: float) -> dict[str, Any] | None:
        """Its next line; None where it has ended, or says nothing for too long."""
        end = time.monotonic() + limit_s
        while True:
            try:
                text = self.arrived.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return None
            if text is None:
                return None
            # Compilers print what they abort on, in braces too.
            if text.startswith('{"case": '):
                found: dict[str, Any] = json.loads(text)
                return found

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()


class GpuLane:
    """One GPU: takes kernels that are compiled, and has them timed."""

    def __init__(self, recording: Recording, start: Callable[[], LineProcess], limit_s: float) -> None:
        self._recording, self._start, self._limit_s = recording, start, limit_s
        self._child: LineProcess | None = None
        self._silent = 0

    def serve(self, kernel: str, ahead: Path) -> bool:
        """Have the sources of a kernel timed; false where this GPU answers no more."""
        recording, silent = self._recording, 0
        for _ in range(RESTARTS + 1):
            if recording.late() or not recording.left[kernel] or silent > 1:
                break
            child = self.begin()
            if child is None:
                return False
            if not child.tell(recording.order(kernel, ahead)):
                self.close()
                continue
            begun = self._listen(child)
            if begun is None:
                break  # served
            self.close()
            silent += not begun
            if begun and not recording.late():
                detail = f"hung for {self._limit_s:g} s, or took the process down"
                recording.keep({"case": kernel, "source": begun, "outcome": "crash", "detail": detail})
        return True

    def begin(self) -> LineProcess | None:
        """A process that is ready, started if need be; None where the GPU answers no more."""
        while self._child is None and self._silent < SILENT_PROCESSES and not self._recording.late():
            child = self._start()
            if child.next_line(self._within(90.0)) is None:
                child.end()
                self._silent += 1
                say("a timing process ended before it was ready")
                continue
            self._child, self._silent = child, 0
        return self._child

    def _within(self, seconds: float) -> float:
        return max(0.0, min(seconds, self._recording.deadline - time.monotonic()))

    def _listen(self, child: LineProcess) -> str | None:
        """Keep a kernel's lines; None when it is served, else the source that was begun and not ended."""
        begun = ""
        while (line := child.next_line(self._within(self._limit_s))) is not None:
            if "begin" in line:
                begun = line["begin"]
                continue
            self._recording.keep(line)
            if "outcome" in line:
                begun = ""
            if "served" in line:
                if "failed" in line:
                    say(f"{line['case']}: {line['failed']}")
                return None
        return begun

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.end()
            self._child = None


def record_pool(script: str, a: Namespace) -> int:
    """Record what is not in `a.out` yet, for `a.seconds`; returns 1 where nothing could be recorded.

    `a` has `record` (the pool), `out`, `gpus`, `workers`, `seconds`, `limit`, `only` and `null`. Raises
    `ValueError` for a file that was recorded of another pool.
    """
    begin = time.monotonic()
    a.out.parent.mkdir(parents=True, exist_ok=True)
    lines = read_lines(a.out)
    head = {"origin": environment(0), "null": a.null, "pool": pool_digest(a.record)}
    if any(line["pool"] != head["pool"] or line["null"] != head["null"] for line in lines if "pool" in line):
        raise ValueError(f"{a.out} was recorded of another pool: give another file")
    only = set(filter(None, a.only.split(",")))
    pool = [one for one in read_pool(a.record) if not only or one.kernel in only]
    with (
        a.out.open("a", encoding="utf-8") as out,
        tempfile.TemporaryDirectory(prefix="sources-", ignore_cleanup_errors=True) as scratch,
    ):
        append_line(out, head)
        recording = Recording(a, pool, out, lines)
        say(f"{len(recording.left)} kernels, {sum(map(len, recording.left.values()))} sources")
        _record(script, a, recording, Path(scratch))
        seconds = time.monotonic() - begin
        left = sum(map(len, recording.left.values()))
        say(f"{recording.ended} sources, {recording.timings} timings in {seconds:.0f} s; {left} sources left")
    return int(recording.ended == 0 and left > 0)


def _record(script: str, a: Namespace, recording: Recording, scratch: Path) -> None:
    """Compile in one process and time in others until all is done or the time is over."""
    ready: queue.Queue[str | None] = queue.Queue()
    variables = child_processes.child_environment(scratch)
    wanted = scratch / "left.json"
    wanted.write_text(json.dumps(recording.left), encoding="utf-8")
    given = {
        "pool": str(a.record.resolve()),
        "ahead": str(scratch),
        "workers": a.workers,
        "left": str(wanted),
    }
    compiler = LineProcess.start(child_processes.child_command(script, a, "compile", given), variables)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = visible.split(",")[: a.gpus] if visible else [str(i) for i in range(a.gpus)]

    def starter(device: str) -> Callable[[], LineProcess]:
        more = {**variables, "CUDA_VISIBLE_DEVICES": device}
        command = child_processes.child_command(script, a, "time", {"pool": given["pool"]})
        return lambda: LineProcess.start(command, more)

    def serve(device: str) -> None:
        lane = GpuLane(recording, starter(device), a.limit)
        lane.begin()
        while (kernel := ready.get()) is not None and not recording.late():
            if not lane.serve(kernel, scratch / f"{kernel}.json"):
                ready.put(kernel)  # for another GPU
                say(f"GPU {device} does not answer")
                break
            say(f"{kernel}: timed; {recording.ended} sources, {recording.timings} timings")
        lane.close()

    threads = [threading.Thread(target=serve, args=(device,), daemon=True) for device in devices]
    for thread in threads:
        thread.start()
    while not recording.late() and any(t.is_alive() for t in threads):
        line = compiler.next_line(max(0.0, min(600.0, recording.deadline - time.monotonic())))
        if line is None:
            break
        say(f"{line['case']}: {line['compiled']} compiled, {line['failed']} failed, {line['core_s']} core s")
        ready.put(line["case"])
    compiler.end()
    for _ in threads:
        ready.put(None)
    for thread in threads:
        thread.join(max(1.0, recording.deadline - time.monotonic() + 5.0))
