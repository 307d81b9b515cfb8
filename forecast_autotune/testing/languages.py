"""What every kernel of another language must obey."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from forecast_autotune.errors import NoWorkingConfigError
from forecast_autotune.languages import LanguageKernel, LanguageMeasurer, tune_language
from forecast_autotune.records import Candidate, Config, Evidence, Outcome
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store


class LanguageContract:
    """What every `LanguageKernel` must obey. Subclass it and implement `make`, and `failing` where configs can fail."""

    def make(self) -> tuple[LanguageKernel, list[Config]]:
        """A fresh kernel, and four or more configs that run and are right; what they compile to must differ."""
        raise AssertionError("a contract test class must implement make()")

    def failing(self) -> dict[Config, Outcome]:
        """Configs that fail, with their outcomes; may be empty where the language refuses nothing."""
        return {}

    def measurer(self, kernel: LanguageKernel) -> LanguageMeasurer:
        """A measurer of the kernel with two workers."""
        return LanguageMeasurer(kernel, workers=2)

    def test_says_what_it_tunes(self) -> None:
        problem = self.make()[0].problem
        again = self.make()[0].problem
        assert problem.kernel.name
        assert problem.kernel.language not in ("", "triton"), "the language is part of what forecasts go by"
        assert problem.kernel.source_sha256, "without it an edited kernel would take decisions of the old one"
        assert problem.arguments
        assert problem.toolchain, "another version of the compiler makes another program"
        assert problem.id == again.id, "a second process would not find what the first has decided"

    def test_what_compiles_is_right_and_has_times(self) -> None:
        kernel, configs = self.make()
        for config in configs[:2]:
            compiled = kernel.compile(config)
            assert kernel.check(compiled) == ""
            times = list(kernel.time(compiled))
            assert len(times) >= 3, "a median needs some"
            assert all(0.0 < t < float("inf") for t in times)

    def test_compiles_in_several_threads_at_once(self) -> None:
        kernel, configs = self.make()
        with ThreadPoolExecutor(4) as pool:
            made = list(pool.map(kernel.compile, configs[:4]))
        assert [kernel.check(one) for one in made] == [""] * len(made)

    def test_a_config_that_fails_is_an_outcome(self) -> None:
        kernel, _ = self.make()
        measurer = self.measurer(kernel)
        expected = {Candidate(config): outcome for config, outcome in self.failing().items()}
        try:
            found = {m.candidate: m for m in measurer.measure(list(expected))}
        finally:
            measurer.close()
        assert {c: m.outcome for c, m in found.items()} == expected
        assert all(m.extra["message"] for m in found.values()), "a failure without a reason"

    def test_is_decided_by_measuring_and_then_from_the_store(self) -> None:
        kernel, configs = self.make()
        store, settings = Store(None), Settings()
        tuned = tune_language(kernel, configs, store=store, settings=settings)
        assert tuned.decision.evidence is Evidence.MEASURED
        assert tuned.decision.chosen.config in configs
        assert kernel.check(tuned.compiled) == ""
        again = tune_language(self.make()[0], configs, store=store, settings=settings)
        assert (again.decision.evidence, again.decision.measured) == (Evidence.STORED, 0)
        assert again.decision.chosen == tuned.decision.chosen

    def test_respects_a_budget_of_measurements(self) -> None:
        kernel, configs = self.make()
        settings = Settings(max_measurements=2)
        assert tune_language(kernel, configs, store=Store(None), settings=settings).decision.measured <= 2

    def test_nothing_that_works_is_an_error(self) -> None:
        kernel, _ = self.make()
        failing: Any = list(self.failing())
        if not failing:
            return
        refused = False
        try:
            tune_language(kernel, failing, store=Store(None), settings=Settings())
        except NoWorkingConfigError:
            refused = True
        assert refused, "a config was chosen although none works"
