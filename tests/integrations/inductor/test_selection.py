"""Inductor's own selection, hooked, in this process: extern kernels on a CPU stand in for templates."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.select_algorithm import (
    AlgorithmSelectorCache,
    ExternKernelChoice,
    add_feedback_saver,
    add_preprocessing_fn,
    clear_preprocessing_fns,
    get_algorithm_selector_cache,
)
from torch._inductor.utils import fresh_cache
from torch._inductor.virtualized import V

from forecast_autotune.records import Candidate, Outcome
from forecast_autotune.settings import Mode
from forecast_autotune.store import Store
from forecast_integrations.inductor import summary
from forecast_integrations.inductor.choices.records import candidate_of
from forecast_integrations.inductor.hooks import selection
from forecast_integrations.inductor.hooks.context import HookContext, PatchSet
from forecast_integrations.inductor.session import TuningSession
from tests.integrations.inductor.graphs import (
    Template,
    graph,
    lowered_product,
    number,
    number_of,
    product_inputs,
    selection_hooked,
    serving,
)

COUNT, BROKEN = 8, 1


def run(a: Any, b: Any, *, out: Any, i: int = -1) -> None:
    """The product; one parameter does not work."""
    if i == BROKEN:
        raise RuntimeError("out of resource: on purpose")
    torch.mm(a, b, out=out)


TEMPLATE = Template(run, name="forecast_test_selection")
LIBRARY = ExternKernelChoice(torch.mm, "at::mm_out", name="forecast_test_selection_library")


@pytest.fixture(autouse=True)
def in_graph() -> Iterator[None]:
    with graph(), fresh_cache(), config.patch(max_autotune=True, autotune_num_choices_displayed=0):
        yield


def log2_ms_of(candidate: Candidate) -> float:
    return float(dict(candidate.config.kwargs).get("i", 3))  # type: ignore[arg-type]


@contextlib.contextmanager
def hooked(ours: TuningSession | None) -> Iterator[tuple[list[Any], Any, Any]]:
    """Choices as a lowering makes them, with their inputs and layout, while the hooks are in place."""
    with selection_hooked(ours):
        yield lowered(32)


def lowered(size: int) -> tuple[list[Any], Any, Any]:
    """Choices of a square product, as a lowering makes them."""
    return lowered_product(product_inputs(size, size, size, device="cpu"), LIBRARY, TEMPLATE, COUNT)


def select(ours: TuningSession | None) -> tuple[int, list[int]]:
    """Inductor's selection: how many rounds of benchmarks it made, and which choices had got code."""
    with hooked(ours) as (made, nodes, layout):
        before = counters["inductor"]["select_algorithm_autotune"]
        _, chosen = get_algorithm_selector_cache()("mm", made, nodes, layout)
        assert chosen is not None
        return counters["inductor"]["select_algorithm_autotune"] - before, list(map(number, made))


def outcomes(store: Path) -> dict[int, Outcome]:
    rows = [m for table in Store(store).tables() for m in table.measurements]
    return {number_of(m.candidate): m.outcome for m in rows}


def test_choices_are_pruned_timed_and_kept_with_their_failures(tmp_path: Path) -> None:
    ours = serving(log2_ms_of, tmp_path)
    assert select(ours) == (1, [-1, 0, 1, 2])
    ok = Outcome.OK
    assert outcomes(tmp_path) == {-1: ok, 0: ok, 1: Outcome.OUT_OF_RESOURCES, 2: ok}
    (table,) = Store(tmp_path).tables()
    (failed,) = [m for m in table.measurements if not m.ok]
    assert failed.extra["message"] == "RuntimeError: out of resource: on purpose"
    assert all(m.extra["choice"] for m in table.measurements)
    assert ours.warn_once.messages == []
    (_, decision), *_ = Store(tmp_path).decisions()
    assert (decision.candidates, decision.measured) == (COUNT + 1, 4)
    # The same again, with Inductor's caches emptied: decided.
    with fresh_cache():
        assert select(serving(log2_ms_of, tmp_path))[0] == 0


def test_listening_stores_all_of_it_once_and_what_it_has_heard_is_used(tmp_path: Path) -> None:
    for rounds in (1, 0):  # Inductor's own cache has the times from there on
        listening = serving(log2_ms_of, tmp_path, mode=Mode.LISTEN)
        assert select(listening) == (rounds, list(range(-1, COUNT)))
        (table,) = Store(tmp_path).tables()
        assert len(table.measurements) == len(outcomes(tmp_path)) == COUNT + 1
    assert list(Store(tmp_path).decisions()) == []
    with fresh_cache():
        assert select(serving(log2_ms_of, tmp_path))[0] == 0
    assert len(next(Store(tmp_path).tables()).measurements) == COUNT + 1


def test_times_that_somebody_altered_are_obeyed_and_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own tests make the library slow in this way; in the store it would be slow for ever."""

    def lookup(self: Any, choices: Any, name: Any, key: Any, benchmark: Any, **_: Any) -> dict[Any, float]:
        taken: dict[Any, float] = benchmark(choices) if benchmark is not None else {}
        return {c: ms * (1e6 if number(c) == -1 else 1) for c, ms in taken.items()}

    monkeypatch.setattr(AlgorithmSelectorCache, "lookup", lookup)
    ours = serving(log2_ms_of, tmp_path)
    for _ in range(2):
        with fresh_cache():
            assert select(ours)[0] == 1
    assert -1 not in outcomes(tmp_path)
    assert outcomes(tmp_path)[0] is Outcome.OK
    assert list(Store(tmp_path).decisions()) == []
    assert ours.warn_once.messages == []


def test_hooks_that_are_no_longer_in_force_do_nothing() -> None:
    assert select(None) == (1, list(range(-1, COUNT)))


def test_what_a_setting_leaves_by_name_is_chosen_among_and_nothing_else(tmp_path: Path) -> None:
    """The library's choice is forecast to be fast: a draft that knew nothing of the setting would keep it instead."""
    ours = serving(log2_ms_of, tmp_path)
    names = {"test_configs.autotune_choice_name_regex": f"{TEMPLATE.name}$"}
    with config.patch(names), hooked(ours) as (made, nodes, layout):
        assert list(map(number, made)) == list(range(-1, COUNT)), "which are left, the setting says"
        get_algorithm_selector_cache()("mm", made, nodes, layout)
    assert -1 not in outcomes(tmp_path)
    assert 0 in outcomes(tmp_path)


def test_a_users_own_function_sees_every_choice_and_we_choose_among_what_it_leaves(tmp_path: Path) -> None:
    seen: list[int] = []

    def without_fastest(choices: list[Any]) -> list[Any]:
        seen.extend(map(number, choices))
        return [choice for choice in choices if number(choice) != 0]

    add_preprocessing_fn(without_fastest)
    try:
        ours = serving(log2_ms_of, tmp_path)
        with hooked(ours) as (made, nodes, layout):
            get_algorithm_selector_cache()("mm", made, nodes, layout)
            functions = list(get_algorithm_selector_cache().preprocessing_fns)
            assert functions[-2] is without_fastest
    finally:
        clear_preprocessing_fns()
    assert seen == list(range(-1, COUNT))
    assert {2} <= set(outcomes(tmp_path)) < set(seen) - {0}
    assert ours.warn_once.messages == []


def test_who_clears_the_users_functions_does_not_clear_ours(tmp_path: Path) -> None:
    with hooked(serving(log2_ms_of, tmp_path)) as (made, nodes, layout):
        clear_preprocessing_fns()
        get_algorithm_selector_cache()("mm", made, nodes, layout)
        assert len(get_algorithm_selector_cache().preprocessing_fns) == 3
    assert len(get_algorithm_selector_cache().preprocessing_fns) == 2
    assert len(outcomes(tmp_path)) < COUNT + 1


def test_a_broken_hook_leaves_the_choices_to_inductor() -> None:
    def broken(candidate: Candidate) -> float:
        return math.nan

    ours = serving(broken)
    with pytest.warns(RuntimeWarning, match="Inductor goes on with all of its own choices"):
        assert select(ours)[1] == list(range(-1, COUNT))


@pytest.mark.parametrize("mode", [Mode.SKIP, Mode.FROZEN, Mode.DETERMINISTIC])
def test_a_hook_that_fails_times_nothing_in_a_mode_without_a_clock(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise LookupError("on purpose")

    monkeypatch.setattr(selection.pruning, "prune_before_compilation", fails)
    with pytest.warns(
        RuntimeWarning, match="Inductor goes on with the first of its own choices, as nothing is timed"
    ):
        rounds, with_code = select(serving(log2_ms_of, mode=mode))
    assert rounds == 0
    assert with_code == [-1, 0]


def test_a_store_that_fails_costs_nothing_but_itself(tmp_path: Path) -> None:
    class Failing(Store):
        def add(self, *_: Any) -> None:
            raise OSError("on purpose")

    ours = serving(log2_ms_of, Failing(tmp_path))
    with pytest.warns(RuntimeWarning, match="on purpose.*Inductor goes on"):
        assert select(ours)[1] == [-1, 0, 1, 2]


def test_times_that_the_scheduler_asks_for_later_are_taken_in_rounds(tmp_path: Path) -> None:
    """On a GPU, Inductor fuses first and measures when the graph has its scheduler."""
    ours = serving(lambda c: log2_ms_of(c) - 40.0, tmp_path)
    with config.patch(cpu_backend="triton"), hooked(ours) as (made, nodes, layout):
        before = counters["inductor"]["select_algorithm_autotune"]
        node, chosen = get_algorithm_selector_cache()("mm", made, nodes, layout, return_multi_template=True)
        assert chosen is None
        assert outcomes(tmp_path) == {}
        V.graph.scheduler = scheduler = object()
        timings = node.data.data.choice_timings()
        assert V.graph.scheduler is scheduler
    rounds = counters["inductor"]["select_algorithm_autotune"] - before
    assert len(made) < len(outcomes(tmp_path)) == COUNT
    assert rounds > 1
    # Inductor keeps only the fastest of what it takes for library calls.
    (table,) = Store(tmp_path).tables()
    assert min(timings.values()) == min(m.ms for m in table.measurements if m.ok)
    assert ours.warn_once.messages == []


def test_others_are_tuned_while_choices_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for one operation's times, and for no other's until the first one's second round has compiled.

    What is alike waits for its like, and a time that cannot be taken is asked for again in its turn.
    """
    ours = serving(lambda c: log2_ms_of(c) - 40.0, tmp_path)
    timed: list[int] = []
    benchmark = AlgorithmSelectorCache.benchmark

    def seen(self: Any, choices: Any, *rest: Any, **more: Any) -> Any:
        timed.append(int(choices[0].layout.size[0]))
        if timed[-1] == 64 and timed.count(64) == 1:
            raise MemoryError("on purpose")
        return benchmark(self, choices, *rest, **more)

    monkeypatch.setattr(AlgorithmSelectorCache, "benchmark", seen)
    with config.patch(cpu_backend="triton"), selection_hooked(ours):
        cache = get_algorithm_selector_cache()
        sizes = (32, 48, 32, 64)
        asked = [cache("mm", *lowered(n), return_multi_template=True)[0].data.data for n in sizes]
        V.graph.scheduler = scheduler_of(asked)
        with pytest.warns(RuntimeWarning, match="ahead of its turn"):
            times = asked[0].choice_timings()
        first, ahead = timed[: timed.index(48)], list(timed)
        assert first == [32]
        assert ahead.count(48) > 1
        assert ahead[len(ahead) - ahead[::-1].index(48) :].count(32) >= 1
        assert (ahead.count(64), ahead[-1]) == (1, 32)
        assert min(map(math.isfinite, asked[1].choice_timings().values()))
        assert min(asked[2].choice_timings().values()) == min(times.values())
        assert timed == ahead
        asked[3].choice_timings()
        assert set(timed[len(ahead) :]) == {64}
    assert len(list(Store(tmp_path).decisions())) == 3


def scheduler_of(buffers: Sequence[Any]) -> Any:
    """As much of a scheduler as says which operations a graph has."""
    nodes = [SimpleNamespace(node=buffer) for buffer in buffers]
    return SimpleNamespace(nodes=[SimpleNamespace(get_nodes=lambda node=node: [node]) for node in nodes])


def test_ranks_that_share_the_work_keep_every_operation_in_the_count(tmp_path: Path) -> None:
    """With `distributed_max_autotune_gemm`, ranks number the operations that have several choices."""
    import torch.distributed as dist

    select(serving(log2_ms_of, tmp_path))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with config.patch(distributed_max_autotune_gemm=True, cpu_backend="triton"), fresh_cache():
            ours = serving(log2_ms_of, tmp_path)
            with hooked(ours) as (made, nodes, layout):
                before = counters["inductor"]["select_algorithm_autotune"]
                select_one = get_algorithm_selector_cache()
                node, chosen = select_one("mm", made, nodes, layout, return_multi_template=True)
                assert chosen is None, "a single choice would have been taken at once"
                timings = node.data.data.choice_timings()
                assert counters["inductor"]["select_algorithm_autotune"] == before
    finally:
        dist.destroy_process_group()
    ((_, decision),) = Store(tmp_path).decisions()
    assert candidate_of(min(timings, key=lambda c: timings[c])) == decision.chosen
    assert ours.tally.known == 1


@pytest.mark.parametrize(
    ("settings", "space"),
    [
        ({"inductor_space": "exhaustive"}, "EXHAUSTIVE"),
        ({}, "DEFAULT"),
        ({"inductor_space": "exhaustive", "mode": Mode.LISTEN}, "DEFAULT"),
    ],
)
def test_the_exhaustive_space_is_in_force_only_while_configs_are_listed(
    settings: dict[str, Any], space: str
) -> None:
    class Listing:
        def get_template_configs(self) -> str:
            return str(config.max_autotune_gemm_search_space)

    patches, context = PatchSet(), HookContext(serving(log2_ms_of, **settings))
    patches.replace(Listing, "get_template_configs", lambda f: selection._template_configs(f, context))
    assert Listing().get_template_configs() == space
    assert config.max_autotune_gemm_search_space == "DEFAULT"


def test_a_listener_that_fails_breaks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def listener(label: str, decision: Any) -> None:
        raise OSError("the stream is closed")

    monkeypatch.setattr(summary, "LISTENERS", [listener])
    with pytest.warns(RuntimeWarning, match="keep what was decided of an operation.*stream is closed"):
        assert select(serving(log2_ms_of, tmp_path)) == (1, [-1, 0, 1, 2])


def test_a_users_list_of_savers_is_theirs_to_count_and_to_clear(tmp_path: Path) -> None:
    told: list[int] = []
    ours = serving(lambda c: log2_ms_of(c) - 40.0, tmp_path)
    with hooked(ours) as (made, nodes, layout):
        cache = get_algorithm_selector_cache()
        cache.clear_feedback_savers()
        add_feedback_saver(lambda timings, *_: told.append(len(timings)))
        before = counters["inductor"]["select_algorithm_autotune"]
        cache("mm", made, nodes, layout)
        rounds = counters["inductor"]["select_algorithm_autotune"] - before
        assert len(cache.feedback_saver_fns) == 1
        cache.clear_feedback_savers()
    assert rounds == len(told) > 1, "ours is told as well, or one round would be all"
    assert sum(told) == len(outcomes(tmp_path))
