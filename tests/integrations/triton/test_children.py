"""Forked children: signals while they are forked, the dispatcher that forks them, and those that hang."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from forecast_autotune.records import Candidate, Config, Outcome
from forecast_integrations.triton.compile import children
from forecast_integrations.triton.compile.children import (
    HUNG_S,
    DispatchedTask,
    Dispatcher,
    ForkedChild,
    ForkedChildren,
    HungProcesses,
    deferred_signals,
    fork_process,
    fork_task,
)
from forecast_integrations.triton.compile.pool import ForkPool
from forecast_integrations.triton.problem.call import KernelCall
from tests.waiting import eventually, is_running

Handler = Callable[[int, FrameType | None], Any]
ROUNDS = 20


class OutOfTimeError(Exception):
    """What the handlers here raise."""


def give_up(number: int, frame: FrameType | None) -> None:
    raise OutOfTimeError


def noting_handler() -> tuple[list[int], Handler]:
    """The signals that came, and a handler that notes them there."""
    came: list[int] = []
    return came, lambda number, frame: came.append(number)


@pytest.fixture
def handle() -> Iterator[Callable[[signal.Signals, Handler], None]]:
    """Sets handlers, until the end of the test."""
    before: dict[signal.Signals, Any] = {}

    def set_handler(number: signal.Signals, handler: Handler) -> None:
        before.setdefault(number, signal.getsignal(number))
        signal.signal(number, handler)

    yield set_handler
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    for number, handler in before.items():
        signal.signal(number, handler)


def forked(run: Callable[[], int] = lambda: 0) -> int:
    """The pid of a child that leaves with the status that `run` returns."""
    pid = fork_process()
    if pid == 0:
        os._exit(run())
    return pid


def _be_interrupted() -> None:
    if INTERRUPTED:
        signal.raise_signal(signal.SIGALRM)


INTERRUPTED: list[bool] = []
"""Not empty: a signal comes in the middle of each fork."""
os.register_at_fork(after_in_parent=_be_interrupted)


def test_what_a_handler_raises_during_a_fork_is_raised_and_no_pipe_stays_open(
    handle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python itself prints it and goes on."""
    handle(signal.SIGALRM, give_up)
    monkeypatch.setattr(sys.modules[__name__], "INTERRUPTED", [True])
    with pytest.raises(OutOfTimeError):
        forked()
    before = open_descriptors()
    with pytest.raises(OutOfTimeError):
        fork_task(lambda pipe: None, 0)
    assert open_descriptors() <= before


def test_no_fork_leaves_loggings_lock_taken(handle: Any) -> None:
    """It would where a handler raises in the hook that lets the lock go, and no other thread could log any more."""
    handle(signal.SIGALRM, give_up)
    for _ in range(ROUNDS):
        with contextlib.suppress(OutOfTimeError):
            signal.setitimer(signal.ITIMER_REAL, 0.0005)  # less than a fork takes
            os.waitpid(forked(), 0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        name = f"{__name__}.{time.monotonic_ns()}"
        free = threading.Thread(target=logging.getLogger, args=(name,), daemon=True)
        free.start()
        free.join(30.0)
        assert not free.is_alive()


def test_the_child_of_a_fork_that_a_handler_ends_is_gone(
    handle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle(signal.SIGALRM, give_up)
    fork, pids = os.fork, []

    def noted() -> int:
        pid = fork()
        if pid:
            signal.raise_signal(signal.SIGALRM)
            pids.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", noted)
    with pytest.raises(OutOfTimeError):
        forked(lambda: time.sleep(20.0) or 0)
    (pid,) = pids
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)


def test_a_fork_waits_for_those_of_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Python 3.12 and later filelock 4 refuses a fork while another thread forks or takes a lock."""
    fork, refusals = os.fork, [RuntimeError("os.fork is unsafe while another thread forks")] * 3

    def refused_at_first() -> int:
        if refusals:
            raise refusals.pop()
        return fork()

    monkeypatch.setattr(os, "fork", refused_at_first)
    _, status = os.waitpid(forked(), 0)
    assert (status, refusals) == (0, [])


def test_all_handlers_are_back_where_one_raises(handle: Any) -> None:
    came, note = noting_handler()
    handle(signal.SIGUSR1, give_up)
    handle(signal.SIGUSR2, note)

    def fail_to_fork() -> None:
        with deferred_signals():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR2)
            raise OSError("no process can be had")

    with pytest.raises(OutOfTimeError):
        fail_to_fork()
    assert came == [signal.SIGUSR2]
    assert (signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)) == (give_up, note)


def test_a_child_has_the_programs_handlers_and_none_of_its_signals(handle: Any) -> None:
    came, note = noting_handler()
    handle(signal.SIGUSR1, note)
    with deferred_signals():
        signal.raise_signal(signal.SIGUSR1)
        pid = os.fork()
    if pid == 0:
        os._exit(0 if signal.getsignal(signal.SIGUSR1) is note and not came else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert came == [signal.SIGUSR1]


HERE = os.getpid()
PATIENCE_S = 20.0


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def children_of(pid: int) -> list[int]:
    """Direct children, zombies included."""
    try:
        return [int(c) for f in Path(f"/proc/{pid}/task").glob("*/children") for c in f.read_text().split()]
    except OSError:
        return []


def sleep_noted(folder: str) -> None:
    """Sleep, with a grandchild that sleeps as well; a file per pid tells of both."""
    grandchild = subprocess.Popen(["sleep", "600"])
    for role, pid in (("child", os.getpid()), ("grandchild", grandchild.pid)):
        (Path(folder) / f"{role}-{pid}").touch()
    time.sleep(600)


def noted(folder: Path, count: int, role: str = "*") -> list[int]:
    """So many pids, once they are all there."""
    assert eventually(lambda: len(list(folder.glob(f"{role}-*"))) >= count)
    return [int(file.name.rpartition("-")[2]) for file in folder.glob(f"{role}-*")]


def fail(_: object) -> None:
    raise RuntimeError("not for the parent")


def memory_score(pid: int) -> int:
    """The higher, the earlier the kernel ends a process where memory runs out."""
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


TASKS: dict[str, Callable[[Any], object]] = {
    "pid": lambda _: [os.getpid(), os.getppid()],
    "memory scores": lambda _: [memory_score(os.getpid()), memory_score(os.getppid())],
    "repeat": lambda count: "x" * count,
    "square": lambda value: value * value,
    "sleep": sleep_noted,
    "exit": os._exit,
    "signal": lambda which: os.kill(os.getpid(), which),
    "fail": fail,
}


class Owner:
    """A dispatcher with the children of one owner."""

    def __init__(self, workers: int) -> None:
        self.dispatcher = Dispatcher(TASKS, workers)
        self.children = ForkedChildren()

    def start(self, task: str, argument: object = None) -> None:
        direct = partial(TASKS[task], argument)
        self.children.start((task, argument), direct, DispatchedTask(self.dispatcher, task, argument))

    def ended(self) -> dict[Any, tuple[ForkedChild, int]]:
        """All children that run now, by tag, when they have ended."""
        found: dict[Any, tuple[ForkedChild, int]] = {}
        limit = time.monotonic() + PATIENCE_S
        while len(self.children) and time.monotonic() < limit:
            for child, status in self.children.finished(1.0)[0]:
                found[child.tag] = child, status
        return found

    def answers(self) -> dict[Any, Any]:
        return {tag: child.answer() for tag, (child, _) in self.ended().items()}

    def close(self) -> None:
        self.children.close()
        self.dispatcher.close()


@pytest.fixture(params=[1, 16], ids=["one process", "four processes"])
def owner(request: pytest.FixtureRequest) -> Iterator[Owner]:
    """Leaves neither a process nor a descriptor behind, whatever a test did."""
    descriptors, children = open_descriptors(), set(children_of(HERE))
    made = Owner(request.param)
    yield made
    made.close()
    assert eventually(lambda: set(children_of(HERE)) <= children)
    assert open_descriptors() == descriptors


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each fork of this process."""
    seen: list[int] = []
    fork = os.fork

    def counted() -> int:
        if os.getpid() == HERE:
            seen.append(len(seen))
        return fork()

    monkeypatch.setattr(os, "fork", counted)
    return seen


def test_sixteen_children_cost_their_process_one_fork(owner: Owner, forks: list[int]) -> None:
    for i in range(16):
        owner.start("square", i)
    assert owner.answers() == {("square", i): i * i for i in range(16)}
    assert len(forks) == 1


def test_a_lack_of_memory_ends_children_then_the_dispatcher_and_last_the_program(owner: Owner) -> None:
    own = memory_score(HERE)
    owner.start("memory scores")
    child, dispatcher = owner.answers()["memory scores", None]
    assert child > dispatcher > own == memory_score(HERE)


def test_long_answers_come_whole_and_besides_others(owner: Owner) -> None:
    sizes = [100_000, *range(1_000_000, 1_000_012), 1, 0, 70_000]
    for size in sizes:
        owner.start("repeat", size)
    time.sleep(0.3)  # more than a socket holds waits for this process
    owner.start("square", 3)
    assert owner.answers() == {**{("repeat", size): "x" * size for size in sizes}, ("square", 3): 9}


def test_the_dead_are_told_from_the_living_with_their_status(owner: Owner) -> None:
    owner.start("exit", 3)
    owner.start("signal", int(signal.SIGALRM))
    owner.start("fail")
    owner.start("square", 2)
    found = owner.ended()
    assert found["square", 2][0].answer() == 4
    assert os.waitstatus_to_exitcode(found["exit", 3][1]) == 3
    assert os.WTERMSIG(found["signal", signal.SIGALRM][1]) == signal.SIGALRM
    assert os.waitstatus_to_exitcode(found["fail", None][1]) == 1
    with pytest.raises(ValueError, match="Expecting value"):
        found["fail", None][0].answer()


def test_a_killed_child_dies_with_what_it_started_and_no_other_does(owner: Owner, tmp_path: Path) -> None:
    for name in ("kept", "killed"):
        (tmp_path / name).mkdir()
        owner.start("sleep", str(tmp_path / name))
    kept, killed = noted(tmp_path / "kept", 2), noted(tmp_path / "killed", 2)
    (child,) = (c for c in owner.children.running() if c.tag[1].endswith("killed"))
    owner.children.kill(child)
    assert eventually(lambda: not any(map(is_running, killed)))
    assert all(map(is_running, kept))
    owner.start("square", 5)
    while (found := owner.children.finished(1.0)[0]) == []:
        pass
    assert [child.answer() for child, _ in found] == [25]
    assert len(owner.children) == 1


@pytest.mark.parametrize("is_busy", [False, True])
def test_closing_does_not_wait_for_the_dispatcher(owner: Owner, tmp_path: Path, is_busy: bool) -> None:
    owner.start("square", 2)
    assert owner.answers() == {("square", 2): 4}
    at_work = []
    if is_busy:
        owner.start("sleep", str(tmp_path))
        at_work = noted(tmp_path, 2)
    pid = owner.dispatcher._pid
    os.kill(pid, signal.SIGSTOP)
    owner.close()
    assert is_running(pid)
    os.kill(pid, signal.SIGCONT)
    assert eventually(lambda: pid not in children_of(HERE))
    assert eventually(lambda: not any(map(is_running, at_work)))


def test_closing_ends_children_and_what_they_started(owner: Owner, tmp_path: Path) -> None:
    for _ in range(3):
        owner.start("sleep", str(tmp_path))
    pids = noted(tmp_path, 6)
    owner.dispatcher.close()
    assert eventually(lambda: not any(map(is_running, pids)))


def test_a_dispatcher_that_is_killed_is_noticed_and_done_without(
    owner: Owner, tmp_path: Path, forks: list[int]
) -> None:
    owner.start("sleep", str(tmp_path))
    pids = noted(tmp_path, 2)
    os.kill(owner.dispatcher._pid, signal.SIGKILL)
    ((child, status),) = owner.ended().values()
    assert os.WTERMSIG(status) == signal.SIGKILL
    with pytest.raises(ValueError, match="Expecting value"):
        child.answer()
    assert eventually(lambda: sum(map(is_running, pids)) <= 1), "what a compiler has started may finish"
    owner.start("pid")
    ((_, parent),) = owner.answers().values()
    assert parent == HERE
    assert len(forks) == 2
    for pid in pids:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_dispatcher_that_cannot_be_forked_is_done_without(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, tries = os.fork, iter(range(10))

    def refuse_once() -> int:
        if next(tries) == 0:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", refuse_once)
    owner.start("pid")
    ((_, parent),) = owner.answers().values()
    assert parent == HERE


@pytest.mark.parametrize("where", ["everywhere", "in the dispatcher"])
def test_children_that_cannot_be_forked_are_refused(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fork, before = os.fork, open_descriptors()

    def refuse() -> int:
        if where == "everywhere" or os.getpid() != HERE:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", refuse)
    listed = [Candidate(Config.of({"BLOCK": n})) for n in range(3)]
    call: Any = KernelCall(None, (), {}, dict.fromkeys(listed))  # type: ignore[arg-type]
    with contextlib.closing(ForkPool(lambda candidate: None, 2, 5.0, call=call)) as pool:
        pool.schedule(listed)
        found = [pool.next() for _ in listed]
    assert {(r.candidate, r.outcome) for r in found if r} == {(c, Outcome.INFRASTRUCTURE) for c in listed}
    assert all("no child could be started" in result.message for result in found if result)
    assert open_descriptors() == before


def test_an_argument_that_cannot_be_sent_is_used_here(owner: Owner) -> None:
    owner.children.start(
        "lambda", os.getppid, DispatchedTask(owner.dispatcher, "square", lambda: "not to be pickled")
    )
    assert owner.answers() == {"lambda": HERE}


def test_a_fork_of_the_owner_neither_ends_nor_keeps_the_dispatcher(owner: Owner) -> None:
    owner.start("square", 2)
    assert owner.answers() == {("square", 2): 4}
    pid = os.fork()
    if pid == 0:
        owner.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    owner.start("square", 3)
    assert owner.answers() == {("square", 3): 9}


_SCRIPT = """
import os, signal, sys
sys.path.insert(0, {folder!r})
{before}
from test_children import Owner
owner = Owner(16)
try:
    for _ in range(4):
        owner.start("sleep", sys.argv[1])
    while True:
        owner.children.finished(1.0)
except KeyboardInterrupt:
    pass
finally:
    owner.close()
"""


@pytest.mark.parametrize("before", ["", "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_child_outlives_its_owner(how: signal.Signals, before: str, tmp_path: Path) -> None:
    script = _SCRIPT.format(folder=str(Path(__file__).parent), before=before)
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    pids = noted(tmp_path, 8)
    dispatched = noted(tmp_path, 4, "child")
    process.send_signal(how)
    code = process.wait(PATIENCE_S)
    assert code == (-how if how == signal.SIGKILL else 0)
    assert eventually(lambda: not any(map(is_running, dispatched)))
    if how == signal.SIGINT:
        assert eventually(lambda: not any(map(is_running, pids))), (
            "it could end what its children have started"
        )
    for pid in filter(is_running, pids):
        os.kill(pid, signal.SIGKILL)


def test_a_host_that_ignores_children_hears_how_they_ended(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        owner.start("signal", int(signal.SIGALRM))
        owner.start("square", 4)
        found = owner.ended()
        owner.close()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert found["square", 4][0].answer() == 16
    assert os.WTERMSIG(found["signal", signal.SIGALRM][1]) == signal.SIGALRM


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells what a process computes")
BUSY = "while True: pass"
LISTED = [Candidate(Config.of({"BLOCK": n})) for n in range(2)]
LOCK = threading.Lock()


@contextlib.contextmanager
def group(code: str) -> Iterator[int]:
    """A process group that runs this Python."""
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        yield process.pid
    finally:
        subprocess.run(["pkill", "-KILL", "-g", str(process.pid)], check=False)
        process.wait()


def compiled(
    compile_one: Callable[[Candidate], object],
    while_hung: Callable[[], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both of `LISTED` compile by a pool of which a child hangs; `while_hung` is called before each wait."""
    monkeypatch.setattr(children, "HUNG_S", 1.0)
    monkeypatch.setattr(children, "_WATCH_S", 0.1)
    call: Any = KernelCall(None, (), {}, dict.fromkeys(LISTED))  # type: ignore[arg-type]
    with contextlib.closing(ForkPool(compile_one, 2, 60.0, call=call)) as pool:
        pool.while_waiting = while_hung
        pool.schedule(LISTED)
        found = [pool.next() for _ in LISTED]
    assert {result.candidate for result in found if result} == set(LISTED)
    assert all(result and result.outcome is None and not result.doubtful for result in found)


@LINUX
def test_what_sleeps_hangs_and_what_it_waits_for_may_be_at_work() -> None:
    now = 0.0
    hung = HungProcesses(lambda: now)
    waiting = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"
    with group("import time; time.sleep(600)") as asleep, group(BUSY) as busy, group(waiting) as waits:
        leaders = [asleep, busy, waits]
        settled = eventually(lambda: _sleeps_alone(leaders))
        assert settled, "the one has begun to sleep, and the others to work"
        assert not hung.among(leaders)
        now = HUNG_S - 1
        assert not hung.among(leaders)
        now = HUNG_S
        assert hung.among(leaders) == {asleep}
        assert not hung.among([busy]), "what is no longer asked about is forgotten"
        assert not hung.among(leaders)


def _sleeps_alone(leaders: list[int]) -> bool:
    before = children.processor_ticks(leaders)
    time.sleep(0.1)
    after = children.processor_ticks(leaders)
    same = [before[one] is not None and before[one] == after[one] for one in leaders]
    return same == [True, False, False]


@LINUX
def test_a_lock_that_was_held_at_the_fork_costs_seconds_and_no_candidate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    LOCK.acquire()

    def compile_one(candidate: Candidate) -> None:
        if candidate == LISTED[0]:
            with LOCK:
                pass

    def release() -> None:
        if LOCK.locked():
            LOCK.release()  # the dispatcher is forked by now, and its children have the lock for ever

    compiled(compile_one, release, monkeypatch)


@LINUX
def test_a_dispatcher_that_hangs_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "run_dispatcher", lambda *_: time.sleep(600))
    compiled(lambda _: None, lambda: None, monkeypatch)
