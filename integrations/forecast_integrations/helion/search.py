"""A search algorithm for Helion's autotuner: our surrogate ranks its configs, our policy plans what it benchmarks.

Helion compiles, checks and times as ever; in place of generations of random neighbours, a pool of its own random
configs (its default and its seeds among them) is priced from generated code, a few are measured, and rounds go on
until the stated risk of having missed a better one of the pool is accepted. `enable_helion` adds it to Helion's
algorithms: `HELION_AUTOTUNER=ForecastSearch`, or `autotuner_fn` of a kernel.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.features.ttir.parser import FeatureError
from forecast_autotune.policy import TuningState
from forecast_autotune.policy.risk_bounded import RiskBounded
from forecast_autotune.records import Candidate, Kernel, Measurement, Outcome, Problem
from forecast_autotune.settings import Settings
from forecast_autotune.store.exchange.helion import PROTOCOL
from forecast_autotune.surrogates.factory import surrogate_for
from forecast_autotune.surrogates.protocol import Query, Surrogate
from forecast_integrations.device import current_device, toolchain
from forecast_integrations.helion.tracing import GeneratedLaunch, generated_launch, to_config

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "ForecastSearch"
POOL = 100
"""Configs that are ranked: as many as Helion's own searches begin with."""
MOST_ROUNDS = 30
MOST_MEASURED = 0.5
"""Share of the pool that is measured at most, whatever risk is left."""
_OUTCOMES = {
    "timeout": Outcome.TIMEOUT,
    "accuracy_error": Outcome.INCORRECT,
    "peer_compilation_fail": Outcome.INFRASTRUCTURE,
    "filtered": Outcome.COMPILE_ERROR,
}


class RankedPool:
    """The configs of one pool, as our records, with what is known of each."""

    def __init__(self, kernel: Any, args: Sequence[Any], configs: Sequence[Any]) -> None:
        """Trace every config that has code; the others are ranked by their neighbours'.

        Raises nothing for configs without code: a pool of nothing else is ranked by parameters alone.
        """
        launches: list[GeneratedLaunch | None] = []
        for config in configs:
            try:
                launches.append(generated_launch(kernel, args, config))
            except FeatureError:
                launches.append(None)
        first = next((found for found in launches if found is not None), None)
        self.configs: dict[Candidate, Any] = {}
        self.texts: dict[str, str] = {}
        self.grids: dict[Candidate, tuple[int, ...]] = {}
        for config, launch in zip(configs, launches, strict=True):
            warps, stages = (launch.num_warps, launch.num_stages) if launch else (4, 1)
            candidate = Candidate(to_config(config, warps, stages))
            self.configs.setdefault(candidate, config)
            # Facts of all candidates are read with one list of arguments: that of kernels like the first.
            if launch is not None and first is not None and _same_arguments(launch, first):
                self.texts[assignment_of(candidate)] = launch.ttir
                self.grids[candidate] = launch.grid
        source = str(getattr(kernel, "kernel_source", "") or "")
        name = str(getattr(getattr(kernel, "kernel", None), "name", "") or "helion_kernel")
        self.problem = Problem.of(
            Kernel(name, "helion", source),
            first.arguments if first else (),
            current_device(),
            key=[str(a.shape) for a in (first.arguments if first else ()) if a.kind == "tensor"],
            toolchain=toolchain(),
            identity=[name],
        )

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


def _same_arguments(one: GeneratedLaunch, other: GeneratedLaunch) -> bool:
    return [(a.name, a.kind) for a in one.arguments] == [(a.name, a.kind) for a in other.arguments]


def search_pool(
    pool: RankedPool,
    benchmark: Callable[[list[Any]], Sequence[tuple[str, float]]],
    surrogate: Surrogate,
    settings: Settings,
) -> tuple[Any, dict[Candidate, Measurement], float]:
    """Measure until the stated risk is accepted: (best config or None, what was measured, the risk at the end).

    `benchmark` gives (Helion's status, milliseconds) of configs, in their order.
    """
    rows: dict[Candidate, Measurement] = {}
    policy = RiskBounded(share=MOST_MEASURED)
    risk = 1.0
    for _ in range(MOST_ROUNDS):
        plan = policy.plan(pool.state(surrogate, rows, settings))
        risk = plan.risk
        wanted = [c for c in plan.measure if c not in rows]
        if not wanted:
            break
        for candidate, (status, ms) in zip(wanted, benchmark([pool.configs[c] for c in wanted]), strict=True):
            rows[candidate] = _measurement(pool.problem.id, candidate, status, ms)
    ran = [m for m in rows.values() if m.ok]
    best = pool.configs[min(ran, key=lambda m: m.ms).candidate] if ran else None
    return best, rows, risk


def _measurement(problem: str, candidate: Candidate, status: str, ms: float) -> Measurement:
    if status in ("ok", "deduplicated") and math.isfinite(ms) and ms > 0:
        return Measurement(problem, candidate, Outcome.OK, ms, protocol=PROTOCOL)
    return Measurement(problem, candidate, _OUTCOMES.get(status, Outcome.RUNTIME_ERROR), protocol=PROTOCOL)


def make_search_class() -> Any:
    """The algorithm's class, over the installed Helion's base. Raises `ImportError` without one."""
    base: Any = importlib.import_module("helion.autotuner.base_search").BaseSearch

    def __init__(self: Any, kernel: Any, args: Sequence[Any], count: int = POOL, **rest: Any) -> None:
        base.__init__(self, kernel, args, **rest)
        self.count = count
        self.stated_risk = 1.0

    def _autotune(self: Any) -> Any:
        generation = self.config_spec.create_config_generation(
            overrides=self.settings.autotune_config_overrides or None
        )
        seeds = list(self._autotune_seed_configs())
        pool = RankedPool(
            self.kernel, self.args, generation.random_population(self.count, user_seed_configs=seeds)
        )
        settings = Settings.from_environment()

        def benchmark(configs: list[Any]) -> list[tuple[str, float]]:
            found = self.benchmark_batch(configs, desc="Forecast", raise_if_no_viable_config=False)
            return [(str(result.status), float(result.perf)) for result in found]

        best, rows, self.stated_risk = search_pool(pool, benchmark, surrogate_for(settings), settings)
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
