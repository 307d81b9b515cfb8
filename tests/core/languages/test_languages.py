"""Kernels of a language that is made up here: what the tuner makes of them, and what the contract tests notice."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from forecast_autotune import Config, Evidence, NoWorkingConfigError, Settings, SettingsError, Space, Store
from forecast_autotune.languages import (
    LanguageKernel,
    LanguageMeasurer,
    RefusedConfigError,
    timed_launches,
    tune_language,
)
from forecast_autotune.records import Argument, Candidate, Device, Kernel, Outcome, Problem
from forecast_autotune.testing import LanguageContract, MeasurerContract
from forecast_autotune.tuning.measurer import Measurer

SPACE = Space({"TILE": [8, 16, 32, 64, 128], "UNROLL": [1, 2, 4]})


class Tiles:
    """A kernel whose time is a formula of its config; 64 tiles are the fastest, some configs fail."""

    protocol = "formula"

    def __init__(self, quiet: bool = True, source: str = "tiles") -> None:
        self.quiet = quiet
        self.problem = Problem.of(
            Kernel("tiles", "made-up", source, source.rjust(64, "0")),
            [Argument("x", "tensor", "float32", (4096,), (1,))],
            Device("made-up device", "none"),
            toolchain={"made-up": "1.0"},
        )
        self.compiled: Counter[Config] = Counter()
        self.compiling = 0
        self.timed_while_compiling = False
        self._lock = threading.Lock()

    def compile(self, config: Config) -> dict[str, Any]:
        with self._lock:
            self.compiled[config] += 1
            self.compiling += 1
        time.sleep(0.01)
        with self._lock:
            self.compiling -= 1
        given = dict(config.kwargs)
        if given["TILE"] == 1:
            raise RefusedConfigError(Outcome.OUT_OF_RESOURCES, "one tile needs too many programs")
        if given["TILE"] == 2:
            raise ValueError("no such tile")
        return given

    def check(self, compiled: dict[str, Any]) -> str:
        if compiled["TILE"] == 3:
            raise RuntimeError("illegal address")
        return "0.5 off" if compiled["TILE"] == 4 else ""

    def time(self, compiled: dict[str, Any]) -> Sequence[float]:
        self.timed_while_compiling |= self.compiling > 0
        ms = 1.0 + abs(compiled["TILE"].bit_length() - 7) + 0.1 * compiled["UNROLL"]
        return [ms, ms, 1.01 * ms]


FAILING = {
    1: Outcome.OUT_OF_RESOURCES,
    2: Outcome.COMPILE_ERROR,
    3: Outcome.RUNTIME_ERROR,
    4: Outcome.INCORRECT,
}


def config(tile: int, unroll: int = 1) -> Config:
    return Config.of({"TILE": tile, "UNROLL": unroll})


class TestTilesOnADevice(LanguageContract):
    def make(self) -> tuple[LanguageKernel, list[Config]]:
        return Tiles(), list(SPACE)

    def failing(self) -> dict[Config, Outcome]:
        return {config(tile): outcome for tile, outcome in FAILING.items()}


class TestTilesOnTheHost(TestTilesOnADevice):
    def make(self) -> tuple[LanguageKernel, list[Config]]:
        return Tiles(quiet=False), list(SPACE)


class TestTheMeasurerOfADevice(MeasurerContract):
    def make(self) -> tuple[Measurer, Sequence[Candidate]]:
        return LanguageMeasurer(Tiles(), workers=2), [Candidate(c) for c in SPACE]


class TestTheMeasurerOfTheHost(MeasurerContract):
    def make(self) -> tuple[Measurer, Sequence[Candidate]]:
        return LanguageMeasurer(Tiles(quiet=False), workers=2), [Candidate(c) for c in SPACE]


def test_a_space_is_decided_by_a_part_of_it_and_each_is_compiled_once() -> None:
    kernel = Tiles()
    tuned = tune_language(kernel, SPACE, store=Store(None), settings=Settings())
    assert tuned.decision.candidates == 15
    assert tuned.decision.measured < 15
    assert dict(tuned.decision.chosen.config.kwargs)["TILE"] == 64
    assert tuned.compiled == dict(tuned.decision.chosen.config.kwargs)
    assert set(kernel.compiled.values()) == {1}, "the chosen one was not compiled again"


def test_where_compiling_disturbs_nothing_is_timed_beside_it() -> None:
    kernel = Tiles(quiet=False)
    tune_language(kernel, SPACE, store=Store(None), settings=Settings(mode="exhaustive"))
    assert len(kernel.compiled) == 15
    assert not kernel.timed_while_compiling


def test_a_stored_decision_compiles_one_config_and_times_none(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(None)
    first = tune_language(Tiles(), SPACE, store=store, settings=Settings())
    kernel = Tiles()
    monkeypatch.setattr(kernel, "time", lambda compiled: pytest.fail("timed"))
    again = tune_language(kernel, SPACE, store=store, settings=Settings())
    assert again.decision.evidence is Evidence.STORED
    assert list(kernel.compiled) == [first.decision.chosen.config]


def test_an_edited_source_is_another_problem() -> None:
    store = Store(None)
    tune_language(Tiles(), SPACE, store=store, settings=Settings())
    edited = tune_language(Tiles(source="edited"), SPACE, store=store, settings=Settings())
    assert edited.decision.measured > 0


def test_failures_are_recorded_with_their_reasons_and_one_that_works_is_found() -> None:
    store, kernel = Store(None), Tiles()
    listed = [config(tile) for tile in (*FAILING, 8)]
    tuned = tune_language(kernel, listed, store=store, settings=Settings(mode="exhaustive"))
    assert tuned.decision.chosen.config == config(8)
    texts = {
        dict(m.candidate.config.kwargs)["TILE"]: (m.outcome, m.extra.get("message"))
        for m in store.measurements(kernel.problem)
        if not m.ok
    }
    assert texts == {
        1: (Outcome.OUT_OF_RESOURCES, "one tile needs too many programs"),
        2: (Outcome.COMPILE_ERROR, "ValueError: no such tile"),
        3: (Outcome.RUNTIME_ERROR, "RuntimeError: illegal address"),
        4: (Outcome.INCORRECT, "0.5 off"),
    }
    with pytest.raises(NoWorkingConfigError):
        tune_language(Tiles(), listed[:4], store=Store(None), settings=Settings())


def test_an_empty_space_is_refused() -> None:
    none = Space({"TILE": [8]}, where=[lambda p: False])
    with pytest.raises(SettingsError, match="the list is empty"):
        tune_language(Tiles(), none, store=Store(None), settings=Settings())


def test_a_prefetch_between_two_measurements_takes_nothing_away() -> None:
    measurer = LanguageMeasurer(Tiles(), workers=1)
    names = [Candidate(c) for c in SPACE]
    try:
        results = []
        for m in measurer.measure(names[:4]):
            results.append(m.candidate)
            measurer.prefetch(names[10:])
    finally:
        measurer.close()
    assert set(results) == set(names[:4])


def test_launches_are_timed_three_times_at_least_and_a_hundred_times_at_most() -> None:
    calls: list[int] = []
    assert len(timed_launches(lambda: calls.append(1), seconds=0.0)) == 3 == len(calls)
    times = timed_launches(lambda: None, seconds=60.0)
    assert len(times) == 100
    assert all(t > 0.0 for t in times)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        ({"check": lambda compiled: "off by one"}, "test_what_compiles_is_right_and_has_times"),
        ({"time": lambda compiled: [1.0]}, "test_what_compiles_is_right_and_has_times"),
        ({"time": lambda compiled: [0.0] * 3}, "test_what_compiles_is_right_and_has_times"),
        ({"problem": Problem.of(Kernel("x"), (), Device("?"))}, "test_says_what_it_tunes"),
    ],
)
def test_the_contract_notices_a_broken_kernel(broken: dict[str, Any], test: str) -> None:
    class Broken(TestTilesOnADevice):
        def make(self) -> tuple[LanguageKernel, list[Config]]:
            kernel = Tiles()
            for name, value in broken.items():
                setattr(kernel, name, value)
            return kernel, list(SPACE)

    with pytest.raises(AssertionError):
        getattr(Broken(), test)()
