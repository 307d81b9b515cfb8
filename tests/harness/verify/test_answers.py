"""Answers of cells: whatever they hold, they are read or called forged; nothing else comes of them."""

from __future__ import annotations

import _thread
import copy
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forecast_harness.sandbox.api import CandidateFault, CellAnswer, Fault, TensorBytes
from forecast_harness.sandbox.wire import map_shared
from forecast_harness.targets.packs import Language, load_pack
from forecast_harness.targets.packs.schema import PackFormat
from forecast_harness.verify import launch_cell as inside
from forecast_harness.verify.cost_control import ComputeDevice
from forecast_harness.verify.launch_cell import note_question, process_report, remember_process
from forecast_harness.verify.launcher import Launcher, WindowedLauncher, open_launcher
from forecast_harness.verify.problem import DrawSpec, LaunchCase, problem_of

ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    3.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    10**400,
    -(10**400),
    1 << 63,
    "",
    "x" * 100_000,
    "\ud800",
    "\x1b[31m\0",
    [],
    [[]],
    {},
    {"t": None},
    [1] * 10_000,
    {"shape": [1 << 60], "dtype": "float32", "stride": [1], "alias": False},
    {"problem": 5},
    {"dtype": "float32", "shape": [2, 2], "stride": [-1, 1], "alias": False},
    {"dtype": "Tensor", "shape": [2], "stride": [1], "alias": False},
    {"dtype": "float64", "shape": [1 << 20] * 2, "stride": [1, 1], "alias": 0},
    json.loads("[" * 200 + "]" * 200),
]
NAMES = ["seconds", "outputs", "shape", "alias", "digests", "harness", "problem", "__class__", "x" * 5000]


def mutated(value: Any, rng: random.Random) -> Any:
    """The value with one to three places in it changed, dropped, repeated or added to."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places: list[tuple[Any, Any]] = []
        stack = [value]
        while stack:
            one = stack.pop()
            keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
            places += [(one, key) for key in keys]
            stack += [one[key] for key in keys]
        if not places or rng.random() < 0.03:
            return copy.deepcopy(rng.choice(ODD))
        where, key = rng.choice(places)
        kind = rng.randrange(4)
        if kind == 0:
            del where[key]
        elif kind == 1 and isinstance(where, dict):
            where[rng.choice(NAMES)] = copy.deepcopy(rng.choice(ODD))
        elif kind == 1:
            where.insert(key, copy.deepcopy(where[key]))
        else:
            where[key] = copy.deepcopy(rng.choice(ODD))
    return value


class Cell:
    """A cell in this process, whose answers to launches are changed on their way."""

    def __init__(self, rng: random.Random | None) -> None:
        self._rng, self._state = rng, {}  # type: ignore[var-annotated]

    def ask(
        self,
        entry: str,
        payload: Mapping[str, Any],
        arrays: Mapping[str, TensorBytes],
        *,
        descriptor: int | None = None,
    ) -> CellAnswer:
        question = entry.partition(":")[2]
        if question == "prepare":
            prepared = inside.prepare({**payload, "file": ""}, arrays, self._state)
            self._state["entry"] = lambda x: torch.softmax(x, -1)
            return prepared
        if descriptor is not None:
            data = map_shared(descriptor, payload["bytes"])
            self._state["shared"] = torch.frombuffer(data, dtype=torch.uint8)
            return CellAnswer({})
        answer: CellAnswer = getattr(inside, question)(payload, arrays, self._state)
        if self._rng is None:
            return answer
        value, given = mutated(answer.value, self._rng), dict(answer.arrays)
        if given and self._rng.random() < 0.3:
            name = self._rng.choice(list(given))
            kind, size = self._rng.choice([("uint8", 1), ("float32", 4)]), self._rng.randrange(9)
            odd = TensorBytes(kind[0], (size,), bytes(size * kind[1]))
            given[self._rng.choice([name, "out7", "out-1", "out", ""])] = odd
        return CellAnswer(value, given, 1e-3)

    def ask_in_window(self, entry: str, payload: Mapping[str, Any]) -> CellAnswer:
        answer = self.ask(entry, payload, {})
        return CellAnswer(answer.value, answer.arrays, 1e-3)

    def share(self, descriptor: int, size: int) -> None:
        self._copies = map_shared(descriptor, size)

    def copy_out(self, places: Sequence[tuple[int, int, int]]) -> int:
        missing = 0
        with Path("/proc/self/mem").open("rb", buffering=0) as memory:
            for address, size, offset in places:
                try:
                    memory.seek(address)
                    data = memory.read(size)
                except (OSError, OverflowError, ValueError):
                    data = b""
                missing += len(data) != size
                self._copies[offset : offset + len(data)] = data
        return missing

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...


def launcher_of(cell: Cell, windowed: bool) -> Launcher:
    rng = random.Random(0)
    result = (
        WindowedLauncher(cell, PackFormat.OWN, rng)
        if windowed
        else Launcher(cell, PackFormat.OWN, rng, "cpu")
    )
    result.prepare("solution.py", "run", Language.TORCH)
    return result


@pytest.fixture
def case(tmp_path: Path) -> LaunchCase:
    how = DrawSpec("normal", "contiguous", torch.Generator().manual_seed(0))
    return problem_of(load_pack("softmax"), tmp_path).case({"M": 4, "N": 8}, how)


@pytest.mark.parametrize("windowed", [False, True], ids=["asked", "in a window"])
def test_answers_that_are_not_changed_are_read(case: LaunchCase, windowed: bool) -> None:
    result = launcher_of(Cell(None), windowed)
    for ask in (result.launch, result.timed):
        reply = ask(case)
        result.read(reply)
        assert not reply.reasons
        assert not result.changed_since(reply)
        assert case.check(reply.tensors)[0] is None


@pytest.mark.parametrize("windowed", [False, True], ids=["asked", "in a window"])
def test_changed_answers_are_read_or_forged(case: LaunchCase, windowed: bool) -> None:
    """1,500 of each: a reply with or without reasons, or a forgery; no other exception, whatever was changed."""
    rng = random.Random(1)
    results: list[CandidateFault] = []
    refused = 0
    cell = Cell(rng)
    result = launcher_of(cell, windowed)
    for _ in range(1500):
        try:
            reply = result.launch(case)
            refused += bool(reply.reasons) or case.check(reply.tensors)[0] is not None
            result.changed_since(reply)
        except CandidateFault as fault:
            results.append(fault)
    assert {fault.fault for fault in results} == {Fault.FORGED}
    assert all(len(fault.detail) < 1000 for fault in results)
    assert len(results) > 1000
    assert refused > 0


@pytest.mark.parametrize("windowed", [False, True], ids=["asked", "in a window"])
def test_a_second_answer_of_less_than_the_first_is_forged(case: LaunchCase, windowed: bool) -> None:
    class Shortened(Cell):
        def ask(self, entry: str, payload: Mapping[str, Any], *more: Any, **options: Any) -> CellAnswer:
            answer = super().ask(entry, payload, *more, **options)
            if "again" in (payload.get("act"), entry.partition(":")[2]):
                return CellAnswer({**answer.value, "outputs": [{}], "places": []}, {}, answer.seconds)
            return answer

    result = launcher_of(Shortened(None), windowed)
    reply = result.launch(case)
    with pytest.raises(CandidateFault) as caught:
        result.changed_since(reply)
    assert caught.value.fault is Fault.FORGED


class StoppedCell(Cell):
    """Has windows, and is copied out of, while it is stopped alone; notes what it is asked otherwise."""

    def __init__(self) -> None:
        super().__init__(None)
        self.frozen = False
        self.log: list[str] = []
        self.seen: list[bytes] = []
        """The block at each question outside of windows."""

    @property
    def block(self) -> bytes:
        """Its begin."""
        return bytes(self._state["shared"][:4096].numpy())

    def ask(self, entry: str, payload: Mapping[str, Any], *more: Any, **options: Any) -> CellAnswer:
        assert not self.frozen, "a stopped cell answers nothing"
        self.log.append(entry.partition(":")[2])
        if "shared" in self._state:
            self.seen.append(self.block)
        return super().ask(entry, payload, *more, **options)

    def ask_in_window(self, entry: str, payload: Mapping[str, Any]) -> CellAnswer:
        assert self.frozen, "only a stopped cell has a window"
        self.log.append("window")
        answer = super().ask(entry, payload, {})
        return CellAnswer(answer.value, answer.arrays, 2e-4)

    def copy_out(self, places: Sequence[tuple[int, int, int]]) -> int:
        assert self.frozen, "only what is stopped holds still"
        return super().copy_out(places)

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False


def some_case(tmp_path: Path, rows: int = 4) -> LaunchCase:
    generator = torch.Generator().manual_seed(rows)
    how = DrawSpec("normal", "contiguous", generator, ComputeDevice("cpu"))
    return problem_of(load_pack("softmax"), tmp_path).case({"M": rows, "N": 32}, how)


def launcher(cell: StoppedCell) -> WindowedLauncher:
    result = WindowedLauncher(cell, PackFormat.OWN, random.Random(0))
    assert result.prepare("solution.py", "run", Language.TORCH) == []
    return result


def test_a_launch_is_read_out_of_the_stopped_cell(tmp_path: Path) -> None:
    cell, case = StoppedCell(), some_case(tmp_path)
    result = launcher(cell)
    reply = result.timed(case)
    assert (reply.reasons, reply.outputs) == ([], None)
    assert reply.wall_seconds == 2e-4
    result.read(reply)
    torch.testing.assert_close(reply.tensors[0], case.tensors["x"].softmax(-1))
    assert cell.frozen


def test_inputs_are_written_after_the_last_question_outside_a_window(tmp_path: Path) -> None:
    cell = StoppedCell()
    result = launcher(cell)
    for rows in (3, 4, 4, 4, 5):
        case = some_case(tmp_path, rows)
        result.timed(case)
        own = case.tensors["x"].numpy().tobytes()
        assert own in cell.block
    contents = [some_case(tmp_path, rows).tensors["x"].numpy().tobytes() for rows in (3, 4, 5)]
    # Each was shown first in a window: what was asked outside before that had not seen it.
    first = {rows: n for n, rows in enumerate((3, 4, 5))}
    assert cell.log.count("window") == 5
    assert not any(contents[first[5]] in seen for seen in cell.seen)


def test_what_is_met_again_is_told_before_the_window(tmp_path: Path) -> None:
    cell, case = StoppedCell(), some_case(tmp_path)
    result = launcher(cell)
    for _ in range(3):
        result.timed(case)
    assert [q for q in cell.log if q != "report"] == ["share", "prepare", "window", "arm", "window", "window"]


def test_an_earlier_launch_is_gone(tmp_path: Path) -> None:
    result = launcher(StoppedCell())
    first = result.timed(some_case(tmp_path))
    result.timed(some_case(tmp_path))
    with pytest.raises(ValueError, match="launch 1 cannot be read after launch 2"):
        result.read(first)


def test_more_memory_is_shared_when_a_block_needs_it(tmp_path: Path) -> None:
    cell = StoppedCell()
    result = launcher(cell)
    result.timed(some_case(tmp_path, 200_000))
    assert cell.log.count("share") == 2
    assert cell.frozen


def test_only_hosts_have_windows() -> None:
    from forecast_harness.verify.cost_control import PhaseTimer

    kinds = [
        open_launcher(StoppedCell(), PackFormat.OWN, random.Random(0), device, PhaseTimer()).windowed
        for device in ("cpu", "cuda")
    ]
    assert kinds == [True, False]


# --- what a cell notices ---


def threads_noticed(between: Callable[[], None]) -> list[str]:
    """What is reported after something happened between two questions."""
    state: dict[str, Any] = {}
    remember_process(state)
    process_report(state)
    between()
    note_question(state)
    results: list[str] = process_report(state)["threads"]
    return results


@contextmanager
def left_running(
    start: Callable[[Callable[[], None]], object], work: Callable[[threading.Event], None]
) -> Iterator[None]:
    end = threading.Event()
    start(lambda: work(end))
    try:
        yield
    finally:
        end.set()


def listed(run: Callable[[], None]) -> object:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def unlisted(run: Callable[[], None]) -> object:
    return _thread.start_new_thread(run, ())


def burn(seconds: float) -> None:
    """Wait until the process has had so many CPU seconds, all of them in other threads."""
    begin = time.process_time()
    while time.process_time() - begin < seconds:
        time.sleep(0.01)


def compute(end: threading.Event) -> None:
    while not end.is_set():
        sum(range(1000))


def wait(end: threading.Event) -> None:
    end.wait()


@pytest.mark.parametrize("start", [listed, unlisted])
def test_threads_that_compute_are_noticed(start: Callable[[Callable[[], None]], object]) -> None:
    shares = []

    def between() -> None:
        begin = time.process_time(), time.monotonic()
        burn(0.5)
        shares.append((time.process_time() - begin[0]) / (time.monotonic() - begin[1]))

    with left_running(start, compute):
        problem = threads_noticed(between)
    assert problem or shares[0] < 0.3, "others had the processor"
    assert all("CPU time" in text for text in problem)


@pytest.mark.parametrize("start", [listed, unlisted])
def test_threads_that_wait_are_not(start: Callable[[Callable[[], None]], object]) -> None:
    with left_running(start, wait):
        assert threads_noticed(lambda: time.sleep(0.3)) == []


def test_pools_of_libraries_are_not() -> None:
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(abs, range(-4, 0))) == [4, 3, 2, 1]
        assert threads_noticed(lambda: time.sleep(0.3)) == []


def test_what_is_computed_when_asked_does_not_count() -> None:
    state: dict[str, Any] = {}
    remember_process(state)
    process_report(state)
    for _ in range(3):
        note_question(state)
        begin = time.process_time()
        while time.process_time() - begin < 0.15:
            sum(range(1000))
        assert process_report(state)["threads"] == []


def test_the_bytes_of_a_question_and_of_the_answer_before_may_be_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        inside, "_wall_clock", time.process_time
    )  # a busy host takes long, and computes no more
    arrays = {"block": TensorBytes("uint8", (1 << 29,), bytes(1 << 29))}  # half a second
    for given, noticed in ((arrays, 0), ({}, 1)):
        state: dict[str, Any] = {}
        remember_process(state)
        process_report(state)
        begin = time.process_time()
        while time.process_time() - begin < 0.4:
            sum(range(1000))
        note_question(state, given)
        assert len(process_report(state)["threads"]) == noticed


_WATCH = """
import sys
import torch
from forecast_harness.verify.launch_cell import watch_launch
{before}
with watch_launch("operations", None) as seen:
    {launch}
print(sorted(seen.items()), "torch._dynamo" in sys.modules)
"""


def _watched(launch: str, before: str = "") -> str:
    text = _WATCH.format(launch=launch, before=before)
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=300
    ).stdout.strip()


def test_operations_are_seen_without_importing_dynamo() -> None:
    problem = _watched("torch.zeros(5) + torch.ones(3, 1)")
    assert problem.endswith("False")
    assert "('aten::add.Tensor', 15)" in problem


def test_what_a_compiling_candidate_does_is_seen_and_the_watch_itself_is_not_compiled() -> None:
    before = """
compiled = []
def backend(graph, inputs):
    compiled.append(graph)
    return graph.forward
double = torch.compile(lambda x: x * 2, backend=backend)
double(torch.ones(7))
assert len(compiled) == 1
"""
    problem = _watched("double(torch.ones(7)); assert len(compiled) == 1", before)
    assert problem.endswith("True")
    assert "('aten::mul.Tensor', 7)" in problem


def test_a_launch_on_a_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(inside, "_synchronize", lambda: done.append("waited"))

    def launch() -> int:
        done.append("launched")
        return 7

    taken = inside._timed(launch, {"watch": "", "protocol": ""}, [], {"device": "cuda", "timer": None})
    assert done == ["launched", "waited"]
    assert (taken.result, taken.protocol) == (7, "host")
    assert 0 <= taken.seconds == taken.total_seconds
