"""One choice for the range of a dynamic size: Inductor's own selection, hooked; kernels sleep for their times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.select_algorithm import (
    AlgorithmSelectorCache,
    ExternKernelChoice,
    get_algorithm_selector_cache,
)
from torch._inductor.utils import fresh_cache
from torch._inductor.virtualized import V

from forecast_autotune.records import Candidate, Decision
from forecast_autotune.store import Store
from forecast_integrations.inductor import choice_timing
from forecast_integrations.inductor.session import TuningSession
from tests.integrations.inductor.graphs import (
    Template,
    lowered_product,
    number,
    number_of,
    product_inputs,
    selection_hooked,
    serving,
)
from tests.integrations.inductor.symbolic import symbolic_graph
from tests.integrations.inductor.test_compile import finish, start

if not hasattr(AlgorithmSelectorCache, "do_autotuning"):
    pytest.skip(
        "this release of torch times choices where no other size can be added", allow_module_level=True
    )

MET, LOW, HIGH = 8, 2, 256
SPECIALIST, ROBUST, FRAGILE = 0, 1, 2
"""Fastest where the graph is met and slow for many rows; never far from the best; fails with many rows."""
COUNT = 4


def seconds(i: int, rows: int) -> float:
    """Far enough apart for a machine on which whoever sleeps is woken milliseconds late."""
    if i == SPECIALIST:
        return 0.004 if rows <= MET else 0.1
    return {ROBUST: 0.014, FRAGILE: 0.01, -1: 0.04}.get(i, 0.025)


def run(a: Any, b: Any, *, out: Any, i: int = -1) -> None:
    if i == FRAGILE and a.shape[0] == HIGH:
        raise RuntimeError("out of resource: on purpose")
    assert out.shape[0] == a.shape[0]
    time.sleep(seconds(i, a.shape[0]))


def library(a: Any, b: Any, *, out: Any) -> None:
    run(a, b, out=out)


TEMPLATE = Template(run, name="forecast_test_dynamic")
LIBRARY = ExternKernelChoice(library, name="forecast_test_dynamic_library")


def log2_ms_of(candidate: Candidate) -> float:
    """All templates are alike, so all are tried."""
    return 0.0


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Kernels that sleep are not judged by what the processor does meanwhile.
    monkeypatch.setattr(choice_timing, "times_on_host", lambda *_: False)
    with fresh_cache(), config.patch(max_autotune=True, autotune_num_choices_displayed=0):
        yield


def lowered(rows: Any) -> tuple[list[Any], Any, Any]:
    return lowered_product(product_inputs(rows, 16, 16, device="cpu"), LIBRARY, TEMPLATE, COUNT)


def select(ours: TuningSession, met: int = MET, low: int | None = LOW, high: int | None = HIGH) -> int:
    """What Inductor takes for a product with so many rows, of a declared range."""
    with symbolic_graph(met, low, high) as (_, rows), selection_hooked(ours):
        _, chosen = get_algorithm_selector_cache()("mm", *lowered(rows))
    return number(chosen)


def decisions(store: Path) -> list[Decision]:
    return [decision for _, decision in Store(store).decisions()]


def timed_rows(store: Path) -> dict[int, set[int]]:
    """The candidates that were tried, by number of rows."""
    return {
        table.problem.arguments[0].shape[0]: {number_of(m.candidate) for m in table.measurements}
        for table in Store(store).tables()
    }


def test_the_choice_is_the_best_of_the_declared_range(tmp_path: Path) -> None:
    ours = serving(log2_ms_of, tmp_path)
    assert select(ours) == ROBUST
    assert ours.warn_once.messages == []
    tried = timed_rows(tmp_path)
    assert set(tried) == {LOW, MET, 64, HIGH}
    assert tried[MET] == tried[HIGH] == {-1, SPECIALIST, ROBUST, FRAGILE, 3}
    (decision,) = decisions(tmp_path)
    assert decision.reason.startswith("one config for 8 sizes")
    assert "=256 +0.0%" in decision.reason
    failed = [m for t in Store(tmp_path).tables() for m in t.measurements if not m.ok]
    assert {(number_of(m.candidate), t) for m in failed for t in [m.problem]} == {
        (
            FRAGILE,
            next(t.problem.id for t in Store(tmp_path).tables() if HIGH in t.problem.arguments[0].shape),
        )
    }


def test_a_decided_range_is_used_whichever_of_its_sizes_is_met(tmp_path: Path) -> None:
    select(serving(log2_ms_of, tmp_path))
    rows, before = timed_rows(tmp_path), counters["inductor"]["select_algorithm_autotune"]
    with fresh_cache():
        assert select(serving(log2_ms_of, tmp_path), met=100) == ROBUST
    assert counters["inductor"]["select_algorithm_autotune"] == before
    assert timed_rows(tmp_path) == rows


def test_another_range_is_decided_anew_from_what_is_known(tmp_path: Path) -> None:
    select(serving(log2_ms_of, tmp_path))
    before = counters["inductor"]["select_algorithm_autotune"]
    with fresh_cache():
        assert select(serving(log2_ms_of, tmp_path), high=MET) == SPECIALIST
    assert counters["inductor"]["select_algorithm_autotune"] == before


@pytest.mark.parametrize(
    ("settings", "bounds", "chosen", "why"),
    [
        ({"inductor_dynamic": "hint"}, (LOW, HIGH), SPECIALIST, ""),
        ({}, (None, None), SPECIALIST, "no range is declared"),
        ({"inductor_dynamic": "2..256"}, (None, None), ROBUST, "one config for 8 sizes"),
        ({"inductor_dynamic": "64..256"}, (None, None), SPECIALIST, "lies outside 64..256"),
    ],
)
def test_what_a_size_without_a_range_is_tuned_for(
    tmp_path: Path, settings: Any, bounds: Any, chosen: int, why: str
) -> None:
    assert select(serving(log2_ms_of, tmp_path, **settings), MET, *bounds) == chosen
    (decision,) = decisions(tmp_path)
    assert why in decision.reason
    if chosen == SPECIALIST:
        assert set(timed_rows(tmp_path)) == {MET}


def test_a_static_size_is_tuned_as_ever(tmp_path: Path) -> None:
    with symbolic_graph(MET, LOW, HIGH), selection_hooked(serving(log2_ms_of, tmp_path)):
        _, chosen = get_algorithm_selector_cache()("mm", *lowered(MET))
    assert number(chosen) == SPECIALIST
    (decision,) = decisions(tmp_path)
    assert "met" not in decision.reason


@pytest.mark.slow  # a real clock times what sleeps: beside a full suite another candidate may win
def test_where_other_sizes_cannot_be_timed_the_met_one_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the tensors do not fit: the compilation goes on, and the decision says why."""
    original = AlgorithmSelectorCache.benchmark_in_current_process.__func__

    def no_room(cls: Any, choices: Any, layout: Any, **more: Any) -> Any:
        if V.graph.sizevars.optimization_hints(layout.size)[0] == HIGH:
            raise torch.OutOfMemoryError("on purpose")
        return original(cls, choices, layout=layout, **more)

    monkeypatch.setattr(AlgorithmSelectorCache, "benchmark_in_current_process", classmethod(no_room))
    ours = serving(log2_ms_of, tmp_path)
    with pytest.warns(RuntimeWarning, match="on purpose"):
        assert select(ours) == SPECIALIST
    (decision,) = decisions(tmp_path)
    assert f"= {MET} alone: OutOfMemoryError: on purpose" in decision.reason
    assert decision.median_ms == pytest.approx(1000 * seconds(SPECIALIST, MET), rel=0.9)
    with fresh_cache(), pytest.warns(RuntimeWarning, match="on purpose"):
        # The range is still undecided: the next compilation tries it again.
        assert select(serving(log2_ms_of, tmp_path)) == SPECIALIST


def test_inputs_that_the_operation_makes_itself_have_the_met_size(tmp_path: Path) -> None:
    make = {0: lambda node: torch.randn(MET, 16).half()}
    with symbolic_graph(MET, LOW, HIGH) as (_, rows), selection_hooked(serving(log2_ms_of, tmp_path)):
        _, chosen = get_algorithm_selector_cache()("mm", *lowered(rows), input_gen_fns=make)
    assert number(chosen) == SPECIALIST
    (decision,) = decisions(tmp_path)
    assert "input 0, of dynamic size" in decision.reason


def test_nothing_is_guarded_on(tmp_path: Path) -> None:
    with symbolic_graph(MET, LOW, HIGH) as (graph, rows), selection_hooked(serving(log2_ms_of, tmp_path)):
        environment = graph.sizevars.shape_env
        before = (list(environment.guards), dict(environment.var_to_range))
        get_algorithm_selector_cache()("mm", *lowered(rows))
        assert (list(environment.guards), dict(environment.var_to_range)) == before
        assert graph.sizevars.optimization_hint(rows) == MET
        assert {"optimization_hint", "size_hint"}.isdisjoint(vars(graph.sizevars))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A frozen layer with a dynamic batch, compiled four times in a process of its own."""
    folder = tmp_path_factory.mktemp("dynamic")
    return finish(start(folder, "caches", "dynamic", str(folder)))


@pytest.mark.slow
def test_a_compiled_layer_is_decided_for_its_declared_range(compiled: dict[str, Any]) -> None:
    """C++ templates are generated anew for each size; the layer is right at every one of them."""
    for found in (found for name, found in compiled.items() if name != "stderr"):
        assert found["correct"]
        assert found["said"] == []
        assert found["graphs"] == 1
    found = compiled["ranged"]
    assert found["sizes"] == [2, 32, 512]
    assert found["choices"] == [2]
    (label,), (reason,) = found["labels"], found["reasons"]
    assert label.startswith("linear_unary(32x128, 256x128, 256) for s")
    assert label.endswith(" in 2..512")
    assert reason.startswith("one config for 9 sizes")


@pytest.mark.slow
def test_a_compiled_layer_of_a_known_range_is_not_measured(compiled: dict[str, Any]) -> None:
    assert compiled["again"]["sizes"] == [2, 32, 512]
    assert compiled["again"]["evidence"] == ["stored"]


@pytest.mark.slow
def test_the_user_says_what_a_dynamic_size_is_tuned_for(compiled: dict[str, Any]) -> None:
    assert compiled["hint"]["sizes"] == [32]
    assert compiled["assumed"]["sizes"] == [2, 32, 512]
    assert compiled["assumed"]["labels"] == compiled["ranged"]["labels"]
