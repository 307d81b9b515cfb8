"""A setting of the interpreter is changed while it is used, and put back once, as far as nobody else set it."""

from __future__ import annotations

import gc
import os
from collections.abc import Collection
from functools import partial
from typing import Any

import pytest

from forecast_autotune.records import Candidate
from forecast_autotune.shared_setting import SharedSetting
from forecast_autotune.store import Store
from tests.core.tuning.loop import TABLE, Bench, decide


def made() -> tuple[dict[str, Any], SharedSetting[float]]:
    held = {"value": 1.0}
    return held, SharedSetting(
        lambda: held["value"], lambda value: held.update(value=round(value, 1)), lambda usual: usual + 0.26
    )


def test_it_is_put_back_when_the_last_user_is_done() -> None:
    held, setting = made()
    with setting.changed():
        with setting.changed():
            assert held["value"] == 1.3, "changed once, and rounded by its owner"
        assert held["value"] == 1.3
    assert held["value"] == 1.0
    held["value"] = 2.0
    with setting.changed():
        assert held["value"] == 2.3, "of what is usual now"
    assert held["value"] == 2.0
    with pytest.raises(ValueError, match="ends it"), setting.changed():
        raise ValueError("ends it")
    assert held["value"] == 2.0


def test_what_is_set_meanwhile_stays() -> None:
    held, setting = made()
    with setting.changed():
        held["value"] = 7.0
    assert held["value"] == 7.0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_meanwhile_has_the_usual_value() -> None:
    held, setting = made()
    with setting.changed():
        child = os.fork()
        if not child:
            with setting.changed():
                inside = held["value"]
            os._exit(0 if (inside, held["value"]) == (1.3, 1.0) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_garbage_is_collected_seldom_while_a_decision_is_made(request: pytest.FixtureRequest) -> None:
    usual, seen = (700, 10, 10), set[tuple[int, int, int]]()
    request.addfinalizer(partial(gc.set_threshold, *gc.get_threshold()))
    gc.set_threshold(*usual)

    class Looking(Bench):
        def ready(self) -> Collection[Candidate]:
            seen.add(gc.get_threshold())
            return super().ready()

    decide(Store(None), Looking(TABLE))
    assert min(a / b for rare in seen for a, b in zip(rare, usual, strict=True)) >= 2
    assert gc.get_threshold() == usual
