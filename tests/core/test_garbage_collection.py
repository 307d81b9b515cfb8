"""Collections of garbage are rare while a decision is made, and what a program has set is left alone."""

from __future__ import annotations

import gc
import os
from collections.abc import Collection, Iterator

import pytest

from forecast_autotune.records import Candidate
from forecast_autotune.shared_setting import rare_collections
from forecast_autotune.store import Store
from forecast_autotune.testing import example_table
from tests.core.tuning.loop import Bench, decide

USUAL = (700, 10, 10)


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*USUAL)
    yield
    gc.set_threshold(*before)


def test_collections_are_rare_until_the_last_user_is_done() -> None:
    with rare_collections():
        rare = gc.get_threshold()
        assert min(a / b for a, b in zip(rare, USUAL, strict=True)) >= 2
        with rare_collections():
            assert gc.get_threshold() == rare
        assert gc.get_threshold() == rare
    assert gc.get_threshold() == USUAL
    with pytest.raises(ValueError, match="ends it"), rare_collections():
        raise ValueError("ends it")
    assert gc.get_threshold() == USUAL


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_meanwhile_collects_as_usual() -> None:
    with rare_collections():
        child = os.fork()
        if not child:
            os._exit(0 if gc.get_threshold() == USUAL else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_decisions_are_made_so() -> None:
    table, seen = example_table([4, 8, 16, 32]), set[tuple[int, int, int]]()

    class Looking(Bench):
        def ready(self) -> Collection[Candidate]:
            seen.add(gc.get_threshold())
            return super().ready()

    decide(Store(None), Looking(table), table=table)
    assert seen
    assert USUAL not in seen
    assert gc.get_threshold() == USUAL
