"""`replay`: the tuner's decisions on recorded tables, in seconds and without a GPU."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from forecast_autotune.commands.output import Output
from forecast_autotune.commands.recorded_tables import load_tables
from forecast_autotune.llm.providers import provider
from forecast_autotune.policy import Exhaustive, Fixed, Policy
from forecast_autotune.records.table import Table
from forecast_autotune.report.table import model_comparison, model_tally, replay_panel, replay_table
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.store import Store
from forecast_autotune.store.files import ADVICE
from forecast_autotune.store.installed_advice import advice_for
from forecast_autotune.tuning.replays.replay import ReplayReport
from forecast_autotune.tuning.replays.replay import replay as replay_tables

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from forecast_autotune.surrogates.default import DefaultSurrogate
    from forecast_autotune.surrogates.protocol import Surrogate
    from forecast_autotune.tuning.replays.replay import ReplayRow


def replay(options: argparse.Namespace, output: Output) -> int:
    """Replay tables, and print the report."""
    policy, settings = _policy(options), _settings(options)
    if options.llm is not None:
        provider().check(options.llm)
    tables = load_tables(options)
    report = _replay(tables, options, settings, policy, output)
    data = report.to_json()
    if report.without is not None and options.llm is not None:
        data["language_model"] = model_tally(report).to_json()
    output.emit(data, *([] if output.as_json else _shown(report, output)))
    return 0


def _shown(report: ReplayReport, output: Output) -> list[RenderableType]:
    plain = output.console.options.ascii_only
    beside = [] if report.without is None else [model_comparison(report)]
    return [replay_table(report, width=output.console.width, plain=plain), *beside, replay_panel(report)]


def _settings(options: argparse.Namespace) -> Settings:
    limit = options.max_measurements
    is_fixed = options.policy in ("random", "first")
    return Settings.from_environment().with_(
        mode=Mode.TUNE,
        tolerance=options.tolerance,
        risk=options.risk,
        seed=options.seed,
        # For a fixed count this is the count; as a budget too, it would end the search for one that runs.
        max_measurements=None if is_fixed else limit,
    )


def _policy(options: argparse.Namespace) -> Callable[[Table], Policy | None]:
    limit, name = options.max_measurements, options.policy
    if name == "default":
        return lambda table: None
    if name == "exhaustive":
        return lambda table: Exhaustive()

    def fixed(table: Table) -> Policy:
        count = limit or max(3, math.ceil(0.1 * len(table.by_candidate())))
        return Fixed(count, random=name == "random")

    return fixed


def _replay(
    tables: list[Table],
    options: argparse.Namespace,
    settings: Settings,
    policy: Callable[[Table], Policy | None],
    output: Output,
) -> ReplayReport:
    from forecast_autotune.surrogates.default import DefaultSurrogate, default_surrogate
    from forecast_autotune.surrogates.formula import AnalyticSurrogate

    # The shipped model has seen the shipped tables: of them only the untrained formula is an honest replay.
    plain: Surrogate = default_surrogate() if options.surrogate == "default" else AnalyticSurrogate()
    base = plain if isinstance(plain, DefaultSurrogate) else DefaultSurrogate(plain)
    arms = [(plain, settings)]
    if options.llm is not None:
        arms = [(base, settings), (_with_model(base, options, settings), settings)]
    elif settings.advice != "off" and _take_stored_advice(tables):
        arms = [(base, settings.with_(advice="off")), (base, settings)]
    with output.progress("replaying") as progress:
        rows: list[ReplayRow] = []

        def done(row: ReplayRow) -> None:
            rows.append(row)
            progress(len(rows), len(arms) * len(tables), row.label)

        try:
            reports = [
                replay_tables(
                    tables,
                    surrogate=surrogate,
                    policy=policy,
                    settings=of_arm,
                    workers=options.workers,
                    progress=done,
                )
                for surrogate, of_arm in arms
            ]
        except KeyboardInterrupt:
            # The finished ones took their time: they are shown all the same.
            if rows and not output.as_json:
                name = f"{plain.name}/{plain.version}"
                part = ReplayReport(options.policy, name, settings.tolerance, settings.risk, rows)
                total = len(arms) * len(tables)
                output.emit({}, *_shown(part, output), f"interrupted after {len(rows)} of {total} replays")
            raise
    if len(reports) > 1:
        reports[1].without, reports[1].left_out = reports[0], "advice" if options.llm is None else "llm"
    return reports[-1]


def _take_stored_advice(tables: list[Table]) -> bool:
    """Put the advice of the store on kernels without their own into their tables; whether any kernel has advice."""
    store, has_advice = Store.default(), False
    for number, table in enumerate(tables):
        names = {name for c in table.by_candidate() for name, _ in c.config.kwargs}
        if table.problem.extra.get(ADVICE) is None:
            advice = advice_for(store, table.problem.kernel, names)
            if advice is not None:
                tables[number] = table.with_extra(ADVICE, advice.to_json())
        has_advice = has_advice or tables[number].problem.extra.get(ADVICE) is not None
    return has_advice


def _with_model(plain: DefaultSurrogate, options: argparse.Namespace, settings: Settings) -> Surrogate:
    from forecast_autotune.surrogates.factory import unasked_model, with_language_model

    if settings.llm_trust == "never":
        return unasked_model(plain, options.llm, "FORECAST_AUTOTUNE_LLM_TRUST=never")
    # Seconds are not real here: it is taken for loaded, and waited for.
    return with_language_model(
        plain,
        options.llm,
        cache=settings.cache_dir,
        timeout_s=settings.llm_timeout_s,
        workers=options.workers,
        patient=True,
        trust=settings.llm_trust,
    )
