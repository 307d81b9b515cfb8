"""A search algorithm for Helion's autotuner: our surrogate ranks its configs, our policy plans what it benchmarks.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from forecast_autotune.features.traced_texts import TracedTexts
from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.policy import TuningState
from forecast_autotune.policy.risk_bounded import RiskBounded
from forecast_autotune.records import Candidate, Kernel, Measurement, Outcome, Problem
from forecast_autotune.settings import Settings
from forecast_autotune.store.exchange.helion import PROTOCOL
from forecast_autotune.surrogates.factory import surrogate_for
from forecast_autotune.surrogates.protocol import Query, Surrogate
from forecast_integrations.device import current_device, toolchain
from forecast_integrations.helion.child_tracing import generated_launches
from forecast_integrations.helion.tracing import GeneratedLaunch, to_config

Benchmark = Callable[[list[Any]], Sequence[tuple[str, float]]]
"""Helion's status and milliseconds of configs, in their order."""

NAME = "ForecastSearch"
POOL, POOL_PER_WORKER = 48, 6
"""Configs that are ranked at first at least, and for each worker; to generate and read the code of one takes a worker
some 0.1 s."""
COMPILE_TIMEOUT_S = 4
"""Seconds that Helion gives a compilation at most: a whole batch waits for its slowest, and what compiles so long is
hardly ever fast."""
BATCH = 8
"""Configs that Helion is given at a time. It compiles them side by side; to check and time one takes it 0.3 s."""
MOST_ELEMENTS = 256
"""Elements of its largest tile for each thread from which on a config is left out: it spills, and may compile for
minutes, for which a whole batch waits. Of 40 recorded ones the median took 8 times as long as the best, a tenth
compiled for more than 6 s, and five were within 2 % of the best."""
MOST_ROUNDS = 30
MOST_MEASURED = 0.5
"""Share of the pool that is measured at most, whatever risk is left."""
MOST_GENERATIONS = 5
"""Times that neighbours of the best join the pool, at most; as many as Helion's own searches at effort `quick`."""
NEIGHBOURS, NEIGHBOURS_PER_WORKER, STEPS = 24, 4, 2
"""Of these, how many are drawn at most, at least so many or so many for each worker; and how far away they are, in
Helion's steps."""
_WORTHWHILE = 0.01
"""Share of its time by which a generation has to be better than the last, for another one to follow."""
_FINALISTS, _FINAL_TIMINGS, _FINAL_MARGIN = 4, 2, 0.05
"""How many of the fastest are timed again, how often, and by what share of the fastest's time others may be slower to
be among them."""
_RAN = ("ok", "deduplicated")
_OUTCOMES = {
    "timeout": Outcome.TIMEOUT,
    "accuracy_error": Outcome.INCORRECT,
    "peer_compilation_fail": Outcome.INFRASTRUCTURE,
    "filtered": Outcome.COMPILE_ERROR,
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
        found = generated_launches(self._kernel, self._args, some, self._workers)
        return list(zip(some, found, strict=True))

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

    def state(
        self, surrogate: Surrogate, rows: Mapping[Candidate, Measurement], settings: Settings
    ) -> TuningState:
        """What the policy looks at, after what was measured."""
        query = Query(self.problem, list(self.configs), self.grids, tuple(rows.values()), ttir=self.texts)
        return TuningState(
            surrogate.forecast(query),
            dict(rows),
            new=len(rows),
            round=len(rows),
            workers=settings.worker_count(),
            tolerance=settings.tolerance,
            risk=settings.risk,
            budget=settings.budget,
            problem=self.problem.id,
        )


def search_pool(
    pool: RankedPool,
    benchmark: Benchmark,
    surrogate: Surrogate,
    settings: Settings,
    *,
    measured: Mapping[Candidate, Measurement] | None = None,
    exhausted: Callable[[], bool] = lambda: False,
) -> tuple[Any, dict[Candidate, Measurement], float]:
    """Measure until the stated risk is accepted: (best config or None, what was measured, the risk at the end).

    `benchmark` gives (Helion's status, milliseconds) of configs, in their order. `measured` is what is known before.
    Once `exhausted`, the search ends: Helion then answers for what it has not tried as for what fails.
    """
    rows: dict[Candidate, Measurement] = dict(measured or {})
    policy = RiskBounded(share=MOST_MEASURED)
    risk = 1.0
    for _ in range(MOST_ROUNDS):
        plan = policy.plan(pool.state(surrogate, rows, settings))
        risk = plan.risk
        # The pool's first, Helion's default or what its heuristics say, is timed as well: no slower one is chosen.
        batch = [*([] if rows else list(pool.configs)[:1]), *plan.measure, *plan.prefetch]
        wanted = [c for c in dict.fromkeys(batch) if c not in rows][:BATCH] if plan.measure else []
        if not wanted or exhausted():
            break
        for candidate, (status, ms) in zip(wanted, benchmark([pool.configs[c] for c in wanted]), strict=True):
            m = _measurement(pool.problem.id, candidate, status, ms)
            if m.ok or not exhausted():
                rows[candidate] = m
    ran = [m for m in rows.values() if m.ok]
    best = pool.configs[min(ran, key=lambda m: m.ms).candidate] if ran else None
    return best, rows, risk


def neighbours(generation: Any, config: Any, generator: random.Random, most: int = NEIGHBOURS) -> list[Any]:
    """Configs that differ from this one in one parameter, or in two block sizes, by a few steps; `most` at most.

    `generation` is Helion's `ConfigGeneration`. What it refuses is left out.
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
    found = []
    for change in changes[:most]:
        with contextlib.suppress(Exception):  # `InvalidConfig` of many kinds
            found.append(generation.unflatten([change.get(i, value) for i, value in enumerate(base)]))
    return found


def search_generations(
    pool: RankedPool,
    generation: Any,
    benchmark: Benchmark,
    surrogate: Surrogate,
    settings: Settings,
    exhausted: Callable[[], bool],
    say: Callable[[str], object] = lambda _: None,
) -> tuple[Any, dict[Candidate, Measurement], float]:
    """`search_pool`, and again with the neighbours of the best, until these are no better; the fastest timed again.

    `say` hears of every generation.
    """
    best, rows, risk = search_pool(pool, benchmark, surrogate, settings, exhausted=exhausted)
    generator = random.Random(settings.seed)
    most = max(NEIGHBOURS, NEIGHBOURS_PER_WORKER * settings.worker_count())
    for count in range(MOST_GENERATIONS):
        before = _fastest_ms(rows)
        say(
            f"Generation {count}: {len(rows)} of {len(pool.configs)} measured, {before:.4f} ms, risk {risk:.0%}"
        )
        if best is None or exhausted():
            break
        if not pool.extend(neighbours(generation, best, generator, most)):
            break
        best, rows, risk = search_pool(
            pool, benchmark, surrogate, settings, measured=rows, exhausted=exhausted
        )
        if _fastest_ms(rows) > (1.0 - _WORTHWHILE) * before:
            break
    if best is not None:
        best = _retimed_best(pool, benchmark, rows)
    return best, rows, risk


def _fastest_ms(rows: Mapping[Candidate, Measurement]) -> float:
    return min((m.ms for m in rows.values() if m.ok), default=math.inf)


def _retimed_best(pool: RankedPool, benchmark: Benchmark, rows: Mapping[Candidate, Measurement]) -> Any:
    """The best config by the median of several timings: single ones crown the luckiest, not the best."""
    limit = (1.0 + _FINAL_MARGIN) * _fastest_ms(rows)
    close = sorted((m for m in rows.values() if m.ok and m.ms <= limit), key=lambda m: m.ms)[:_FINALISTS]
    times = {m.candidate: [m.ms] for m in close}
    for _ in range(_FINAL_TIMINGS if len(times) > 1 else 0):
        for c, (status, ms) in zip(times, benchmark([pool.configs[c] for c in times]), strict=True):
            if status in _RAN and math.isfinite(ms):
                times[c].append(ms)
    return pool.configs[min(times, key=lambda c: statistics.median(times[c]))]


def _start_benchmark_process(search: Any) -> None:
    """Have Helion's process that times configs come up, 10 s, while they are ranked.

    Its own searches start it with the first config. Nothing happens where this release of Helion has none.
    """
    with contextlib.suppress(Exception):
        provider = search.benchmark_provider
        if provider._subprocess_benchmark_enabled() and provider._benchmark_worker is None:
            made = importlib.import_module("helion.autotuner.benchmark_worker").BenchmarkWorker(device=None)
            made._start()
            provider._benchmark_worker = made


def _measurement(problem: str, candidate: Candidate, status: str, ms: float) -> Measurement:
    if status in _RAN and math.isfinite(ms) and ms > 0:
        return Measurement(problem, candidate, Outcome.OK, ms, protocol=PROTOCOL)
    return Measurement(problem, candidate, _OUTCOMES.get(status, Outcome.RUNTIME_ERROR), protocol=PROTOCOL)


def make_search_class() -> Any:
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
                found = self.benchmark_batch(configs, desc="Forecast", **options)
            except Exception:
                if quiet:
                    raise
                return [("error", math.inf)] * len(configs)
            return [(str(result.status), float(result.perf)) for result in found]

        usual = self.settings.autotune_compile_timeout
        self.settings.autotune_compile_timeout = min(usual, COMPILE_TIMEOUT_S)
        try:
            best, rows, self.stated_risk = search_generations(
                pool,
                generation,
                benchmark,
                surrogate_for(settings),
                settings,
                self._autotune_budget_exceeded,
                self.log,
            )
        finally:
            self.settings.autotune_compile_timeout = usual
        self.log(
            f"{len(rows)} of {len(pool.configs)} configs measured, {self.stated_risk:.0%} risk of a better one"
        )
        if best is None:
            raise importlib.import_module("helion.exc").NoConfigFound
        return best

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
    made = algorithms.get(NAME) or make_search_class()
    algorithms[NAME] = made
    if default:
        os.environ["HELION_AUTOTUNER"] = NAME
    return made


def disable_helion() -> None:
    """Take the algorithm out again."""
    with contextlib.suppress(ImportError):
        importlib.import_module("helion.autotuner").search_algorithms.pop(NAME, None)
    if os.environ.get("HELION_AUTOTUNER") == NAME:
        del os.environ["HELION_AUTOTUNER"]
