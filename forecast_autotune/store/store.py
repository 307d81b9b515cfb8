"""`Store`: every measurement and decision, shared by all processes that use one directory."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records.compilation import Compilation
from forecast_autotune.records.problem import FACTS
from forecast_autotune.settings import NO_HOME, NOWHERE, default_directory
from forecast_autotune.store.directory import (
    KernelDirectory,
    StoredCounts,
    launch_marker,
    recover_crashes,
)
from forecast_autotune.store.files import (
    ADVICE,
    COMPILATIONS,
    MISSES,
    VERSION,
    StoreNotes,
    device_directory,
    kernel_of,
    list_folders,
)
from forecast_autotune.store.importing import Importer, NewRow
from forecast_autotune.store.layers import StoreLayers, layer_configuration
from forecast_autotune.store.misses import Miss, RecordFile
from forecast_autotune.store.relatives import DEVICES, affordable_directories, nearest_relatives, nearness_key
from forecast_autotune.store.variants import VariantFiles, with_checks

if TYPE_CHECKING:
    from forecast_autotune.llm.advice.record import Advice
    from forecast_autotune.records import Candidate, Decision, Measurement, Problem, RiskVerdict
    from forecast_autotune.records.table import Table
    from forecast_autotune.store.advice import AdviceFiles
    from forecast_autotune.store.captures import CaptureFiles
    from forecast_autotune.surrogates.protocol import Relative
    from forecast_autotune.variants.records import Check, Variant


class Store:
    """Append-only measurements, decisions and locks below one directory.

    Safe to share between threads, processes and, on a network file system, hosts. Trouble with the
    disk never raises from the methods that tuning uses: it is noted, and memory takes over.

    Args:
        root: the cache directory, created when first written to; None keeps everything in memory.
    """

    def __init__(self, root: Path | None) -> None:
        self.root = None if root is None else Path(root).absolute()
        self._notes = StoreNotes()
        self._variants = VariantFiles(self.root, self._notes)
        self._advice: AdviceFiles | None = None
        """Opened at its first use: most processes never meet advice."""
        self._mutex = threading.RLock()
        self._directories: dict[tuple[str, str], KernelDirectory] = {}
        self._verdicts: dict[str, list[RiskVerdict]] = {}
        """By device directory, as far as they were asked for."""
        self.layers = StoreLayers((), self._notes)
        self.misses = RecordFile(self.root, self._notes, MISSES, Miss.from_json)
        self.compilations = RecordFile(self.root, self._notes, COMPILATIONS, Compilation.from_json)
        _STORES.add(self)

    @classmethod
    def default(cls, root: Path | None = None) -> Store:
        """The process-wide store of a directory, over the bundles and the remote store configured.

        Without `root` that is FORECAST_AUTOTUNE_CACHE_DIR or, if unset or empty, the user's cache
        directory for `forecast-autotune`; for a user without a home it is in memory, which is noted once.
        """
        root = (default_directory() if root is None else root).absolute()
        name = root, *layer_configuration()
        with _DEFAULTS_MUTEX:
            if name not in _DEFAULTS:
                _DEFAULTS[name] = cls(None if root == NOWHERE else root)
                if root == NOWHERE:
                    _DEFAULTS[name]._notes.add(NO_HOME)
                _DEFAULTS[name].layers = StoreLayers.configured(_DEFAULTS[name]._notes)
            return _DEFAULTS[name]

    @property
    def place(self) -> str:
        """The store's folder, or `memory`, for people."""
        return "memory" if self.root is None else str(self.root)

    @property
    def issued_warnings(self) -> list[str]:
        """Notes on what was skipped or not saved; each was also issued once as a `StoreWarning`."""
        return list(self._notes.texts)

    def is_doubtful(self, problem: Problem) -> bool:
        """Whether a file or folder that may hold rows of a problem could not be read."""
        with self._mutex:
            place, unread = self._directory(problem).path, self._notes.unread
        near = () if place is None else (place, *place.parents)
        is_unread = any(path == Path() or path in near or place in path.parents for path in unread)
        return is_unread or self.layers.is_unanswered(problem)

    def measurements(self, problem: Problem) -> list[Measurement]:
        """Everything measured of this problem by any process so far, oldest first."""
        with self._mutex:
            directory = self._directory(problem)
            directory.refresh()
            return self.layers.measurements(problem, directory.measurements(problem.id))

    def relatives(self, problem: Problem, limit: int = 8) -> list[Relative]:
        """Other problems of this kernel name with an ok measurement.

        First up to `limit` of this device class, most similar first: same source hash before others, then
        the distance of `feature_distance`. Then, unless `limit` is 0, the most similar one of the same
        source of each other device class, as far as their logs are quick to read (`store.relatives`). Relatives of
        this device class have their stored facts.
        """
        from forecast_autotune.surrogates.protocol import Relative

        with self._mutex:
            directory = self._directory(problem)
            directory.refresh()
            every = self.layers.tables(problem, directory.tables())
            tables = [t for t in every if t.problem.id != problem.id]
            distant = nearest_relatives(problem, self._other_device_directories(problem)) if limit > 0 else []
        tables = [t for t in tables if any(m.ok for m in t.measurements)]
        tables.sort(key=lambda t: nearness_key(problem, t.problem))
        near = [t.with_extra(FACTS, self.facts(t.problem)) for t in tables[: max(limit, 0)]]
        return [Relative(t.problem, tuple(t.measurements)) for t in near] + distant

    def add(self, problem: Problem, measurement: Measurement) -> None:
        """Commit one measurement; see `add_all`."""
        self.add_all(problem, [measurement])

    def add_all(self, problem: Problem, measurements: Sequence[Measurement]) -> None:
        """Commit measurements, all or none: on return, a kill cannot lose them (a power cut can, until `sync`).

        When the disk refuses, they are kept in memory and the store warns once. Raises `RecordError` if
        a measurement is about another problem, or holds values that JSON cannot.
        """
        with self._mutex:
            self._directory(problem).add([NewRow.of(problem, m) for m in measurements])
        for measurement in measurements:
            self.layers.offer(problem, measurement)

    def decision(self, problem: Problem) -> Decision | None:
        """The stored decision: one small file is opened. A damaged file is noted and counts as none."""
        with self._mutex:
            directory = self._directory(problem)
            decision = self.layers.held_decision(problem, directory)
        return decision or self.layers.fetched_decision(problem, directory, self._mutex)

    def put_decision(self, problem: Problem, decision: Decision) -> None:
        """Store a decision atomically, in place of an earlier one.

        When the disk refuses, it is kept in memory and the store warns once. Raises `RecordError` if
        it is about another problem.
        """
        if decision.problem != problem.id:
            raise RecordError(
                f"a decision is filed under its own problem: it is about {decision.problem!r}, not "
                f"{problem.id!r}; pass the problem it was made for"
            )
        with self._mutex:
            self._directory(problem).put_decision(problem, decision)
            self.layers.offer(problem, decision)
            if decision.verdicts:
                # Rare (an audit, a second tuning): the next call reads all verdicts again.
                self._verdicts.pop(device_directory(problem.device.slug), None)

    def facts(self, problem: Problem) -> Mapping[str, Any] | None:
        """The stored facts of a problem for refits (`features.traced_texts`), if any. A damaged file counts as none."""
        with self._mutex:
            return self._directory(problem).facts(problem.id)

    def put_facts(self, problem: Problem, facts: Mapping[str, Any]) -> None:
        """Store facts of a problem for refits and relatives' decisions, in place of earlier ones: one small file.
        Raises `RecordError` for values that JSON cannot hold."""
        with self._mutex:
            self._directory(problem).put_facts(problem.id, facts)

    def verdicts(self, problem: Problem) -> list[RiskVerdict]:
        """The outcomes of the risks stated on this problem's device class, whatever the kernel.

        Read from the decisions on file once per process, and again after a decision with verdicts.
        """
        device = device_directory(problem.device.slug)
        with self._mutex:
            if device not in self._verdicts:
                for path in self._on_disk(device):
                    self._directory_at(path.parent.name, path.name)
                self._verdicts[device] = [
                    verdict
                    for (slug, _), directory in sorted(self._directories.items())
                    if slug == device
                    for verdict in directory.verdicts()
                ]
            return list(self._verdicts[device])

    def tuning_lock(self, problem: Problem, timeout_s: float) -> contextlib.AbstractContextManager[bool]:
        """The right to tune one problem, among all threads and processes; best effort between hosts.

        The context yields True if the lock is held, and False, without raising, if it could not be acquired within
        `timeout_s` seconds or at all. The lock dies with its holder. In memory-only mode it works between threads.
        """
        with self._mutex:
            directory = self._directory(problem)
        return directory.tuning_lock(problem.id, timeout_s)

    def watch(self, problem: Problem, candidate: Candidate) -> contextlib.AbstractContextManager[None]:
        """Mark the candidate that a process launches, in case the process dies inside the `with` block."""
        return launch_marker(self._directory(problem).path, problem, candidate)

    def recover(self, problem: Problem) -> list[Measurement]:
        """Record and return the candidates whose launch took a process of this host down."""
        result = recover_crashes(self._directory(problem).path, problem, self._notes)
        for measurement in result:
            self.add(problem, measurement)
        return result

    def add_miss(self, miss: Miss) -> None:
        """Record a problem of a launch where nothing could be measured, for `warm`."""
        self.misses.add(miss)

    # --- other sources of kernels ---

    def variants(self, base_sha256: str | None = None) -> list[Variant]:
        """The variants held of a base source (`Kernel.source_sha256`), or of all; nothing is imported."""
        with self._mutex:
            return self._variants.of(base_sha256)

    def put_variant(self, variant: Variant, checks: Iterable[Check] = ()) -> None:
        """Store a variant, and add `checks` to its own and to the stored ones of the same source.

        When the disk refuses, it is kept in memory and the store warns once. Raises `RecordError` for
        values that JSON cannot hold.
        """
        with self._mutex:
            self._variants.put(with_checks(variant, tuple(checks)))

    def variants_of(self, kernel: str | None = None) -> list[Variant]:
        """The variants of all kernels whose name contains `kernel`, in any case."""
        return [v for v in self.variants() if _matches_all(kernel, v.kernel)]

    def clear_variants(self, kernel: str | None = None) -> int:
        """Remove `variants_of(kernel)`; returns how many. Raises `StoreError` if a file cannot be removed."""
        with self._mutex:
            return self._variants.clear(self.variants_of(kernel))

    # --- advice ---

    def advice(self, source_sha256: str) -> Advice | None:
        """The advice of a language model on a kernel source (`Kernel.source_sha256`), if there is any."""
        with self._mutex:
            if self._advice is None and not self._has_advice():
                return None
            return self._advice_files().of(source_sha256)

    def put_advice(self, advice: Advice) -> None:
        """Store advice in place of earlier advice on its source. In memory only when the disk refuses."""
        with self._mutex:
            self._advice_files().put(advice)

    def advice_of(self, kernel: str | None = None) -> list[Advice]:
        """The advice on all kernels whose name contains `kernel`, in any case."""
        with self._mutex:
            return [a for a in self._advice_files().every() if _matches_all(kernel, a.kernel)]

    def clear_advice(self, kernel: str | None = None) -> int:
        """Remove `advice_of(kernel)`; returns how many. Raises `StoreError` if a file cannot be removed."""
        with self._mutex:
            return self._advice_files().clear(self.advice_of(kernel))

    # --- captured calls ---

    @property
    def captures(self) -> CaptureFiles | None:
        """The calls that programs captured here; None for a store in memory."""
        from forecast_autotune.store.captures import CaptureFiles

        return None if self.root is None else CaptureFiles(self.root, self._notes)

    def clear_captures(self, kernel: str | None = None) -> int:
        """Remove captured calls of kernels whose name contains `kernel`; returns how many. Raises `StoreError`."""
        files = self.captures
        return 0 if files is None else files.clear(lambda name: _matches_all(kernel, name))

    def _has_advice(self) -> bool:
        return self.root is not None and (self.root / ADVICE).is_dir()

    def _advice_files(self) -> AdviceFiles:
        if self._advice is None:
            from forecast_autotune.store.advice import AdviceFiles

            self._advice = AdviceFiles(self.root, self._notes)
        return self._advice

    # --- everything ---

    def tables(self, kernel: str | None = None, device: str | None = None) -> Iterator[Table]:
        """Everything measured, one table per problem, whatever host measured it, with the facts kept of it.

        `kernel` and `device` are substrings, in any case, of the kernel's name and of the device's
        name or slug.
        """
        for directory in self._matching(kernel, device):
            with self._mutex:
                tables = [t.with_extra(FACTS, directory.facts(t.problem.id)) for t in directory.tables()]
            yield from map(self._with_advice, tables)

    def decisions(
        self, kernel: str | None = None, device: str | None = None
    ) -> Iterator[tuple[Problem, Decision]]:
        """Every stored decision with its problem; filters as in `tables`."""
        for directory in self._matching(kernel, device):
            with self._mutex:
                results = list(directory.decisions())
            yield from results

    def counts(self, kernel: str | None = None, device: str | None = None) -> StoredCounts:
        """How much there is, also of what this release cannot read; filters as in `tables`."""
        with self._mutex:
            return sum((d.counts() for d in self._matching(kernel, device)), StoredCounts())

    def clear(self, kernel: str | None = None, device: str | None = None) -> int:
        """Remove measurements and decisions; filters as in `tables`.

        Returns the number of measurements removed. Raises `StoreError` if a file cannot be removed.
        """
        with self._mutex:
            self._verdicts.clear()
            return sum(directory.clear() for directory in self._matching(kernel, device))

    def import_tables(self, tables: Iterable[Table]) -> int:
        """Add the measurements that are not held yet; returns how many.

        Held is what agrees in problem, candidate, outcome, time of day and median. Raises
        `RecordError` if a table's measurement names another problem than its table.
        """
        importer = self.importer()
        importer.add((t.problem, m) for t in tables for m in (None, *t.measurements))
        return importer.count.added

    def importer(self) -> Importer:
        """A way in for rows that come one by one: those of files."""

        def directory_of(device: str, kernel: str) -> KernelDirectory:
            with self._mutex:
                return self._directory_at(device, kernel)

        return Importer(directory_of, self._take_advice, self.root)

    def _with_advice(self, table: Table) -> Table:
        advice = self.advice(table.problem.kernel.source_sha256)
        return table if advice is None else table.with_extra(ADVICE, advice.to_json())

    def _take_advice(self, problem: Problem) -> None:
        """Keep the advice that came with a problem, if there is none on its source yet."""
        if problem.extra.get(ADVICE) is None or self.advice(problem.kernel.source_sha256) is not None:
            return
        from forecast_autotune.store.advice import advice_in

        if (advice := advice_in(problem, self._notes)) is not None:
            self.put_advice(advice)

    def sync(self) -> None:
        """Make everything this process appended survive a power cut; call once per decision."""
        with self._mutex:
            for directory in self._directories.values():
                directory.sync()

    # --- directories ---

    def _directory(self, problem: Problem) -> KernelDirectory:
        return self._directory_at(*kernel_of(problem))

    def _directory_at(self, device: str, kernel: str) -> KernelDirectory:
        name = (device, kernel)
        if name not in self._directories:
            path = None if self.root is None else self.root / VERSION / device / kernel
            self._directories[name] = KernelDirectory(path, self._notes)
        return self._directories[name]

    def _other_device_directories(self, problem: Problem) -> list[KernelDirectory]:
        """This kernel's directories of other device classes, read up to date; see `elsewhere`."""
        own, kernel = kernel_of(problem)
        if self.root is not None:
            try:
                paths = affordable_directories(self.root / VERSION, kernel, own)
            except OSError as error:
                self._notes.add(f"{self.root}: cannot be listed: {error}", topic=str(self.root))
                return []
            results = [self._directory_at(path.parent.name, path.name) for path in paths]
        else:
            names = sorted(self._directories)
            results = [self._directories[x] for x in names if x[1] == kernel and x[0] != own][:DEVICES]
        for directory in results:
            directory.refresh()
        return results

    def _matching(self, kernel: str | None, device: str | None) -> list[KernelDirectory]:
        """Directories that hold a problem passing both filters, read up to date."""
        with self._mutex:
            for path in self._on_disk():
                self._directory_at(path.parent.name, path.name)
            results = []
            for (slug, _), directory in sorted(self._directories.items()):
                directory.refresh()
                # All problems of a directory share kernel name and device slug.
                problem = next(iter(directory.problems().values()), None)
                if problem is None:
                    # Nothing to show or to match by, but `clear()` of everything includes it.
                    if kernel is None and device is None:
                        results.append(directory)
                elif _matches_all(kernel, problem.kernel.name) and _matches_all(
                    device, slug, problem.device.slug, problem.device.name
                ):
                    results.append(directory)
            return results

    def _on_disk(self, device: str | None = None) -> list[Path]:
        """The kernels' folders on disk, of one device's folder or of all."""
        if self.root is None:
            return []
        root = self.root / VERSION
        devices = list_folders(root, self._notes) if device is None else [root / device]
        return [path for folder in devices for path in list_folders(folder, self._notes)]

    def _after_fork(self) -> None:
        # Another thread may have held the mutex, or been half-way through a file, when we were forked.
        self._mutex = threading.RLock()
        self.misses.forget()
        self.compilations.forget()
        self.layers.forget()
        for directory in self._directories.values():
            directory.forget()


def _matches_all(part: str | None, *names: str) -> bool:
    return part is None or any(part.lower() in name.lower() for name in names)


_STORES: weakref.WeakSet[Store] = weakref.WeakSet()
_DEFAULTS: dict[tuple[object, ...], Store] = {}
_DEFAULTS_MUTEX = threading.Lock()


def _reset_after_fork() -> None:
    global _DEFAULTS_MUTEX
    _DEFAULTS_MUTEX = threading.Lock()
    for store in list(_STORES):
        store._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
