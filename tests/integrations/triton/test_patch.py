"""Zero-code adoption on the null device: plain `triton.autotune` objects, served and given back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.runtime.autotuner import Autotuner

from forecast_autotune import autotune, patch_triton, unpatch_triton
from forecast_integrations.triton import publication
from tests.integrations.null import binaries, blocks, configs, double, fresh, launch, tables

ATTRIBUTES = {"best_config", "configs_timings", "bench_time", "cache", "configs", "fn", "keys", "arg_names"}


@pytest.fixture(autouse=True)
def original() -> Iterator[Any]:
    """Triton's own `run`, which is there again after every test."""
    unpatch_triton()
    run = Autotuner.run
    yield run
    unpatch_triton()
    assert Autotuner.run is run


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """(kernel, decision) of every decision."""
    heard: list[tuple[str, Any]] = []
    listeners = [*publication.LISTENERS, lambda name, decision: heard.append((name, decision))]
    monkeypatch.setattr(publication, "LISTENERS", listeners)
    return heard


def plain(listed: Any = None, **options: Any) -> Any:
    """A tuner as a library makes it."""
    return triton.autotune(configs=listed or configs(), key=["n"], **options)(fresh(double))


@pytest.mark.parametrize("moment", ["before", "after"])
def test_tuners_made_before_and_after_are_served(
    device: Any, decided: list[Any], tmp_path: Path, moment: str
) -> None:
    early = plain()
    patch_triton()
    tuner = early if moment == "before" else plain()
    launch(tuner)
    launch(tuner)
    ((name, decision),) = decided
    assert name == "double"
    assert 2 <= decision.measured < 24
    assert binaries() < 24
    (table,) = tables(tmp_path / "measurements")
    assert len(table.by_candidate()) == decision.measured
    assert list(tuner.cache.values()) == [tuner.best_config]
    launches, single = device.launches, plain(blocks(128))
    launch(single)
    assert (len(decided), single.cache, device.launches) == (1, {}, launches + 1), (
        "one config needs no decision"
    )


def test_type_and_attributes_stay_tritons(device: Any) -> None:
    fields = set(vars(plain()))
    patch_triton()
    tuner = plain()
    assert type(tuner) is Autotuner
    launch(tuner)
    tritons = {"nargs", "best_config", "configs_timings", "bench_time"}
    added = set(vars(tuner)) - fields - tritons
    assert {name for name in added if not name.startswith("_forecast")} == set()
    assert all(hasattr(tuner, name) for name in ATTRIBUTES)
    assert tuner.nargs is None
    assert tuner.best_config in tuner.configs
    assert tuner.configs_timings[tuner.best_config][0] == min(t[0] for t in tuner.configs_timings.values())
    assert tuner.bench_time > 0


def test_a_subclass_with_its_own_run_is_served(device: Any, decided: list[Any]) -> None:
    class Counting(Autotuner):  # type: ignore[misc]
        calls = 0

        def run(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return super().run(*args, **kwargs)

    patch_triton()
    kernel = fresh(double)
    tuner = Counting(kernel, kernel.arg_names, blocks(32, 128), ["n"], None, None)
    launch(tuner)
    launch(tuner)
    assert tuner.calls == 2
    assert [decision.measured for _, decision in decided] == [2]


def test_a_subclass_times_with_its_own_benchmark(device: Any, decided: list[Any]) -> None:
    class ByMethod(Autotuner):  # type: ignore[misc]
        def do_bench(self, kernel_call: Any, quantiles: Any) -> list[float]:
            kernel_call()
            return [7.0] * 3

    class ByProperty(Autotuner):  # type: ignore[misc]
        @property
        def do_bench(self) -> Any:
            return lambda kernel_call, quantiles: [7.0] * 3

    patch_triton()
    for number, made in enumerate((ByMethod, ByProperty)):
        kernel = fresh(double)
        tuner = made(kernel, kernel.arg_names, blocks(32, 128), ["n"], None, None)
        launch(tuner, 4096 << number)
        assert [list(times) for times in tuner.configs_timings.values()] == [[7.0] * 3] * 2


def test_our_own_tuners_keep_their_options_under_the_patch(device: Any, tmp_path: Path) -> None:
    patch_triton()
    tuner = autotune(configs=blocks(32, 128), key=["n"], store=False)(fresh(double))
    launch(tuner)
    assert tuner.decision.measured == 2
    assert not (tmp_path / "measurements").exists()


def test_unpatching_gives_triton_its_tuning_back(device: Any, decided: list[Any], original: Any) -> None:
    patch_triton()
    patch_triton()
    assert Autotuner.run is original, "it is served where it stands"
    tuner = plain(blocks(32, 128))
    launch(tuner, 4096)
    unpatch_triton()
    unpatch_triton()
    assert Autotuner.run is original
    before = device.launches
    launch(tuner, 4096)
    assert device.launches == before + 1, "what is decided stays decided"
    launch(tuner, 8192)
    assert len(tuner.configs_timings) == 2
    assert len(decided) == 1, "Triton timed the second size by itself"


def test_somebody_elses_wrapper_on_top_of_ours_stays(
    device: Any, monkeypatch: pytest.MonkeyPatch, decided: list[Any]
) -> None:
    """Ours cannot be taken out from under it, but it stops serving, and can serve again."""
    calls: list[int] = []
    patch_triton()
    with monkeypatch.context() as patch:
        ours = Autotuner.run

        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(kwargs["n"] if "n" in kwargs else args[2])
            return ours(self, *args, **kwargs)

        patch.setattr(Autotuner, "run", wrapper)
        tuner = plain(blocks(32, 128))
        unpatch_triton()
        assert Autotuner.run is wrapper
        launch(tuner, 4096)
        assert decided == []
        patch_triton()
        launch(tuner, 8192)
        assert len(decided) == 1
        own = autotune(configs=blocks(32, 128), key=["n"], store=False)(fresh(double))
        assert launch(own, 512).metadata.name == "double"
    assert calls == [4096, 8192, 512]
