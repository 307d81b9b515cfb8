"""What `explain` says of a language model's advice on a kernel: its summary, its terms, what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Decision, Measurement, Problem
from forecast_autotune.records.table import Table, latest_labels
from forecast_autotune.store import Store

if TYPE_CHECKING:
    from rich.console import RenderableType

    from forecast_autotune.llm.advice.record import Advice


def advice_json(
    store: Store, problem: Problem, rows: Sequence[Measurement], decision: Decision | None
) -> dict[str, Any] | None:
    """The advice on a problem's kernel, with its terms at the config that was chosen; None without any.

    Terms are in the advice's own unit: only their ratios between configs mean something.
    """
    advice = store.advice(problem.kernel.source_sha256)
    if advice is None:
        return None
    found: dict[str, Any] = {"model": advice.model, "at": advice.at, "provenance": advice.provenance}
    if decision is not None:
        found["outcome"] = decision.advice or "not asked about in this decision"
    try:
        function = advice.function
        found |= {"summary": function.summary, "confidence": function.confidence}
        table = Table(problem, list(rows))
        found["terms"] = _terms(advice, table, decision)
        found["constants"] = _constants(advice, table)
    except RecordError as error:
        found["trouble"] = str(error)
    return found


def _terms(advice: Advice, table: Table, decision: Decision | None) -> list[dict[str, Any]]:
    """Each labelled term of the chosen config (else the fastest) beside the median of all that were measured.

    Raises `AdviceError` where the advice cannot be evaluated.
    """
    import numpy as np

    from forecast_autotune.llm.advice.subject import AdviceSubject

    labels = latest_labels(table.measurements)
    fast = sorted((m for m in labels.values() if m.ok), key=lambda m: m.ms)
    named = [decision.chosen] if decision is not None else [m.candidate for m in fast[:1]]
    candidates = [c for c in dict.fromkeys([*named, *labels]) if c.is_base_variant]
    grids = table.grids()
    if table.problem.grid is None and grids:
        candidates = [c for c in candidates if c in grids]
    if not named or named[0] not in candidates:
        return []
    costs = advice.function.evaluate(AdviceSubject.of(table.problem, candidates, grids))
    at, terms = candidates.index(named[0]), {"cost": 2.0**costs.log2, **costs.terms}
    return [
        {
            "term": label,
            "chosen": float(values[at]),
            "median": float(np.median(values)),
            "candidates": len(candidates),
        }
        for label, values in terms.items()
        if np.isfinite(values).all()
    ]


def _constants(advice: Advice, table: Table) -> list[dict[str, Any]]:
    """Each named constant as stated, and as this problem's measurements would have it.

    One step of least squares on log2 times, held back by the stated spreads: for people, decisions weigh more.
    Raises `AdviceError` where the advice cannot be evaluated.
    """
    import numpy as np

    from forecast_autotune.llm.advice.subject import AdviceSubject

    function, step = advice.function, 0.25
    rows = [m for m in table.by_candidate().values() if m.ok and m.candidate.is_base_variant]
    if len(rows) < 2 or not function.constants:
        return []
    subject = AdviceSubject.of(table.problem, [m.candidate for m in rows], table.grids())
    stated = function.evaluate(subject).log2
    moved = [function.evaluate(subject, {c.name: step}).log2 for c in function.constants]
    slopes = np.stack([(m - stated) / step for m in moved], axis=1)
    slopes -= slopes.mean(axis=0)
    left = np.log2([m.ms for m in rows]) - stated
    held = np.diag([(function.spread / np.log2(c.spread)) ** 2 for c in function.constants])
    shifts = np.linalg.solve(slopes.T @ slopes + held, slopes.T @ (left - left.mean()))
    return [
        {"constant": c.name, "stated": c.value, "fitted": float(c.value * 2.0 ** np.clip(shift, -10, 10))}
        for c, shift in zip(function.constants, shifts, strict=True)
    ]


def advice_lines(advice: Mapping[str, Any] | None) -> list[RenderableType]:
    """An entry of `advice_json` for people."""
    if advice is None:
        return []
    from rich.padding import Padding
    from rich.text import Text

    from forecast_autotune.report.shown_text import shown_text

    by = f" ({advice['model']})" if advice["model"] else ""
    head = shown_text(f"advice{by}: {advice.get('summary') or 'without a summary'}")
    if trouble := advice.get("trouble"):
        head.append_text(shown_text(f"; it cannot be evaluated here: {trouble}", style="yellow"))
    lines = [head]
    if outcome := advice.get("outcome"):
        lines.append(shown_text(f"  {outcome}", style="yellow" if "dropped" in outcome else ""))
    for row in advice.get("terms", ()):
        told = (
            f"  {row['term']}: {row['chosen']:.4g} for the chosen config, {row['median']:.4g} in the median"
        )
        lines.append(shown_text(f"{told} of {row['candidates']}", style="dim"))
    for row in advice.get("constants", ()):
        told = f"  {row['constant']}: stated {row['stated']:.4g}, by these measurements about {row['fitted']:.3g}"
        lines.append(shown_text(told, style="dim"))
    return [Padding(Text("\n").join(lines), (0, 0, 1, 2))]
