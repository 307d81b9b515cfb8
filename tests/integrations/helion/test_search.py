"""Helion's own code generator, config space and autotuner interface, ranked by our surrogate; times are made up."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 5):
    pytest.skip("Helion supports Triton from 3.5 on", allow_module_level=True)
pytest.importorskip("helion", reason="needs the package helion")
import helion
import helion.language as hl
from torch._subclasses import FakeTensorMode

from forecast_autotune.errors import NoWorkingConfigError
from forecast_autotune.features.traced_texts import cached_facts
from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.features.ttir.parser import FeatureError
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.factory import surrogate_for
from forecast_integrations.helion import tracing
from forecast_integrations.helion.search import (
    BATCH,
    MOST_MEASURED,
    NAME,
    NEIGHBOURS,
    POOL,
    POOL_PER_WORKER,
    BatchMeasurer,
    RankedPool,
    _start_benchmark_process,
    disable_helion,
    enable_helion,
    neighbours,
    search_generations,
)
from forecast_integrations.helion.tracing import generated_launch, generated_launches
from forecast_integrations.triton.compile.children import answers_of_children
from forecast_integrations.triton.compile.pool import without_device


class NoNeighbours:
    """Helion's generator where every parameter is fixed: the pool stays as it is."""

    overridden_flat_indices = block_size_indices = flat_spec = ()

    def flatten(self, config: Any) -> list[Any]:
        return []


@helion.kernel(autotune_effort="quick", static_shapes=True)
def row_sums(x: torch.Tensor) -> torch.Tensor:
    rows, _ = x.size()
    out = torch.empty([rows], dtype=x.dtype, device=x.device)
    for tile in hl.tile(rows):
        out[tile] = x[tile, :].sum(-1)
    return out


ARGS = (torch.empty(1024, 512),)


@pytest.fixture(scope="module")
def bound() -> Any:
    return row_sums.bind(ARGS)


@pytest.fixture
def enabled(clean_environment: None) -> Iterator[Any]:
    yield enable_helion()
    disable_helion()


def population(bound: Any, count: int) -> list[Any]:
    return list(bound.config_spec.create_config_generation().random_population(count))


def made_up_ms(config: Any) -> float:
    """Best at 16 rows and 4 warps."""
    rows, warps = config.config["block_sizes"][0], config.config["num_warps"]
    return 0.1 + 0.05 * abs(rows.bit_length() - 5) + 0.03 * abs(warps.bit_length() - 3)


class Timed(list[Any]):
    """A benchmark of made-up times; holds the configs that were asked for."""

    def __call__(self, some: list[Any]) -> list[tuple[str, float]]:
        self += some
        return [("ok", made_up_ms(c)) for c in some]


def test_a_config_is_traced_by_its_generated_code_without_a_launch(bound: Any) -> None:
    launch = generated_launch(bound, ARGS, bound.config_spec.default_config())
    rows = bound.config_spec.default_config().config["block_sizes"][0]
    assert launch.grid[0] == -(-1024 // rows)
    assert "tt.func" in launch.ttir
    assert [a.shape for a in launch.arguments if a.kind == "tensor"][:1] == [(1024, 512)]


def test_what_has_no_code_is_refused(bound: Any) -> None:
    with pytest.raises(FeatureError, match="no code"):
        generated_launch(bound, ARGS, helion.Config(block_sizes=["many"]))


def test_a_part_of_a_pool_is_measured_until_the_risk_is_accepted(bound: Any) -> None:
    pool = RankedPool(bound, ARGS, population(bound, 24))
    assert pool.texts, "some of the pool has code on this machine"
    asked, settings = Timed(), Settings()
    decision = search_generations(pool, NoNeighbours(), asked, surrogate_for(settings), settings)
    measured = set(map(id, asked))
    assert decision.measured == len(measured) <= len(pool.configs)
    assert made_up_ms(pool.configs[decision.chosen]) == min(made_up_ms(c) for c in asked)
    assert decision.stated_risk <= settings.risk or len(measured) >= MOST_MEASURED * len(pool.configs)


def test_a_pool_of_configs_that_fail_has_no_best(bound: Any) -> None:
    pool, settings = RankedPool(bound, ARGS, population(bound, 8)), Settings()
    fail = lambda some: [("accuracy_error", float("inf"))] * len(some)  # noqa: E731
    with pytest.raises(NoWorkingConfigError, match="incorrect"):
        search_generations(pool, NoNeighbours(), fail, surrogate_for(settings), settings)


def test_what_failed_after_the_time_was_up_says_nothing_of_its_config(bound: Any) -> None:
    generation = bound.config_spec.create_config_generation()
    start = bound.config_spec.default_config()
    pool = RankedPool(bound, ARGS, neighbours(generation, start, random.Random(0)))
    settings = Settings().with_(workers=8)
    calls: list[int] = []
    first: list[Any] = []

    def benchmark(some: list[Any]) -> list[tuple[str, float]]:
        calls.append(len(some))
        first.append(some[0])
        return [("ok", made_up_ms(some[0])), *[("error", float("inf"))] * (len(some) - 1)]

    measurer = BatchMeasurer(pool, benchmark, 8, lambda: bool(calls))
    rows = list(measurer.measure(list(pool.configs)[: 2 * BATCH]))
    assert [m.outcome.is_label for m in rows] == [True] + [False] * (len(rows) - 1)
    calls.clear()
    decision = search_generations(
        pool, generation, benchmark, surrogate_for(settings), settings, lambda: len(calls) == 1
    )
    assert calls[0] > 1 == len(calls)
    assert pool.configs[decision.chosen] == first[-1]


def test_facts_are_read_with_each_configs_own_arguments(bound: Any) -> None:
    """Generated kernels differ in their arguments: with another's, what they load would be unknown."""
    pool = RankedPool(bound, ARGS, population(bound, 24))
    for candidate, config in pool.configs.items():
        launch = generated_launch(bound, ARGS, config)
        own = cached_facts(launch.ttir, launch.arguments, launch.grid)
        name = assignment_of(candidate)
        assert pool.texts.facts(name, pool.problem.arguments, launch.grid) == own
    assert pool.extend(pool.configs.values()) == 0


def test_what_holds_hundreds_of_elements_per_thread_is_left_out(bound: Any) -> None:
    """It would compile for a minute, and spill."""
    default = bound.config_spec.default_config().config
    plain, many = (helion.Config(**{**default, "block_sizes": [rows], "num_warps": 1}) for rows in (1, 64))
    pool = RankedPool(bound, ARGS, [plain, many])
    assert list(pool.configs.values()) == [plain]
    assert pool.extend([many]) == 0


def test_neighbours_are_a_few_steps_away(bound: Any) -> None:
    generation = bound.config_spec.create_config_generation()
    config = bound.config_spec.default_config()
    found = neighbours(generation, config, random.Random(0))
    assert 1 < len(found) <= NEIGHBOURS
    base = generation.flatten(config)
    flat = [generation.flatten(one) for one in found]
    changed = [sum(a != b for a, b in zip(one, base, strict=True)) for one in flat]
    assert set(changed) <= {0, 1, 2}  # some parameters say nothing beside others


@pytest.mark.slow
def test_neighbours_of_the_best_join_the_pool_while_they_are_better(bound: Any) -> None:
    generation = bound.config_spec.create_config_generation()
    start = helion.Config(**{**bound.config_spec.default_config().config, "block_sizes": [512]})
    pool = RankedPool(bound, ARGS, [start])
    asked, settings = Timed(), Settings()
    surrogate = surrogate_for(settings)
    decision = search_generations(pool, generation, asked, surrogate, settings)
    best = pool.configs[decision.chosen]
    assert made_up_ms(best) < made_up_ms(start)
    assert made_up_ms(best) == min(map(made_up_ms, asked)) == decision.median_ms
    with pytest.raises(NoWorkingConfigError):
        search_generations(pool, generation, asked, surrogate, settings, lambda: True)


def test_the_luckiest_of_close_ones_is_not_taken(bound: Any) -> None:
    pool = RankedPool(bound, ARGS, population(bound, 24))
    lucky: list[Any] = []

    def benchmark(some: list[Any]) -> list[tuple[str, float]]:
        first = not lucky
        lucky.extend(some[:1] if first else [])
        return [("ok", 0.97 if first and c is lucky[0] else 1.02 if c is lucky[0] else 1.0) for c in some]

    generation = bound.config_spec.create_config_generation()
    decision = search_generations(pool, generation, benchmark, surrogate_for(Settings()), Settings())
    assert lucky
    assert pool.configs[decision.chosen] is not lucky[0]
    assert decision.median_ms == 1.0


@pytest.mark.parametrize("release", ["1.4", "1.5"])
def test_helions_own_autotuner_runs_it_by_name(
    release: str, enabled: Any, bound: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from helion.autotuner import search_algorithms
    from helion.autotuner.benchmark_provider import BenchmarkResult

    assert search_algorithms[NAME] is enabled
    assert enable_helion() is enabled, "twice is once"
    search = enabled(bound, ARGS, count=8)
    search._autotune_budget_start = None

    def before(configs: list[Any], *, desc: str = "Benchmarking") -> list[BenchmarkResult]:
        """In place of a GPU."""
        return [BenchmarkResult(c, lambda: None, made_up_ms(c), "ok", 0.1) for c in configs]

    def since(
        configs: list[Any], *, desc: str = "Benchmarking", raise_if_no_viable_config: bool = True
    ) -> Any:
        assert not raise_if_no_viable_config
        return before(configs)

    monkeypatch.setattr(search, "benchmark_batch", before if release == "1.4" else since)
    best = search._autotune()
    assert made_up_ms(best) > 0
    assert search.settings.autotune_compile_timeout == 60, "as it was"
    assert 0.0 <= search.stated_risk <= 1.0


@pytest.mark.parametrize(("workers", "ranked"), [(2, POOL), (16, 16 * POOL_PER_WORKER)])
def test_more_workers_rank_more_configs(
    workers: int, ranked: int, enabled: Any, bound: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from helion.autotuner.config_generation import ConfigGeneration

    class Asked(Exception):
        pass

    def random_population(generation: Any, count: int, **seeds: Any) -> None:
        raise Asked(count)

    monkeypatch.setenv("FORECAST_AUTOTUNE_WORKERS", str(workers))
    monkeypatch.setattr(ConfigGeneration, "random_population", random_population)
    with pytest.raises(Asked) as asked:
        enabled(bound, ARGS)._autotune()
    assert asked.value.args == (ranked,)


def test_a_batch_without_code_is_no_end_of_the_search_with_helion_1_4(
    enabled: Any, bound: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import helion.exc

    search = enabled(bound, ARGS, count=8)

    def raising(configs: list[Any], *, desc: str = "Benchmarking") -> list[Any]:
        raise RuntimeError("no code")

    monkeypatch.setattr(search, "benchmark_batch", raising)
    with pytest.raises(helion.exc.NoConfigFound):
        search._autotune()


@pytest.mark.slow
def test_helions_process_comes_up_before_it_is_needed() -> None:
    provider = SimpleNamespace(_subprocess_benchmark_enabled=lambda: True, _benchmark_worker=None)
    _start_benchmark_process(SimpleNamespace(benchmark_provider=provider))
    worker: Any = provider._benchmark_worker
    try:
        assert worker.alive()
        process = worker._process
        assert worker.run(os.getpid, 60.0) == process.pid
        _start_benchmark_process(SimpleNamespace(benchmark_provider=provider))
        assert worker._process is process
    finally:
        worker.shutdown()
    off = SimpleNamespace(_subprocess_benchmark_enabled=lambda: False, _benchmark_worker=None)
    _start_benchmark_process(SimpleNamespace(benchmark_provider=off))
    assert off._benchmark_worker is None
    _start_benchmark_process(SimpleNamespace())


def test_it_is_taken_out_again(enabled: Any) -> None:
    from helion.autotuner import search_algorithms

    enable_helion(default=True)
    assert os.environ["HELION_AUTOTUNER"] == NAME
    disable_helion()
    assert NAME not in search_algorithms
    assert "HELION_AUTOTUNER" not in os.environ


# --- launches from children ---

HERE = os.getpid()


@pytest.fixture
def traced_here(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Configs that this process traces itself."""
    seen: list[Any] = []
    trace = tracing.generated_launch

    def noted(kernel: Any, args: Any, config: Any, *host: Any) -> Any:
        if os.getpid() == HERE:
            seen.append(config)
        return trace(kernel, args, config, *host)

    monkeypatch.setattr(tracing, "generated_launch", noted)
    return seen


def test_children_say_what_this_process_would(bound: Any, traced_here: list[Any], device: Any) -> None:
    configs = [*population(bound, 12), helion.Config(block_sizes=["many"])]
    here = generated_launches(bound, ARGS, configs)
    assert len(traced_here) == len(configs)
    assert here[-1] is None
    assert any(launch is not None and launch.facts is not None for launch in here)
    assert generated_launches(bound, ARGS, configs, workers=3) == here
    assert len(traced_here) == len(configs), "children did all of it"


@pytest.mark.parametrize("trouble", ["dies", "needs the device"])
def test_what_children_cannot_do_is_done_here(
    trouble: str, bound: Any, traced_here: list[Any], device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = population(bound, 8)
    here = generated_launches(bound, ARGS, configs)
    trace = tracing.generated_launch

    def elsewhere(kernel: Any, args: Any, config: Any, *host: Any) -> Any:
        if os.getpid() != HERE and config is configs[3]:
            if trouble == "dies":
                os._exit(9)
            raise tracing.FeatureError("no code: RuntimeError: Cannot re-initialize CUDA")
        return trace(kernel, args, config, *host)

    monkeypatch.setattr(tracing, "generated_launch", elsewhere)
    traced_here.clear()
    assert generated_launches(bound, ARGS, configs, workers=2) == here
    assert traced_here == (configs[1::2] if trouble == "dies" else [configs[3]])


def test_a_child_generates_code_for_a_device_that_it_must_not_use(device: Any) -> None:
    """Told of a CUDA device that is not there; its arguments have no memory."""
    properties = SimpleNamespace(
        **{"name": "NVIDIA H200", "major": 9, "minor": 0, "warp_size": 32, "multi_processor_count": 132},
        **{"shared_memory_per_block_optin": 232448, "L2_cache_size": 60 << 20, "total_memory": 1 << 37},
        **{"max_threads_per_multi_processor": 2048, "regs_per_multiprocessor": 65536, "gcnArchName": ""},
    )
    told = {name: properties for name in ("get_device_properties", "_get_device_properties")}
    told |= {"is_available": True, "current_device": 0, "device_count": 1, "_lazy_init": None}
    known = tracing._KnownDevice({**told, "get_device_name": "NVIDIA H200"})

    def answer(share: Any) -> list[Any]:
        known.be_known()
        with FakeTensorMode():
            args = (torch.empty(1024, 512, device="cuda"),)
        bound = row_sums.bind(args)
        tracer = tracing._Tracer(bound, args, known)
        return tracer.answer(list(enumerate(population(bound, share[0]))))

    (found,) = answers_of_children(without_device(answer), [[6]], 120.0)
    launches = [tracing._decode(launch) for _, launch in found]
    assert len(launches) == 6, "nothing needs the device"
    assert any(launch is not None and "tt.func" in launch.ttir for launch in launches)


def test_a_child_knows_the_device_and_takes_no_memory_of_it() -> None:
    known = tracing._KnownDevice(
        {"is_available": True, "current_device": 3, "get_device_properties": "H200", "_lazy_init": None}
    )

    def answer(shapes: Any) -> list[Any]:
        known.be_known()
        (shape,) = shapes
        with tracing._WithoutMemory():
            made = [torch.empty(shape, device="cuda"), torch.zeros(shape, device="cuda:3", dtype=torch.int8)]
            made += [torch.empty_like(made[0]), made[0].new_full(shape, 1.0), torch.ones(shape)]
        told = torch.cuda.get_device_properties(torch.cuda.current_device())
        return [torch.cuda.is_available(), told, [[str(t.device), list(t.shape)] for t in made]]

    ((available, told, made),) = answers_of_children(answer, [[(2, 5)]], 30.0)
    assert (available, told) == (True, "H200")
    assert made == [["meta", [2, 5]]] * 4 + [["cpu", [2, 5]]]
    assert not torch.cuda.is_available() or torch.cuda.current_device() == 0, "only the child is told"


def test_children_that_hang_are_not_waited_for() -> None:
    def answer(share: Any) -> list[Any]:
        time.sleep(60 * share[0])
        return list(share)

    assert answers_of_children(answer, [[0], [1]], 3.0) == [[0], None]
