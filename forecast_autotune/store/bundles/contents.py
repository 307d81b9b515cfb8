"""What a bundle's files say: rows of kernels, in the one form in which they are written.

A file of rows is accepted only if every line is a valid record in canonical form, in order and once, if all
records belong to the kernel that the file is named after, and if every decision stands beside the rows it rests on.
"""

from __future__ import annotations

from collections.abc import Iterable

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Decision, Evidence, Measurement, Problem
from forecast_autotune.records.table import latest_labels
from forecast_autotune.store.bundles.manifest import BundleError, Coverage
from forecast_autotune.store.files import KernelName
from forecast_autotune.store.merging.rows import KernelRows, Row

ROWS = "rows"
"""Folder of the files of rows: `rows/DEVICE/KERNEL.jsonl`."""
MAX_ROWS_BYTES = 256 * 1024 * 1024
"""Of one file."""


def rows_path(kernel: KernelName) -> str:
    """Where a bundle keeps a kernel's rows."""
    return f"{ROWS}/{kernel[0]}/{kernel[1]}.jsonl"


def kernel_at(path: str) -> KernelName | None:
    """The kernel whose rows are at a path of a bundle; None for other files."""
    parts = path.split("/")
    if len(parts) != 3 or parts[0] != ROWS or not parts[2].endswith(".jsonl"):
        return None
    return parts[1], parts[2].removesuffix(".jsonl")


def to_bytes(rows: KernelRows) -> bytes:
    """The file of a set of rows: equal sets give equal bytes."""
    return b"".join(row.line for row in sorted(rows, key=lambda row: row.order))


def from_bytes(data: bytes, kernel: KernelName) -> KernelRows:
    """The rows of such a file. Raises `BundleError` for anything that `to_bytes` does not give."""
    where = rows_path(kernel)
    rows = KernelRows()
    for number, raw in enumerate(data.splitlines(keepends=True), 1):
        try:
            row = Row.read(raw)
        except RecordError as error:
            raise BundleError(f"{where}:{number} is no record ({error})"[:300]) from error
        if row is None or row.line != raw or not rows.add(row):
            raise BundleError(f"{where}:{number} is not a row as a bundle has them")
        if row.kernel not in (None, kernel):
            raise BundleError(f"{where}:{number} is about another kernel or device")
    if to_bytes(rows) != data:
        raise BundleError(f"{where}: its rows are not in order")
    strangers = len(rows) - len(rows.with_problems()[0])
    if strangers:
        raise BundleError(f"{where}: {strangers} rows are about problems that it does not describe")
    if said := unfounded_decision(rows):
        raise BundleError(f"{where}: {said}")
    return rows


def unfounded_decision(rows: KernelRows) -> str:
    """What is wrong with the first decision that its rows do not bear out; empty where all is well."""
    measured: dict[str, list[Measurement]] = {}
    for row in sorted(rows.measurements.values(), key=lambda row: row.order):
        measured.setdefault(row.problem, []).append(Measurement.from_json(row.data))
    for row in rows.decisions.values():
        decision = Decision.from_json(row.data)
        if decision.evidence in (Evidence.FORECAST, Evidence.ONLY) and decision.median_ms is None:
            continue
        labels = latest_labels(measured.get(row.problem, ()))
        found = labels.get(decision.chosen)
        if found is None or not found.ok:
            return f"the decision on {row.problem} rests on a time that is not there"
    return ""


def coverage_of(rows: KernelRows) -> Coverage:
    """What a manifest says of a kernel's rows. There is at least one problem among them."""
    problems = [Problem.from_json(rows.problems[name].data) for name in sorted(rows.problems)]
    toolchains = {", ".join(f"{tool} {version}" for tool, version in p.toolchain) for p in problems}
    first = problems[0]
    return Coverage(
        first.device.name,
        first.device.slug,
        first.kernel.name,
        tuple(sorted(toolchains)),
        len(rows.problems),
        len(rows.measurements),
        len(rows.decisions),
    )


def newest(every: Iterable[KernelRows]) -> str:
    """Time of the newest row."""
    return max((row.at for rows in every for row in rows), default="")


def without_code(rows: KernelRows) -> KernelRows:
    """The rows without texts of programs: no kernel's source and no IR; a source's hash stays."""
    made = KernelRows(decisions=dict(rows.decisions))
    for row in rows.measurements.values():
        if b'"ir_override":"' not in row.line:  # else the candidate itself is IR
            made.add(row)
    for row in rows.problems.values():
        data = {name: value for name, value in row.data.items() if name in _PROBLEM_FIELDS}
        data["kernel"] = {**data["kernel"], "source": ""}
        stripped = Row.of(data)
        assert stripped is not None
        made.add(stripped)
    return made


_PROBLEM_FIELDS = frozenset(
    ("type", "schema", "id", "kernel", "arguments", "grid", "key", "device", "toolchain")
)
"""Of a problem's record; unknown fields could hold anything."""
