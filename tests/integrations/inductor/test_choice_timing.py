"""Choices timed by a clock of the device in the place of Inductor's benchmarker: all of them, or none."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._inductor import config, select_algorithm
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.runtime import benchmarking
from torch._inductor.select_algorithm import ExternKernelCaller, get_algorithm_selector_cache
from torch._inductor.utils import fresh_cache

from forecast_autotune.records import Candidate, Decision
from forecast_autotune.settings import Mode
from forecast_autotune.store import Store
from forecast_integrations.inductor import choice_timing, operation_search, policy, pruning
from forecast_integrations.inductor.choice_timing import ChoiceTiming, clock_of, is_of_clock, times_calls
from forecast_integrations.inductor.choices.graph_position import GraphPosition, GraphProducts
from forecast_integrations.inductor.choices.records import problem_of
from forecast_integrations.inductor.harvest import make_measurement
from forecast_integrations.inductor.hooks import benchmarks, selection
from forecast_integrations.inductor.hooks.context import HookContext
from forecast_integrations.inductor.policy import (
    LIBRARY_BEST_RISK,
    NOT_WORTH_WAITING,
    SMALL,
    TRUSTED,
    FewRoundsPolicy,
)
from forecast_integrations.inductor.pruning import SelectionCall, prune_before_codegen
from forecast_integrations.inductor.session import TuningSession
from forecast_integrations.triton.timer.timers import CallTime
from tests.integrations.inductor.graphs import (
    graph,
    number,
    number_of,
    product_choices,
    product_inputs,
    serving,
)
from tests.integrations.inductor.test_selection import COUNT, log2_ms_of, lowered

RECORDED, BY_EVENTS = "graph-l2read-2", "events-l2read-3"
LIBRARY = -1
"""Its number among the choices of `test_selection`."""


class Clock:
    """Says of a call what was put into `ms` for it, in milliseconds."""

    def __init__(self, ms: Callable[[Callable[[], object]], CallTime]) -> None:
        self.ms = ms
        self.best: list[float] = []
        self.may_record: list[bool] = []

    def on_stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def time(self, call: Callable[[], object], best_ms: float, *, may_record: bool = True) -> CallTime:
        self.best.append(best_ms)
        self.may_record.append(may_record)
        return self.ms(call)


def choice(name: str) -> Any:
    """As much of an Inductor choice as names it."""
    shown = SimpleNamespace(name=name, description="", annotations={}, info_dict=dict, hash_key=lambda: name)
    return _Choice(**vars(shown))


class _Choice(SimpleNamespace):
    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def benchmarked(calls: ChoiceTiming, inductors: dict[Any, float], altered: float = 1.0) -> dict[Any, float]:
    """What Inductor hears of these choices; `altered` is what somebody makes of a benchmarker's time."""
    return {
        c: calls.benchmark_choice(
            c, lambda c=c, ms=ms: altered * calls.benchmark_call(lambda: c, lambda ms=ms: ms)
        )
        for c, ms in inductors.items()
    }


def of(found: dict[str, CallTime]) -> Clock:
    return Clock(lambda call: found[call().name])  # type: ignore[attr-defined]


def test_all_choices_are_told_by_the_clock_of_the_device() -> None:
    library, template, long = map(choice, ("library", "template", "long"))
    found = {
        library: CallTime(0.019, RECORDED),
        template: CallTime(0.025, RECORDED),
        long: CallTime(0.4, BY_EVENTS),
    }
    clock = of({c.name: time for c, time in found.items()})
    calls = ChoiceTiming(serving(), "mm", clock)
    told = benchmarked(calls, {library: 0.046, template: 0.030, long: 0.41})
    assert told == {c: time.ms for c, time in found.items()}
    assert clock.best == [math.inf, 0.019, 0.019], "what cannot win is timed briefly"
    assert calls.note_clocks({**told, choice("broken"): math.inf}) == ""
    assert {c: clock_of(c, ms) for c, ms in told.items()} == found
    assert clock_of(library, 0.046) is None


def test_times_that_somebody_altered_stay_and_their_clock_is_nobodys() -> None:
    library, template = choice("library"), choice("template")
    clock = of({"library": CallTime(0.019, RECORDED), "template": CallTime(0.025, RECORDED)})
    calls = ChoiceTiming(serving(), "mm", clock)
    halved = benchmarked(calls, {library: 0.046, template: 0.030}, altered=0.5)
    assert halved == {library: 0.0095, template: 0.0125}
    assert "host's part" in calls.note_clocks(halved)
    assert clock_of(library, 0.0095) is None
    # Altered after they were told, one of them only.
    told = benchmarked(calls, {library: 0.046, template: 0.030})
    assert "host's part" in calls.note_clocks({**told, template: 0.031})
    assert clock_of(library, 0.019) is not None
    assert clock_of(template, 0.031) is None


def test_a_clock_that_fails_leaves_a_choice_to_inductor_and_says_so() -> None:
    library, template = choice("library"), choice("template")

    def fails_once(call: Callable[[], Any]) -> CallTime:
        if call() is template:
            raise MemoryError("on purpose")
        return CallTime(0.019, RECORDED)

    calls = ChoiceTiming(serving(), "mm", Clock(fails_once))
    assert not calls.failed
    with pytest.warns(RuntimeWarning, match="time a call on the device.*on purpose"):
        assert benchmarked(calls, {library: 0.046, template: 0.030})[template] == 0.030
    assert calls.failed


def test_what_cannot_be_recorded_is_remembered_and_said_where_it_waits() -> None:
    first = choice("waits")
    session = serving()
    clock = of({"waits": CallTime(0.05, BY_EVENTS, host_bound=True, recordable=False)})
    for _ in range(2):
        calls = ChoiceTiming(session, "mm", clock)
        assert "wait for the device" in calls.note_clocks(benchmarked(calls, {first: 0.06}))
    assert clock.may_record == [True, False]
    other = ChoiceTiming(session, "bmm", clock)
    benchmarked(other, {first: 0.05})
    assert clock.may_record[-1], "of another operation nothing is known"


def problem(device: str) -> Any:
    with graph():
        inputs = product_inputs(16, 64, 64, device=device)
        return problem_of("mm", inputs.nodes(), inputs.output_layout(flexible=False))


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A product on a CUDA device, which is not asked for its name."""
    found = problem("cpu")
    return SimpleNamespace(kernel=found.kernel, device=SimpleNamespace(backend="cuda"))


def test_choices_are_timed_by_the_device_on_cuda_in_one_process(product: Any) -> None:
    assert times_calls(serving(), product)
    assert not times_calls(serving(mode=Mode.LISTEN), product)
    assert not times_calls(serving(), problem("cpu"))
    for elsewhere in ({"autotune_in_subproc": True}, {"max_autotune_gemm_backends": "ATEN,CUTLASS"}):
        with config.patch(**elsewhere):  # type: ignore[arg-type]
            assert not times_calls(serving(), product)


@pytest.mark.parametrize("short", [True, False])
def test_short_times_of_the_other_clock_do_not_count(short: bool) -> None:
    found = problem("cpu")
    timed = choice("library")
    by_inductor = make_measurement(found, timed, 0.046)
    timed.forecast_autotune_clock = CallTime(0.019, RECORDED, host_bound=True)
    recorded = make_measurement(found, timed, 0.019)
    assert (by_inductor.protocol, recorded.protocol) == ("inductor", RECORDED)
    assert recorded.extra["host_bound"] is True
    assert is_of_clock(by_inductor, device_clock=short) is not short
    assert is_of_clock(recorded, device_clock=short) is short
    for both in (make_measurement(found, timed, 0.4), make_measurement(found, timed, math.inf)):
        assert is_of_clock(both, device_clock=short)


# --- Inductor's own selection, with a benchmarker of its GPU path ---


class Benchmarked:
    """What Inductor's benchmarker and the other clock say, in milliseconds by the number of the choice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, torchs: bool = True) -> None:
        self.told = {LIBRARY: 0.046, **dict.fromkeys(range(COUNT), 0.03)}
        self.found = {LIBRARY: 0.019, **dict.fromkeys(range(COUNT), 0.025)}
        self.taken: list[int] = []
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(_benchmarker(), "benchmark_gpu", lambda _, call, **__: self.told[_run(call)])
        if torchs:
            monkeypatch.setattr(benchmarking, "__file__", __file__)  # where torch's own function is written
        monkeypatch.setattr(ExternKernelCaller, "benchmark", _benchmark)
        monkeypatch.setattr(operation_search, "times_calls", lambda *_: True)
        monkeypatch.setattr(choice_timing, "open_clock", lambda _: Clock(self._time))

    def _time(self, call: Callable[[], object]) -> CallTime:
        self.taken.append(_run(call))
        return CallTime(self.found[self.taken[-1]], RECORDED)

    def stand_at(self, position: GraphPosition) -> None:
        """Say where in its graph the next operation stands, on a device that forecasts have measurements of."""
        self._monkeypatch.setattr(choice_timing, "can_time", lambda _: True)
        self._monkeypatch.setattr(pruning, "graph_position", lambda *_: position)
        self._monkeypatch.setattr(policy, "is_measured_device", lambda _: True)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Benchmarked:
    return Benchmarked(monkeypatch)


def _benchmarker() -> type:
    return next(c for c in type(benchmarking.benchmarker).__mro__ if "benchmark_gpu" in vars(c))


def _run(call: Any) -> int:
    """Which choice a call runs; it is run."""
    call()
    return int(call.keywords.get("i", LIBRARY))


def _benchmark(self: Any, *args: Any, out: Any) -> Any:
    """As choices on a GPU do."""
    return benchmarking.benchmarker.benchmark_gpu(partial(self.to_callable(), *args, out=out))


def chosen_by(ours: TuningSession, *, warned: bool = False) -> Decision:
    """What is decided of a product, with Inductor's caches empty; `warned`: something goes wrong."""
    context = HookContext(ours)
    patches = [benchmarks.install(context), selection.install(context)]
    assert [p.missing for p in patches] == [[], []]
    try:
        with graph(), fresh_cache(), config.patch(max_autotune=True, autotune_num_choices_displayed=0):
            made, nodes, layout = lowered(32)
            get_algorithm_selector_cache()("mm", made, nodes, layout)
    finally:
        for p in reversed(patches):
            p.restore()
    assert context.thread.call_timing is None
    assert bool(ours.warn_once.messages) == warned
    (_, decision), *_ = ours.snapshot.store.decisions()
    return decision


@pytest.mark.parametrize("compared", [False, True])
def test_known_choices_are_timed_again_where_results_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compared: bool, device: Benchmarked
) -> None:
    """The reference is the first choice that is timed, and has to be the one that Inductor lists first."""
    chosen_by(serving(log2_ms_of, tmp_path))
    known = set(device.taken)
    device.taken.clear()
    anything = {"atol": math.inf, "rtol": 0.0, "equal_nan": True}
    monkeypatch.setattr(select_algorithm, "VERIFY", anything if compared else {})
    chosen_by(serving(lambda c: -log2_ms_of(c), tmp_path, risk=1e-6))
    taken = set(device.taken)
    assert taken - known, "more is measured for so small a risk"
    assert taken & known == ({LIBRARY} if compared else set()), "of what is handed on"


def protocols(store: Path) -> dict[int, list[str]]:
    """Of the rows that have times, by the number of their choice."""
    found: dict[int, list[str]] = {}
    for table in Store(store).tables():
        for m in table.measurements:
            if m.ok:
                found.setdefault(number_of(m.candidate), []).append(m.protocol)
    return found


def test_the_library_is_not_charged_for_the_host(tmp_path: Path, device: Benchmarked) -> None:
    decision = chosen_by(serving(log2_ms_of, tmp_path))
    assert (decision.median_ms, dict(decision.chosen.config.kwargs)) == (0.019, {})
    assert sorted(device.taken) == [-1, 0, 2], "what fails is not timed"
    assert protocols(tmp_path) == {-1: [RECORDED], 0: [RECORDED], 2: [RECORDED]}
    # Known by the next process.
    assert chosen_by(serving(log2_ms_of, tmp_path)).chosen == decision.chosen
    assert len(device.taken) == 3


def test_what_was_stored_with_the_hosts_part_is_decided_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Benchmarked
) -> None:
    with monkeypatch.context() as before:
        before.setattr(operation_search, "times_calls", lambda *_: False)
        before.setattr(choice_timing, "times_on_host", lambda *_: False)
        old = chosen_by(serving(log2_ms_of, tmp_path))
    assert (old.median_ms, dict(old.chosen.config.kwargs)) == (0.03, {"i": 0})
    assert protocols(tmp_path) == {-1: ["inductor"], 0: ["inductor"], 2: ["inductor"]}
    assert device.taken == []
    # Whoever only takes what is decided takes it, however it was timed.
    frozen = serving(log2_ms_of, tmp_path, mode=Mode.FROZEN)
    assert chosen_by(frozen).chosen == old.chosen
    assert (frozen.tally.known, device.taken) == (1, [])
    new = chosen_by(serving(log2_ms_of, tmp_path))
    assert (new.median_ms, dict(new.chosen.config.kwargs)) == (0.019, {})
    assert new.known == 1, "a failure is one by any clock"
    assert protocols(tmp_path)[LIBRARY] == ["inductor", RECORDED]


def test_a_benchmarker_of_the_users_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Benchmarked(monkeypatch, torchs=False)
    decision = chosen_by(serving(log2_ms_of, tmp_path))
    assert (decision.median_ms, dict(decision.chosen.config.kwargs)) == (0.03, {"i": 0})
    assert device.taken == []
    assert "host's part" in decision.reason


def test_a_device_whose_calls_cannot_be_timed_is_left_to_inductor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Benchmarked
) -> None:
    monkeypatch.setattr(choice_timing, "open_clock", lambda _: None)
    decision = chosen_by(serving(log2_ms_of, tmp_path))
    assert decision.median_ms == 0.03
    assert "host's part" not in decision.reason


def test_where_the_clock_fails_once_inductors_decides_alone(tmp_path: Path, device: Benchmarked) -> None:
    del device.found[0]
    with pytest.warns(RuntimeWarning, match="time a call on the device"):
        decision = chosen_by(serving(log2_ms_of, tmp_path), warned=True)
    assert (decision.median_ms, dict(decision.chosen.config.kwargs)) == (0.03, {"i": 0})
    assert set(map(tuple, protocols(tmp_path).values())) == {("inductor",)}


def test_fused_kernels_are_timed_by_the_clock_of_the_choices(
    monkeypatch: pytest.MonkeyPatch, device: Benchmarked
) -> None:
    session, kernel = serving(), partial(int, "0")

    def benchmark_codegened_module(self: object, module: object) -> tuple[float, str]:
        return benchmarking.benchmarker.benchmark_gpu(kernel), ""

    monkeypatch.setattr(TritonScheduling, "benchmark_codegened_module", benchmark_codegened_module)
    context = HookContext(session)
    patches = benchmarks.install(context)
    try:
        scheduling: Any = object.__new__(TritonScheduling)
        with graph() as lowering, lowering.set_current_device(torch.device("cpu")):
            assert scheduling.benchmark_codegened_module(None) == (0.019, "")
            device.found.clear()
            with pytest.warns(RuntimeWarning, match="time a call on the device"):
                assert scheduling.benchmark_codegened_module(None) == (0.046, "")
            context.session = None
            assert scheduling.benchmark_codegened_module(None) == (0.046, "")
    finally:
        patches.restore()
    assert context.thread.call_timing is None


# --- the library's kernels, timed while an operation is lowered ---


def test_where_the_library_is_known_to_be_far_ahead_less_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Benchmarked
) -> None:
    def slow(candidate: Candidate) -> float:
        return 3.0

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


def handed_on(ours: TuningSession) -> list[int]:
    """The numbers of the choices that Inductor goes on with."""
    with graph(), config.patch(max_autotune=True):
        made, nodes, layout = lowered(32)
        kept = pruning.prune_before_compilation(ours, SelectionCall("mm", nodes, layout), made)
        return list(map(number, kept))


def in_a_graph_of(ms: float) -> GraphPosition:
    """An operation without anything behind it, in a graph whose products take so long."""
    return GraphPosition(0.0, ("mm",), GraphProducts({("mm",): (1, 0.0), ("large",): (1, ms)}))


def test_where_nothing_is_likely_to_be_faster_nothing_is_compiled(
    tmp_path: Path, device: Benchmarked
) -> None:
    device.stand_at(GraphPosition(fusion_ms=0.0))
    ours = serving(lambda _: 3.0, tmp_path)
    decision = chosen_by(ours)
    assert device.taken == [LIBRARY]
    assert (decision.reason, decision.median_ms, decision.measured) == (TRUSTED, 0.019, 1)
    assert decision.stated_risk == LIBRARY_BEST_RISK
    assert protocols(tmp_path) == {LIBRARY: [RECORDED]}
    chosen_by(ours)
    assert device.taken == [LIBRARY], "it is decided"
    # Elsewhere a choice may compute what follows, too.
    device.stand_at(GraphPosition(fusion_ms=0.01))
    again = chosen_by(ours)
    assert len(device.taken) > 2
    assert device.taken.count(LIBRARY) == 2, "it is timed beside the others"
    assert again.reason != TRUSTED


def test_what_is_likely_to_be_faster_is_compiled_and_what_is_asked_for_is_obeyed(
    tmp_path: Path, device: Benchmarked
) -> None:
    device.stand_at(GraphPosition(fusion_ms=0.0))
    chosen_by(serving(lambda _: -9.0, tmp_path / "fast"))
    assert len(set(device.taken)) > 1
    device.taken.clear()
    chosen_by(serving(lambda _: 3.0, tmp_path / "careful", risk=0.001))
    assert len(set(device.taken)) > 1, "none of 29 operations is no proof for so small a risk"


def test_on_a_device_without_measurements_the_stated_risk_is_the_forecasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Benchmarked
) -> None:
    device.stand_at(GraphPosition(fusion_ms=0.0))
    monkeypatch.setattr(policy, "is_measured_device", lambda _: False)
    decision = chosen_by(serving(lambda _: 3.0, tmp_path))
    assert device.taken == [LIBRARY]
    assert decision.stated_risk < LIBRARY_BEST_RISK, "nothing comes near"


def test_a_decision_for_the_library_leaves_choices_to_be_fused(tmp_path: Path, device: Benchmarked) -> None:
    device.stand_at(GraphPosition(fusion_ms=0.01))
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
    device.stand_at(GraphPosition(fusion_ms=0.0))
    assert handed_on(ours) == [LIBRARY]


def test_a_further_round_is_waited_for_where_it_may_gain_something(
    tmp_path: Path, device: Benchmarked
) -> None:
    device.stand_at(in_a_graph_of(1.5))  # more than 1 % of it, and less than 3 %
    ours = serving(lambda _: -9.0, tmp_path)
    decision = chosen_by(ours)
    assert decision.rounds[-1] == NOT_WORTH_WAITING
    assert decision.stated_risk > ours.settings.risk
    first = len(set(device.taken))
    careful = chosen_by(serving(lambda _: -9.0, tmp_path / "careful", risk=0.01))
    assert careful.rounds[-1] != NOT_WORTH_WAITING, "who accepts little has small ones measured like others"
    device.stand_at(GraphPosition(fusion_ms=0.0))
    again = chosen_by(ours)
    assert again.rounds[-1] != NOT_WORTH_WAITING, "it is all of another graph"
    assert len(set(device.taken)) > first


def test_an_operation_that_its_graph_hardly_notices_is_not_compiled_for(
    tmp_path: Path, device: Benchmarked
) -> None:
    device.stand_at(in_a_graph_of(10.0))
    ours = serving(lambda _: -9.0, tmp_path)
    decision = chosen_by(ours)
    assert device.taken == [LIBRARY]
    assert decision.reason == SMALL
    assert decision.stated_risk > 0.5, "it is not said to be fast"
    device.stand_at(in_a_graph_of(0.02))
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
