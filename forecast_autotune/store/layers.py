"""What lies below the user's own store: read-only bundles, asked in their order.

The user's own decision comes first, and its measurements are joined by all that bundles hold of the problem. A
problem's id names its device class, its toolchain and its kernel's source, so what a bundle holds under an id was
measured on the like of what runs here; whether the candidates are the same is asked by whoever uses a decision.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from forecast_autotune.errors import StoreError
from forecast_autotune.records import Decision, Measurement, Problem
from forecast_autotune.records.table import Table
from forecast_autotune.store.bundles.discovery import VARIABLE, bundle_folders
from forecast_autotune.store.files import StoreNotes
from forecast_autotune.store.merging.rows import KernelRows, kernel_of

if TYPE_CHECKING:
    from forecast_autotune.store.bundles.reading import Bundle


class StoreLayers:
    """Bundles, opened when they are first asked. One that is refused is noted once, and left out whole.

    Args:
        folders: where they are; None for wherever this process looks for them.
        notes: is told of those that are refused.
    """

    def __init__(self, folders: Sequence[Path] | None, notes: StoreNotes) -> None:
        self._folders, self._notes = folders, notes
        self._bundles: list[Bundle] | None = [] if folders is not None and not folders else None

    @property
    def bundles(self) -> list[Bundle]:
        """Those that were accepted, in the order in which they are asked."""
        if self._bundles is None:
            from forecast_autotune.store.bundles.reading import Bundle

            self._bundles = []
            for place in bundle_folders() if self._folders is None else self._folders:
                try:
                    if isinstance(place, StoreError):
                        raise place
                    self._bundles.append(Bundle.open(place))
                except StoreError as error:
                    self._notes.add(str(error))
        return self._bundles

    def decision(self, problem: Problem) -> Decision | None:
        """The first one that a bundle holds on a problem."""
        for rows in self._rows(problem):
            if (row := rows.decisions.get(problem.id)) is not None:
                return Decision.from_json(row.data)
        return None

    def measurements(self, problem: Problem, own: list[Measurement]) -> list[Measurement]:
        """The user's own measurements of a problem and those of all bundles, each once, oldest first."""
        others = [
            Measurement.from_json(r.data) for rows in self._rows(problem) for r in rows.of_problem(problem.id)
        ]
        if not others:
            return own
        # Equal but for free-form facts: what was merged from a bundle is the same row.
        return sorted(dict.fromkeys([*own, *others]), key=attrgetter("at"))

    def tables(self, problem: Problem, own: Iterable[Table]) -> list[Table]:
        """The tables of this kernel and device class: the user's own, then what bundles hold of other problems."""
        found = {table.problem.id: table for table in own}
        for rows in self._rows(problem):
            for name, row in rows.problems.items():
                if name not in found and (measured := rows.of_problem(name)):
                    listed = [Measurement.from_json(r.data) for r in measured]
                    found[name] = Table(Problem.from_json(row.data), listed)
        return list(found.values())

    def _rows(self, problem: Problem) -> list[KernelRows]:
        if not self.bundles:
            return []
        kernel = kernel_of(problem)
        return [rows for bundle in self.bundles if len(rows := bundle.rows(kernel))]


def layer_configuration() -> tuple[str, ...]:
    """What says which layers there are: a store opened under another one has others."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.environ.get(VARIABLE, ""), str(main)
