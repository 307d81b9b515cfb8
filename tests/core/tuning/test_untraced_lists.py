"""Short lists on one worker: measured whole, as tracing them there takes longer than it saves."""

from __future__ import annotations

from typing import Any

import pytest

from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.policy import RiskBounded
from tests.core.tuning.test_compiling_ahead import NAMES, Logged, run

TEXTS = list(dict.fromkeys(map(assignment_of, NAMES)))


def of_texts(texts: int, each: int = 1) -> list[Any]:
    """Candidates of so many texts, `each` of every one."""
    found: list[Any] = []
    for text in TEXTS[:texts]:
        found += [name for name in NAMES if assignment_of(name) == text][:each]
    return found


def verbs(workers: int, names: list[Any], **options: Any) -> tuple[list[str], int]:
    """What happened, and how many were measured."""
    log: list[tuple[str, int]] = []
    decision = run(Logged(log, workers), log, names=names, **options)
    return [verb for verb, _ in log], decision.measured


@pytest.mark.parametrize("texts", [2, 4, 6])
def test_one_worker_measures_a_short_list_of_many_texts_and_traces_nothing(texts: int) -> None:
    names = of_texts(texts)
    log: list[tuple[str, int]] = []
    bench = Logged(log, workers=1)
    decision = run(bench, log, names=names)
    assert "trace" not in dict(log)
    assert (decision.measured, decision.stated_risk) == (len(names), 0.0)
    assert bench.ahead == names


@pytest.mark.parametrize(
    ("workers", "texts", "each", "options"),
    [
        pytest.param(2, 6, 1, {}, id="children trace"),
        pytest.param(1, 8, 1, {}, id="a long list"),
        pytest.param(1, 2, 2, {}, id="a trace stands for two"),
        pytest.param(1, 6, 1, {"settings": {"max_measurements": 3}}, id="few may be measured"),
        pytest.param(1, 6, 1, {"policy": RiskBounded()}, id="a policy that does not look at the clock"),
    ],
)
def test_other_lists_are_traced(workers: int, texts: int, each: int, options: dict[str, Any]) -> None:
    seen, measured = verbs(workers, of_texts(texts, each), **options)
    assert "trace" in seen
    assert measured > 0
