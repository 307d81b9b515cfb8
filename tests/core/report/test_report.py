"""Tables of a report."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from forecast_autotune.report.table import (
    checklist,
    decision_explanation,
    replay_table,
    store_table,
)
from forecast_autotune.tuning.replays.replay import ReplayReport, ReplayRow


def row(label: str = "matmul/64", path: tuple[float, ...] = (1.5, 0.4, 0.01), **changes: object) -> ReplayRow:
    fields: dict[str, object] = {
        "id": "1",
        "kernel": "matmul",
        "label": label,
        "candidates": 20,
        "measured": len(path),
        "regret": path[-1],
        "stated_risk": 0.08,
        "evidence": "measured",
        "chosen": "BLOCK=64 warps=4 stages=3",
        "best_ms": 0.2,
        "chosen_ms": 0.2 * (1 + path[-1]),
        "tune_s": 2.0,
        "exhaustive_s": 30.0,
        "forecast_s": 0.1,
        "rounds": 2,
        "path": path,
    }
    return ReplayRow(**{**fields, **changes})  # type: ignore[arg-type]


def report(*rows: ReplayRow) -> ReplayReport:
    return ReplayReport("risk", "analytic/1", 0.02, 0.1, list(rows or (row(), row("softmax/8", (9.0, 0.0)))))


def rendered(shown: RenderableType, width: int = 140) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(shown)
    return stream.getvalue()


def test_the_table_shows_share_path_regret_and_factor() -> None:
    text = rendered(replay_table(report()))
    line = next(line for line in text.splitlines() if "matmul/64" in line)
    for part in ("3 of 20", "█▆▁", "1 %", "8 %", "2.00 s", "30.0 s", "15x"):
        assert part in line
    assert "within 2 %" in text


def test_a_narrow_terminal_gets_the_figures_whole() -> None:
    text = rendered(replay_table(report(), width=80), 80)
    assert "matmul/64" in text
    assert "30.0 s" in text
    assert "…" not in text
    assert "█" not in text


def test_labels_are_text_and_never_markup() -> None:
    odd = "[bold]x[/bold] [/]"
    assert odd in rendered(replay_table(report(row(odd))))
    facts = {"kernel": odd, "device": odd, "problems": 1, "decided": 0, "candidates": 2, "ok": 1}
    assert rendered(store_table([{**facts, "failed": 1, "best_ms": 0.2, "last": ""}])).count(odd) == 2
    assert odd in rendered(checklist([("ok", "store", odd, "")]))


def store_row(name: str) -> dict[str, object]:
    facts = {"kernel": name, "device": "NVIDIA H100 80GB HBM3", "problems": 7, "decided": 3, "candidates": 90}
    return {**facts, "ok": 80, "failed": 10, "best_ms": 0.2, "last": "2026-11-23T21:53:26+00:00"}


@pytest.mark.parametrize("width", [20, 40, 60, 80, 132])
def test_a_table_that_is_too_wide_loses_figures_and_never_names(width: int) -> None:
    names = ("paged_attention_kernel_v2", "k")
    lines = rendered(store_table([store_row(name) for name in names]), width).splitlines()
    assert max(map(len, lines)) <= width
    columns = [line.split("   ")[0].strip() for line in lines]
    assert "".join(columns) == f"kernel{'─' * (len(columns[2]))}{''.join(names)}"
    assert not any("…" in line.split("   ")[0] for line in lines)
    assert ("failed" in "".join(lines)) == (width >= 80)


def explained(*measured: tuple[str, float, float], chosen: str, width: int = 140) -> str:
    decision = {
        "candidate": chosen,
        "shown": chosen,
        "cost": {"wall_s": 2.0, "forecast_s": 0.1, "compile_s": 4.0, "compiled": 8, "timing_s": 0.2},
        "saved_s": 0.0,
        "median_ms": 1.0,
        "tolerance": 0.02,
        "stated_risk": 0.078,
        "candidates": 9,
        "measured": 2,
        "known": 0,
        "trusted": 7,
        "refused": 0,
        "evidence": "measured",
        "reason": "measured 2 of 9",
        "at": "2026-11-23T21:53:26+00:00",
        "rounds": [],
    }
    rows = [
        {
            "candidate": name,
            "shown": f"B={name} warps=4",
            "outcome": "ok",
            "median_ms": ms,
            "forecast": {"ms": forecast, "low_ms": forecast, "high_ms": forecast},
        }
        for name, ms, forecast in measured
    ]
    problem = {"kernel": "k", "key": ["64"], "device": "card", "decision": decision, "measurements": rows}
    return rendered(decision_explanation(problem, 8), width)


@pytest.mark.parametrize(
    ("forecast", "said"),
    [(0.004, "1600x too low"), (9600.0, "1500x too high"), (6.08, "1.05x too low"), (6.4, "1.00x")],
)
def test_a_forecast_says_how_far_and_in_which_direction_it_is_off(forecast: float, said: str) -> None:
    line = next(li for li in explained(("64", 6.4, forecast), chosen="64").splitlines() if "B=64" in li)
    assert line.rstrip().endswith(f" {said}")


def test_of_configs_that_tie_the_chosen_one_is_marked_without_colours() -> None:
    text = explained(("64", 6.4, 6.4), ("128", 6.4, 6.4), chosen="128")
    assert " 1     B=64 " in text
    assert " 2 *   B=128 " in text
    assert "* chosen" in text
    assert "7.8 % that a better one (more than 2 % faster) is untried" in text


def test_an_explanation_without_a_decision_says_so() -> None:
    text = rendered(
        decision_explanation(
            {
                "kernel": "k",
                "key": ["64"],
                "device": "card",
                "decision": None,
                "measurements": [
                    {"candidate": "1", "shown": "B=1", "outcome": "ok", "median_ms": 0.5, "forecast": None},
                    {
                        "candidate": "2",
                        "shown": "B=2",
                        "outcome": "timeout",
                        "median_ms": None,
                        "forecast": None,
                    },
                ],
            },
            8,
        )
    )
    assert "none stored" in text
    assert "0.5 ms" in text
    assert "1 timeout" in text
