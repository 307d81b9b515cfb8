"""The one protocol of readers: a `Format` knows its files by their first bytes and gives their rows, one by one.

Few files of other tools hold source and toolchain, and some name no device: imported rows are prior knowledge of a
kernel, and never answer for a problem of their own. Nothing in them is evaluated.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Device, Measurement, Problem
from forecast_autotune.records.bounded_json import decode_document
from forecast_autotune.records.json_fields import LARGEST_PARAMETER
from forecast_autotune.records.named_lines import Refuse, bounded_refusals, read_document, refuse_row
from forecast_autotune.records.table import Table

Row: TypeAlias = tuple[Problem, Measurement | None]
"""A measurement with its problem; without one, a problem's record that is fuller than the one before."""

HEAD_BYTES = 1 << 16
IMPORTED_FROM = "imported_from"
"""A field of a problem line: the timing protocol of the format that its rows came from."""


@dataclass
class Reading:
    """One file that is read: where it was measured, and what becomes of that which is no row."""

    path: Path
    device: Device | None = None
    """The device that the user named; it counts over the file's."""
    refuse: Refuse | None = None
    """Takes rows that break a rule; without it, the first one is raised."""
    other: Callable[[dict[str, Any]], None] | None = None
    """Takes lines of our own tables that are of other types."""
    local: Callable[[], Device | None] | None = None
    """The device of this machine, for files that lie only where they were measured."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Sound entries that are no measurements, by the reason."""
    companions: set[Path] = field(default_factory=set)
    """Files beside this one that were read with it."""

    def __post_init__(self) -> None:
        self.refuse = bounded_refusals(self.path, self.refuse)

    def refuse_row(self, error: object, where: str = "") -> None:
        """Refuse a row; `where` follows the file's name."""
        refuse_row(RecordError(f"{self.path}{where}: {error}"), self.refuse)

    def document(self) -> Any:
        """The file as one JSON value. Raises `RecordError`, naming the file."""
        try:
            return decode_document(read_document(self.path))
        except RecordError as error:
            raise RecordError(
                str(error) if str(self.path) in str(error) else f"{self.path}: {error}"
            ) from None
        except ValueError as error:
            raise RecordError(f"{self.path}: damaged or cut off, so none of it is taken ({error})") from error

    def beside(self, name: str) -> Path | None:
        """A file in the same folder, if there is one."""
        path = self.path.with_name(name)
        if not path.is_file():
            return None
        self.companions.add(path)
        return path

    def device_named(self, name: object) -> Device:
        """The user's device, else that of the file. Raises `RecordError` where neither is named."""
        if self.device is not None:
            return self.device
        if isinstance(name, str) and name.strip():
            return device_from_name(name.strip())
        raise RecordError(
            f"{self.path}: the file names no device: say where it was measured, as in "
            "--device-name 'NVIDIA H200'"
        )


@dataclass(frozen=True)
class Format:
    """A format of files: how it is known, how it is read, and how much of a measurement it holds."""

    name: str
    """Timing protocol of its rows, too, where it has one."""
    tool: str
    files: str
    is_theirs: Callable[[Path, str], bool]
    """Path and first characters -> whether a file is of the format."""
    read: Callable[[Reading], Iterable[Row]]
    version: str
    """Releases whose own files were read."""
    holds: tuple[str, str, str, str, str] | None
    """How times, failures, device, shapes and dates are held, in words; None for a file without measurements."""
    lost: str
    """Parts that are not in the file, or not taken."""

    def rows(self, reading: Reading) -> Iterator[Row]:
        """The rows of a file, as `read` gives them. Raises `RecordError`, naming the file, where it cannot be read."""
        try:
            yield from self.read(reading)
        except OSError as error:
            raise RecordError(f"{reading.path}: unreadable: {error.strerror or error}") from error


def head_text(path: Path) -> str:
    """The first characters of a file, gzip-compressed or not; empty where it cannot be read."""
    if not path.is_file():
        return ""  # what is read from a pipe is gone for whoever reads it next
    try:
        return read_document(path, HEAD_BYTES)
    except (OSError, RecordError):
        return ""


def tables_of(rows: Iterable[Row]) -> list[Table]:
    """The rows of one file as tables, by problem."""
    tables: dict[str, Table] = {}
    for problem, measurement in rows:
        table = tables.setdefault(problem.id, Table(problem))
        table.problem = problem
        if measurement is not None:
            table.measurements.append(measurement)
    return list(tables.values())


_CPU = re.compile(
    r"\b(cpu|epyc|xeon|ryzen|threadripper|opteron|processor|core\(tm\)|x86(_64)?|amd64|i[3-6]86|aarch64|arm64|armv\w+"
    r"|ppc64\w*|riscv\w*|neoverse|graviton|llvm)\b"
)
_AMD = re.compile(r"\b(amd|ati|radeon|instinct|vega\w*|gfx\d\w*|mi\d{2,3}\w*)\b")
_WIDE = re.compile(r"\b(instinct|vega\w*|radeon vii|gfx[6-9]\w*|mi\d{2,3}\w*)\b")
"""Models whose wavefronts have 64 lanes: GCN and CDNA. RDNA, from gfx10 on, runs 32."""
_OTHERS = (
    (re.compile(r"\bintel\b.*\b(arc|gpu|max|flex|graphics)\b"), "xpu"),
    (re.compile(r"\bascend"), "npu"),
)


def device_from_name(name: str) -> Device:
    """A device known by its name alone; one that names no other maker is taken for CUDA's."""
    words = name.lower()
    if _CPU.search(words) and not re.search(r"radeon|instinct", words):
        return Device(name, "cpu")
    for pattern, backend in _OTHERS:
        if pattern.search(words):
            return Device(name, backend)
    if _AMD.search(words):
        return Device(name, "hip", warp_size=64 if _WIDE.search(words) else 32)
    return Device(name, "cuda")


def flat_parameters(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each parameter of a config, its lists spread over numbered ones: `block_sizes[0]`.

    Raises `RecordError` for an integer that no record holds.
    """
    for name, value in given.items():
        if isinstance(value, list | tuple):
            yield from flat_parameters({f"{name}[{i}]": part for i, part in enumerate(value)})
        elif isinstance(value, int) and abs(value) > LARGEST_PARAMETER:
            raise RecordError(f"{name} must have 128 bits at most")
        else:
            yield name, value


def reason(error: BaseException) -> str:
    """An error of a reader in one line."""
    if isinstance(error, KeyError):
        return f"it has no {error}"
    text = str(error)[:200]
    return text if isinstance(error, RecordError) else f"{type(error).__name__}: {text}"
