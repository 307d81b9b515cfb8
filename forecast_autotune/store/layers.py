"""The layers below the user's own store: read-only bundles, asked in their order, and a remote store behind them.

The user's own decision comes first, and its measurements are joined by all that bundles hold of the problem. A
problem's id names its device class, its toolchain and its kernel's source, so what a bundle holds under an id was
measured on the like of what runs here; whether the candidates are the same is asked by whoever uses a decision.

The remote store is asked for what neither the user's store nor a bundle has decided; its rows are copied into the
user's store. Measurements of this machine are handed to it in the background.

| place | who puts it there |
|---|---|
| `FORECAST_AUTOTUNE_STORES` | whoever starts the program: folders, divided as in `PATH` |
| `forecast_autotune_bundles/NAME` beside the program's main file | whoever builds the image |
| the same beside the `__init__.py` of what `kernels` has loaded | kernel repositories of the Hugging Face Hub |
| entry points `forecast_autotune.bundles` | packages: `NAME = "package.folder"`, a folder of the package |

They are asked in this order. A package's folder is found without importing the package. A repository of the Hub is
no installed package, and has no entry points: its bundle is found once `kernels` has loaded it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from forecast_autotune.errors import RecordError, SettingsError, StoreError
from forecast_autotune.records import Decision, Measurement, Problem
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings, parse_directories
from forecast_autotune.store.directory import KernelDirectory
from forecast_autotune.store.files import KernelName, StoreNotes, kernel_of
from forecast_autotune.store.importing import NewRow
from forecast_autotune.store.remote.backends import VARIABLE as REMOTE_VARIABLE
from forecast_autotune.store.remote.backends import entry_of, sound_rows
from forecast_autotune.store.rows import KernelRows, canonical_line

if TYPE_CHECKING:
    from forecast_autotune.store.bundles import Bundle
    from forecast_autotune.store.remote.client import RemoteClient

GROUP = "forecast_autotune.bundles"
BESIDE = "forecast_autotune_bundles"
VARIABLE = "FORECAST_AUTOTUNE_STORES"


def bundle_folders() -> list[Path | StoreError]:
    """Every folder that should be a bundle, in the order in which they are asked; errors for those not found."""
    results: dict[Path, Path | StoreError] = {}
    for place in [*_named(), *_beside_program(), *_beside_loaded_kernels(), *_of_packages()]:
        results.setdefault(place if isinstance(place, Path) else Path(str(place)), place)
    return list(results.values())


def _named() -> Iterator[Path | StoreError]:
    try:
        yield from parse_directories(os.environ.get(VARIABLE, ""))
    except SettingsError as error:
        yield StoreError(f"{VARIABLE}: {error}")


def _beside_program() -> Iterator[Path]:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main:
        yield from _beside(main)


def _beside_loaded_kernels() -> Iterator[Path]:
    for file in loaded_kernel_files():
        yield from _beside(file)


def loaded_kernel_files() -> list[str]:
    """The modules' files of all that the package `kernels` has loaded from the Hub; never imports it."""
    ask = getattr(sys.modules.get("kernels"), "get_loaded_kernels", None)
    if ask is None:
        return []
    try:
        return [str(kernel.module.__file__) for kernel in ask() if kernel.module.__file__]
    except Exception:  # another package of this name, or a release that keeps them otherwise
        return []


def _beside(file: str) -> Iterator[Path]:
    folder = Path(file).absolute().parent / BESIDE
    if folder.is_dir():
        yield from sorted(path for path in folder.iterdir() if path.is_dir())


def _of_packages() -> Iterator[Path | StoreError]:
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        yield _folder_of(entry)


def _folder_of(entry: EntryPoint) -> Path | StoreError:
    package, *inner = entry.value.split(".")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in places:
        folder = Path(place, *inner)
        if folder.is_dir():
            return folder
    return StoreError(
        f"the bundle {entry.name} = {entry.value!r:.100} of an installed package is not there: its value must be "
        "the dotted path of a folder in the package"
    )


_REMOTE = (REMOTE_VARIABLE, f"{REMOTE_VARIABLE}_WAIT")


class StoreLayers:
    """Bundles, opened at their first use. A refused one is noted once, and left out whole.

    Args:
        folders: the bundles' folders; None for all places where this process looks for them.
        notes: gets a note for each refused bundle.
    """

    def __init__(
        self, folders: Sequence[Path] | None, notes: StoreNotes, remote: RemoteClient | None = None
    ) -> None:
        self._folders, self._notes = folders, notes
        self._bundles: list[Bundle] | None = [] if folders is not None and not folders else None
        self._tables: dict[KernelName, list[dict[str, Table]]] = {}
        """Tables of each requested kernel, by bundle."""
        self.remote = remote
        self._fetched: set[str] = set()
        """Problems whose remote rows were copied."""
        self._offers: set[str] = set()
        """Problems whose records were offered to the remote store."""
        self._asking = threading.RLock()
        """Held from a request to the remote store until its rows are copied, so that there is one for each problem."""

    @classmethod
    def configured(cls, notes: StoreNotes) -> StoreLayers:
        """The layers of this process's environment. Raises `SettingsError` for a malformed address."""
        variables = {name: value for name in _REMOTE if (value := os.environ.get(name)) is not None}
        if not variables.get(_REMOTE[0]):
            return cls(None, notes)
        from forecast_autotune.store.remote.client import RemoteClient

        settings = Settings.from_environment(variables)
        return cls(None, notes, RemoteClient(settings.remote, notes, settings.remote_wait_s))

    def connect(self) -> None:
        """Start the worker of a remote store, so that the first decision does not wait for it."""
        if self.remote is not None:
            self.remote.start()

    @property
    def bundles(self) -> list[Bundle]:
        """The accepted bundles, in the order in which they are asked."""
        if self._bundles is None:
            from forecast_autotune.store.bundles import Bundle

            self._bundles = []
            for place in bundle_folders() if self._folders is None else self._folders:
                try:
                    if isinstance(place, StoreError):
                        raise place
                    self._bundles.append(Bundle.open(place))
                except StoreError as error:
                    self._notes.unread.add(Path())  # whatever it was to hold
                    self._notes.add(str(error))
        return self._bundles

    def forget(self) -> None:
        """Renew the lock; a forked child calls this, as another thread may have held it."""
        self._asking = threading.RLock()

    def held_decision(self, problem: Problem, directory: KernelDirectory) -> Decision | None:
        """The user's own decision, which `directory` files, else the first bundle's."""
        if (own := directory.decision(problem.id)) is not None:
            return own
        for rows in self._rows(problem):
            if (row := rows.decisions.get(problem.id)) is not None:
                return Decision.from_json(row.data)
        return None

    def fetched_decision(
        self, problem: Problem, directory: KernelDirectory, mutex: AbstractContextManager[object]
    ) -> Decision | None:
        """The decision in the remote store; its rows of the problem are copied to `directory`.

        `mutex` guards `directory`. It is not held while waiting for the answer, up to `Settings.remote_wait_s`.
        """
        if self.remote is None:
            return None
        with self._asking:
            lines = None
            if problem.id not in self._fetched:
                lines = self.remote.ask(entry_of(kernel_of(problem), problem.id), problem.id)
            with mutex:
                if lines is not None:
                    self._fetched.add(problem.id)
                    self._copy(lines, problem, directory)
                return directory.decision(problem.id)

    def _copy(self, lines: list[bytes], problem: Problem, directory: KernelDirectory) -> None:
        try:
            rows = sound_rows(lines, problem.id)
            measurements = [Measurement.from_json(row.data) for row in rows.of_problem(problem.id)]
            decisions = [Decision.from_json(row.data) for row in rows.decisions.values()]
        except RecordError as error:
            message = f"the remote store's rows of {problem.id} are ignored: {error}"
            self._notes.add(message[:300], topic="remote")
            return
        if measurements:
            directory.add([NewRow.of(problem, m) for m in measurements], unique=True)
        if directory.decision(problem.id) is not None:
            return  # the user's own, made while the remote store was asked
        for decision in decisions:
            directory.put_decision(problem, decision)

    def is_unanswered(self, problem: Problem) -> bool:
        """Whether there is a remote store whose rows of a problem are not known yet."""
        return self.remote is not None and problem.id not in self._fetched

    def offer(self, problem: Problem, record: Measurement | Decision) -> None:
        """Hand a new record to the remote store, if there is one, without waiting for it."""
        if self.remote is None:
            return
        lines = [canonical_line(record.to_json())]
        if problem.id not in self._offers:
            self._offers.add(problem.id)
            # Without IR and facts, of which there may be megabytes.
            bare = replace(problem, ttir={}, extra={})
            lines.insert(0, canonical_line(bare.to_json()))
        self.remote.offer(entry_of(kernel_of(problem), problem.id), problem.id, lines)

    def measurements(self, problem: Problem, own: list[Measurement]) -> list[Measurement]:
        """The user's own measurements of a problem and those of all bundles, each once, oldest first."""
        rows = [
            m
            for tables in self._bundled_tables(problem)
            if problem.id in tables
            for m in tables[problem.id].measurements
        ]
        if not rows:
            return own
        # Equal but for free-form facts: what was merged from a bundle is the same row.
        return sorted(dict.fromkeys([*own, *rows]), key=attrgetter("at"))

    def tables(self, problem: Problem, own: Iterable[Table]) -> list[Table]:
        """The tables of this kernel and device class: the user's own, then what bundles hold of other problems."""
        results = {table.problem.id: table for table in own}
        for tables in self._bundled_tables(problem):
            for name, table in tables.items():
                if name not in results:
                    results[name] = replace(table, measurements=list(table.measurements))
        return list(results.values())

    def _bundled_tables(self, problem: Problem) -> list[dict[str, Table]]:
        """The tables of this kernel in each bundle, by problem: read once, and changed by nobody."""
        if not self.bundles:
            return []
        kernel = kernel_of(problem)
        if kernel not in self._tables:
            self._tables[kernel] = [_tables_of(rows) for rows in self._rows(problem)]
        return self._tables[kernel]

    def _rows(self, problem: Problem) -> list[KernelRows]:
        if not self.bundles:
            return []
        kernel = kernel_of(problem)
        return [rows for bundle in self.bundles if len(rows := bundle.rows(kernel))]


def _tables_of(rows: KernelRows) -> dict[str, Table]:
    by_problem: dict[str, list[Measurement]] = {}
    for row in sorted(rows.measurements.values(), key=attrgetter("order")):
        by_problem.setdefault(row.problem, []).append(Measurement.from_json(row.data))
    return {
        name: Table(Problem.from_json(row.data), by_problem[name])
        for name, row in rows.problems.items()
        if name in by_problem
    }


def layer_configuration() -> tuple[str, ...]:
    """The variables and files that say which layers there are: a store opened under another one has others."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    values = (os.environ.get(name, "") for name in (VARIABLE, *_REMOTE))
    return str(main), *values, *loaded_kernel_files()
