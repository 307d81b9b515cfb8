"""`show` and `explain`: the store's contents, and why a kernel got its configs."""

from __future__ import annotations

import argparse
import difflib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forecast_autotune.commands.output import CommandError, Output
from forecast_autotune.commands.store_access import bundled_stores, first_forecasts, open_named_store
from forecast_autotune.errors import RecordError
from forecast_autotune.printable import count_text
from forecast_autotune.records import Decision, Measurement, Problem
from forecast_autotune.records.table import Table, latest_labels
from forecast_autotune.store import Store
from forecast_autotune.store.installed_advice import advice_for

if TYPE_CHECKING:
    from rich.console import RenderableType

    from forecast_autotune.llm.advice.record import Advice


def show(options: argparse.Namespace, output: Output) -> int:
    """One line per kernel and device; or its calibration, or its page."""
    if options.calibration:
        from forecast_autotune.commands.calibration import calibration

        return calibration(options, output)
    if options.compilations:
        return show_compilations(options, output)
    if options.page is not None:
        from forecast_autotune.commands.store_page import store_page

        return store_page(options, output)
    store = open_named_store(options)
    filters = options.kernel, options.device

    def shown_layer(layer: Store) -> dict[str, Any]:
        return {
            "store": layer.place,
            "kernels": summarize(layer.tables(*filters), layer.decisions(*filters)),
        }

    below = [shown_layer(layer) for layer in bundled_stores(store)]
    advice_count = len(store.advice_of(options.kernel))
    remote = store.layers.remote
    data = {
        **shown_layer(store),
        "advised_sources": advice_count,
        "bundles": below,
        "remote": remote and remote.address,
    }
    rows = data["kernels"]
    if output.as_json:
        output.emit(data)
        return 0
    from forecast_autotune.report.table import shown_text, store_table

    place = shown_text(f"store: {store.place}", style="dim")
    under: list[RenderableType] = []
    for entry in below:
        nothing = shown_text("the bundle holds nothing that matches")
        under += [store_table(entry["kernels"]) if entry["kernels"] else nothing]
        under += [shown_text(f"bundle: {entry['store']}", style="dim")]
    if remote is not None:
        under += [shown_text(f"remote store, asked for one problem at a time: {remote.address}", style="dim")]
    if advice_count:
        place = shown_text(f"advice on {count_text(advice_count, 'kernel source')}").append("\n") + place
    if rows:
        output.emit(data, store_table(rows), place, *under)
    else:
        what = "nothing that matches" if options.kernel or options.device else "nothing yet"
        output.emit(data, shown_text(f"the store holds {what}"), place, *under)
    return 0


def show_compilations(options: argparse.Namespace, output: Output) -> int:
    """One line per Triton binary that programs needed, and why it came late if it did."""
    every = open_named_store(options).compilations.all()
    matches = [c for c in every if options.kernel is None or options.kernel.lower() in c.name.lower()]
    lines = [
        f"{c.name} ({c.shown_states}): {c.seconds:.2f} s, {c.caller}"
        + (f"; after the program was ready: {c.cause}" if c.cause else "")
        for c in matches
    ]
    late = sum(bool(c.cause) for c in matches)
    lines.append(f"{len(matches)} binaries, {late} of them compiled after a program was ready")
    output.emit({"compilations": [c.to_json() for c in matches]}, *lines)
    return 0


def summarize(tables: Iterator[Table], decisions: Iterator[tuple[Problem, Decision]]) -> list[dict[str, Any]]:
    """Counts per (kernel, device slug), sorted by both."""
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    ids: dict[tuple[str, str], set[str]] = {}

    def group(problem: Problem) -> dict[str, Any]:
        name = (problem.kernel.name, problem.device.slug)
        problem_ids = ids.setdefault(name, set())
        problem_ids.add(problem.id)
        result = groups.setdefault(
            name,
            {
                "kernel": problem.kernel.name,
                "device": problem.device.name,
                "problems": 0,
                "decided": 0,
                "candidates": 0,
                "ok": 0,
                "failed": 0,
                "best_ms": None,
                "last": "",
            },
        )
        result["problems"] = len(problem_ids)
        return result

    for table in tables:
        row, labels = group(table.problem), table.by_candidate().values()
        times = [m.ms for m in labels if m.ok]
        row["candidates"] += len(labels)
        row["ok"] += len(times)
        row["failed"] += len(labels) - len(times)
        row["best_ms"] = min([*times, *([] if row["best_ms"] is None else [row["best_ms"]])], default=None)
        row["last"] = max([row["last"], *(m.at for m in table.measurements)])
    for problem, _ in decisions:
        group(problem)["decided"] += 1
    return [groups[name] for name in sorted(groups)]


def explain(options: argparse.Namespace, output: Output) -> int:
    """Decision, evidence and forecasts of every problem of a kernel."""
    store = open_named_store(options)
    problems, rows, decisions = _stored_by_id(store)
    candidates = [p for p in problems.values() if p.kernel.name == options.kernel]
    if not candidates:
        raise CommandError(_unknown_kernel(options.kernel, {p.kernel.name for p in problems.values()}, store))
    matching = [p for p in candidates if key_contains(p.key, options.key)]
    if not matching:
        keys = sorted({" ".join(p.key) for p in candidates})
        raise CommandError(
            f"kernel {options.kernel} has no key that holds {' '.join(options.key)}; stored keys: "
            + "; ".join(keys[:8])
        )
    results = [_problem_json(p, rows.get(p.id, []), decisions.get(p.id)) for p in matching]
    for problem, entry in zip(matching, results, strict=True):
        entry["advice"] = advice_json(store, problem, rows.get(problem.id, []), decisions.get(problem.id))
    data = {"kernel": options.kernel, "problems": results}
    if output.as_json:
        output.emit(data)
        return 0
    from forecast_autotune.report.table import decision_explanation

    lines: list[RenderableType] = []
    for entry in results:
        lines += [decision_explanation(entry, options.top), *advice_lines(entry["advice"])]
    output.emit(data, *lines)
    return 0


def _stored_by_id(
    store: Store,
) -> tuple[dict[str, Problem], dict[str, list[Measurement]], dict[str, Decision]]:
    """Problems, measurements and decisions of a store and the bundles below it; the upper one's decision counts."""
    problems: dict[str, Problem] = {}
    rows: dict[str, list[Measurement]] = defaultdict(list)
    decisions: dict[str, Decision] = {}
    for layer in reversed([store, *bundled_stores(store)]):
        for table in layer.tables():
            problems[table.problem.id] = table.problem
            rows[table.problem.id] += table.measurements
        for problem, decision in layer.decisions():
            problems[problem.id] = problem
            decisions[problem.id] = decision
    return problems, rows, decisions


def _unknown_kernel(name: str, names: set[str], store: Store) -> str:
    if backends := {m.problem.device.backend for m in store.misses.all() if m.problem.kernel.name == name}:
        if backends == {"cpu"}:
            return (
                f"kernel {name} ran in Triton's interpreter alone: nothing of it was timed. Run it on a GPU"
            )
        return f"kernel {name} was met in modes that time nothing alone: `forecast-autotune warm` tunes it"
    if not names:
        return f"the store at {store.place} holds no kernel yet: run something tuned first, or give --store"
    lower = {n.lower(): n for n in names}
    near = difflib.get_close_matches(name.lower(), lower, n=5, cutoff=0.4)
    near += [n for n in sorted(lower) if name.lower() in n and n not in near]
    names_near = [lower[n] for n in near] or sorted(names)[:8]
    return f"the store holds no kernel named {name!r}; {'nearest' if near else 'it holds'}: {', '.join(names_near)}"


def key_contains(key: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether a problem's key contains the wanted values, in their order; `torch.` may be left out."""
    values = iter(key)
    return all(any(part in (value, value.removeprefix("torch.")) for value in values) for part in wanted)


def _problem_json(problem: Problem, rows: Sequence[Measurement], decision: Decision | None) -> dict[str, Any]:
    """One problem of `explain --json`: measurements sorted, fastest first, failures last."""
    forecasts = first_forecasts(problem, rows)
    labels = sorted(
        latest_labels(rows).values(), key=lambda m: (not m.ok, m.median_ms or 0.0, str(m.candidate))
    )
    return {
        "problem": problem.id,
        "kernel": problem.kernel.name,
        "key": list(problem.key),
        "device": problem.device.name,
        "decision": None
        if decision is None
        else {**decision.to_json(), "candidate": decision.chosen.id, "shown": str(decision.chosen)},
        "measurements": [
            {
                "candidate": m.candidate.id,
                "shown": str(m.candidate),
                "outcome": str(m.outcome),
                "median_ms": m.median_ms,
                "at": m.at,
                "message": str(m.extra.get("message", "")),
                "forecast": forecasts.get(m.candidate),
            }
            for m in labels
        ],
    }


def advice_json(
    store: Store, problem: Problem, rows: Sequence[Measurement], decision: Decision | None
) -> dict[str, Any] | None:
    """The advice on a problem's kernel, with its terms at the config that was chosen; None without any.

    Terms are in the advice's own unit: only their ratios between configs mean something.
    """
    parameters = {name for m in rows for name, _ in m.candidate.config.kwargs}
    advice = advice_for(store, problem.kernel, parameters)
    if advice is None:
        return None
    data: dict[str, Any] = {"model": advice.model, "at": advice.at, "provenance": advice.provenance}
    if origin := advice.origin:
        data["origin"] = origin
    if decision is not None:
        data["outcome"] = decision.advice or "not asked about in this decision"
    try:
        function = advice.function
        data |= {"summary": function.summary, "confidence": function.confidence}
        table = Table(problem, list(rows))
        data["terms"] = _terms(advice, table, decision)
        data["constants"] = _constants(advice, table)
    except RecordError as error:
        data["trouble"] = str(error)
    return data


def _terms(advice: Advice, table: Table, decision: Decision | None) -> list[dict[str, Any]]:
    """Each labelled term of the chosen config (else the fastest) beside the median of all that were measured.

    Raises `AdviceError` where the advice cannot be evaluated.
    """
    import numpy as np

    from forecast_autotune.llm.advice.subject import AdviceSubject

    labels = latest_labels(table.measurements)
    fast = sorted((m for m in labels.values() if m.ok), key=lambda m: m.ms)
    choice = [decision.chosen] if decision is not None else [m.candidate for m in fast[:1]]
    candidates = [c for c in dict.fromkeys([*choice, *labels]) if c.is_base_variant]
    grids = table.grids()
    if table.problem.grid is None and grids:
        candidates = [c for c in candidates if c in grids]
    if not choice or choice[0] not in candidates:
        return []
    costs = advice.function.evaluate(AdviceSubject.of(table.problem, candidates, grids))
    at, terms = candidates.index(choice[0]), {"cost": 2.0**costs.log2, **costs.terms}
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
    log2_costs = function.evaluate(subject).log2
    variations = [function.evaluate(subject, {c.name: step}).log2 for c in function.constants]
    slopes = np.stack([(m - log2_costs) / step for m in variations], axis=1)
    slopes -= slopes.mean(axis=0)
    residual = np.log2([m.ms for m in rows]) - log2_costs
    penalty = np.diag([(function.spread / np.log2(c.spread)) ** 2 for c in function.constants])
    shifts = np.linalg.solve(slopes.T @ slopes + penalty, slopes.T @ (residual - residual.mean()))
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

    from forecast_autotune.report.table import shown_text

    by = ", ".join(filter(None, (advice["model"], advice.get("origin"))))
    by = f" ({by})" if by else ""
    head = shown_text(f"advice{by}: {advice.get('summary') or 'without a summary'}")
    if trouble := advice.get("trouble"):
        head.append_text(shown_text(f"; it cannot be evaluated here: {trouble}", style="yellow"))
    lines = [head]
    if outcome := advice.get("outcome"):
        lines.append(shown_text(f"  {outcome}", style="yellow" if "dropped" in outcome else ""))
    for row in advice.get("terms", ()):
        text = (
            f"  {row['term']}: {row['chosen']:.4g} for the chosen config, {row['median']:.4g} in the median"
        )
        lines.append(shown_text(f"{text} of {row['candidates']}", style="dim"))
    for row in advice.get("constants", ()):
        text = f"  {row['constant']}: stated {row['stated']:.4g}, by these measurements about {row['fitted']:.3g}"
        lines.append(shown_text(text, style="dim"))
    return [Padding(Text("\n").join(lines), (0, 0, 1, 2))]
