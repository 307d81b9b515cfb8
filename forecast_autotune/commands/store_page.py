"""`show --page`: the store as a page."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from forecast_autotune.commands.calibration import coverage, reliability
from forecast_autotune.commands.output import Output, output_path
from forecast_autotune.commands.store_access import first_forecasts, open_named_store
from forecast_autotune.file_access import open_named_output
from forecast_autotune.printable import count_text
from forecast_autotune.report.store_page import ProblemRow, StoreOverview, disk_use, render_store_page
from forecast_autotune.store import Store


def store_page(options: argparse.Namespace, output: Output) -> int:
    """Write the page. Raises `UsageError` for a folder that is not there."""
    store = open_named_store(options)
    path = output_path("--page", options.page, ".html", ".htm")
    overview = overview_of(store, options.kernel, options.device)
    with open_named_output(path) as stream:
        stream.write(render_store_page(overview).encode("utf-8", "replace"))
    text = f"wrote {options.page}: {count_text(overview.problems, 'problem')}"
    output.emit({"page": options.page, "problems": overview.problems}, text)
    return 0


def overview_of(store: Store, kernel: str | None = None, device: str | None = None) -> StoreOverview:
    """The page's data on the problems that pass both filters; they are those of `Store.tables`."""
    decisions = {problem.id: (problem, decision) for problem, decision in store.decisions(kernel, device)}
    verdicts = [verdict for _, decision in decisions.values() for verdict in decision.verdicts]

    def rows() -> Iterator[ProblemRow]:
        names = set()
        for table in store.tables(kernel, device):
            names.add(table.problem.id)
            _, decision = decisions.get(table.problem.id, (None, None))
            forecasts = first_forecasts(table.problem, table.measurements)
            yield ProblemRow.of(table.problem, table.measurements, decision, forecasts)
        for name, (problem, decision) in decisions.items():
            if name not in names:
                yield ProblemRow.of(problem, (), decision)

    files, size = disk_use(store.root)
    return StoreOverview.of(
        store.place,
        rows(),
        reliability=reliability(verdicts),
        intervals=coverage(store.tables(kernel, device)),
        files=files,
        disk_bytes=size,
        misses=len(store.misses.all()),
        remarks=store.issued_warnings,
    )
