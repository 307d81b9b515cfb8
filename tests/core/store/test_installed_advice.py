"""Installed advice: matched by source, normal form or place; damaged and hostile files cost nothing."""

from __future__ import annotations

import json
import os
import random
import sys
import time
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from forecast_autotune.llm.advice.record import MATCH, SAME_FORM, SAME_PLACE, SAME_SOURCE, Advice
from forecast_autotune.records import Kernel
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store, StoreWarning, installed_advice
from forecast_autotune.store.installed_advice import GROUP, advice_for, place_of
from forecast_autotune.surrogates.advised import advised_forecasts
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.protocol import Query
from forecast_autotune.testing import example_table
from forecast_autotune.tuning.replays.replay import replay_one
from tests.core.llm.advice.functions import BLOCKS, SOURCE, sample

FORM = "7" * 64
PLACE = place_of("shelf", "rows", ["BLOCK"])
RECORD = Advice(
    "rows",
    SOURCE,
    BLOCKS,
    "m",
    extra={"normal_sha256": FORM, "place": PLACE, "package": "shelf", "package_version": "2"},
)
KERNEL = Kernel("rows", source_sha256=SOURCE, extra={"module": "shelf.ops"})

Install = Callable[..., Path]


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are read once a process."""
    monkeypatch.setattr(installed_advice, "_results", {})
    installed_advice._contributed_path.cache_clear()
    installed_advice._warn.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Lay a package with a layer out as pip does; it is never imported."""

    def lay_out(content: bytes | None = None, value: str = "shelf.data.advice", name: str = "shelf") -> Path:
        folder = tmp_path / "shelf" / "data"
        folder.mkdir(parents=True, exist_ok=True)
        (tmp_path / "shelf" / "__init__.py").write_text("raise RuntimeError('imported')")
        about = tmp_path / "shelf-2.dist-info"
        about.mkdir(exist_ok=True)
        (about / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {value}\n")
        path = folder / "advice.jsonl"
        if content is not None:
            path.write_bytes(content)
        package = types.ModuleType("shelf")
        package.__path__ = [str(tmp_path / "shelf")]
        monkeypatch.setitem(sys.modules, "shelf", package)
        return path

    return lay_out


def question() -> Query:
    one = sample()
    return Query(one.problem, list(one.candidates), one.grids)


def line(advice: Advice = RECORD) -> bytes:
    return json.dumps(advice.to_json()).encode() + b"\n"


@pytest.mark.parametrize(
    ("kernel", "form", "parameters", "match"),
    [
        (KERNEL, "", ["BLOCK"], SAME_SOURCE),
        (replace(KERNEL, source_sha256="8" * 64), FORM, ["BLOCK"], SAME_FORM),
        (replace(KERNEL, source_sha256="8" * 64), "", ["BLOCK"], SAME_PLACE),
        (replace(KERNEL, source_sha256="8" * 64), "9" * 64, ["BLOCK", "GROUP"], None),
        (replace(KERNEL, source_sha256="8" * 64), "", (), None),
        (Kernel("rows", source_sha256="8" * 64, extra={"module": "other"}), "", ["BLOCK"], None),
        (Kernel("rows", source_sha256="8" * 64), "", ["BLOCK"], None),
    ],
)
def test_a_kernel_is_matched_by_source_form_or_place_and_never_by_name_alone(
    install: Install, kernel: Kernel, form: str, parameters: list[str], match: str | None
) -> None:
    install(line())
    advice = advice_for(Store(None), kernel, parameters, lambda: form)
    assert (advice and advice.extra[MATCH]) == match
    if advice is not None:
        assert advice.source_sha256 == kernel.source_sha256
        assert advice.origin == f"installed, written for shelf 2, {match}"


def test_the_users_own_advice_comes_first_and_later_lines_replace_earlier_ones(install: Install) -> None:
    install(line() + line(replace(RECORD, model="later")))
    store = Store(None)
    first = advice_for(store, KERNEL)
    assert first is not None
    assert first.model == "later"
    store.put_advice(replace(RECORD, model="own"))
    own = advice_for(store, KERNEL)
    assert own is not None
    assert (own.model, own.origin) == ("own", "")


def test_the_normal_form_is_computed_only_where_a_layer_knows_the_name_and_not_the_source(
    install: Install,
) -> None:
    def fail() -> str:
        raise AssertionError("nobody needs it")

    install(line())
    assert (
        advice_for(Store(None), Kernel("other", source_sha256="8" * 64, extra={"module": "shelf"}), (), fail)
        is None
    )
    assert advice_for(Store(None), KERNEL, (), fail) is not None


def test_advice_on_another_release_has_half_the_weight(install: Install) -> None:
    install(line())
    query, base = question(), AnalyticSurrogate()

    def noted(advice: Advice | None) -> float:
        text = advised_forecasts(base, replace(query, advice=advice)).advice
        return float(text.removeprefix("advice at weight ").split()[0])

    whole = noted(advice_for(Store(None), KERNEL))
    moved = advice_for(Store(None), KERNEL)
    assert moved is not None
    half = noted(replace(moved, extra={**moved.extra, MATCH: SAME_PLACE}))
    assert 0.4 < half / whole <= 0.5


@pytest.mark.parametrize(
    "value", ["shelf", "shelf.data.none", "other.data.advice", "shelf.../advice", "shelf:load", "shelf.data"]
)
def test_an_entry_point_that_names_no_file_of_its_package_is_said_once(install: Install, value: str) -> None:
    install(line(), value)
    with pytest.warns(StoreWarning, match="names no file of the package"):
        assert advice_for(Store(None), KERNEL) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert advice_for(Store(None), KERNEL, ["BLOCK"]) is None


def test_a_package_gives_advice_on_its_own_kernels_alone(install: Install) -> None:
    install(line(), name="victim")
    victim = replace(KERNEL, extra={"module": "victim.ops"})
    assert advice_for(Store(None), victim) is None
    assert advice_for(Store(None), KERNEL) is None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_files_that_hang_or_fill_the_memory_are_passed_over(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = install()
    os.mkfifo(path)
    with pytest.warns(StoreWarning, match="names no file"):
        assert advice_for(Store(None), KERNEL) is None
    path.unlink()
    installed_advice._contributed_path.cache_clear()
    path.write_bytes(line())
    monkeypatch.setattr(installed_advice, "MAX_BYTES", 100)
    monkeypatch.setattr(installed_advice, "_results", {})
    with pytest.warns(StoreWarning):
        assert advice_for(Store(None), KERNEL) is None


def test_mutated_layers_raise_nothing(install: Install) -> None:
    """Bytes changed, cut, doubled and moved: advice, or none, in bounded time."""
    generator, whole, usable = random.Random(0), line() * 3, 0
    path = install(whole)
    begin = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(300):
            data = bytearray(whole)
            for _ in range(generator.choice((1, 4, 32))):
                at = generator.randrange(len(data))
                odd = [
                    generator.choice((generator.randrange(256), *b'9"['))
                    for _ in range(generator.choice((0, 1, 5)))
                ]
                data[at : at + generator.choice((0, 1, 8))] = bytes(odd)
            path.write_bytes(bytes(data))
            installed_advice._results.clear()
            advice = advice_for(Store(None), KERNEL, ["BLOCK"], lambda: FORM)
            if advice is not None:
                usable += 1
                advised_forecasts(AnalyticSurrogate(), replace(question(), advice=advice))
    assert usable > 30
    assert time.process_time() - begin < 100


@pytest.mark.parametrize("setting", ["stored", "off"])
def test_a_decision_follows_it_unless_advice_is_off(install: Install, setting: str) -> None:
    table = example_table()
    kernel = replace(table.problem.kernel, source_sha256=SOURCE, extra=KERNEL.extra)
    install(
        line(
            replace(
                RECORD,
                kernel=kernel.name,
                text="def cost(config, args, device, launch):\n    return 1 + config.num_warps\n",
            )
        )
    )
    settings = Settings.from_environment().with_(advice=setting)
    row, _ = replay_one(
        replace(table, problem=replace(table.problem, kernel=kernel)),
        surrogate=default_surrogate(),
        policy=None,
        settings=settings,
    )
    assert ("installed, written for shelf 2, same source" in row.advice) == (setting == "stored")


def test_every_record_of_this_package_is_a_cost_function_with_a_permissive_licence() -> None:
    (path,) = installed_advice.layer_paths()
    lines = path.read_bytes().splitlines()
    records = dict(installed_advice.every_installed())[path]
    assert len(records) == len(lines) == len({r.source_sha256 for r in records})
    for record in records:
        assert record.functions
        assert record.extra["license"] in ("MIT", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause"), record.kernel
        assert record.extra["package_version"]
        assert len(str(record.extra.get("normal_sha256", FORM))) == 64
        assert "#" not in "".join((record.text, *record.others))
        assert record.at
    assert path.stat().st_size < installed_advice.MAX_BYTES / 2
