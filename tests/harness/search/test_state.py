"""The state is a fold; what decisions see of it does not depend on the order of answers."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from benchmarks.lib.search.synthetic_landscape import CONTEXT, SEEDS, TARGET, settings
from forecast_autotune.errors import RecordError, StoreError
from forecast_autotune.records import Outcome
from forecast_harness.records import NodeResult, Proposed, SearchCost
from forecast_harness.search.events import Chosen, Event, Finished, Resumed, Started, Stopped
from forecast_harness.search.log import SearchLog, read_log
from forecast_harness.search.plan import pending_actions
from forecast_harness.search.state import SearchState, apply_event, batch_view, replay_events
from tests.harness.search.simulated_search import SimulatedSearch, comparable_outcome

Whole = tuple[list[Event], SearchState]


@pytest.fixture(scope="module")
def finished() -> Whole:
    return SimulatedSearch(settings(24)).run(random.Random(0))


@hypothesis_settings(max_examples=25)
@given(st.randoms(use_true_random=False), st.integers(0, 50))
def test_the_order_of_answers_changes_nothing_for_any_seed(order: random.Random, seed: int) -> None:
    world = SimulatedSearch(settings(16, seed=seed))
    assert comparable_outcome(world.run(order)[1]) == comparable_outcome(world.run(random.Random(1))[1])


def test_a_search_resumed_at_any_event_ends_as_if_it_had_not_been(finished: Whole) -> None:
    events, state = finished
    world = SimulatedSearch(settings(24))
    for cut in range(1, len(events)):
        _, resumed = world.run(random.Random(cut), [*events[:cut], Resumed("")])
        assert comparable_outcome(resumed) == comparable_outcome(state), (
            f"after {cut} of {len(events)} events"
        )
        assert resumed.resumed == 1


def test_scores_add_up_along_what_each_node_was_timed_beside(finished: Whole) -> None:
    _, state = finished
    first = state.seeds[0]
    assert state.scores[first] == 0.0
    for node, score in state.scores.items():
        judged = state.judged[node]
        if node != first:
            assert judged.log2_ratio is not None
            assert score == state.scores[judged.against] + judged.log2_ratio
    assert set(state.scores) == {n for n, j in state.judged.items() if j.outcome is Outcome.OK}
    assert len(state.scores) < len(state.judged), "nothing failed, so this shows little"


def test_the_history_has_the_best_after_every_measurement(finished: Whole) -> None:
    _, state = finished
    assert [p.measurements for p in state.history] == list(range(1, 25))
    best = 0.0
    for point in state.history:
        best = min(best, point.score if point.score is not None else best)
        assert point.best == best
    assert best == state.scores[state.incumbent] < 0.0
    assert {p.reason for p in state.history} >= {"seed", "top"}


def test_spending_adds_up(finished: Whole) -> None:
    _, state = finished
    kinds = sum(state.spent_on.values(), SearchCost())
    batches = sum((b.spent for b in state.batches.values()), state.spent_on["confirmation"])
    for name in vars(state.spent):
        assert getattr(kinds, name) == pytest.approx(getattr(state.spent, name))
        assert getattr(batches, name) == pytest.approx(getattr(state.spent, name))
    assert state.spent.measurements == len(state.judged)
    assert state.spent.tokens == 50 * sum(len(a.nodes) for a in state.answers.values())


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_view_knows_the_batches_that_it_may(depth: int) -> None:
    _, state = SimulatedSearch(settings(40, depth=depth)).run(random.Random(3))
    last = max(b.number for b in state.batches.values() if b.ended)
    assert last > 4
    for number in range(1, last + 1):
        seen = batch_view(state, number)
        known = {n for b in range(max(0, number - depth) + 1) for n in state.batches[b].finished}
        assert set(seen.judged) == known
        assert set(seen.nodes) == {n for b in range(number) for n in state.batches[b].nodes}
        assert seen.incumbent == min(seen.scores, key=lambda n: seen.scores[n])
        assert seen.spent.measurements == len(known)
        asked = [len({a.parent for a in state.batches[b].answers.values()}) for b in range(1, number)]
        assert sum(seen.expansions.values()) == sum(asked)


def test_what_is_no_event_or_out_of_place_is_refused(finished: Whole) -> None:
    events, state = finished
    with pytest.raises(RecordError, match="is no event"):
        apply_event(SearchState(), cast("Any", "stopped"))
    with pytest.raises(RecordError, match="must be `started`"):
        replay_events(events[1:])
    with pytest.raises(RecordError, match="at least one seed"):
        replay_events([replace(cast("Any", events[0]), seeds=())])
    unknown = Finished("job", "nobody", 1, NodeResult(Outcome.INCORRECT))
    with pytest.raises(RecordError, match="did not choose it"):
        apply_event(state, unknown)
    with pytest.raises(RecordError, match="not in the pool"):
        apply_event(state, Chosen(99, (state.seeds[0],), ("top",), (1.0,)))
    with pytest.raises(RecordError, match="was closed"):
        apply_event(state, Proposed("late", (), batch=1))


def test_an_interruption_can_be_resumed_and_an_end_cannot(finished: Whole) -> None:
    events, _ = finished
    halfway = [*events[:20], Stopped("interrupted", interrupted=True)]
    assert pending_actions(replay_events(halfway)) == ()
    assert (
        pending_actions(replay_events([*halfway, Resumed("")]))
        == pending_actions(replay_events(events[:20]))
        != ()
    )
    assert pending_actions(replay_events([*events, Resumed("")])) == ()


def test_a_node_that_was_not_verified_in_full_leads_nowhere(finished: Whole) -> None:
    events, state = finished
    name = state.incumbent
    assert name not in state.seeds

    def unverified(event: Event) -> Event:
        if not isinstance(event, Finished) or event.node != name:
            return event
        return replace(event, judged=replace(event.judged, facts={"verified_in_full": False}))

    kept = [unverified(e) for e in events if not isinstance(e, Stopped)]
    place = next(n for n, e in enumerate(kept) if isinstance(e, Finished) and e.node == name)
    before, after = replay_events(kept[:place]), replay_events(kept[: place + 1])
    assert after.scores[name] < before.scores[before.incumbent]
    assert (after.incumbent, after.best) == (before.incumbent, before.best)
    assert after.history[-1].best == before.history[-1].best
    assert after.status(name) == "not verified in full"
    with_it = replay_events(kept)
    views = [batch_view(with_it, b) for b in range(1, max(with_it.batches) + 1) if with_it.batch(b).chosen]
    assert any(name in v.scores for v in views)
    assert name not in {v.incumbent for v in views}


# --- the log ---


STARTED = Started(CONTEXT, TARGET, SEEDS, "2026-01-01T00:00:00+00:00")


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return SimulatedSearch(settings(12)).run(random.Random(0))[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "search" / "log.jsonl"


def test_events_come_back_as_they_went_in(path: Path, events: list[Event]) -> None:
    assert isinstance(events[0], Started)
    with SearchLog.create(path, events[0]) as log:
        for event in events[1:]:
            assert log.append(event) == event
        assert log.events == events
    assert list(read_log(path)) == events
    with SearchLog.open(path, events[0].context) as log:
        assert log.events == events


def test_a_log_cut_anywhere_holds_the_whole_lines_before(path: Path, events: list[Event]) -> None:
    assert isinstance(events[0], Started)
    with SearchLog.create(path, events[0]) as log:
        for event in events[1:8]:
            log.append(event)
    raw = path.read_bytes()
    lines = raw.splitlines(keepends=True)
    chance = random.Random(1)
    cuts = [
        len(raw) - 1,
        len(lines[0]),
        len(lines[0]) + 1,
        *chance.sample(range(len(lines[0]), len(raw)), 40),
    ]
    for cut in cuts:
        path.write_bytes(raw[:cut])
        whole = raw[:cut].count(b"\n")
        assert list(read_log(path)) == events[:whole]
        assert path.read_bytes() == raw[:cut], "a reader must not change it"
        with SearchLog.open(path, events[0].context) as log:
            assert log.events == events[:whole]
            assert path.stat().st_size == sum(map(len, lines[:whole]))
            log.append(Resumed("now"))
        assert list(read_log(path)) == [*events[:whole], Resumed("now")]


def test_a_changed_context_is_refused_with_what_changed(path: Path) -> None:
    SearchLog.create(path, STARTED).close()
    other = replace(
        CONTEXT, settings=settings(61, k=3), toolchain={"table": "2", "torch": "2.9"}, device="another"
    )
    with pytest.raises(RecordError) as caught:
        SearchLog.open(path, other)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert 'device: "table" in the log, "another" now' in lines
    assert "settings.budget.measurements: 200 in the log, 61 now" in lines
    assert "settings.k: 4 in the log, 3 now" in lines
    assert 'toolchain.table: "1" in the log, "2" now' in lines
    assert 'toolchain.torch: absent in the log, "2.9" now' in lines
    assert not any(line.startswith(("harness", "settings.seed")) for line in lines)
    SearchLog.open(path, CONTEXT).close()


def test_a_second_writer_is_told_who_the_first_is_until_that_is_killed(path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from forecast_harness.search.log import SearchLog\n"
        "from tests.harness.search.test_state import STARTED\n"
        "log = SearchLog.create(Path(sys.argv[1]), STARTED); print('ready', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    assert read_log(path) == (STARTED,), "those who only read need no lock"
    with pytest.raises(StoreError, match=f"is being written by process {child.pid}"):
        SearchLog.open(path, CONTEXT)
    child.send_signal(signal.SIGKILL)
    child.wait()
    with SearchLog.open(path, CONTEXT) as log:
        assert log.events == [STARTED]


def test_a_full_disk_loses_nothing(path: Path) -> None:
    """A limit on the size of files stands in for a full disk: writes are cut in the same way."""
    log = SearchLog.create(path, STARTED)
    size = path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
    try:
        with pytest.raises(StoreError, match="free space or make the folder writable"):
            log.append(Stopped("a reason that is longer than ten bytes"))
        assert path.stat().st_size == size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    log.append(Stopped("space again"))
    log.close()
    assert read_log(path) == (STARTED, Stopped("space again"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreError, match="cannot be"):
            SearchLog.create(tmp_path / "log.jsonl", STARTED)
    finally:
        tmp_path.chmod(0o700)


def test_damage_is_named_with_its_line(path: Path) -> None:
    with SearchLog.create(path, STARTED) as log:
        log.append(Resumed("1"))
        log.append(Resumed("2"))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"type":"resumed"}\n' + lines[2])
    with pytest.raises(RecordError, match=r"log.jsonl:2: not an event"):
        read_log(path)
    path.write_bytes(lines[1])
    with pytest.raises(RecordError, match="it is not a search's log"):
        SearchLog.open(path, CONTEXT)
