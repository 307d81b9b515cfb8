"""Forked children that each do one task and answer in JSON, and the dispatcher that forks them for a large process.

A child shares nothing with its parent but a copy of its memory: the parent's interpreter stays free, and a task that
aborts or hangs costs only its child. A child never touches the device, and leaves by `os._exit`, because the parent's
buffers and device context are not its own to tear down.

A fork blocks its caller while the page tables are copied: 20 ms in a process that has loaded CUDA and torch. A
decision with sixteen compilations would wait for a third of a second; its dispatcher forks them meanwhile. Children
share the dispatcher's memory as it was when it was forked, at the first request.

A dispatcher receives `("start", number, task, argument)` and `("kill", number)`, and sends `Answer`s; both ends run the
same program, as one is the other's fork.
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
    """Run the program's handlers of signals after the block, in the order of the signals.

    Python runs a handler at the next line of Python in the main thread. During a fork that line may be in a hook, such
    as those by which `logging` takes and releases its lock. A handler's exception there, also `KeyboardInterrupt`, is
    printed and dropped, and the lock stays taken: every other thread that logs or imports then waits for ever.

    Raises a handler's exception after the block. Does nothing in other threads, where no handler runs. A process that
    is forked within the block has the program's handlers, and drops signals from before the fork.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        pending.append(number)

    handlers = {n: handler for n in _SIGNALS if callable(handler := signal.getsignal(n))}
    process = os.getpid()
    first_error: BaseException | None = None
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
                    if signal.getsignal(number) is note:  # else a hook of the fork has set another handler
                        signal.signal(number, handler)
                while pending:
                    signal.raise_signal(pending.pop(0))
                break
            except BaseException as error:  # raised by a handler: the others must be restored, too
                first_error = first_error or error
        if first_error is not None:
            raise first_error


_PR_SET_PDEATHSIG = 1
_FIRST_TO_END = 1000
"""The kernel ends a process of this score before any other. A dispatcher comes after its children."""
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_SHOWN_WARNINGS = mmap.mmap(-1, 1 << 16)
"""A byte for each hash of a warning, set by the first child that shows it: all forks share this memory."""


def fork_process() -> int:
    """As `os.fork`, without Python 3.12's warning of threads; no handler of a signal runs within it.

    A fork blocks its caller while the page tables are copied: about 10 ms per 2 GB in use. Raises `OSError` when no
    process can be had, and a handler's exception, after the child was ended.
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
        # All threads share the filters of warnings, and the main thread's must not be reset here.
        return _fork_in_turn()
    with warnings.catch_warnings():
        # The child runs no other thread's code, and leaves by `os._exit`.
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
    """Fork a child that calls `write(pipe)` and leaves; returns its pid and the pipe's other end, to be read.

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
    """Set up a process just forked by `parent`: in a group to kill, to die with the parent, nicer by `nice`."""
    gc.disable()
    _show_warnings_once()
    os.setpgid(0, 0)  # so that a kill reaches ptxas as well
    signal.set_wakeup_fd(-1)  # a signal here must not wake an event loop of the parent's
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    with contextlib.suppress(OSError):
        # Where memory runs out, the kernel ends the largest process: that is the program, unless others volunteer.
        Path("/proc/self/oom_score_adj").write_text(str(_FIRST_TO_END if nice else _FIRST_TO_END // 2))
    if nice:
        with contextlib.suppress(OSError):
            os.nice(nice)


def _show_warnings_once() -> None:
    """Hide warnings in this child that another child has shown: each compiles a config of the same kernel."""
    show = warnings.showwarning
    if getattr(show, "func", None) is not _show_first:  # a child's child has it already
        warnings.showwarning = partial(_show_first, show)


def _show_first(
    show: Callable[..., None],
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    *rest: Any,
    **keywords: Any,
) -> None:
    line = f"{filename}:{lineno}: {category.__name__}: {message}".encode(errors="replace")
    slot = zlib.crc32(line) % len(_SHOWN_WARNINGS)
    if not _SHOWN_WARNINGS[slot]:
        _SHOWN_WARNINGS[slot] = 1
        show(message, category, filename, lineno, *rest, **keywords)


def kill_group(pid: int) -> None:
    """End a child that was not waited for, and everything that it has started. Never raises."""
    for target in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            target(pid, signal.SIGKILL)


HUNG_S = 10.0
"""Seconds of sleep after which a process counts as hung."""
_BUSY = "RDTt"
"""Linux' states of a process that runs, waits for a disk, or was stopped."""


class HungProcesses:
    """Finds process groups that hang, by comparing their times from look to look; on Linux only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._last: dict[int, tuple[int, float]] = {}
        """Processor ticks of each group, and the time since which they have not changed."""

    def among(self, leaders: Iterable[int]) -> set[int]:
        """Return the leaders whose groups have slept for `HUNG_S` seconds. To be called about once a second."""
        now = self._clock()
        ticks_by_leader = processor_ticks(leaders)
        before, self._last = self._last, {}
        for leader, ticks in ticks_by_leader.items():
            same = ticks is not None and leader in before and before[leader][0] == ticks
            self._last[leader] = (-1 if ticks is None else ticks, before[leader][1] if same else now)
        return {leader for leader, (_, since) in self._last.items() if now - since >= HUNG_S}


def processor_ticks(leaders: Iterable[int]) -> dict[int, int | None]:
    """Return the clock ticks that each process group has used; None for one that works at this moment."""
    ticks_by_leader: dict[int, int | None] = dict.fromkeys(leaders, 0)
    if not ticks_by_leader:
        return ticks_by_leader
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            stat = file.read_text()
        except OSError:
            continue  # it has ended meanwhile
        state, _, group, *rest = stat.rpartition(")")[2].split()
        pid = int(file.parent.name)
        leader = pid if pid in ticks_by_leader else int(group)
        if (ticks := ticks_by_leader.get(leader)) is not None:
            ticks_by_leader[leader] = None if state in _BUSY else ticks + sum(map(int, rest[8:12]))
    return ticks_by_leader


_REAP_S = 0.05
"""Seconds between two looks for children that have answered: they take milliseconds to free their memory."""
_WATCH_S = 1.0
"""Seconds between two looks for children that hang."""


@dataclass(frozen=True)
class Answer:
    """The end of one child."""

    number: int
    text: str = ""
    """The task's result in JSON; empty where the child died without one, or never lived."""
    status: int = 0
    """The wait status of a child without a text."""
    refusal: str = ""
    """Why no child could be started; empty where one was."""
    hung: bool = False
    """Whether the child was killed as hung."""


def run_dispatcher(
    ends: Sequence[Connection], tasks: Mapping[str, Callable[[Any], object]], nice: int
) -> None:
    """Fork the dispatcher's process into as many as there are ends, and serve one end in each.

    Returns, in each process, when the other end was shut down and all children are gone.
    """
    # All processes so far fork at the same time: two rounds make four.
    first, last, pids = 0, len(ends), list[int]()
    while last - first > 1:
        middle = (first + last + 1) // 2
        parent = os.getpid()
        pid = fork_process()
        if pid == 0:
            settle_in(parent, 0)
            first, pids = middle, []
        else:
            pids.append(pid)
            last = middle
    for i, end in enumerate(ends):
        if i != first:
            end.close()
    # A host may let the kernel reap its children; here their wait status is needed.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _DispatcherLoop(ends[first], tasks, nice).run()
    for pid in pids:
        os.waitpid(pid, 0)


class _DispatcherLoop:
    """One process of a dispatcher."""

    def __init__(self, end: Connection, tasks: Mapping[str, Callable[[Any], object]], nice: int) -> None:
        self._end, self._tasks, self._nice = end, tasks, nice
        self._children: dict[int, tuple[int, Connection]] = {}
        """Pid and pipe of each running child, by its number."""
        self._ending: set[int] = set()
        """Pids of children that have answered or were killed."""
        self._hung = HungProcesses()
        self._watch_at = time.monotonic() + _WATCH_S

    def run(self) -> None:
        """Serve until the other end was shut down; then end all children."""
        with contextlib.suppress(OSError, EOFError):  # the other end is closed
            self._end.send(None)  # the greeting
            while True:
                self._serve()
        pids = self._ending | {pid for pid, _ in self._children.values()}
        for pid in pids:
            kill_group(pid)
        for pid in pids:
            os.waitpid(pid, 0)

    def _serve(self) -> None:
        """Wait for messages and handle them. Raises `OSError` or `EOFError` when the other end is gone."""
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
            hung_pids = self._hung.among([pid for pid, _ in self._children.values()])
            for number in [n for n, (pid, _) in self._children.items() if pid in hung_pids]:
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
        if text:  # without waiting for its end: its memory takes milliseconds to free
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
    """Return the answer of a child; empty where it has died without one."""
    try:
        return pipe.recv_bytes().decode()
    except (OSError, EOFError):
        return ""


NICE = 5
"""Niceness of children: the main process times launches meanwhile."""
_STARTS_PER_PROCESS = 4
_MAX_PROCESSES = 4
"""A dispatcher of one process starts sixteen children one after the other. Four become four in the time of two
forks, and start four each."""
_CLOSE_S = 5.0
"""Seconds for a dispatcher to end its children; it needs milliseconds."""


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
        """Ends that have sent nothing so far, not even a greeting."""
        self._forked_at = 0.0
        self._outstanding: set[int] = set()
        self._answers: dict[int, Answer] = {}
        self._count = 0
        self._is_closed = False

    def start(self, task: str, argument: object) -> int | None:
        """Start a child for the task; returns the number by which to `take` its answer.

        None where that is impossible: the dispatcher is gone or cannot be forked, or the argument cannot be pickled.
        """
        number = self._count
        try:
            request = pickle.dumps(("start", number, task, argument))
        except Exception:  # objects of the user's may fail in any way
            return None
        if self._is_closed:
            return None
        if not self._pid:
            try:
                self._fork()
            except OSError:
                self._is_closed = True
                return None
        self._count += 1
        if not self._send(number, request):
            return None
        self._outstanding.add(number)
        return number

    def kill(self, number: int) -> None:
        """End this child and everything that it has started; it has no answer then."""
        self._answers.pop(number, None)
        if number in self._outstanding:
            self._outstanding.discard(number)
            self._send(number, pickle.dumps(("kill", number)))

    def take(self, number: int) -> Answer | None:
        """Return the answer of this child, once; None while there is none."""
        return self._answers.pop(number, None)

    @property
    def ends(self) -> Sequence[Connection]:
        """Connections that become readable when `listen` has messages to read."""
        return self._ends

    def listen(self) -> None:
        """Read messages, without waiting. All children of a dispatcher that died are dead as well."""
        if not all(map(self._hear, self._ends)):
            self._give_up()
            return
        if self._silent and time.perf_counter() > self._forked_at + HUNG_S:
            self._give_up(hung=True)

    def close(self) -> None:
        """End all children, and the dispatcher. Returns at once: freeing their memory takes a tenth of a second."""
        self._is_closed = True
        is_copy = self._owner != os.getpid()  # a fork's: the dispatcher is its parent's
        for end in self._ends:
            if not is_copy:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(end.fileno())) as twin:
                    twin.shutdown(socket.SHUT_RDWR)  # works even if another fork of this process has a copy
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
            for own, other in pairs:
                own.close()
                other.close()
            raise
        if pid == 0:
            code = 1
            try:
                settle_in(parent, 0)
                for own, _ in pairs:
                    own.close()
                run_dispatcher([other for _, other in pairs], self._tasks, self._nice)
                code = 0
            finally:
                os._exit(code)
        for _, other in pairs:
            other.close()
        self._pid, self._owner, self._forked_at = pid, parent, time.perf_counter()
        self._ends = [own for own, _ in pairs]
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
        """Read an end's messages; returns whether the process at the other end lives."""
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
        """Close a dispatcher of which a process died or hangs; outstanding requests get an answer that says so."""
        for end in self._ends:
            self._hear(end)
        numbers, answers = self._outstanding, self._answers
        self._outstanding = set()
        self._answers = {}
        self.close()
        self._answers = answers | {n: Answer(n, status=signal.SIGKILL, hung=hung) for n in numbers}


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
    """A task by its name in a dispatcher, with its argument."""

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
    """The dispatcher's number of the child."""
    text: str = ""
    refusal: str = ""
    """Why the dispatcher could start no child; empty where it could."""
    hung: bool = False
    """Whether the dispatcher has killed the child as hung, or hangs itself."""

    def answer(self) -> Any:
        """Return the task's result. Raises `ValueError` when the child died without one."""
        return json.loads(self.text)


class ForkedChildren:
    """The running children of one owner, who must `close` it."""

    def __init__(self, nice: int = NICE) -> None:
        """`nice` is added to the niceness of the process that starts the children."""
        self._nice = nice
        self._running: list[ForkedChild] = []
        self._ending: set[int] = set()
        """Processes that have answered and free their memory, which takes milliseconds."""

    def __len__(self) -> int:
        return len(self._running)

    def start(self, tag: object, task: Callable[[], object], request: DispatchedTask | None = None) -> None:
        """Run `task` in a child; its result must be JSON-able. Raises `OSError` when none can be had.

        With a `request` for the same task its dispatcher starts the child, unless the dispatcher is gone.
        """
        if request is not None:
            number = request.dispatcher.start(request.name, request.argument)
            if number is not None:
                child = ForkedChild(tag, time.perf_counter(), dispatcher=request.dispatcher, number=number)
                self._running.append(child)
                return
        pid, pipe = fork_task(lambda pipe: pipe.send_bytes(json.dumps(task()).encode()), self._nice)
        self._running.append(ForkedChild(tag, time.perf_counter(), pid, pipe))

    def finished(self, timeout_s: float) -> tuple[list[tuple[ForkedChild, int]], bool]:
        """Listen for at most `timeout_s`; returns the children that ended, with their wait status, and whether
        any message came."""
        self._ending = {pid for pid in self._ending if _wait_status(pid, os.WNOHANG) is None}
        results = self._dispatcher_results()
        children_by_pipe = {child.pipe: child for child in self._running if child.pipe is not None}
        dispatchers = {id(d): d for child in self._running if (d := child.dispatcher) is not None}
        ends = [end for d in dispatchers.values() for end in d.ends]
        readable = wait([*children_by_pipe, *ends], 0 if results else timeout_s)
        for child in (children_by_pipe[pipe] for pipe in readable if pipe in children_by_pipe):
            assert child.pipe is not None
            child.text = _text_of(child.pipe)
            results.append((child, self._forget(child)))
        for dispatcher in dispatchers.values():
            dispatcher.listen()
        results += self._dispatcher_results()
        return results, bool(readable or results)

    def running(self) -> list[ForkedChild]:
        """Return the children that have not ended, as far as their messages were read."""
        return list(self._running)

    def overdue(self, seconds: float) -> list[ForkedChild]:
        """Return the children that have been running for longer than `seconds`."""
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
        """Kill running children. A dispatcher is closed by its own owner."""
        for child in list(self._running):
            self.kill(child)
        while self._ending:
            _wait_status(self._ending.pop())

    def _dispatcher_results(self) -> list[tuple[ForkedChild, int]]:
        """Return children whose end their dispatchers have reported, with their wait status."""
        results = []
        for child in list(self._running):
            if child.dispatcher is None or (answer := child.dispatcher.take(child.number)) is None:
                continue
            child.text, child.refusal, child.hung = answer.text, answer.refusal, answer.hung
            self._running.remove(child)
            results.append((child, answer.status))
        return results

    def _forget(self, child: ForkedChild) -> int:
        self._running.remove(child)
        if child.pipe is not None:
            child.pipe.close()
        if child.text:
            self._ending.add(child.pid)
            return 0
        return _wait_status(child.pid) or 0


def _wait_status(pid: int, options: int = 0) -> int | None:
    """Return the wait status of a child that has ended; None while it runs."""
    try:
        ended_pid, status = os.waitpid(pid, options)
    except ChildProcessError:  # a host that reaps every child itself (SIGCHLD ignored)
        return 0
    return status if ended_pid else None


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
        while len(children) and (remaining_s := until - time.perf_counter()) > 0:
            for child, _ in children.finished(remaining_s)[0]:
                with suppress(ValueError):
                    answers[child.tag] = child.answer()
    finally:
        children.close()
        dispatcher.close()
    return answers
