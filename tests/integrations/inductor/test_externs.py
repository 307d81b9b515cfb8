"""The library's kernels are timed while an operation is lowered, and what is chosen first knows their times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._inductor import config

from forecast_autotune.records import Candidate
from forecast_autotune.settings import Mode
from forecast_integrations.inductor import choice_timing, operation_search, policy, pruning
from forecast_integrations.inductor.choices.graph_position import GraphPosition, GraphProducts
from forecast_integrations.inductor.choices.records import candidate_of
from forecast_integrations.inductor.policy import (
    LIBRARY_BEST_RISK,
    NOT_WORTH_WAITING,
    SMALL,
    TRUSTED,
    FewRoundsPolicy,
)
from forecast_integrations.inductor.pruning import SelectionCall, prune_before_codegen
from forecast_integrations.inductor.session import TuningSession
from tests.integrations.inductor import test_selection
from tests.integrations.inductor.graphs import graph, product_choices, product_inputs, serving
from tests.integrations.inductor.test_choice_timing import (
    LIBRARY,
    RECORDED,
    Benchmarked,
    chosen_by,
    protocols,
)
from tests.integrations.inductor.test_selection import log2_ms_of, lowered


def test_where_the_library_is_known_to_be_far_ahead_less_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(candidate: Candidate) -> float:
        return 3.0

    device = Benchmarked(monkeypatch)
    chosen_by(serving(slow, tmp_path / "without", policy=FewRoundsPolicy(least=1)))
    without = list(device.taken)
    device.taken.clear()
    monkeypatch.setattr(choice_timing, "can_time", lambda _: True)
    ours = serving(slow, tmp_path / "with", policy=FewRoundsPolicy(least=1))
    decision = chosen_by(ours)
    assert device.taken[0] == LIBRARY, "before anything is chosen"
    assert device.taken.count(LIBRARY) == 2, "and once more beside what is"
    assert len(set(device.taken)) < len(set(without))
    assert protocols(tmp_path / "with")[LIBRARY] == [RECORDED], "what was timed apart decides nothing"
    assert (decision.median_ms, decision.measured) == (0.019, 2)
    # In the next graph of this session, too, but not where it is decided.
    chosen_by(ours)
    assert device.taken.count(LIBRARY) == 2


def stand_at(monkeypatch: pytest.MonkeyPatch, position: GraphPosition) -> None:
    """Say where in its graph the next operation stands, on a device that forecasts have measurements of."""
    monkeypatch.setattr(choice_timing, "can_time", lambda _: True)
    monkeypatch.setattr(pruning, "graph_position", lambda *_: position)
    monkeypatch.setattr(policy, "is_measured_device", lambda _: True)


def benchmarked_at(monkeypatch: pytest.MonkeyPatch, position: GraphPosition) -> Benchmarked:
    """A device whose next operation stands there."""
    device = Benchmarked(monkeypatch)
    stand_at(monkeypatch, position)
    return device


def handed_on(ours: TuningSession) -> list[int]:
    """The numbers of the choices that Inductor goes on with."""
    with graph(), config.patch(max_autotune=True):
        made, nodes, layout = lowered(32)
        kept = pruning.prune_before_compilation(ours, SelectionCall("mm", nodes, layout), made)
        return [int(dict(candidate_of(c).config.kwargs).get("i", LIBRARY)) for c in kept]  # type: ignore[arg-type]


def in_a_graph_of(ms: float) -> GraphPosition:
    """An operation without anything behind it, in a graph whose products take so long."""
    return GraphPosition(0.0, ("mm",), GraphProducts({("mm",): (1, 0.0), ("large",): (1, ms)}))


def test_where_nothing_is_likely_to_be_faster_nothing_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = benchmarked_at(monkeypatch, GraphPosition(fusion_ms=0.0))
    ours = serving(lambda _: 3.0, tmp_path)
    decision = chosen_by(ours)
    assert device.taken == [LIBRARY]
    assert (decision.reason, decision.median_ms, decision.measured) == (TRUSTED, 0.019, 1)
    assert decision.stated_risk == LIBRARY_BEST_RISK
    assert protocols(tmp_path) == {LIBRARY: [RECORDED]}
    chosen_by(ours)
    assert device.taken == [LIBRARY], "it is decided"
    # Elsewhere a choice may compute what follows, too.
    stand_at(monkeypatch, GraphPosition(fusion_ms=0.01))
    again = chosen_by(ours)
    assert len(device.taken) > 2
    assert device.taken.count(LIBRARY) == 2, "it is timed beside the others"
    assert again.reason != TRUSTED


@pytest.mark.parametrize("listed", [1, 2])
def test_a_choice_that_is_listed_alone_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: int
) -> None:
    """However slow it is thought to be: somebody has narrowed the list to it."""
    monkeypatch.setattr(test_selection, "COUNT", listed)
    device = benchmarked_at(monkeypatch, GraphPosition(fusion_ms=0.0))
    decision = chosen_by(serving(lambda _: 3.0, tmp_path))
    assert set(device.taken) == ({LIBRARY, 0} if listed == 1 else {LIBRARY})
    assert (decision.reason == TRUSTED) == (listed == 2)
    assert (decision.measured, decision.candidates) == ((2, 2) if listed == 1 else (1, 3))
    assert decision.stated_risk == (0.0 if listed == 1 else LIBRARY_BEST_RISK)


def test_what_is_likely_to_be_faster_is_compiled_and_what_is_asked_for_is_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = benchmarked_at(monkeypatch, GraphPosition(fusion_ms=0.0))
    chosen_by(serving(lambda _: -9.0, tmp_path / "fast"))
    assert len(set(device.taken)) > 1
    device.taken.clear()
    chosen_by(serving(lambda _: 3.0, tmp_path / "careful", risk=0.001))
    assert len(set(device.taken)) > 1, "none of 29 operations is no proof for so small a risk"


def test_on_a_device_without_measurements_the_stated_risk_is_the_forecasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = benchmarked_at(monkeypatch, GraphPosition(fusion_ms=0.0))
    monkeypatch.setattr(policy, "is_measured_device", lambda _: False)
    decision = chosen_by(serving(lambda _: 3.0, tmp_path))
    assert device.taken == [LIBRARY]
    assert decision.stated_risk < LIBRARY_BEST_RISK, "nothing comes near"


def test_a_decision_for_the_library_leaves_choices_to_be_fused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = benchmarked_at(monkeypatch, GraphPosition(fusion_ms=0.01))
    ours = serving(lambda _: 3.0, tmp_path)
    decided = chosen_by(ours)
    assert dict(decided.chosen.config.kwargs) == {}, "the library's kernel"
    taken = list(device.taken)
    kept = handed_on(ours)
    assert kept[0] == LIBRARY
    assert len(kept) == 2, "one may be faster with what follows"
    for mode in (Mode.TUNE, Mode.FROZEN, Mode.SKIP):
        again = chosen_by(serving(lambda _: 3.0, tmp_path, mode=mode))
        assert again.chosen == decided.chosen
        assert device.taken == taken, "nothing is timed again"
        assert len(handed_on(serving(lambda _: 3.0, tmp_path, mode=mode))) == (2 if mode is Mode.TUNE else 1)
    stand_at(monkeypatch, GraphPosition(fusion_ms=0.0))
    assert handed_on(ours) == [LIBRARY]


def test_where_inductor_times_otherwise_a_decision_is_all_that_is_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmarked_at(monkeypatch, GraphPosition(fusion_ms=0.01))
    ours = serving(lambda _: 3.0, tmp_path)
    chosen_by(ours)
    monkeypatch.setattr(operation_search, "times_calls", lambda *_: False)
    monkeypatch.setattr(operation_search, "is_of_clock", lambda *_, **__: True)
    assert handed_on(ours) == [LIBRARY]


def test_a_further_round_is_waited_for_where_it_may_gain_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = benchmarked_at(monkeypatch, in_a_graph_of(1.5))  # more than 1 % of it, and less than 3 %
    ours = serving(lambda _: -9.0, tmp_path)
    decision = chosen_by(ours)
    assert decision.rounds[-1] == NOT_WORTH_WAITING
    assert decision.stated_risk > ours.settings.risk
    first = len(set(device.taken))
    careful = chosen_by(serving(lambda _: -9.0, tmp_path / "careful", risk=0.01))
    assert careful.rounds[-1] != NOT_WORTH_WAITING, "who accepts little has small ones measured like others"
    stand_at(monkeypatch, GraphPosition(fusion_ms=0.0))
    again = chosen_by(ours)
    assert again.rounds[-1] != NOT_WORTH_WAITING, "it is all of another graph"
    assert len(set(device.taken)) > first


def test_an_operation_that_its_graph_hardly_notices_is_not_compiled_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = benchmarked_at(monkeypatch, in_a_graph_of(10.0))
    ours = serving(lambda _: -9.0, tmp_path)
    decision = chosen_by(ours)
    assert device.taken == [LIBRARY]
    assert decision.reason == SMALL
    assert decision.stated_risk > 0.5, "it is not said to be fast"
    stand_at(monkeypatch, in_a_graph_of(0.02))
    chosen_by(ours)
    assert len(set(device.taken)) > 1, "another graph is all about it"
    assert device.taken.count(LIBRARY) == 2, "it is timed beside the others"


def test_inputs_that_may_be_places_are_left_to_inductor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[object] = []

    def time_externs(search: object, externs: object, operation: SelectionCall) -> list[Any]:
        timed.append(operation)
        return []

    monkeypatch.setattr(operation_search, "times_calls", lambda *_: True)
    inputs = product_inputs(64, 64, 64, device="cpu")
    with graph(), config.patch(max_autotune=True):
        listed = product_choices(inputs)
        prune_before_codegen(serving(store=tmp_path), "mm", inputs, listed, time_externs=time_externs)
        assert len(timed) == 1
        with config.patch(deterministic=True):
            prune_before_codegen(serving(), "mm", inputs, listed, time_externs=time_externs)
        monkeypatch.setattr(type(inputs.nodes()[0]), "get_dtype", lambda _: torch.int32)
        prune_before_codegen(serving(), "mm", inputs, listed, time_externs=time_externs)
    assert len(timed) == 1


def test_a_library_that_cannot_be_timed_ahead_is_timed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Benchmarked(monkeypatch)
    monkeypatch.setattr(choice_timing, "can_time", _fails)
    decision = chosen_by(serving(log2_ms_of, tmp_path), warned=True)
    assert (decision.median_ms, device.taken.count(LIBRARY)) == (0.019, 1)


def _fails(device: torch.device) -> bool:
    raise RuntimeError("on purpose")
