"""FlagGems' own tuner, its own operators' kernels and its own database, with decisions through us."""

from __future__ import annotations

import importlib
import itertools
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

pytest.importorskip("sqlalchemy", reason="needs the package flag_gems")
os.environ.setdefault("GEMS_VENDOR", "nvidia")  # where there is no device to tell by
os.environ.setdefault("FLAGGEMS_DB_URL", "sqlite://")
pytest.importorskip("flag_gems", reason="needs the package flag_gems")

from forecast_autotune.records import Evidence
from forecast_autotune.store import Store
from forecast_autotune.store.formats import read_file
from forecast_integrations.flaggems.policy import POLICY, disable_flaggems, enable_flaggems
from forecast_integrations.triton.engine import DecoratorOptions
from tests.integrations.null import double, fresh, launch

BLOCKS, WARPS = (128, 256, 512), (1, 2, 4, 8)

libentry: Any = importlib.import_module("flag_gems.utils.libentry")  # the package has a function of this name


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """FlagGems' database, in a file of this test's."""
    path = tmp_path / "TunedConfig_NVIDIA_H200_triton_3_6.db"
    importlib.import_module("flag_gems.utils.models.sql").Base.metadata.clear()  # tables of other databases
    monkeypatch.setattr(libentry, "libcache", _new_cache(f"sqlite:///{path}"))
    return path


def _new_cache(url: str) -> Any:
    made = object.__new__(libentry.LibCache)
    made.__init__(url)
    return made


@pytest.fixture
def enabled(device: Any, database: Path, tmp_path: Path) -> Iterator[Path]:
    """The policy, with a store of its own."""
    enable_flaggems(DecoratorOptions(store=tmp_path / "store"))
    yield tmp_path / "store"
    disable_flaggems()


def configs() -> list[triton.Config]:
    """No two compile to the same program, so that none stands for another; the fastest have 4 warps."""
    return [
        triton.Config({"BLOCK": b}, num_warps=w, num_stages=3) for b, w in itertools.product(BLOCKS, WARPS)
    ]


def lib_tuner(**options: Any) -> Any:
    return libentry.libtuner(configs=configs(), key=["n"], **options)(fresh(double))


@pytest.mark.parametrize("policy", [{}, {"policy": POLICY}])
def test_a_decision_measures_a_part_and_both_sides_keep_it(
    enabled: Path, database: Path, policy: Any
) -> None:
    tuner = lib_tuner(**policy)
    launch(tuner)
    decision = tuner.__dict__["_forecast_engine"].last
    assert decision.evidence is Evidence.MEASURED
    assert 2 <= decision.measured < len(configs())
    assert tuner.best_config.num_warps == 4, "the fastest of all"
    (table,) = Store(enabled).tables()
    assert len(table.by_candidate()) == decision.measured
    key = tuner.get_key({"x": torch.empty(1), "out": torch.empty(1), "n": 4096})
    assert tuner.cache[key].all_kwargs() == tuner.best_config.all_kwargs(), "from its own database"
    times = libentry.libcache[tuner.benchmark_table_name, key]
    assert times.get(tuner.best_config)[0] > 0
    with sqlite3.connect(database) as opened:
        names = [name for (name,) in opened.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    assert any("_benchmark-" in name for name in names)


def test_a_second_tuner_finds_the_decision_in_flaggems_database(enabled: Path) -> None:
    launch(lib_tuner())
    again = lib_tuner()
    launch(again)
    assert "_forecast_engine" not in again.__dict__, "nothing was asked of us"
    assert again.best_config.num_warps == 4


def test_its_strategy_groups_keys_and_its_pruning_counts(enabled: Path) -> None:
    seen: list[int] = []

    def few(listed: Any, named: Any, **_: Any) -> Any:
        seen.append(len(listed))
        return [c for c in listed if c.num_warps == 2][:2]

    tuner = lib_tuner(strategy="align32", prune_configs_by={"early_config_prune": few})
    launch(tuner, 4090)
    launch(tuner, 4096)
    assert seen == [len(configs())], "one key, and pruned once"
    assert tuner.best_config.num_warps == 2
    (table,) = Store(enabled).tables()
    assert len(table.by_candidate()) == 2


def test_its_own_policy_comes_back(enabled: Path) -> None:
    disable_flaggems()
    tuner = lib_tuner()
    launch(tuner)
    assert "_forecast_engine" not in tuner.__dict__
    assert list(Store(enabled).tables()) == []


def test_an_operator_of_flaggems_decides_through_us(enabled: Path) -> None:
    from flag_gems.ops.amax import amax_kernel

    tuner = amax_kernel.fn
    while not isinstance(tuner, libentry.LibTuner):
        tuner = tuner.fn
    x, out = torch.empty(64, 512), torch.empty(64)
    tuner.run(x, out, 64, 512, grid=lambda meta: (triton.cdiv(64, meta["BLOCK_M"]),), warmup=False)
    decision = tuner.__dict__.pop("_forecast_engine").last
    assert decision.evidence is Evidence.MEASURED
    assert decision.candidates == len(tuner.configs) >= decision.measured > 0
    assert tuner.best_config in tuner.configs


def test_what_flaggems_measured_comes_in_as_prior_knowledge(enabled: Path, database: Path) -> None:
    disable_flaggems()
    tuner = lib_tuner()
    launch(tuner)
    (table,) = read_file(database)
    assert (table.problem.kernel.name, table.problem.device.name) == ("double", "NVIDIA H200")
    assert table.problem.key[0] == "4096"
    assert dict(table.problem.toolchain) == {"triton": "3.6"}
    rows = table.by_candidate()
    assert len(rows) == len(configs())
    best = min(rows.values(), key=lambda m: m.ms).candidate.config
    assert (best.num_warps, best.num_stages) == (4, 3)
    assert dict(best.kwargs)["BLOCK"] in BLOCKS
