"""What a language model changed in a replay: its tally, and the figures without it beside those with it."""

from __future__ import annotations

from forecast_autotune.report.chart import percent, seconds
from forecast_autotune.report.summary import ModelTally
from forecast_autotune.tuning.replays.replay import ReplayReport


def model_tally(report: ReplayReport) -> ModelTally:
    """What the model did in all problems of a replay."""
    tally = ModelTally()
    for row in report.rows:
        tally.add(row.llm)
    return tally


def model_rows(report: ReplayReport) -> list[tuple[str, str]]:
    """Lines of a replay's panel: what the model did, and the sums without it; empty where none was named."""
    if report.without is None:
        return []
    alone = report.without.summary()
    measured = sum(r.measured for r in report.rows), sum(r.measured for r in report.without.rows)
    told = [
        f"{measured[1]} candidates measured (with it {measured[0]})",
        f"{percent(alone['geomean_regret'])} regret, {percent(alone['max_regret'])} at worst",
        f"{seconds(alone['tune_s'])} of tuning",
    ]
    line = model_tally(report).line().removeprefix("language model: ")
    return [("language model", line or "not asked: no decision was due"), ("without it", ", ".join(told))]
