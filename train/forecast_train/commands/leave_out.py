"""`replay --leave-out`: every problem is replayed with a surrogate that never saw its group."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from forecast_autotune.commands.output import Output, UsageError
from forecast_autotune.policy import Policy
from forecast_autotune.records.table import Table
from forecast_autotune.report.table import replay_panel, replay_table
from forecast_autotune.settings import Settings
from forecast_autotune.tuning.replays.replay import ReplayReport, replay_one
from forecast_train.commands.evaluate import run_evaluation
from forecast_train.evaluation.baselines import methods
from forecast_train.evaluation.report import shown
from forecast_train.evaluation.splits import SplitError, make_folds


def left_out(
    tables: list[Table],
    options: argparse.Namespace,
    settings: Settings,
    policy: Callable[[Table], Policy | None],
    output: Output,
) -> int:
    """Replay every problem with a surrogate that never saw its group; print the replay and the scores."""

    try:
        split = make_folds(tables, options.leave_out)
    except SplitError as error:
        raise UsageError(f"--leave-out {options.leave_out}: {error}") from error
    every = [m for m in methods if m != "learned"]
    given = every if options.baselines is None else [b for b in options.baselines.split(",") if b]
    if unknown := [name for name in given if name not in every]:
        raise UsageError(f"--baselines {','.join(unknown)}: choose from {','.join(every)}")
    report = ReplayReport("default", "", options.leave_out, settings.tolerance, settings.risk)
    for fold in split:
        surrogate = methods["learned"](fold.train)
        report.surrogate = f"{surrogate.name}/{surrogate.version}"
        for table in fold.test:
            chosen = policy(table)
            report.policy = "default" if chosen is None else chosen.name
            row, _ = replay_one(
                table,
                surrogate=surrogate,
                policy=chosen,
                settings=settings,
                relatives=fold.relatives(table),
                workers=options.workers,
            )
            report.rows.append(row)
        output.remark(f"{fold.name}: {len(fold.test)} problems replayed")
    summary = run_evaluation(
        tables,
        ["learned", *given],
        output,
        leave_out=options.leave_out,
        seeds=options.seeds or 5,
        jobs=options.jobs or 1,
        out=None,
    )
    plain = not output.as_json and output.console.options.ascii_only
    width = 0 if output.as_json else output.console.width
    parts = () if output.as_json else (replay_table(report, width=width, plain=plain), replay_panel(report))
    scores = () if output.as_json else (shown(summary, width=width),)
    found = {**report.to_json(), "leave_out": options.leave_out, "evaluation": summary.to_json()}
    output.emit(found, *parts, *scores)
    return 0
