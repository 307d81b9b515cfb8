"""Which pool compiles, and that each gives up, stops and reports as it must."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from forecast_autotune.features.trace import trace_many
from forecast_autotune.features.traced_texts import CompressedText, TracedTexts
from forecast_autotune.features.ttir.extraction import assignment_of, extract_facts
from forecast_autotune.records import Candidate, Config, Outcome, Problem
from forecast_integrations.triton.compile import pool
from forecast_integrations.triton.compile.pool import ForkPool, ThreadPool
from forecast_integrations.triton.null_device import null_device
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.trace import ChildTracer
from tests.integrations.null import kernel_call
from tests.waiting import eventually

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

ITEMS = [Candidate(Config.of({"BLOCK": n})) for n in range(8)]
QUICK, SLOW = ITEMS[:6], ITEMS[6]

Traced = tuple[KernelCall, list[Candidate]]


@triton.jit
def _scale(x_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, 2 * tl.load(x_ptr + i, mask=i < n), mask=i < n)


@pytest.fixture
def traced() -> Iterator[Traced]:
    """A call on the null device, and its eight candidates."""
    tuner = triton.autotune([triton.Config({"BLOCK": 2**k}) for k in range(4, 12)], key=["n"])(_scale)
    with null_device():
        yield kernel_call(tuner, torch.empty(64, device="meta"), 64, grid=(1,))


def problem_of(call: KernelCall) -> Problem:
    return describe.describe(_scale, describe.kernel_record(_scale), call.arguments(), ("64",), call.grid)


def tracer_of(call: KernelCall, workers: int) -> ChildTracer:
    return ChildTracer(call, TracedTexts(), workers, problem_of(call), {})


def texts_of(tracer: ChildTracer, texts: TracedTexts) -> TracedTexts:
    """With all that the tracer was started for."""
    while tracer.outstanding:
        texts.merge(tracer.poll(5.0))
    return texts


def block(candidate: Candidate) -> int:
    return int(dict(candidate.config.kwargs)["BLOCK"] or 0)


def compile_one(candidate: Candidate) -> None:
    if candidate == SLOW:
        time.sleep(60)


@pytest.mark.parametrize(
    ("how", "fork_below", "kind"),
    [
        ("auto", None, ForkPool),
        ("fork", None, ForkPool),
        ("threads", None, ThreadPool),
        pytest.param("auto", 1, ThreadPool, id="a huge process is not forked"),
    ],
)
def test_the_setting_chooses_the_pool(
    how: str, fork_below: int | None, kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if fork_below:
        monkeypatch.setattr(pool, "_FORK_BELOW", fork_below)
    with null_device(), closing(pool.make_pool(compile_one, 2, 10.0, how)) as made:
        assert type(made) is kind


BOTH = pytest.mark.parametrize(
    "make",
    [lambda f, n: ForkPool(f, n, 20.0), lambda f, n: ThreadPool(f, n, 20.0, lambda: None)],
    ids=["fork", "threads"],
)


@BOTH
def test_every_candidate_is_reported_once(make: Callable[..., Any]) -> None:
    def odd_fails(candidate: Candidate) -> None:
        if block(candidate) % 2:
            raise RuntimeError(f"block {block(candidate)}")

    with closing(make(odd_fails, 3)) as made:
        made.schedule(ITEMS)
        made.schedule(ITEMS)  # known already
        found = [made.next() for _ in ITEMS]
    assert sorted(block(done.candidate) for done in found) == list(range(8))
    for done in found:
        failed = block(done.candidate) % 2
        assert done.outcome is None
        assert done.doubtful == bool(failed), "that is not Triton's word: it is tried where the call is"
        assert ("block" in done.message) == bool(failed)


def test_threads_try_again_when_python_trips_over_itself() -> None:
    """CPython 3.11 raises SystemError from `ast.parse` now and then when threads compile together."""
    tripped: list[Candidate] = []

    def trips_once(candidate: Candidate) -> None:
        if candidate not in tripped:
            tripped.append(candidate)
            raise SystemError("AST constructor recursion depth mismatch")

    with closing(ThreadPool(trips_once, 2, 20.0, lambda: None)) as made:
        made.schedule(ITEMS)
        found = [made.next() for _ in ITEMS]
    assert all(done and done.outcome is None and not done.doubtful for done in found)
    assert sorted(map(block, tripped)) == list(range(8))


def test_closing_kills_the_children() -> None:
    made = ForkPool(compile_one, 2, 50.0)
    made.schedule([SLOW])
    (child,) = made._children.running()
    made.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_facts_come_from_children_with_their_texts(traced: Traced) -> None:
    """What children read is what this process reads; a further shape is read again, not traced."""
    call, candidates = traced
    problem = problem_of(call)
    grids = {c: (64 // block(c) + 1, 1, 1) for c in candidates}
    known = TracedTexts()
    tracer = ChildTracer(call, known, 3, problem, grids)
    tracer.start(candidates)
    assert tracer.outstanding == 8
    texts = texts_of(tracer, TracedTexts(problem.arguments))
    assert len(tracer.poll(0.0)) == 0
    assert len(texts) == len(known) == 8
    alone = ChildTracer(call, TracedTexts(), 1, problem, grids)(candidates)
    assert alone == texts
    for c in candidates:
        name, grid = assignment_of(c), grids[c]
        mine = extract_facts(alone[name], problem.arguments, grid)
        assert texts.facts(name, problem.arguments, grid) == mine
        assert mine.load_bytes == 4 * block(c)
    name = assignment_of(candidates[0])
    known.add(name, CompressedText.of("no module"))
    again = ChildTracer(call, known, 3, problem, grids)(candidates)
    assert again[name] == "no module", "remembered"
    assert again.facts(name, problem.arguments, grids[candidates[0]]) is None


@pytest.mark.parametrize("trouble", ["dies", "hangs"])
def test_the_share_of_a_child_that_fails_is_traced_here(
    trouble: str, traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that dies among many, and one that hangs."""
    parent = os.getpid()

    def fails(fn: Any, args: Any, kwargs: Any, assignments: Any) -> Any:
        if os.getpid() != parent and any(a["BLOCK"] == 64 for a in assignments):
            os._exit(3) if trouble == "dies" else time.sleep(60)
        return trace_many(fn, args, kwargs, assignments)

    monkeypatch.setattr("forecast_integrations.triton.trace.trace_many", fails)
    if trouble == "hangs":
        monkeypatch.setattr("forecast_integrations.triton.trace._TIMEOUT_S", 1.0)
        monkeypatch.setattr("forecast_integrations.triton.trace._TIMEOUT_PER_JOB_S", 0.1)
    call, candidates = traced
    tracer = tracer_of(call, 7 if trouble == "dies" else 2)
    tracer.start(candidates)
    assert len(texts_of(tracer, TracedTexts())) == len(candidates)
    tracer.start(candidates[:0])
    assert tracer.outstanding == 0


def test_a_tracer_that_is_closed_leaves_no_child(traced: Traced) -> None:
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    before = set(listing.read_text().split())  # other tests' processes may still end
    tracer = tracer_of(traced[0], 2)
    tracer.start(traced[1])
    assert len(tracer._children.running()) == 2
    (own,) = set(listing.read_text().split()) - before
    tracer.close()
    assert tracer.outstanding == 0
    assert eventually(lambda: own not in listing.read_text().split())


def blocked_on(release: Path, blocked: Collection[Candidate]) -> Callable[[Candidate], None]:
    """Compilations that end once there is a file, and others that end at once."""

    def compile_blocked(candidate: Candidate) -> None:
        while candidate in blocked and not release.exists():
            time.sleep(0.01)

    return compile_blocked


def test_a_compilation_whose_worker_is_needed_is_given_up_unless_it_is_listed(tmp_path: Path) -> None:
    with closing(ForkPool(blocked_on(tmp_path / "go", ITEMS[:2]), 2, 20.0)) as made:
        made.schedule(ITEMS[:2])
        assert set(made.compiling()) == set(ITEMS[:2])
        made.schedule([ITEMS[1], ITEMS[2]])
        assert made.next().candidate == ITEMS[2]  # type: ignore[union-attr]
        assert set(made.compiling()) == {ITEMS[1]}, "it was listed, and goes on"
        made.schedule([])
        assert set(made.compiling()) == {ITEMS[1]}, "nothing needs its worker"
        (tmp_path / "go").touch()
        assert made.next().candidate == ITEMS[1]  # type: ignore[union-attr]
        made.schedule(ITEMS[:3])
        assert made.next().candidate == ITEMS[0], "what was given up starts again"  # type: ignore[union-attr]
        assert made.next(0.0) is None
        assert made.finished == 3


@BOTH
def test_a_schedule_replaces_what_was_queued(make: Callable[..., Any], tmp_path: Path) -> None:
    with closing(make(blocked_on(tmp_path / "go", ITEMS[:1]), 1)) as made:
        made.schedule(ITEMS[:3])
        while ITEMS[0] not in made.compiling():
            time.sleep(0.01)
        assert made.next(0.05) is None, "it still compiles"
        assert 0.0 < made.compiling()[ITEMS[0]] < 20.0
        made.schedule([ITEMS[0], ITEMS[3], ITEMS[1]])
        (tmp_path / "go").touch()
        assert [made.next().candidate for _ in range(3)] == [ITEMS[0], ITEMS[3], ITEMS[1]]
        assert made.next(0.05) is None, "the third of the first list was forgotten"
        assert not made.compiling()


def test_a_compilation_that_hangs_is_given_up_however_short_the_waits() -> None:
    with closing(ForkPool(compile_one, 1, 0.3)) as made:
        made.schedule([SLOW])
        results = iter(lambda: made.next(0.02), object())
        found = next(result for result in results if result is not None)
        assert (found.candidate, found.outcome) == (SLOW, Outcome.TIMEOUT)
        made.schedule([SLOW])
        assert not made.compiling(), "it had its turn"
