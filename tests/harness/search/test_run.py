"""The pipeline: threads, lanes, interruptions, answers on file."""

from __future__ import annotations

import importlib.util
import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.search.synthetic_landscape import (
    CONTEXT,
    SEEDS,
    CallLedger,
    LandscapeAuthor,
    LandscapeJudge,
    settings,
)
from benchmarks.search.killed_search import KilledSearch, comparable_state, work
from forecast_autotune.commands.output import CommandError
from forecast_autotune.errors import RecordError, SettingsError, StoreError
from forecast_autotune.records import Outcome
from forecast_autotune.store import Store
from forecast_autotune.variants import Check, Origin, Provenance
from forecast_harness.commands.search import _check_end
from forecast_harness.records import (
    Node,
    NodeJob,
    NodeResult,
    ProposalRequest,
    Proposed,
    SearchBudget,
    SearchCost,
    SearchSettings,
    SearchTarget,
    TargetKind,
)
from forecast_harness.search.events import Chosen, Confirmed, Finished, Started, Stopped
from forecast_harness.search.log import read_log
from forecast_harness.search.output import store_variants, write_output
from forecast_harness.search.run import CANNOT_CONFIRM, LOG_FILE
from forecast_harness.search.state import SearchState, replay_events
from forecast_harness.trials.judge_pool import LocalJudgePool
from forecast_harness.trials.protocol import LaneFailure
from tests.harness.search.simulated_search import SimulatedSearch, comparable_outcome, run_search


@pytest.fixture
def chosen() -> SearchSettings:
    return settings(30)


@pytest.fixture
def expected(chosen: SearchSettings) -> dict[str, Any]:
    return comparable_outcome(SimulatedSearch(chosen).run(random.Random(0))[1])


def test_threads_and_lanes_change_nothing(
    tmp_path: Path, chosen: SearchSettings, expected: dict[str, Any]
) -> None:
    seen: list[int] = []
    ledger = CallLedger(tmp_path / "ledger")
    state = run_search(
        tmp_path / "a", chosen, ledger=ledger, watch=lambda s: seen.append(len(s.judged)), lanes=3
    )
    assert comparable_outcome(state) == expected
    events = read_log(tmp_path / "a" / "log.jsonl")
    assert comparable_outcome(replay_events(events)) == expected
    assert len(seen) == len(events) - 1
    assert seen == sorted(seen)
    paid = Counter((tmp_path / "ledger").read_text().splitlines())
    assert set(paid.values()) == {1}
    assert len(paid) == 2 * (len(state.answers) + 30 + len(state.batches) - 1 + 1)


def test_a_finished_search_is_only_read_again(tmp_path: Path, chosen: SearchSettings) -> None:
    ledger = CallLedger(tmp_path / "ledger")
    first = run_search(tmp_path / "a", chosen, ledger=ledger)
    log, paid = ((tmp_path / name).read_bytes() for name in ("a/log.jsonl", "ledger"))
    assert comparable_outcome(run_search(tmp_path / "a", chosen, ledger=ledger)) == comparable_outcome(first)
    assert log == (tmp_path / "a/log.jsonl").read_bytes()
    assert paid == (tmp_path / "ledger").read_bytes()


def test_ctrl_c_stops_it_and_it_can_be_resumed(
    tmp_path: Path, chosen: SearchSettings, expected: dict[str, Any]
) -> None:
    ledger = CallLedger(tmp_path / "ledger")
    interruptions = 0
    for count in (3, 8, 14, 20):
        sent: list[int] = []

        def interrupt(state: SearchState, count: int = count, sent: list[int] = sent) -> None:
            if state.history and state.history[-1].measurements == count and not sent:
                sent.append(count)
                os.kill(os.getpid(), signal.SIGINT)

        before = signal.getsignal(signal.SIGINT)
        state = run_search(tmp_path / "a", chosen, ledger=ledger, watch=interrupt)
        assert signal.getsignal(signal.SIGINT) is before
        assert state.stopped is not None
        interruptions += state.stopped.interrupted
        last = read_log(tmp_path / "a" / "log.jsonl")[-1]
        assert isinstance(last, Stopped)
        assert last.interrupted == state.stopped.interrupted
        assert (tmp_path / "a" / "best.py").is_file()
    assert interruptions == 4
    state = run_search(tmp_path / "a", chosen, ledger=ledger)
    assert comparable_outcome(state) == expected
    assert state.resumed == 4
    paid = Counter((tmp_path / "ledger").read_text().splitlines())
    assert set(paid.values()) == {1}, "work under way is awaited or cancelled, not done twice"


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path, chosen: SearchSettings) -> None:
    hang = threading.Event()

    class Hanging(LandscapeAuthor):
        def propose(self, request: ProposalRequest) -> Proposed:
            if request.batch == 2:
                hang.wait(60)
            return super().propose(request)

    sent: list[int] = []

    def interrupt(state: SearchState) -> None:
        if len(state.judged) == 3 and not sent:
            sent.append(3)
            os.kill(os.getpid(), signal.SIGINT)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_search(tmp_path, chosen, proposer=Hanging(), watch=interrupt)
    hang.set()
    assert time.monotonic() - begin < 30.0, "the time that work under way is given"
    state = run_search(tmp_path, chosen)
    assert not state.stopped.interrupted


def test_another_context_is_refused(tmp_path: Path, chosen: SearchSettings) -> None:
    run_search(tmp_path, settings(4))
    with pytest.raises(RecordError, match=r"settings.budget.measurements: 4 in the log, 30 now"):
        run_search(tmp_path, chosen)
    with pytest.raises(RecordError, match='surrogate: "table-1" in the log, "none" now'):
        run_search(tmp_path, settings(4), forecasts=False)

    class Other(LandscapeAuthor):
        styles = ("near",)

    with pytest.raises(RecordError, match="arms: "):
        run_search(tmp_path, settings(4), proposer=Other())
    with pytest.raises(StoreError, match="cannot be made"):
        run_search(tmp_path / "log.jsonl", settings(4))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"archive": "none"}, "an archive must be one of puct, greedy, not 'none'"),
        ({"depth": 0}, "depth must be at least 1, not 0"),
        ({"audit": 1.5}, "0 to 1, not 1.5"),
    ],
)
def test_settings_that_cannot_be_searched_with_are_refused(
    tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    with pytest.raises(SettingsError, match=text):
        run_search(tmp_path, replace(settings(4), **change))
    assert not (tmp_path / "log.jsonl").exists()


# --- plug-ins that misbehave ---


def test_proposers_that_fail_are_told_in_the_log(tmp_path: Path) -> None:
    class Failing(LandscapeAuthor):
        def propose(self, request: ProposalRequest) -> Proposed:
            if request.arm == "table/far":
                raise ConnectionError("no route to the model")
            found = super().propose(request)
            if request.batch == 2:
                return replace(found, spent=SearchCost(money=float("nan")))
            return replace(found, request="not mine", batch=77, nodes=(*found.nodes, *found.nodes))

    state = run_search(tmp_path, settings(12), proposer=Failing())
    assert state.spent.measurements == 12
    problems = {a.problem for a in state.answers.values() if a.arm == "table/far"}
    assert problems == {"ConnectionError: no route to the model"}
    near = [a for a in state.answers.values() if a.arm == "table/near"]
    assert all("JSON values only" in a.problem for a in near if a.batch == 2)
    assert not any(a.nodes for a in near if a.batch == 2)
    for answer in state.answers.values():
        assert answer.request.startswith(f"{answer.batch:04d}-")
        assert all((n.request, n.arm) == (answer.request, answer.arm) for n in answer.nodes)


def test_a_late_author_keeps_no_lane_waiting_and_its_answer_counts_later(tmp_path: Path) -> None:
    free = threading.Event()

    class Late(LandscapeAuthor):
        def propose(self, request: ProposalRequest) -> Proposed:
            if request.arm == "table/far" and request.batch == 1:
                free.wait(60)
            return super().propose(request)

    def let_go(state: SearchState) -> None:
        if any("no answer in" in a.problem for a in state.answers.values()):
            free.set()

    limit = replace(settings(20), budget=SearchBudget(20, wall_seconds=4.0))
    state = run_search(tmp_path, limit, proposer=Late(), watch=let_go)
    assert {(a.arm, a.batch) for a in state.answers.values() if a.problem} == {("table/far", 1)}
    assert any(a.nodes for a in state.answers.values() if a.arm == "table/far")


def test_a_proposed_node_is_booked_by_its_text_and_its_request(tmp_path: Path) -> None:
    class Lying(LandscapeAuthor):
        def propose(self, request: ProposalRequest) -> Proposed:
            found = super().propose(request)
            return replace(
                found,
                nodes=tuple(
                    replace(n, id=SEEDS[0].id, parents=("nobody",), batch=0, arm="else") for n in found.nodes
                ),
            )

    state = run_search(tmp_path, settings(8), proposer=Lying())
    new = [n for n in state.nodes.values() if n.batch]
    assert new
    assert len({n.id for n in new}) == len(new)
    assert all(n.parents[0] in state.nodes and n.arm.startswith("table/") for n in new)


def test_a_judge_that_fails_loses_its_lane_and_no_more(
    tmp_path: Path, chosen: SearchSettings, expected: dict[str, Any]
) -> None:
    """NaN among the facts and an infrastructure outcome are no results either: the job is tried again."""
    calls: Counter[str] = Counter()
    state = run_search(tmp_path, chosen, make_judge=lambda _: FlakyJudge(calls))
    assert comparable_outcome(state) == expected
    assert set(calls.values()) == {2}


class FlakyJudge(LandscapeJudge):
    """Every job fails once, in one of three ways, and then does not."""

    def __init__(self, calls: Counter[str]) -> None:
        super().__init__()
        self.calls = calls

    def judge(self, job: NodeJob) -> NodeResult:
        self.calls[job.node.id] += 1
        if self.calls[job.node.id] > 1:
            return super().judge(job)
        kind = int(job.id[:6], 16) % 3
        if kind == 0:
            raise LaneFailure("fell off the bus", "lane")
        if kind == 1:
            return NodeResult(Outcome.INFRASTRUCTURE, feedback="the driver is gone")
        return replace(super().judge(job), outcome=Outcome.OK, log2_ratio=0.0, facts={"x": float("nan")})


def test_a_disk_that_fills_up_says_so_and_loses_nothing(
    tmp_path: Path, chosen: SearchSettings, expected: dict[str, Any]
) -> None:
    """A limit on the size of files stands in for a full disk: writes are cut in the same way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        with pytest.raises(StoreError, match=r"log.jsonl: an event cannot be written .*File too large"):
            run_search(tmp_path, chosen)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert comparable_outcome(run_search(tmp_path, chosen)) == expected


# --- what overlaps ---


def test_proposing_goes_on_while_jobs_run(tmp_path: Path) -> None:
    """With a depth of two, batch 2 is proposed before a single job of batch 1 is done."""
    proposed = threading.Event()

    class Noting(LandscapeAuthor):
        def propose(self, request: ProposalRequest) -> Proposed:
            if request.batch == 2:
                proposed.set()
            return super().propose(request)

    class Waiting(LandscapeJudge):
        def judge(self, job: NodeJob) -> NodeResult:
            assert job.batch == 0 or proposed.wait(30), "a job waited for a proposal that waits for it"
            return super().judge(job)

    state = run_search(tmp_path, settings(12), proposer=Noting(), make_judge=lambda _: Waiting())
    assert state.spent.measurements == 12


def test_lanes_are_not_given_more_than_a_little_ahead(tmp_path: Path) -> None:
    most = 0

    class Counting(LocalJudgePool):
        given = 0

        def submit(self, job: NodeJob) -> Any:
            nonlocal most
            self.given += 1
            most = max(most, self.given)
            future = super().submit(job)
            future.add_done_callback(lambda _: self._done())
            return future

        def _done(self) -> None:
            self.given -= 1

    run_search(tmp_path, settings(40, k=10), pool=Counting, lanes=1, forecasts=False)
    assert most == 2


def test_a_search_whose_confirmation_cannot_work_ends_as_soon_as_that_is_known(tmp_path: Path) -> None:
    class Refused(LocalJudgePool):
        @property
        def problem(self) -> str:
            return "the base kernel" if judged else ""

    judged: set[str] = set()

    class Noting(LandscapeJudge):
        def judge(self, job: NodeJob) -> NodeResult:
            judged.add(job.node.id)
            return super().judge(job)

    state = run_search(
        tmp_path, settings(40), make_judge=lambda _: Noting(), pool=Refused, lanes=1, forecasts=False
    )
    assert state.stopped is not None
    assert state.stopped.reason == f"{CANNOT_CONFIRM}: the base kernel"
    assert state.spent.measurements <= 1
    with pytest.raises(CommandError, match="could be confirmed: the base kernel"):
        _check_end(state)


def test_a_limit_on_the_clock_ends_a_search_that_waits(tmp_path: Path) -> None:
    """A lane that hangs takes nothing but itself: what is known is confirmed by the other one."""
    free = threading.Event()

    class Hanging(LandscapeJudge):
        def judge(self, job: NodeJob) -> NodeResult:
            if job.batch > 1:
                free.wait(60)
            return super().judge(job)

    limit = replace(settings(100), budget=SearchBudget(100, wall_seconds=2.0))
    made = [Hanging(None, 0.002), LandscapeJudge(None, 0.002)]

    def let_go(state: SearchState) -> None:
        if state.stopped is not None:  # lanes are waited for when they are closed
            free.set()

    state = run_search(tmp_path, limit, make_judge=lambda index: made[index], lanes=2, watch=let_go)
    assert state.expired is not None
    assert state.stopped.reason.startswith("the time is up")
    assert state.spent.measurements < 100
    assert state.confirmed
    again = replay_events(read_log(tmp_path / "log.jsonl"))
    assert comparable_outcome(again) == comparable_outcome(state)


# --- kills ---


def test_a_killed_search_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    (tmp_path / "calm").mkdir()
    calm = work(tmp_path / "calm", 0, delay_s=0.0)
    (tmp_path / "killed").mkdir()
    killed = KilledSearch(tmp_path / "killed", 0)
    hits = [killed.leg(wait_s) for wait_s in (0.1, 0.6, 0.4)]
    assert any(hits)
    assert comparable_state(killed.finish()) == comparable_state(calm)
    assert killed.counts["repeated"] == 0
    assert comparable_state(replay_events(read_log(tmp_path / "calm" / LOG_FILE))) == comparable_state(calm)


# --- what a search leaves behind ---


def test_the_best_source_can_be_imported_and_says_where_it_is_from(tmp_path: Path) -> None:
    state = run_search(tmp_path, settings(30, audit=0.4))
    spec = importlib.util.spec_from_file_location("best", tmp_path / "best.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (tmp_path / "best.py").read_text()
    assert text.endswith(state.nodes[state.best].source)
    assert module.run(0) == int(state.nodes[state.best].source.split("+ ")[1])
    assert f"# id: {state.best}\n" in text
    assert f"# speed: {2**-state.best_score:.3f} times the first seed, confirmed in a fresh process" in text
    assert "# toolchain: table 1\n" in text


def test_the_best_file_follows_the_search(tmp_path: Path) -> None:
    seen: list[tuple[str, bool]] = []

    def watch(state: SearchState) -> None:
        seen.append((state.best, f"# id: {state.best}\n" in (tmp_path / "best.py").read_text()))

    run_search(tmp_path, settings(20), watch=watch)
    assert all(current for _, current in seen)
    assert len({best for best, _ in seen}) > 2


# --- a kernel's variants ---

KERNEL = """import triton
import triton.language as tl

CONFIGS = [{"kwargs": {"BLOCK": 64}}, {"kwargs": {"BLOCK": 128}, "num_warps": 8}]


@triton.jit
def run(x, n, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), NUMBER)
"""


def kernel_search(confirmed: Mapping[str, float | None]) -> SearchState:
    """Five variants beside a base kernel, the later the faster; `confirmed` by number."""
    target = SearchTarget(
        TargetKind.KERNEL, "run", "kernel-1", "triton", "run", "", {"source_sha256": "0" * 64}
    )
    made = Provenance(Origin.REWRITE, note="other tiles")
    sources = [KERNEL.replace("NUMBER", str(n)) for n in range(6)]
    nodes = [
        Node(f"n{i}", s, "triton", ("n0",) if i else (), made, batch=i > 0) for i, s in enumerate(sources)
    ]
    check = Check("h200", "signature", True, "12 launches").to_json()
    best = {"kwargs": {"BLOCK": 128}, "num_warps": 8}

    def judged(ratio: float | None) -> NodeResult:
        if ratio is None:
            return NodeResult(Outcome.INCORRECT)
        return NodeResult(Outcome.OK, "n0", ratio, config=best, facts={"checks_passed": [check]})

    context = replace(CONTEXT, target=target.id, seeds=("n0",), settings=settings(20), arms=("a/b",))
    ids = tuple(f"n{i}" for i in range(1, 6))
    events: list[Any] = [
        Started(context, target, (nodes[0],), ""),
        Finished("job-0", "n0", 0, judged(0.0)),
        Proposed("r", tuple(nodes[1:]), batch=1, arm="a/b", parent="n0"),
        Chosen(1, ids, ("unforecast",) * 5, (1.0,) * 5),
        *(Finished(f"job-{i}", f"n{i}", 1, judged(0.15 - 0.1 * i)) for i in range(1, 6)),
    ]
    if confirmed:
        events.append(Confirmed({n: judged(r) for n, r in confirmed.items()}))
    return replay_events([*events, Stopped("done")])


def test_confirmed_variants_go_into_the_store_with_their_checks(tmp_path: Path) -> None:
    store = Store(tmp_path)
    state = kernel_search({"n0": 0.0, "n5": None, "n4": -0.2, "n3": 0.01})
    (kept,) = store_variants(state, store)
    (held,) = store.variants("0" * 64)
    assert held.source == kept.source == state.nodes["n4"].source
    assert [c.signature for c in held.checks] == ["signature"]
    assert [(dict(c.kwargs)["BLOCK"], c.num_warps) for c in held.configs] == [(128, 8), (64, 4)]
    assert held.provenance.note == "other tiles"


def test_the_fastest_go_into_the_store_where_none_could_be_confirmed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    kept = store_variants(kernel_search({}), store)
    assert [v.source for v in kept] == [KERNEL.replace("NUMBER", str(n)) for n in (5, 4, 3)]
    assert len(store.variants()) == 3
    assert store_variants(kernel_search({"n5": None, "n4": None, "n3": None}), store) == []


def test_what_is_not_verified_in_full_goes_into_no_store(tmp_path: Path) -> None:
    state = kernel_search({})
    state.judged["n5"] = replace(state.judged["n5"], facts={"verified_in_full": False})
    kept = store_variants(state, Store(tmp_path))
    assert [v.source for v in kept] == [KERNEL.replace("NUMBER", str(n)) for n in (4, 3, 2)]


def test_a_kernels_finished_search_fills_the_default_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path / "store"))
    write_output(kernel_search({"n4": -0.2}), tmp_path / "search")
    assert [v.source for v in Store.default().variants()] == [KERNEL.replace("NUMBER", "4")]
    assert "measured on" not in (tmp_path / "search" / "best.py").read_text()


@pytest.mark.parametrize(
    ("ratio", "sd", "facts", "evidence"),
    [
        (-0.12, 0.24, {"standing": "undecided"}, "undecided"),
        (-0.12, 0.01, {"standing": "undecided"}, "undecided"),
        (-0.12, 0.24, {"standing": "faster"}, "undecided"),  # its interval holds 1
        (-0.12, 0.05, {"standing": "faster"}, "confirmed"),
        (-0.12, 0.07, {}, "undecided"),
        (-0.12, 0.05, {}, "confirmed"),
        (0.12, 0.01, {}, "undecided"),
        (None, 0.0, {}, "refuted"),
    ],
)
def test_only_what_was_shown_to_be_faster_is_confirmed(
    ratio: float | None, sd: float, facts: dict[str, str], evidence: str
) -> None:
    outcome = Outcome.OK if ratio is not None else Outcome.INCORRECT
    assert NodeResult(outcome, log2_ratio=ratio, sd=sd, facts=facts).evidence == evidence
