"""The library's kernels are timed while an operation is lowered, and what is chosen first knows their times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._inductor import config

from forecast_autotune.records import Candidate
from forecast_integrations.inductor import choice_timing, operation_search
from forecast_integrations.inductor.pruning import SelectionCall, prune_before_codegen
from forecast_integrations.inductor.session import FewRoundsPolicy
from tests.integrations.inductor.graphs import graph, product_choices, product_inputs, serving
from tests.integrations.inductor.test_choice_timing import (
    LIBRARY,
    RECORDED,
    Benchmarked,
    chosen_by,
    protocols,
)
from tests.integrations.inductor.test_selection import log2_ms_of


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
