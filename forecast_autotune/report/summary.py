"""The one-line summary of a decision."""

from __future__ import annotations

from forecast_autotune.records import Decision


def summary_line(kernel: str, decision: Decision) -> str:
    """Candidates, forecast, measured, trusted, time spent and saved, choice and risk in one line."""
    timed = "" if decision.median_ms is None else f" {decision.median_ms:.4g} ms"
    counts = f"{decision.candidates} candidates"
    if decision.measured or decision.evidence == "forecast":
        counts += f", all forecast, {decision.measured} measured, {decision.trusted} trusted"
        counts += f", {decision.refused} refused" if decision.refused else ""
        spent = f"; {decision.cost.wall_s:.2f} s spent"
        spent += f", about {decision.saved_s:.0f} s saved" if decision.saved_s >= 1 else ""
    else:
        spent = "; nothing timed"
    return (
        f"forecast_autotune {kernel}: {counts}{spent}; chose {decision.chosen}{timed} "
        f"[{decision.evidence}; {decision.stated_risk:.0%} risk of > {decision.tolerance:.0%} regret]"
    )
