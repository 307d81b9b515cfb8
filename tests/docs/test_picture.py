"""The pictures of README and results: drawn by their scripts, and small."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from benchmarks.plots import replay_curve, results
from forecast_autotune import read_tables, shipped_tables
from forecast_autotune.tuning.replays.replay import ReplayReport

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "assets" / "replay.svg"


def texts(path: Path) -> list[str]:
    """All text in an SVG file, outside of comments."""
    root = ElementTree.parse(path).getroot()
    return [text.strip() for text in root.itertext() if text.strip()]


Replayed = tuple[ReplayReport, replay_curve.Curve]


@pytest.fixture(scope="module")
def replayed() -> Replayed:
    """Three tables by the default policy, and in random orders."""
    tables = [table for path in shipped_tables() for table in read_tables(path)][:3]
    return replay_curve.replay_by_default_policy(tables), replay_curve.random_curve(tables)


def test_the_curves_fall_and_forecasts_are_below_chance(replayed: Replayed) -> None:
    forecast, random = replay_curve.forecast_curve(replayed[0]), replayed[1]
    for curve in (forecast, random):
        assert curve.shape == replay_curve.SHARES.shape
        assert (np.diff(curve) <= 1e-12).all()
        assert curve[-1] >= 0
    tenth = int(np.argmin(np.abs(replay_curve.SHARES - 0.1)))
    assert forecast[tenth] < random[tenth]


def test_the_script_draws_the_same_file_twice(replayed: Replayed, tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        replay_curve.draw(*replayed, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert set(texts(PICTURE)) - set(texts(tmp_path / "one.svg")) == {
        "36 recorded H200 problems of 12 kernels, replayed"
    }, "the picture is older than its script: run python -m benchmarks.plots.replay_curve"


def test_the_readme_shows_it_and_it_is_small() -> None:
    assert f"]({PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert PICTURE.stat().st_size < 120_000


def test_the_pictures_of_the_results_are_drawn_from_what_is_recorded(tmp_path: Path) -> None:
    results.draw_first_calls(results.first_call_seconds(), tmp_path / "first_calls.svg")
    results.draw_searches(results.search_gains(), tmp_path / "searches.svg")
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for drawn in tmp_path.iterdir():
        kept = PICTURE.parent / drawn.name
        assert texts(kept) == texts(drawn), "older than the results: run python -m benchmarks.plots.results"
        assert f"](assets/{drawn.name})" in page
