"""Tune a kernel of another language: the decorator's loop, store, forecasts and settings, without the decorator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from forecast_autotune.errors import SettingsError
from forecast_autotune.languages.measurer import LanguageMeasurer
from forecast_autotune.languages.protocol import LanguageKernel
from forecast_autotune.policy import Policy
from forecast_autotune.records import Candidate, Config, Decision
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.factory import surrogate_for
from forecast_autotune.surrogates.protocol import Surrogate
from forecast_autotune.tuning.loop import TuningTask, tune


@dataclass(frozen=True)
class TunedKernel:
    """What was decided, and what the kernel's `compile` made of the config that was chosen."""

    decision: Decision
    compiled: Any


def tune_language(
    kernel: LanguageKernel,
    configs: Iterable[Config],
    *,
    store: Store | None = None,
    settings: Settings | None = None,
    surrogate: Surrogate | None = None,
    policy: Policy | None = None,
) -> TunedKernel:
    """Choose a config of a list or a `Space`, measuring what forecasts are unsure about.

    Without arguments, the user's store and the settings of the environment. What was decided before is compiled
    and not measured. Raises `NoWorkingConfigError` if every config fails, `FrozenMissError` as the decorator does,
    and `SettingsError` for an empty list.
    """
    candidates = [Candidate(config) for config in dict.fromkeys(configs)]
    if not candidates:
        raise SettingsError(
            "a kernel needs one config or more: the list is empty, or no constraint allows any"
        )
    chosen = settings or Settings.from_environment()
    kept = store if store is not None else Store.default()
    measurers: list[LanguageMeasurer] = []

    def make() -> LanguageMeasurer:
        guard = lambda candidate: kept.watch(kernel.problem, candidate)  # noqa: E731
        measurers.append(LanguageMeasurer(kernel, workers=chosen.worker_count(), guard=guard))
        return measurers[-1]

    task = TuningTask(kernel.problem, candidates)
    decision = tune(
        task,
        make,
        store=kept,
        surrogate=surrogate or surrogate_for(chosen),
        settings=chosen,
        policy=policy,
    )
    known = [found for m in measurers if (found := m.compiled(decision.chosen)) is not None]
    return TunedKernel(decision, known[0] if known else kernel.compile(decision.chosen.config))
