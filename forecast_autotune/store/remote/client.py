"""A process's side of a remote store: its requests, its offers, and its limits on waiting.

No server is contacted here: a daemon thread passes JSON to and from a worker process (`worker`). A tuner's
measurements go into a queue of bounded size and from there, in batches, to the worker; a full queue drops
what is newest, which the store on disk has anyway. A question waits for at most `wait_s`; after one that was
answered too late, no other waits until the remote store is quick again. A failure costs one warning:
the worker is ended, and nothing is asked of the remote store for a while.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forecast_autotune.store.files import StoreNotes
from forecast_autotune.store.remote.backends import VARIABLE

QUEUE_BYTES = 4 * 1024 * 1024
"""The most bytes that wait to be written."""
BATCH_S = 0.25
"""How long a row waits for others before it is sent."""
BATCH_BYTES = 64 * 1024
"""The most bytes of one message: making it takes the interpreter's lock from all for a tenth of a millisecond."""
DOZE_S = 5.0
"""Without news for so long, the thread sleeps until it is woken."""
MAX_ANSWERS = 64
"""Most late answers that are kept for the next request."""
START_S, ANSWER_S = 20.0, 6.0
"""Seconds until the worker is ready, and until it answers, before it is ended."""
PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0
"""How long nothing is asked after a failure; twice as long after each further one."""
MAX_MESSAGE_BYTES = 1024 * 1024
"""The most bytes of an answer that is read."""
EXIT_S = 1.0
"""Seconds that the end of a program waits until its measurements are handed to the worker."""

WORKER = (
    *(sys.executable, "-P", "-c"),
    # A core that the program wants is the program's: first of all, as loading a client takes a second.
    "import os; os.nice(10); from forecast_autotune.store.remote.backends import main; raise SystemExit(main())",
)
"""Its argument is the descriptor of its end of the connection."""


class WorkerError(Exception):
    """The worker is gone, too slow, or sends a malformed answer."""


class RemoteError(WorkerError):
    """The remote store failed, by its worker's report."""


@dataclass
class RemoteCounts:
    """Counts of a client's calls, for tests and reports."""

    asked: int = 0
    answered: int = 0
    """In time."""
    sent: int = 0
    """Rows that the remote store took."""
    dropped: int = 0
    """Rows that it did not get."""
    failures: int = 0


@dataclass
class _Queue:
    """Rows that wait to be written: callers append without a lock, and the thread alone takes them."""

    offered: deque[tuple[tuple[str, ...], list[bytes]]] = field(default_factory=deque)
    put_bytes: int = 0
    """That were offered and not dropped, ever."""
    taken_bytes: int = 0
    """That were sent, ever."""
    since: float | None = None
    """When the thread saw the oldest of them."""

    @property
    def size(self) -> int:
        return self.put_bytes - self.taken_bytes

    def take(self) -> dict[tuple[str, ...], list[str]]:
        """The oldest rows by entry, up to `BATCH_BYTES` of them and the end of what was offered together."""
        batch: dict[tuple[str, ...], list[str]] = {}
        end = self.taken_bytes + BATCH_BYTES
        while self.offered and self.taken_bytes < end:
            name, lines = self.offered.popleft()
            self.taken_bytes += sum(map(len, lines))
            batch.setdefault(name[:-1], []).extend(line.decode("ascii") for line in lines)
        self.since = None
        return batch


class RemoteClient:
    """One remote store, shared by all threads of a process.

    Args:
        address: as in FORECAST_AUTOTUNE_REMOTE.
        notes: is told of the first thing that goes wrong.
        wait_s: the most seconds that `ask` takes.
        command: what starts a worker, for tests.
        pause_s: how long nothing is asked after a failure.
    """

    def __init__(
        self,
        address: str,
        notes: StoreNotes,
        wait_s: float,
        *,
        command: Sequence[str] = WORKER,
        pause_s: float = PAUSE_S,
    ) -> None:
        self.address, self.wait_s = address, wait_s
        self.counts = RemoteCounts()
        self._notes, self._command, self._pause_s = notes, command, pause_s
        self._failed_s = pause_s
        self._reset()
        _CLIENTS.add(self)

    def _reset(self) -> None:
        self._news = threading.Condition()
        self._queue = _Queue()
        self._questions: OrderedDict[tuple[str, ...], None] = OrderedDict()
        self._answers: OrderedDict[tuple[str, ...], list[bytes]] = OrderedDict()
        self._prompt = True
        """Whether the last answer came within `wait_s`."""
        self._silent_until = 0.0
        self._thread: threading.Thread | None = None
        self._worker: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._requests = 0
        self._busy = False
        self._closing = False
        self._flushing = False
        self._dozing = True
        """Whether the thread has to be woken for what is offered."""

    # --- methods for a program's own threads ---

    def start(self) -> None:
        """Start the worker, so that the first question does not wait for that."""
        with self._news:
            self._awaken()

    def offer(self, entry: Sequence[str], problem_id: str, lines: Sequence[bytes]) -> None:
        """Queue rows of a problem for the worker. Takes microseconds, whatever the state of the remote store."""
        name = (*entry, problem_id)
        size = sum(map(len, lines))
        queue = self._queue
        if queue.size + size > QUEUE_BYTES or self._closing:
            self.counts.dropped += len(lines)
            return
        queue.put_bytes += size
        queue.offered.append((name, list(lines)))
        if self._dozing:
            with self._news:
                self._awaken()

    def ask(self, entry: Sequence[str], problem_id: str) -> list[bytes] | None:
        """Lines that the remote store holds of a problem; None where it does not say so in time."""
        name = (*entry, problem_id)
        with self._news:
            if name not in self._answers:
                if self._closing or time.monotonic() < self._silent_until:
                    return None
                self.counts.asked += 1
                self._questions[name] = None
                if len(self._questions) > MAX_ANSWERS:
                    self._questions.popitem(last=False)
                self._awaken()
                if self._prompt:
                    self._prompt = self._news.wait_for(lambda: name not in self._questions, self.wait_s)
            result = self._answers.pop(name, None)
            self.counts.answered += result is not None
            return result

    def flush(self, timeout_s: float) -> bool:
        """Wait until all offers are written; whether they are. For commands and tests."""
        with self._news:
            self._flushing = True
            self._awaken()
            is_written = self._news.wait_for(lambda: not self._queue.offered and not self._busy, timeout_s)
            self._flushing = False
            return is_written

    def close(self, timeout_s: float = EXIT_S) -> None:
        """Hand on what is queued, and leave; the worker writes it and ends by itself."""
        with self._news:
            thread, self._closing = self._thread, True
            self._news.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _awaken(self) -> None:
        if self._thread is None and not self._closing:
            self._thread = threading.Thread(target=self._serve, name="forecast-autotune-remote", daemon=True)
            self._thread.start()
        self._news.notify_all()

    # --- methods of the daemon thread ---

    def _serve(self) -> None:
        try:
            self._ready()
        except WorkerError as error:
            self._fail(error)
        while True:
            with self._news:
                self._wait_for_work()
                if self._closing and not self._queue.offered:
                    break
                if time.monotonic() < self._silent_until:
                    if self._closing:
                        break
                    self._drop_questions()
                    continue
                question = next(iter(self._questions), None)
                batch = self._queue.take() if question is None else {}
                self._busy = True
            try:
                if question is not None:
                    self._get(question)
                elif batch:
                    self._put(batch)
            except WorkerError as error:
                self._fail(error)
                self.counts.dropped += sum(map(len, batch.values()))
            finally:
                with self._news:
                    self._busy = False
                    self._news.notify_all()
        self._end_worker(kill=False)

    def _wait_for_work(self) -> None:
        """Sleep until there is work; check for new offers now and then."""
        last_news = time.monotonic()
        while True:
            if self._queue.offered:
                last_news = time.monotonic()
                self._queue.since = self._queue.since or last_news
            if self._has_work():
                return
            # Set before the last check of the queue, so that no later offer is overlooked.
            self._dozing = self._queue.since is None and time.monotonic() > last_news + DOZE_S
            if not (self._dozing and self._queue.offered):
                self._news.wait(None if self._dozing else BATCH_S)
            self._dozing = False

    def _has_work(self) -> bool:
        if self._closing or self._questions:
            return True
        now, since = time.monotonic(), self._queue.since
        if now < self._silent_until or since is None:
            return False
        return self._flushing or self._queue.size >= BATCH_BYTES or now >= since + BATCH_S

    def _get(self, name: tuple[str, ...]) -> None:
        begin = time.monotonic()
        answer = self._request({"do": "get", "entry": name[:-1], "problem": name[-1]})
        lines = answer.get("lines")
        if not isinstance(lines, list) or not all(isinstance(line, str) and line.isascii() for line in lines):
            raise WorkerError("it does not speak the protocol")
        with self._news:
            self._prompt = time.monotonic() - begin <= self.wait_s
            self._answers[name] = [line.encode("ascii") for line in lines]
            if len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
            self._questions.pop(name, None)
            self._failed_s = self._pause_s

    def _put(self, batch: dict[tuple[str, ...], list[str]]) -> None:
        # Once the program ends nobody waits for an answer: the worker goes on for a while by itself.
        self._request({"do": "put", "rows": list(batch.items())}, needs_answer=not self._closing)
        self.counts.sent += sum(map(len, batch.values()))

    def _ready(self) -> None:
        if self._worker is None:
            self._request({"do": "ready"}, START_S)

    def _request(
        self, message: dict[str, Any], timeout_s: float = ANSWER_S, *, needs_answer: bool = True
    ) -> dict[str, Any]:
        connection = self._connection or self._open_worker()
        self._requests += 1
        try:
            connection.send_bytes(json.dumps({**message, "id": self._requests}).encode("ascii"))
            if not needs_answer:
                return {}
            if not connection.poll(timeout_s):
                raise WorkerError("it did not answer in time")
            answer = json.loads(connection.recv_bytes(MAX_MESSAGE_BYTES))
        except (EOFError, OSError) as error:
            raise WorkerError(f"it is gone ({error or 'end of file'})") from error
        except (ValueError, RecursionError) as error:
            raise WorkerError("it does not speak the protocol") from error
        if not isinstance(answer, dict) or answer.get("id") != self._requests:
            raise WorkerError("it does not speak the protocol")
        if "error" in answer:
            raise RemoteError(str(answer["error"])[:200])
        return answer

    def _open_worker(self) -> Connection:
        package = str(Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, VARIABLE: self.address, "FORECAST_AUTOTUNE": "0", "PYTHONPATH": path}
        here, there = multiprocessing.Pipe()
        try:
            self._worker = subprocess.Popen(
                [*self._command, str(there.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                env=environment,
                start_new_session=True,  # Ctrl-C is for the program; its measurements are still written
            )
        except (OSError, ValueError) as error:
            here.close()
            raise WorkerError(f"no process can be started for it ({error})") from error
        finally:
            there.close()
        self._connection = here
        return here

    def _end_worker(self, *, kill: bool) -> None:
        worker, self._worker = self._worker, None
        connection, self._connection = self._connection, None
        if worker is None:
            return
        with contextlib.suppress(OSError):
            if kill:
                worker.kill()
        if connection is not None:
            connection.close()
        # A worker that was not ended may still be writing: it ends by itself, soon after this process.
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(None if kill else 0.2)
        worker.returncode = 0 if worker.returncode is None else worker.returncode

    def _fail(self, error: WorkerError) -> None:
        if not isinstance(error, RemoteError):
            # Else the worker is well, and to start one costs everybody a moment.
            self._end_worker(kill=True)
        with self._news:
            self.counts.failures += 1
            self._silent_until = time.monotonic() + self._failed_s
            self._failed_s = min(2 * self._failed_s, LONGEST_PAUSE_S)
            self._drop_questions()
        message = (
            f"the remote store {self.address} is not used for a while: {error}; tuning goes on without it"
        )
        with contextlib.suppress(Warning):  # where warnings are errors, this thread goes on all the same
            self._notes.add(message, topic="remote")

    def _drop_questions(self) -> None:
        self._questions.clear()
        self._news.notify_all()

    def _after_fork(self) -> None:
        # The worker and the connection are the parent's. Closed, so that the worker hears of the parent's end.
        if self._connection is not None:
            self._connection.close()
        if self._worker is not None:
            self._worker.returncode = 0
        self._reset()


_CLIENTS: weakref.WeakSet[RemoteClient] = weakref.WeakSet()


def _close_all() -> None:
    end = time.monotonic() + EXIT_S
    for client in list(_CLIENTS):
        client.close(max(0.0, end - time.monotonic()))


def _reset_all_after_fork() -> None:
    for client in list(_CLIENTS):
        client._after_fork()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all_after_fork)
