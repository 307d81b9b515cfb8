"""Helion's own code generator, config space and autotuner interface, ranked by our surrogate; times are made up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 5):
    pytest.skip("Helion supports Triton from 3.5 on", allow_module_level=True)
pytest.importorskip("helion", reason="needs the package helion")
import helion
import helion.language as hl

from forecast_autotune.features.ttir.parser import FeatureError
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.factory import surrogate_for
from forecast_integrations.helion.search import (
    MOST_MEASURED,
    NAME,
    RankedPool,
    disable_helion,
    enable_helion,
    search_pool,
)
from forecast_integrations.helion.tracing import generated_launch, to_config


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


def test_a_config_is_traced_by_its_generated_code_without_a_launch(bound: Any) -> None:
    launch = generated_launch(bound, ARGS, bound.config_spec.default_config())
    rows = bound.config_spec.default_config().config["block_sizes"][0]
    assert launch.grid[0] == -(-1024 // rows)
    assert "tt.func" in launch.ttir
    assert [a.shape for a in launch.arguments if a.kind == "tensor"][:1] == [(1024, 512)]


def test_what_has_no_code_is_refused(bound: Any) -> None:
    with pytest.raises(FeatureError, match="no code for"):
        generated_launch(bound, ARGS, helion.Config(block_sizes=["many"]))


def test_lists_of_a_config_become_numbered_parameters() -> None:
    made = to_config(helion.Config(block_sizes=[16, 32], num_warps=8, indexing="pointer"))
    assert dict(made.kwargs)["block_sizes[1]"] == 32
    assert (made.num_warps, made.num_stages) == (8, 1)


def test_a_part_of_a_pool_is_measured_until_the_risk_is_accepted(bound: Any) -> None:
    configs = population(bound, 24)
    pool = RankedPool(bound, ARGS, configs)
    assert pool.texts, "some of the pool has code on this machine"
    asked: list[Any] = []

    def benchmark(some: list[Any]) -> list[tuple[str, float]]:
        asked.extend(some)
        return [("ok", made_up_ms(c)) for c in some]

    settings = Settings()
    best, rows, risk = search_pool(pool, benchmark, surrogate_for(settings), settings)
    assert len(asked) == len(rows) <= len(pool.configs)
    assert made_up_ms(best) == min(made_up_ms(c) for c in asked)
    assert risk <= settings.risk or len(rows) >= MOST_MEASURED * len(pool.configs)


def test_configs_that_fail_are_labels_and_a_pool_of_them_has_no_best(bound: Any) -> None:
    pool = RankedPool(bound, ARGS, population(bound, 8))
    settings = Settings()
    best, rows, _ = search_pool(
        pool, lambda some: [("accuracy_error", float("inf"))] * len(some), surrogate_for(settings), settings
    )
    assert best is None
    assert {str(m.outcome) for m in rows.values()} == {"incorrect"}


def test_helions_own_autotuner_runs_it_by_name(
    enabled: Any, bound: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from helion.autotuner import search_algorithms
    from helion.autotuner.benchmark_provider import BenchmarkResult

    assert search_algorithms[NAME] is enabled
    assert enable_helion() is enabled, "twice is once"
    search = enabled(bound, ARGS, count=8)

    def benchmark_batch(configs: list[Any], **_: Any) -> list[BenchmarkResult]:
        """In place of a GPU."""
        return [BenchmarkResult(c, lambda: None, made_up_ms(c), "ok", 0.1) for c in configs]

    monkeypatch.setattr(search, "benchmark_batch", benchmark_batch)
    best = search._autotune()
    assert made_up_ms(best) > 0
    assert 0.0 <= search.stated_risk <= 1.0


def test_it_is_taken_out_again(enabled: Any) -> None:
    from helion.autotuner import search_algorithms

    enable_helion(default=True)
    assert os.environ["HELION_AUTOTUNER"] == NAME
    disable_helion()
    assert NAME not in search_algorithms
    assert "HELION_AUTOTUNER" not in os.environ
