"""Which choices stay, on Inductor's own template choices: before code is generated, and in rounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._inductor.select_algorithm import ExternKernelChoice, NoValidChoicesError

from forecast_autotune.policy import RiskBounded
from forecast_autotune.records import (
    Candidate,
    Outcome,
)
from forecast_autotune.settings import Mode
from forecast_autotune.store import Store
from forecast_autotune.telemetry import spans
from forecast_integrations.inductor import rounds
from forecast_integrations.inductor.choices import records
from forecast_integrations.inductor.choices.pool import ChoicePool
from forecast_integrations.inductor.choices.records import candidate_of, is_extern, problem_of
from forecast_integrations.inductor.harvest import make_measurement, note_error
from forecast_integrations.inductor.pruning import (
    SelectionCall,
    prune_before_codegen,
    prune_before_compilation,
    search_of,
)
from forecast_integrations.inductor.session import TuningSession
from tests.core.telemetry.recorder import Recorder
from tests.integrations.inductor.graphs import (
    H200,
    Template,
    graph,
    listed_choices,
    number,
    number_of,
    product_choices,
    product_inputs,
    serving,
)

COUNT = 12
NARROW = RiskBounded(first=0.085, share=0.12)
"""Few choices a round, so that there are several."""


@pytest.fixture(autouse=True)
def in_graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The record of a GPU that is not there is the only thing that has to be given."""
    real = records.device_of
    monkeypatch.setattr(records, "device_of", lambda d: H200 if d.type == "cuda" else real(d))
    monkeypatch.setattr(records, "tools", lambda d: {"torch": "2.13.0"})
    with graph():
        yield


def tile(candidate: Candidate) -> float:
    """A belief: large tiles are fast, the library is in the middle."""
    kwargs = dict(candidate.config.kwargs)
    if "BLOCK_M" not in kwargs:
        return 0.0
    return 7.0 - math.log2(int(kwargs["BLOCK_M"] or 1) * int(kwargs["BLOCK_N"] or 1)) / 2


@pytest.mark.parametrize(("space", "most"), [("DEFAULT", 8), ("EXHAUSTIVE", 30)])
def test_a_handful_gets_code_and_the_library_stays(space: str, most: int) -> None:
    inputs = product_inputs()
    listed = product_choices(inputs, space)
    kept = prune_before_codegen(serving(tile), "mm", inputs, listed)
    assert len(listed) > 2.5 * most
    assert 2 <= len(kept) <= most
    assert [is_extern(c) for c in kept].count(True) == 1
    best = min(map(tile, map(candidate_of, listed)))
    assert best in [tile(candidate_of(c)) for c in kept]
    order = [listed.index(c) for c in kept]
    assert order == sorted(order)
    assert not any(hasattr(c, "_choice") for c in listed), "no code may have been generated"


@pytest.mark.parametrize("mode", [Mode.LISTEN, Mode.EXHAUSTIVE])
def test_who_listens_or_wants_all_gets_all(mode: Mode) -> None:
    inputs = product_inputs()
    listed = product_choices(inputs)
    assert prune_before_codegen(serving(tile, mode=mode), "mm", inputs, listed) == listed


def test_two_processes_with_the_same_view_keep_the_same(tmp_path: Path) -> None:
    inputs = product_inputs()
    listed = product_choices(inputs)
    problem = problem_of("mm", inputs.nodes(), listed[0].layout)
    kept = []
    for i in range(2):
        ours = serving(tile, tmp_path, until="2020")
        kept.append([candidate_of(c) for c in prune_before_codegen(ours, "mm", inputs, listed)])
        # What one rank measures must not change what the other one does.
        Store(tmp_path).add(problem, make_measurement(problem, listed[i + 1], 0.1))
    assert kept[0] == kept[1]


def test_what_the_store_decided_gets_code_and_company(tmp_path: Path) -> None:
    """Before code generation not all choices are known, so one more stays beside the library."""
    inputs = product_inputs()
    listed = product_choices(inputs)
    ours = serving(tile, tmp_path)
    slow = max(listed, key=lambda c: tile(candidate_of(c)))
    problem = problem_of("mm", inputs.nodes(), listed[0].layout)
    for choice in listed:
        ours.snapshot.add(problem, make_measurement(problem, choice, 1.0 if choice is slow else 2.0))
    kept = prune_before_codegen(serving(tile, tmp_path), "mm", inputs, listed)
    assert {candidate_of(c) for c in kept} == {candidate_of(slow), candidate_of(listed[0])}


# --- all of it, with code: extern choices stand in for templates, which need a GPU ---


STANDS_IN = Template(torch.mm, "at::mm_out", name="forecast_test_mm")
LIBRARY = ExternKernelChoice(torch.mm, "at::mm_out", name="forecast_test_library")


class Bench:
    """Inductor's round of benchmarks, with made-up times: milliseconds by the parameter `i`."""

    def __init__(self, ours: TuningSession, times: dict[int, float]) -> None:
        self.ours, self.times = ours, times
        self.rounds: list[list[int]] = []
        self.prepared: list[list[Any]] = []

    def prepare(self, choices: list[Any]) -> str:
        self.prepared.append(choices)
        return "prepared"

    def measure(self, choices: list[Any], prepared: Any) -> dict[Any, float]:
        search = search_of(choices)
        self.rounds.append([number(c) for c in choices])
        timings = {c: self.times.get(number(c), 1.0) for c in choices}
        if all(map(math.isinf, timings.values())):
            raise NoValidChoicesError
        for choice in (c for c, ms in timings.items() if math.isinf(ms)):
            note_error(choice, RuntimeError("on purpose"))
        rows = [make_measurement(search.problem, c, ms) for c, ms in timings.items()]
        for m in rows:
            self.ours.snapshot.add(search.problem, m)
        search.add_measurements(rows)
        return timings


def log2_ms_of(candidate: Candidate) -> float:
    """A belief: the higher the number, the slower; everything is far faster than it is."""
    return float(dict(candidate.config.kwargs).get("i", 6)) - 40.0  # type: ignore[arg-type]


def listed_here(inputs: Any, count: int = COUNT) -> list[Any]:
    lists = listed_choices(inputs, LIBRARY, STANDS_IN, count)
    return [*lists["library"], *lists["template"]]


def first_of(ours: TuningSession, inputs: Any, listed: list[Any], *, drafted: bool = True) -> list[Any]:
    """The choices that are compiled first; `drafted`: among those that get code."""
    made = [c.choice for c in (prune_before_codegen(ours, "mm", inputs, listed) if drafted else listed)]
    return prune_before_compilation(ours, SelectionCall("mm", inputs.nodes(), made[0].layout), made)


def select(
    ours: TuningSession, times: dict[int, float], count: int = COUNT
) -> tuple[Bench, dict[int, float]]:
    """Inductor's selection: its times by number. Empty when it was left a single choice."""
    inputs = product_inputs(64, 32, 16, device="cpu")
    left = first_of(ours, inputs, listed_here(inputs, count))
    bench = Bench(ours, times)
    if len(left) == 1:
        bench.rounds.append([number(left[0])])
        return bench, {}
    timings = rounds.tune_in_rounds(ours, bench.measure, bench.prepare, left, "first")
    return bench, {number(c): ms for c, ms in timings.items()}


def test_rounds_bring_reserved_templates_back() -> None:
    ours = serving(log2_ms_of, policy=NARROW)
    bench, timings = select(ours, {})
    assert bench.rounds[0] == [-1, 0, 1, 2]
    assert bench.rounds[1:] == [[3, 4, 5, 6]]
    assert [[number(c) for c in r] for r in bench.prepared] == bench.rounds[1:]
    assert set(timings) == {-1, *range(7)}, "the policy's cap of eight"
    assert "8 compiled and timed" in ours.tally.line()


def test_an_operations_decision_is_told_with_the_figures_of_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    ours = serving(log2_ms_of, tmp_path)
    monkeypatch.setattr(spans._state, "exporter", recorder)
    bench, _ = select(ours, {})
    later = serving(log2_ms_of, tmp_path)
    select(later, {})
    first, second = recorder.named("decide")
    assert [m["candidates"] for m in recorder.named("measure")] == [len(r) for r in bench.rounds]
    assert (first["evidence"], second["evidence"]) == ("measured", "stored")
    assert recorder.named("forecast")
    assert recorder.counted == {
        "hits": later.tally.known,
        "misses": 1,
        "measured": ours.tally.compiled,
        "seconds_saved": 0.0,
    }


def test_when_nothing_of_the_first_round_runs_everything_else_is_tried() -> None:
    broken = dict.fromkeys((-1, 0, 1, 2), math.inf)
    bench, timings = select(serving(log2_ms_of, policy=NARROW), broken)
    assert bench.rounds[:2] == [[-1, 0, 1, 2], list(range(3, COUNT))]
    assert {i for i, ms in timings.items() if math.isinf(ms)} == set(broken)


def test_when_nothing_at_all_runs_inductor_says_so() -> None:
    with pytest.raises(NoValidChoicesError):
        select(serving(log2_ms_of), dict.fromkeys(range(-1, COUNT), math.inf))


def test_a_known_failure_is_not_tried_again(tmp_path: Path) -> None:
    select(serving(log2_ms_of, tmp_path), {0: math.inf, 1: 0.5})
    (table,) = Store(tmp_path).tables()
    failed = [m for m in table.measurements if m.outcome is not Outcome.OK]
    assert [dict(m.candidate.config.kwargs)["i"] for m in failed] == [0]
    # Another policy, so the decision does not count and the search begins anew.
    bench, timings = select(serving(log2_ms_of, tmp_path, tolerance=0.01), {})
    known = {dict(m.candidate.config.kwargs).get("i", -1) for m in table.measurements}
    assert not known & {i for r in bench.rounds for i in r}
    assert math.isinf(timings.get(0, math.inf))


@pytest.mark.parametrize("mode", [Mode.SKIP, Mode.FROZEN, Mode.DETERMINISTIC])
def test_modes_without_a_clock_leave_the_best_guess(mode: Mode, tmp_path: Path) -> None:
    bench, timings = select(serving(log2_ms_of, tmp_path, mode=mode), {})
    assert (bench.rounds, timings) == ([[0]], {})
    select(serving(log2_ms_of, tmp_path), {3: 0.01})
    bench, _ = select(serving(log2_ms_of, tmp_path, mode=mode), {})
    assert bench.rounds == [[0 if mode is Mode.DETERMINISTIC else 3]]


def test_collective_operations_are_left_alone() -> None:
    inputs = product_inputs(64, 32, 16, device="cpu")
    made = [c.choice for c in listed_here(inputs)]
    operation = SelectionCall("mm", inputs.nodes(), made[0].layout, tuned_by_all_ranks=True)
    assert prune_before_compilation(serving(log2_ms_of), operation, made) is made


def test_a_template_that_gives_no_code_is_replaced() -> None:
    """Inductor drops a template choice whose code cannot be generated; the next best takes its place."""

    class Barren(Template):
        def choice_or_none(self, **kwargs: Any) -> Any:
            return None if kwargs.get("i", 0) in (3, 4) else super().choice_or_none(**kwargs)

    barren = Barren(torch.mm, "at::mm_out", name="forecast_test_barren")
    ours = serving(log2_ms_of, policy=NARROW)
    inputs = product_inputs(64, 32, 16, device="cpu")
    listed = listed_here(inputs)
    for choice in listed[1:]:
        choice.template = barren
    left, bench = first_of(ours, inputs, listed), Bench(ours, {})
    timings = rounds.tune_in_rounds(ours, bench.measure, bench.prepare, left, "")
    assert {3, 4}.isdisjoint(number(c) for c in timings)
    assert {5, 6} <= {number(c) for c in timings}


def test_what_was_decided_before_and_has_no_code_is_not_decided_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    select(serving(log2_ms_of, tmp_path), {4: 0.25})

    made_of = ChoicePool._with_code
    monkeypatch.setattr(ChoicePool, "_with_code", lambda s, c: None if number(c) == 4 else made_of(s, c))
    inputs = product_inputs(64, 32, 16, device="cpu")
    ours = serving(log2_ms_of, tmp_path)
    left = first_of(ours, inputs, listed_here(inputs), drafted=False)
    assert len(left) > 1
    assert 4 not in map(number, left)
    bench = Bench(ours, {})
    assert 4 not in map(number, rounds.tune_in_rounds(ours, bench.measure, bench.prepare, left, ""))
    (_, decision), *_ = ours.snapshot.store.decisions()
    assert number_of(decision.chosen) != 4


def test_what_was_not_waited_for_is_not_asked_for_again() -> None:
    ours = serving(log2_ms_of, policy=NARROW)
    inputs = product_inputs(64, 32, 16, device="cpu")
    listed = listed_here(inputs)
    left, bench = first_of(ours, inputs, listed), Bench(ours, {})
    search_of(left).set_aside(candidate_of(next(c for c in listed if number(c) == 4)))
    rounds.tune_in_rounds(ours, bench.measure, bench.prepare, left, "")
    assert bench.rounds[1] == [3, 5, 6]
    assert not any(4 in r for r in bench.rounds)
    (_, decision), *_ = ours.snapshot.store.decisions()
    assert "was not waited for" in decision.reason
