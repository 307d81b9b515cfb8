"""Union and differences of stores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from forecast_autotune.store.files import KernelName
from forecast_autotune.store.merging.row_stores import RowSource, RowTarget
from forecast_autotune.store.merging.rows import MEASUREMENT, KernelRows


@dataclass
class MergeCounts:
    """What a merge read and added, in rows."""

    kernels: int = 0
    rows: int = 0
    added: int = 0

    def to_json(self) -> dict[str, int]:
        """As JSON has it."""
        return dict(vars(self))


@dataclass(frozen=True)
class KernelDifference:
    """What one of two stores has of a kernel and the other has not."""

    kernel: KernelName
    only_first: int
    """Measurements."""
    only_second: int
    decided_otherwise: tuple[str, ...]
    """Problems that both have decided, differently."""
    decided_by_first: int
    """Problems that only the first has decided."""
    decided_by_second: int


def merge(sources: Iterable[RowSource], into: RowTarget) -> MergeCounts:
    """Add all rows of the sources to a store. Merging again, or in another order, changes nothing.

    Raises `StoreError` if a source cannot be read or the store not be written; what was added by then stays.
    """
    counts = MergeCounts()
    for source in sources:
        for kernel in source.kernels():
            rows = source.rows(kernel)
            counts.kernels += 1
            counts.rows += len(rows)
            if len(rows):
                counts.added += into.add(kernel, rows)
    return counts


def differences(first: RowSource, second: RowSource) -> Iterator[KernelDifference]:
    """How two stores differ in measurements and decisions, for each kernel in which they do, in order."""
    held, other = set(first.kernels()), set(second.kernels())
    for kernel in sorted(held | other):
        one = first.rows(kernel) if kernel in held else KernelRows()
        two = second.rows(kernel) if kernel in other else KernelRows()
        both = one.decisions.keys() & two.decisions.keys()
        found = KernelDifference(
            kernel,
            len(one.measurements.keys() - two.measurements.keys()),
            len(two.measurements.keys() - one.measurements.keys()),
            tuple(sorted(i for i in both if one.decisions[i].digest != two.decisions[i].digest)),
            len(one.decisions.keys() - both),
            len(two.decisions.keys() - both),
        )
        if any((found.only_first, found.only_second, found.decided_otherwise)) or both != (
            one.decisions.keys() | two.decisions.keys()
        ):
            yield found


def row_digests(source: RowSource) -> frozenset[str]:
    """Names of all measurements and decisions: equal for stores that hold the same."""
    return frozenset(
        row.digest
        for kernel in source.kernels()
        for row in source.rows(kernel)
        if row.kind == MEASUREMENT or row.kind == "decision"
    )
