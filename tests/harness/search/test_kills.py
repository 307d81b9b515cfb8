"""A search that gets SIGKILL is resumed to the same end; `benchmarks/search/killed_search.py` does it more often."""

from __future__ import annotations

from pathlib import Path

from benchmarks.search.killed_search import KilledSearch, comparable_state, work
from forecast_harness.search.log import read_log
from forecast_harness.search.run import LOG_FILE
from forecast_harness.search.state import replay_events


def test_a_killed_search_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    (tmp_path / "calm").mkdir()
    calm = work(tmp_path / "calm", 0, "", delay_s=0.0)
    (tmp_path / "killed").mkdir()
    killed = KilledSearch(tmp_path / "killed", 0, "")
    hits = [killed.leg(wait_s) for wait_s in (0.1, 0.6, 0.4)]
    assert any(hits)
    assert comparable_state(killed.finish()) == comparable_state(calm)
    assert killed.counts["repeated"] == 0
    assert comparable_state(replay_events(read_log(tmp_path / "calm" / LOG_FILE))) == comparable_state(calm)


def test_the_instrument_sees_what_is_done_twice(tmp_path: Path) -> None:
    """A search whose answers and log are spoiled does everything again, and that is counted."""
    spoiled = KilledSearch(tmp_path, 0, "")
    assert spoiled.leg(0.8)
    answers = list((tmp_path / "answers").iterdir())
    assert answers
    for path in answers:
        path.write_text("")
    (tmp_path / LOG_FILE).write_text("")
    spoiled.finish()
    assert spoiled.counts["repeated"] == len(answers)
    assert spoiled.counts["complete_but_unseen"] >= len(answers)
