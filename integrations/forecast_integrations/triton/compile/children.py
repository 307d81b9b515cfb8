"""Forked children that each do one task and answer in JSON, and the dispatcher that forks them for a large process.

A child shares nothing with its parent but a copy of its memory: the parent's interpreter stays free, and a task that
aborts or hangs costs only its child. A child never touches the device, and leaves by `os._exit`, because the parent's
buffers and device context are not its own to tear down.

A fork holds its caller up while the page tables are copied: 20 ms in a process that has loaded CUDA and torch. A
decision with sixteen compilations would stand still for a third of a second; its dispatcher forks them while it goes
on. Children share the dispatcher's memory as it was when it was forked, at the first request.

To a dispatcher go `("start", number, task, argument)` and `("kill", number)`; both ends run the same program, one being
the other's fork. From it come `Answer`s.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import mmap
import os
import pickle
import signal
import socket
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

_SIGNALS = tuple(sorted(map(int, signal.valid_signals())))


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Have the program's handlers of signals run after the block, in the order in which the signals came.

    Python runs a handler at the next line of Python in the main thread. While it forks, that is a hook, such as the
    one by which `logging` takes its lock and lets it go. A handler's exception there, `KeyboardInterrupt` as well, is
    printed and forgotten, and the lock stays taken: every other thread that logs or imports then waits for ever.

    Raises what a handler raises, after the block. Does nothing in other threads, where no handler runs. In a process
    forked within the block the handlers are the program's again, and earlier signals are the parent's affair.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        pending.append(number)

    handlers = {n: handler for n in _SIGNALS if callable(handler := signal.getsignal(n))}
    process = os.getpid()
    raised: BaseException | None = None
    try:
        for number in handlers:
            signal.signal(number, note)
        yield
    finally:
        if os.getpid() != process:
            pending.clear()
        while True:
            try:
                for number, handler in handlers.items():
                    if signal.getsignal(number) is note:  # else a hook of the fork has put another there
                        signal.signal(number, handler)
                while pending:
                    signal.raise_signal(pending.pop(0))
                break
            except BaseException as error:  # of a handler that is back: the others have to be, too
                raised = raised or error
        if raised is not None:
            raise raised


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_SHOWN_WARNINGS = mmap.mmap(-1, 1 << 16)
"""A byte for each hash of a warning, set by the first child that shows it: all forks share this memory."""


def fork_process() -> int:
    """As `os.fork`, without Python 3.12's warning of threads; no handler of a signal runs within it.

    A fork holds its caller up while the page tables are copied: about 10 ms per 2 GB in use. Raises `OSError` when no
    process can be had, and what a handler raises: then the child is ended.
    """
    pid = -1
    try:
        with deferred_signals():
            pid = _fork()
    except BaseException:
        if pid == 0:
            os._exit(1)
        if pid > 0:
            kill_group(pid)
            os.waitpid(pid, 0)
        raise
    return pid


def _fork() -> int:
    if threading.current_thread() is not threading.main_thread():
        # Filters of warnings are one for all threads: those of the main thread are not to be put back here.
        return _fork_in_turn()
    with warnings.catch_warnings():
        # What was forked runs no other thread's code, and leaves by `os._exit`.
        warnings.simplefilter("ignore", DeprecationWarning)
        return _fork_in_turn()


def _fork_in_turn() -> int:
    """As `os.fork`, after the forks of other threads: an audit hook may refuse two at once, as filelock 4's does."""
    ends = time.monotonic() + 1.0
    while True:
        try:
            return os.fork()
        except RuntimeError:
            if time.monotonic() > ends:
                raise
        time.sleep(0.001)


def fork_task(write: Callable[[Connection], None], nice: int) -> tuple[int, Connection]:
    """Fork a child that calls `write(pipe)` and leaves; its pid and the pipe's other end, for the caller to read.

    The child leaves with status 0, or 1 if `write` raised. Raises `OSError` when no process can be had.
    """
    inward, outward = Pipe(duplex=False)
    parent = os.getpid()
    try:
        pid = fork_process()
    except BaseException:
        inward.close()
        outward.close()
        raise
    if pid == 0:
        code = 1
        try:
            inward.close()
            settle_in(parent, nice)
            write(outward)
            code = 0
        finally:
            os._exit(code)
    outward.close()
    return pid, inward


def settle_in(parent: int, nice: int) -> None:
    """In a process just forked by `parent`: be in reach of a kill, die with the parent, yield to it by `nice`."""
    gc.disable()
    _show_warnings_once()
    os.setpgid(0, 0)  # so that a kill reaches ptxas as well
    signal.set_wakeup_fd(-1)  # an event loop of the parent's is not to wake up for a signal here
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    if nice:
        with contextlib.suppress(OSError):
            os.nice(nice)


def _show_warnings_once() -> None:
    """Have this child show no warning that another has shown: each compiles a config of the same kernel."""
    show = warnings.showwarning
    if getattr(show, "func", None) is not _show_first:  # unless it was forked by one that has settled in
        warnings.showwarning = partial(_show_first, show)


def _show_first(
    show: Callable[..., None],
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    *rest: Any,
    **named: Any,
) -> None:
    line = f"{filename}:{lineno}: {category.__name__}: {message}".encode(errors="replace")
    slot = zlib.crc32(line) % len(_SHOWN_WARNINGS)
    if not _SHOWN_WARNINGS[slot]:
        _SHOWN_WARNINGS[slot] = 1
        show(message, category, filename, lineno, *rest, **named)


def kill_group(pid: int) -> None:
    """End a child that was not waited for, and everything that it has started. Never raises."""
    for target in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            target(pid, signal.SIGKILL)


HUNG_S = 10.0
"""Seconds of sleep after which a process counts as hung."""
_BUSY = "RDTt"
"""States in which Linux has a process that runs, waits for a disk, or was stopped by somebody."""


class HungProcesses:
    """Finds those that hang among leaders of process groups, from one look to the next. Only Linux tells."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._last: dict[int, tuple[int, float]] = {}
        """Processor ticks of each group, and since when they are so many."""

    def among(self, leaders: Iterable[int]) -> set[int]:
        """Leaders whose groups have slept since `HUNG_S` seconds ago. To be asked about once a second."""
        now = self._clock()
        used = processor_ticks(leaders)
        before, self._last = self._last, {}
        for leader, ticks in used.items():
            same = ticks is not None and leader in before and before[leader][0] == ticks
            self._last[leader] = (-1 if ticks is None else ticks, before[leader][1] if same else now)
        return {leader for leader, (_, since) in self._last.items() if now - since >= HUNG_S}


def processor_ticks(leaders: Iterable[int]) -> dict[int, int | None]:
    """Clock ticks that each process group has computed for; None where it is at work at this moment."""
    used: dict[int, int | None] = dict.fromkeys(leaders, 0)
    if not used:
        return used
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            stat = file.read_text()
        except OSError:
            continue  # it has ended meanwhile
        state, _, group, *rest = stat.rpartition(")")[2].split()
        pid = int(file.parent.name)
        leader = pid if pid in used else int(group)
        if (ticks := used.get(leader)) is not None:
            used[leader] = None if state in _BUSY else ticks + sum(map(int, rest[8:12]))
    return used


_REAP_S = 0.05
"""Children that have answered take milliseconds to give their memory back; they are looked for so often."""
_WATCH_S = 1.0
"""Seconds between two looks for children that hang."""


@dataclass(frozen=True)
class Answer:
    """How one child ended."""

    number: int
    text: str = ""
    """The task's result in JSON; empty where the child died before it could say, or never lived."""
    status: int = 0
    """The wait status of a child without a text."""
    refusal: str = ""
    """Why no child could be started; empty where one was."""
    hung: bool = False
    """Whether it was ended for doing nothing."""


def run_dispatcher(
    ends: Sequence[Connection], tasks: Mapping[str, Callable[[Any], object]], nice: int
) -> None:
    """In the dispatcher's process: become as many processes as there are ends, and serve each end.

    Returns, in every one of them, when the other end was shut down and all children are gone.
    """
    # Those that exist fork side by side: two rounds make four.
    first, last, forked = 0, len(ends), list[int]()
    while last - first > 1:
        middle = (first + last + 1) // 2
        parent = os.getpid()
        pid = fork_process()
        if pid == 0:
            settle_in(parent, 0)
            first, forked = middle, []
        else:
            forked.append(pid)
            last = middle
    for i, end in enumerate(ends):
        if i != first:
            end.close()
    # A host may have its children reaped by the kernel; here their wait status is wanted.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _DispatcherLoop(ends[first], tasks, nice).run()
    for pid in forked:
        os.waitpid(pid, 0)


class _DispatcherLoop:
    """One process of a dispatcher."""

    def __init__(self, end: Connection, tasks: Mapping[str, Callable[[Any], object]], nice: int) -> None:
        self._end, self._tasks, self._nice = end, tasks, nice
        self._children: dict[int, tuple[int, Connection]] = {}
        """Pid and pipe of each that runs, by its number."""
        self._ending: set[int] = set()
        """Pids of children that have answered or were killed."""
        self._hung = HungProcesses()
        self._watch_at = time.monotonic() + _WATCH_S

    def run(self) -> None:
        """Serve until the other end was shut down; then end all children."""
        with contextlib.suppress(OSError, EOFError):  # nobody listens any more
            self._end.send(None)  # it has begun
            while True:
                self._serve()
        pids = self._ending | {pid for pid, _ in self._children.values()}
        for pid in pids:
            kill_group(pid)
        for pid in pids:
            os.waitpid(pid, 0)

    def _serve(self) -> None:
        """Wait for something to do and do it. Raises `OSError` or `EOFError` when the other end is gone."""
        numbers: dict[Any, int] = {pipe: number for number, (_, pipe) in self._children.items()}
        wait_s = _REAP_S if self._ending else _WATCH_S if numbers else None
        for ready in wait([self._end, *numbers], wait_s):
            if ready is self._end:
                self._obey(*pickle.loads(self._end.recv_bytes()))
            elif (number := numbers[ready]) in self._children:  # it was not killed in this round
                self._listen(number)
        self._ending = {pid for pid in self._ending if os.waitpid(pid, os.WNOHANG)[0] == 0}
        if time.monotonic() >= self._watch_at:
            self._watch_at = time.monotonic() + _WATCH_S
            hung = self._hung.among([pid for pid, _ in self._children.values()])
            for number in [n for n, (pid, _) in self._children.items() if pid in hung]:
                kill_group(self._forget(number))
                self._end.send(Answer(number, status=signal.SIGKILL, hung=True))

    def _obey(self, verb: str, number: int, *details: Any) -> None:
        if verb == "start":
            try:
                self._start(number, *details)
            except OSError as error:
                self._end.send(Answer(number, refusal=str(error)))
        elif number in self._children:
            kill_group(self._forget(number))

    def _start(self, number: int, task: str, argument: object) -> None:
        def answer(pipe: Connection) -> None:
            self._end.close()
            pipe.send_bytes(json.dumps(self._tasks[task](argument)).encode())

        self._children[number] = fork_task(answer, self._nice)

    def _listen(self, number: int) -> None:
        text = _text_of(self._children[number][1])
        pid = self._forget(number)
        if text:  # without waiting for its end: what it has used takes milliseconds to free
            self._end.send(Answer(number, text))
        else:
            self._ending.discard(pid)
            self._end.send(Answer(number, status=os.waitpid(pid, 0)[1]))

    def _forget(self, number: int) -> int:
        pid, pipe = self._children.pop(number)
        pipe.close()
        self._ending.add(pid)
        return pid


def _text_of(pipe: Connection) -> str:
    """The answer of a child; empty where it has died without one."""
    try:
        return pipe.recv_bytes().decode()
    except (OSError, EOFError):
        return ""


NICE = 5
"""Children yield to the main process, whose launches are being timed."""
_STARTS_PER_PROCESS = 4
_MAX_PROCESSES = 4
"""A dispatcher of one process starts sixteen children one after the other. Four become four in the time of two
forks, and start four each."""
_CLOSE_S = 5.0
"""Seconds that a dispatcher has for ending its children; it needs milliseconds."""


class Dispatcher:
    """Starts children that do one of the `tasks` each; its owner must `close` it.

    A task takes one argument, which can be pickled, and gives what JSON can hold.
    """

    def __init__(self, tasks: Mapping[str, Callable[[Any], object]], workers: int, nice: int = NICE) -> None:
        """About `workers` children run at once, and yield to this process by `nice`. Nothing is forked yet."""
        self._tasks, self._nice = tasks, nice
        self._processes = max(1, min(_MAX_PROCESSES, workers // _STARTS_PER_PROCESS))
        self._pid = 0
        self._owner = 0
        self._ends: list[Connection] = []
        self._silent: set[Connection] = set()
        """Ends from which nothing has come so far, not even a greeting."""
        self._forked_at = 0.0
        self._outstanding: set[int] = set()
        self._answers: dict[int, Answer] = {}
        self._count = 0
        self._closed = False

    def start(self, task: str, argument: object) -> int | None:
        """Have a child do the task; the number by which its answer is asked for.

        None where this dispatcher cannot do it: it is gone, cannot be forked, or the argument cannot be pickled.
        """
        number = self._count
        try:
            request = pickle.dumps(("start", number, task, argument))
        except Exception:  # objects of the user's may fail in any way
            return None
        if self._closed:
            return None
        if not self._pid:
            try:
                self._fork()
            except OSError:
                self._closed = True
                return None
        self._count += 1
        if not self._send(number, request):
            return None
        self._outstanding.add(number)
        return number

    def kill(self, number: int) -> None:
        """End this child and everything that it has started; its answer does not come."""
        self._answers.pop(number, None)
        if number in self._outstanding:
            self._outstanding.discard(number)
            self._send(number, pickle.dumps(("kill", number)))

    def take(self, number: int) -> Answer | None:
        """The answer of this child, once; None while there is none."""
        return self._answers.pop(number, None)

    @property
    def ends(self) -> Sequence[Connection]:
        """Connections that become readable when `listen` has something to hear."""
        return self._ends

    def listen(self) -> None:
        """Take in messages, without waiting. All children of a dispatcher that died are dead as well."""
        if not all(map(self._hear, self._ends)):
            self._give_up()
            return
        if self._silent and time.perf_counter() > self._forked_at + HUNG_S:
            self._give_up(hung=True)

    def close(self) -> None:
        """End all children, and the dispatcher. Returns at once: freeing their memory takes a tenth of a second."""
        self._closed = True
        is_copy = self._owner != os.getpid()  # a fork's: the dispatcher is its parent's
        for end in self._ends:
            if not is_copy:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(end.fileno())) as twin:
                    twin.shutdown(socket.SHUT_RDWR)  # heard even if another fork of this process holds a copy
            end.close()
        self._ends.clear()
        if is_copy:
            return
        self._silent.clear()
        self._outstanding.clear()
        self._answers.clear()
        pid, self._pid = self._pid, 0
        if pid:
            try:
                threading.Thread(target=_reap, args=(pid,), name="reap-dispatcher", daemon=True).start()
            except RuntimeError:  # the interpreter ends, or there is no room for another thread
                _reap(pid)

    def _fork(self) -> None:
        pairs: list[tuple[Connection, Connection]] = []
        parent = os.getpid()
        try:
            pairs.extend(Pipe() for _ in range(self._processes))
            pid = fork_process()
        except BaseException:
            for mine, other in pairs:
                mine.close()
                other.close()
            raise
        if pid == 0:
            code = 1
            try:
                settle_in(parent, 0)
                for mine, _ in pairs:
                    mine.close()
                run_dispatcher([other for _, other in pairs], self._tasks, self._nice)
                code = 0
            finally:
                os._exit(code)
        for _, other in pairs:
            other.close()
        self._pid, self._owner, self._forked_at = pid, parent, time.perf_counter()
        self._ends = [mine for mine, _ in pairs]
        self._silent = set(self._ends)

    def _send(self, number: int, request: bytes) -> bool:
        if not self._ends:
            return False
        try:
            self._ends[number % len(self._ends)].send_bytes(request)
        except OSError:
            self._give_up()
            return False
        return True

    def _hear(self, end: Connection) -> bool:
        """Whether the process at the other end lives."""
        try:
            while end.poll():
                answer: Answer | None = end.recv()
                self._silent.discard(end)
                if answer is not None and answer.number in self._outstanding:  # it was not killed meanwhile
                    self._outstanding.discard(answer.number)
                    self._answers[answer.number] = answer
        except (OSError, EOFError):
            return False
        return True

    def _give_up(self, *, hung: bool = False) -> None:
        """A process of the dispatcher's died or hangs: requests to it are lost, and the others are ended."""
        for end in self._ends:
            self._hear(end)
        lost, kept = self._outstanding, self._answers
        self._outstanding = set()
        self._answers = {}
        self.close()
        self._answers = kept | {number: Answer(number, status=signal.SIGKILL, hung=hung) for number in lost}


def _reap(pid: int) -> None:
    """Wait for a dispatcher that ends its children and then itself, and end it when it does not."""
    limit = time.perf_counter() + _CLOSE_S
    with contextlib.suppress(ChildProcessError):  # a host that reaps every child itself (SIGCHLD ignored)
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.perf_counter() > limit:
                kill_group(pid)
                os.waitpid(pid, 0)
                return
            time.sleep(0.001)


T = TypeVar("T")


@dataclass(frozen=True)
class DispatchedTask:
    """A task as a dispatcher knows it: by name, with its argument."""

    dispatcher: Dispatcher
    name: str
    argument: object = None


@dataclass(eq=False)
class ForkedChild:
    """One running child, and its answer."""

    tag: Any
    began: float
    pid: int = 0
    """0 where a dispatcher has forked it."""
    pipe: Connection | None = None
    dispatcher: Dispatcher | None = None
    number: int = -1
    """Its dispatcher's number for it."""
    text: str = ""
    refusal: str = ""
    """Why its dispatcher could start no child; empty where it could."""
    hung: bool = False
    """Whether its dispatcher has ended it for doing nothing, or hangs itself."""

    def answer(self) -> Any:
        """Return the task's result. Raises `ValueError` when the child died before it could say."""
        return json.loads(self.text)


class ForkedChildren:
    """The running children of one owner, who must `close` it."""

    def __init__(self, nice: int = NICE) -> None:
        """`nice` is how much further children yield than whoever starts them."""
        self._nice = nice
        self._running: list[ForkedChild] = []
        self._ending: set[int] = set()
        """Processes that have answered and free their memory, which takes milliseconds."""

    def __len__(self) -> int:
        return len(self._running)

    def start(
        self, tag: object, task: Callable[[], object], dispatched: DispatchedTask | None = None
    ) -> None:
        """Run `task` in a child; its result must be JSON-able. Raises `OSError` when none can be had.

        The same task as a dispatcher's is `dispatched` instead, unless the dispatcher is gone.
        """
        if dispatched is not None:
            number = dispatched.dispatcher.start(dispatched.name, dispatched.argument)
            if number is not None:
                child = ForkedChild(tag, time.perf_counter(), dispatcher=dispatched.dispatcher, number=number)
                self._running.append(child)
                return
        pid, pipe = fork_task(lambda pipe: pipe.send_bytes(json.dumps(task()).encode()), self._nice)
        self._running.append(ForkedChild(tag, time.perf_counter(), pid, pipe))

    def finished(self, timeout_s: float) -> tuple[list[tuple[ForkedChild, int]], bool]:
        """Listen for at most `timeout_s`: children that ended, with their wait status, and whether
        anybody said anything."""
        self._ending = {pid for pid in self._ending if _reaped(pid, os.WNOHANG) is None}
        ended = self._dispatched_answers()
        forked = {child.pipe: child for child in self._running if child.pipe is not None}
        dispatchers = {id(d): d for child in self._running if (d := child.dispatcher) is not None}
        ends = [end for d in dispatchers.values() for end in d.ends]
        readable = wait([*forked, *ends], 0 if ended else timeout_s)
        for child in (forked[pipe] for pipe in readable if pipe in forked):
            assert child.pipe is not None
            child.text = _text_of(child.pipe)
            ended.append((child, self._forget(child)))
        for dispatcher in dispatchers.values():
            dispatcher.listen()
        ended += self._dispatched_answers()
        return ended, bool(readable or ended)

    def running(self) -> list[ForkedChild]:
        """Children that have not ended, or have not been heard to."""
        return list(self._running)

    def overdue(self, seconds: float) -> list[ForkedChild]:
        """Children that have been running for longer than that."""
        limit = time.perf_counter() - seconds
        return [child for child in self._running if child.began < limit]

    def kill(self, child: ForkedChild) -> None:
        """End a child and everything it has started."""
        if child.dispatcher is not None:
            child.dispatcher.kill(child.number)
            self._running.remove(child)
            return
        kill_group(child.pid)
        self._forget(child)

    def close(self) -> None:
        """Kill what still runs. A dispatcher is closed by its own owner."""
        for child in list(self._running):
            self.kill(child)
        while self._ending:
            _reaped(self._ending.pop())

    def _dispatched_answers(self) -> list[tuple[ForkedChild, int]]:
        """Children whose dispatchers have heard of their end, with their wait status."""
        ended = []
        for child in list(self._running):
            if child.dispatcher is None or (answer := child.dispatcher.take(child.number)) is None:
                continue
            child.text, child.refusal, child.hung = answer.text, answer.refusal, answer.hung
            self._running.remove(child)
            ended.append((child, answer.status))
        return ended

    def _forget(self, child: ForkedChild) -> int:
        self._running.remove(child)
        if child.pipe is not None:
            child.pipe.close()
        if child.text:
            self._ending.add(child.pid)
            return 0
        return _reaped(child.pid) or 0


def _reaped(pid: int, options: int = 0) -> int | None:
    """The wait status of a child that has ended; None while it has not."""
    try:
        ended, status = os.waitpid(pid, options)
    except ChildProcessError:  # a host that reaps every child itself (SIGCHLD ignored)
        return 0
    return status if ended else None


def answers_of_children(
    answer: Callable[[Sequence[T]], object], shares: Sequence[Sequence[T]], timeout_s: float
) -> list[Any]:
    """Call `answer` on each share in a child of its own; returns the results as JSON has them.

    None for a share whose child cannot be had, dies, or has not answered after `timeout_s` seconds.
    """
    answers: list[Any] = [None] * len(shares)
    children = ForkedChildren()
    dispatcher = Dispatcher({"share": lambda i: answer(shares[i])}, len(shares))
    until = time.perf_counter() + timeout_s
    try:
        for i, share in enumerate(shares):
            with suppress(OSError):
                children.start(i, partial(answer, share), DispatchedTask(dispatcher, "share", i))
        while len(children) and (left := until - time.perf_counter()) > 0:
            for child, _ in children.finished(left)[0]:
                with suppress(ValueError):
                    answers[child.tag] = child.answer()
    finally:
        children.close()
        dispatcher.close()
    return answers
