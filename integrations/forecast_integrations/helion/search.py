"""A search algorithm for Helion's autotuner: the project's loop over Helion's configs and Helion's clock.

Helion compiles, checks and times as ever; a pool of its own random configs (its default and its seeds among them) is
priced from generated code, a few are measured, and rounds go on until the stated risk of having missed a better one of
the pool is accepted. Then the neighbours of the best join the pool, as long as that finds better ones. `enable_helion`
adds it to Helion's algorithms: `HELION_AUTOTUNER=ForecastSearch`, or `autotuner_fn` of a kernel.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import math
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forecast_autotune.errors import NoWorkingConfigError
from forecast_autotune.features.traced_texts import TracedTexts
from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.policy import TuningState
from forecast_autotune.policy.risk_bounded import RiskBounded
from forecast_autotune.records import (
    Candidate,
    Decision,
    Kernel,
    Measurement,
    MeasuringCost,
    Outcome,
    Plan,
    Problem,
)
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.store import Store
from forecast_autotune.store.formats.helion import HELION_PROTOCOL
from forecast_autotune.surrogates.factory import surrogate_for
from forecast_autotune.surrogates.protocol import Surrogate
from forecast_autotune.tuning.loop import TuningTask, tune
from forecast_autotune.tuning.measurer import Measurer
from forecast_integrations.device import current_device, toolchain
from forecast_integrations.helion.tracing import GeneratedLaunch, generated_launches, to_config

Benchmark = Callable[[list[Any]], Sequence[tuple[str, float]]]
"""Helion's status and milliseconds of configs, in their order."""

NAME = "ForecastSearch"
POOL, POOL_PER_WORKER = 48, 6
"""Configs that are ranked at first at least, and for each worker; to generate and read the code of one takes a worker
some 0.1 s."""
COMPILE_TIMEOUT_S = 4
"""Seconds that Helion gives a compilation at most: a whole batch waits for its slowest, and one that compiles so long
is hardly ever fast."""
BATCH = 8
"""Configs that Helion is given at a time. It compiles them side by side; to check and time one takes it 0.3 s."""
MOST_ELEMENTS = 256
"""Elements of its largest tile for each thread from which on a config is left out: it spills, and may compile for
minutes, for which a whole batch waits. The median of 40 recorded ones took 8 times as long as the best, a tenth
compiled for more than 6 s, and five were within 2 % of the best."""
MOST_MEASURED = 0.5
"""Share of the pool that is measured at most, whatever risk is left."""
MOST_GENERATIONS = 5
"""Times that neighbours of the best join the pool, at most; as many as Helion's own searches at effort `quick`."""
NEIGHBOURS, NEIGHBOURS_PER_WORKER, STEPS = 24, 4, 2
"""How many of these are drawn at most, at least so many or so many for each worker; and how far away they are, in
Helion's steps."""
_WORTHWHILE = 0.01
"""Share of its time by which a generation has to be better than the last, for another one to follow."""
_FINAL_TIMINGS = 3
"""How often each of the fastest is timed in all: single timings crown the luckiest, not the best."""
_RAN = ("ok", "deduplicated")
_TIME_IS_UP = "time is up"
_OUTCOMES = {
    "timeout": Outcome.TIMEOUT,
    "accuracy_error": Outcome.INCORRECT,
    "peer_compilation_fail": Outcome.INFRASTRUCTURE,
    "filtered": Outcome.COMPILE_ERROR,
    _TIME_IS_UP: Outcome.INFRASTRUCTURE,
}


class RankedPool:
    """The configs of one pool, as our records, with what is known of each."""

    def __init__(self, kernel: Any, args: Sequence[Any], configs: Iterable[Any], workers: int = 1) -> None:
        """Trace every config. Those without code are left out, as nobody could launch them, and so is what spills.

        Up to `workers` children trace. Raises nothing where there is none with code: such a pool is ranked by
        parameters alone.
        """
        self._kernel, self._args, self._workers = kernel, args, workers
        launches = self._launches(configs)
        first = next((launch for _, launch in launches if launch is not None), None)
        arguments = first.arguments if first else ()
        source = str(getattr(kernel, "kernel_source", "") or "")
        name = str(getattr(getattr(kernel, "kernel", None), "name", "") or "helion_kernel")
        self.problem = Problem.of(
            Kernel(name, "helion", source),
            arguments,
            current_device(),
            key=[str(a.shape) for a in arguments if a.kind == "tensor"],
            toolchain=toolchain(),
            identity=[name],
        )
        self.configs: dict[Candidate, Any] = {}
        self.texts = TracedTexts(self.problem.arguments)
        self.grids: dict[Candidate, tuple[int, ...]] = {}
        for config, launch in launches:
            if launch is not None or first is None:
                self._add(config, launch)

    def extend(self, configs: Iterable[Any]) -> int:
        """Add configs that have code and were not there; how many these were."""
        before = len(self.configs)
        for config, launch in self._launches(configs):
            if launch is not None:
                self._add(config, launch)
        return len(self.configs) - before

    def _launches(self, configs: Iterable[Any]) -> list[tuple[Any, GeneratedLaunch | None]]:
        some = list(configs)
        return list(zip(some, generated_launches(self._kernel, self._args, some, self._workers), strict=True))

    def _add(self, config: Any, launch: GeneratedLaunch | None) -> None:
        candidate = Candidate(to_config(config, *((launch.num_warps, launch.num_stages) if launch else ())))
        if launch is not None:
            # What a kernel's arguments are depends on its config: its facts are read with its own.
            read = launch.facts
            threads = launch.num_warps * self.problem.device.warp_size
            if read is not None and self.configs and read.largest_tile >= MOST_ELEMENTS * threads:
                return
            self.texts.add(assignment_of(candidate), launch.ttir, {launch.grid: read})
            self.grids[candidate] = launch.grid
        self.configs.setdefault(candidate, config)


@dataclass(frozen=True)
class BatchPolicy(RiskBounded):
    """Plans in batches of Helion's. Measurements of a smaller pool count against the limits of a larger one."""

    share: float = MOST_MEASURED
    exhausted: Callable[[], bool] = field(default=lambda: False, repr=False)
    """Whether the search has to end: Helion then answers for what it has not tried as for what fails."""

    def cap(self, state: TuningState) -> int:
        """Most measurements of one generation."""
        return max(0, super().cap(state) - (len(state.measured) - state.new))

    def plan(self, state: TuningState) -> Plan:
        """The pool's first, Helion's default or what its heuristics say, is timed as well: no slower one is chosen."""
        plan = super().plan(state)
        if not plan.measure or self.exhausted():
            return replace(plan, measure=(), prefetch=())
        first = () if state.measured else (state.forecasts.candidates[0],)
        batch = tuple(dict.fromkeys((*first, *plan.measure, *plan.prefetch)))[:BATCH]
        return replace(plan, measure=batch, prefetch=())


class BatchMeasurer(Measurer):
    """A `Measurer` over Helion's own benchmark, which compiles and times a batch of configs at once."""

    def __init__(
        self, pool: RankedPool, benchmark: Benchmark, workers: int, exhausted: Callable[[], bool]
    ) -> None:
        """`benchmark` gives (Helion's status, milliseconds) of configs, in their order."""
        self._workers = workers
        self._pool, self._benchmark, self._exhausted = pool, benchmark, exhausted
        self._begin = time.perf_counter()
        self._timing_s = 0.0
        self._times: dict[Candidate, list[float]] = defaultdict(list)

    @property
    def workers(self) -> int:
        """How many configs Helion compiles side by side."""
        return self._workers

    def measure(
        self,
        candidates: Sequence[Candidate],
        *,
        prefetch: Sequence[Candidate] = (),
        within_s: float | None = None,
    ) -> Iterator[Measurement]:
        """Yield measurements, a batch at a time; a failure once the time is up says nothing of its config."""
        for start in range(0, len(candidates), BATCH):
            batch = candidates[start : start + BATCH]
            none = [("", math.inf)] * len(batch)
            for candidate, (status, ms) in zip(
                batch, none if self._exhausted() else self._timed(batch), strict=True
            ):
                known = status if _has_run(status, ms) or not self._exhausted() else _TIME_IS_UP
                yield _measurement(self._pool.problem.id, candidate, known, ms)

    def compare(self, candidates: Sequence[Candidate]) -> list[Measurement]:
        """Time these until each has been timed `_FINAL_TIMINGS` times; its time is the median."""
        for _ in range(1, _FINAL_TIMINGS):
            if lacking := [c for c in candidates if len(self._times[c]) < _FINAL_TIMINGS]:
                self._timed(lacking)
        problem = self._pool.problem.id
        return [_measurement(problem, c, "ok", statistics.median(self._times[c])) for c in candidates]

    def spent(self) -> MeasuringCost:
        """Helion does not tell compiling from timing."""
        return MeasuringCost(timing_s=self._timing_s, wall_s=time.perf_counter() - self._begin)

    def _timed(self, batch: Sequence[Candidate]) -> list[tuple[str, float]]:
        begin = time.perf_counter()
        results = list(self._benchmark([self._pool.configs[c] for c in batch]))
        self._timing_s += time.perf_counter() - begin
        for candidate, (status, ms) in zip(batch, results, strict=True):
            if _has_run(status, ms):
                self._times[candidate].append(ms)
        return results


def neighbours(generation: Any, config: Any, generator: random.Random, most: int = NEIGHBOURS) -> list[Any]:
    """Configs that differ from this one in one parameter, or in two block sizes, by a few steps; `most` at most.

    `generation` is Helion's `ConfigGeneration`. Refused configs are left out.
    """
    base = generation.flatten(config)
    fixed = generation.overridden_flat_indices
    steps = [
        [] if i in fixed else spec.pattern_neighbors(base[i], STEPS)
        for i, spec in enumerate(generation.flat_spec)
    ]
    changes = [{i: value} for i, values in enumerate(steps) for value in values]
    blocks = [i for i in generation.block_size_indices if i not in fixed]
    for one, other in itertools.combinations(blocks, 2):
        changes += [{one: a, other: b} for a in steps[one] for b in steps[other]]
    generator.shuffle(changes)
    configs = []
    for change in changes[:most]:
        with contextlib.suppress(Exception):  # `InvalidConfig` of many kinds
            configs.append(generation.unflatten([change.get(i, value) for i, value in enumerate(base)]))
    return configs


def search_generations(
    pool: RankedPool,
    generation: Any,
    benchmark: Benchmark,
    surrogate: Surrogate,
    settings: Settings,
    exhausted: Callable[[], bool] = lambda: False,
    say: Callable[[str], object] = lambda _: None,
) -> Decision:
    """Decide on a config of the pool, and again with the neighbours of the best, until these are no better.

    `generation` is Helion's `ConfigGeneration`; `say` hears of every generation. Raises `NoWorkingConfigError` where
    nothing runs.
    """
    settings = settings.with_(mode=Mode.TUNE)
    measurer = BatchMeasurer(pool, benchmark, settings.worker_count(), exhausted)
    policy, store = BatchPolicy(exhausted=exhausted), Store(None)
    generator = random.Random(settings.seed)
    most = max(NEIGHBOURS, NEIGHBOURS_PER_WORKER * settings.worker_count())
    before = math.inf
    for count in range(MOST_GENERATIONS + 1):
        task = TuningTask(pool.problem, list(pool.configs), pool.grids, trace=lambda _: pool.texts)
        decision = tune(
            task, lambda: measurer, store=store, surrogate=surrogate, settings=settings, policy=policy
        )
        if decision.median_ms is None:  # the time was up before anything ran
            raise NoWorkingConfigError(
                f"{pool.problem.kernel.name}: no config of {len(pool.configs)} was timed"
            )
        ms = decision.median_ms
        shown = f"{decision.known + decision.measured} of {len(pool.configs)} measured, {ms:.4f} ms"
        say(f"Generation {count}: {shown}, risk {decision.stated_risk:.0%}")
        if ms > (1.0 - _WORTHWHILE) * before or exhausted() or count == MOST_GENERATIONS:
            break
        before = ms
        if not pool.extend(neighbours(generation, pool.configs[decision.chosen], generator, most)):
            break
    return decision


def _start_benchmark_process(search: Any) -> None:
    """Have Helion's process that times configs come up, 10 s, while they are ranked.

    Its own searches start it with the first config. Nothing happens where this release of Helion has none.
    """
    with contextlib.suppress(Exception):
        provider = search.benchmark_provider
        if provider._subprocess_benchmark_enabled() and provider._benchmark_worker is None:
            worker = importlib.import_module("helion.autotuner.benchmark_worker").BenchmarkWorker(device=None)
            worker._start()
            provider._benchmark_worker = worker


def _has_run(status: str, ms: float) -> bool:
    return status in _RAN and math.isfinite(ms) and ms > 0


def _measurement(problem: str, candidate: Candidate, status: str, ms: float) -> Measurement:
    if _has_run(status, ms):
        return Measurement(problem, candidate, Outcome.OK, ms, protocol=HELION_PROTOCOL)
    return Measurement(
        problem, candidate, _OUTCOMES.get(status, Outcome.RUNTIME_ERROR), protocol=HELION_PROTOCOL
    )


def _make_search_class() -> Any:
    """The algorithm's class, over the installed Helion's base. Raises `ImportError` without one."""
    base: Any = importlib.import_module("helion.autotuner.base_search").BaseSearch

    def __init__(self: Any, kernel: Any, args: Sequence[Any], count: int = 0, **rest: Any) -> None:
        base.__init__(self, kernel, args, **rest)
        self.count = count
        self.stated_risk = 1.0

    def _autotune(self: Any) -> Any:
        generation = self.config_spec.create_config_generation(
            overrides=self.settings.autotune_config_overrides or None
        )
        seeds = list(self._autotune_seed_configs())
        settings = Settings.from_environment()
        _start_benchmark_process(self)
        begin = time.perf_counter()
        workers = settings.worker_count()
        count = self.count or max(POOL, POOL_PER_WORKER * workers)
        population = generation.random_population(count, user_seed_configs=seeds)
        pool = RankedPool(self.kernel, self.args, population, workers)
        self.log(f"{len(pool.configs)} of {count} configs ranked, {time.perf_counter() - begin:.1f} s")

        # Helion 1.4 does not know the keyword, and raises only if the last config of a batch has no code.
        quiet = "raise_if_no_viable_config" in inspect.signature(self.benchmark_batch).parameters
        options = {"raise_if_no_viable_config": False} if quiet else {}

        def benchmark(configs: list[Any]) -> list[tuple[str, float]]:
            try:
                results = self.benchmark_batch(configs, desc="Forecast", **options)
            except Exception:
                if quiet:
                    raise
                return [("error", math.inf)] * len(configs)
            return [(str(result.status), float(result.perf)) for result in results]

        usual = self.settings.autotune_compile_timeout
        self.settings.autotune_compile_timeout = min(usual, COMPILE_TIMEOUT_S)
        try:
            decision = search_generations(
                pool,
                generation,
                benchmark,
                surrogate_for(settings),
                settings,
                self._autotune_budget_exceeded,
                self.log,
            )
        except NoWorkingConfigError as error:
            raise importlib.import_module("helion.exc").NoConfigFound from error
        finally:
            self.settings.autotune_compile_timeout = usual
        self.stated_risk = decision.stated_risk
        return pool.configs[decision.chosen]

    return type(
        NAME,
        (base,),
        {
            "__init__": __init__,
            "_autotune": _autotune,
            "__doc__": "Measures what a forecast is unsure about.",
        },
    )


def enable_helion(*, default: bool = False) -> Any:
    """Add the algorithm to Helion's, and return its class; with `default`, for all kernels of this process.

    Raises `ImportError` where Helion is not installed.
    """
    algorithms: dict[str, Any] = importlib.import_module("helion.autotuner").search_algorithms
    search = algorithms[NAME] = algorithms.get(NAME) or _make_search_class()
    if default:
        os.environ["HELION_AUTOTUNER"] = NAME
    return search


def disable_helion() -> None:
    """Take the algorithm out again."""
    with contextlib.suppress(ImportError):
        importlib.import_module("helion.autotuner").search_algorithms.pop(NAME, None)
    if os.environ.get("HELION_AUTOTUNER") == NAME:
        del os.environ["HELION_AUTOTUNER"]
