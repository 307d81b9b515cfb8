"""Bundles: read-only folders of measurements and decisions, made on one machine and used on others.

`manifest.json` lists every file with its SHA-256, and the bundle's kernels and devices. The bytes of a manifest follow
from its contents, and its contents from the files beside it, except for compiled kernels and sources. So every later
change of a bundle is detected, and the bundle is refused whole.

Compiled kernels (the contents of Triton's cache) and compiled graphs (one file of
`torch.compiler.save_cache_artifacts()`) are code. A bundle carries them on request only, and nothing loads them from
a bundle: a user who trusts its author installs or extracts them by command and by the bundle's digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from forecast_autotune.errors import RecordError, StoreError
from forecast_autotune.file_access import read_regular
from forecast_autotune.records import Decision, Evidence, Measurement, Problem
from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.compilation import Compilation
from forecast_autotune.records.json_fields import MALFORMED, read_text
from forecast_autotune.records.table import latest_labels
from forecast_autotune.store.files import COMPILATIONS, MANIFEST, KernelName, decode, encode, write_atomically
from forecast_autotune.store.merging import RowSource
from forecast_autotune.store.rows import KernelRows, Row
from forecast_autotune.version import __version__

SCHEMA = 1
MAX_FILES = 100_000
_PART = re.compile(r"[A-Za-z0-9_+=][A-Za-z0-9_.+=-]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class BundleError(StoreError):
    """A bundle that is refused whole: damaged, tampered with, incomplete, or not one at all."""


@dataclass(frozen=True)
class BundledFile(Record, label="file", unknown="refuse"):
    """One file of a bundle."""

    size: int
    """Bytes."""
    sha256: str = field(metadata=json_option(read=read_text))

    @classmethod
    def of(cls, data: bytes) -> BundledFile:
        """The entry of a file with these bytes."""
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class Coverage(Record, label="coverage", unknown="refuse"):
    """The part of a bundle on one kernel and one device class."""

    device: str
    """Name of the device, such as `NVIDIA H200`."""
    slug: str
    """Name of the device class, as stores have it."""
    kernel: str
    toolchains: tuple[str, ...]
    """Toolchains of its problems, each as `name version, ...`."""
    problems: int
    measurements: int
    decisions: int


def _read_files(value: object) -> dict[str, BundledFile]:
    if not isinstance(value, Mapping):
        raise RecordError(" must be an object")
    if len(value) > MAX_FILES:
        raise RecordError(f" must have at most {MAX_FILES} entries, not {len(value)}")
    results = {str(path): BundledFile.from_json(entry) for path, entry in value.items()}
    for path, entry in results.items():
        if not is_plain_path(path) or path == MANIFEST:
            raise RecordError(f" must name files in the bundle by plain names, not {path!r:.80}")
        if not _DIGEST.fullmatch(entry.sha256):
            raise RecordError(f"[{path!r}] must have a SHA-256 of 64 hexadecimal digits")
    return results


def is_plain_path(path: str) -> bool:
    """Whether a relative path is made of plain names, none of which begins with a dot."""
    parts = path.split("/")
    return 0 < len(parts) <= 8 and all(_PART.fullmatch(part) for part in parts)


@dataclass(frozen=True)
class Manifest(Record, tag="bundle", schema=SCHEMA, unknown="refuse", complete=True):
    """The lists of a bundle's files, and of its kernels and devices."""

    release: str
    """Version of forecast-autotune that made it."""
    newest: str
    """Time of its newest row: bundles of equal rows are equal, byte by byte."""
    carries: tuple[str, ...]
    """Kinds of code in the bundle, on request only: `sources`, `compiled`, `graphs`."""
    covers: tuple[Coverage, ...]
    files: Mapping[str, BundledFile] = field(
        metadata=json_option(
            read=_read_files, write=lambda files: {path: files[path].to_json() for path in sorted(files)}
        )
    )
    digest: str
    """SHA-256 of all other fields: one name for the bundle and every byte in it."""

    def sealed(self) -> Manifest:
        """The manifest with its computed digest."""
        return replace(self, digest=self.computed_digest())

    def computed_digest(self) -> str:
        """The digest of all other fields."""
        data = {name: value for name, value in self.to_json().items() if name != "digest"}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    def to_bytes(self) -> bytes:
        """The canonical bytes of the file."""
        return (json.dumps(self.to_json(), indent=1) + "\n").encode("ascii")

    @classmethod
    def of_bytes(cls, data: bytes) -> Manifest:
        """Read it. Raises `BundleError` for anything that `to_bytes` does not write."""
        try:
            result = cls.from_json(decode(data))
        except MALFORMED as error:
            raise BundleError(f"{MANIFEST} is no manifest ({error})"[:300]) from error
        if result.digest != result.computed_digest():
            raise BundleError(f"{MANIFEST} is not what its digest {result.digest[:16]!r} was made of")
        if result.to_bytes() != data:
            raise BundleError(f"{MANIFEST} was edited: it has other bytes than were written")
        return result


ROWS = "rows"
"""Folder of the files of rows: `rows/DEVICE/KERNEL.jsonl`."""
MAX_ROWS_BYTES = 256 * 1024 * 1024
"""The most bytes of one file."""


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
    if message := unfounded_decision(rows):
        raise BundleError(f"{where}: {message}")
    return rows


def unfounded_decision(rows: KernelRows) -> str:
    """The fault of the first decision without its measurement in `rows`; empty where there is none."""
    by_problem: dict[str, list[Measurement]] = {}
    for row in sorted(rows.measurements.values(), key=lambda row: row.order):
        by_problem.setdefault(row.problem, []).append(Measurement.from_json(row.data))
    for row in rows.decisions.values():
        decision = Decision.from_json(row.data)
        if decision.evidence in (Evidence.FORECAST, Evidence.ONLY) and decision.median_ms is None:
            continue
        labels = latest_labels(by_problem.get(row.problem, ()))
        label = labels.get(decision.chosen)
        if label is None or not label.ok:
            return f"the decision on {row.problem} rests on a time that is not there"
    return ""


def coverage_of(rows: KernelRows) -> Coverage:
    """The entry of a manifest for a kernel's rows. There is at least one problem among them."""
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
    kernel_rows = KernelRows(decisions=dict(rows.decisions))
    for row in rows.measurements.values():
        if b'"ir_override":"' not in row.line:  # else the candidate itself is IR
            kernel_rows.add(row)
    for row in rows.problems.values():
        data = {name: value for name, value in row.data.items() if name in _PROBLEM_FIELDS}
        data["kernel"] = {**data["kernel"], "source": ""}
        bare = Row.of(data)
        assert bare is not None
        kernel_rows.add(bare)
    return kernel_rows


_PROBLEM_FIELDS = frozenset(
    ("type", "schema", "id", "kernel", "arguments", "grid", "key", "device", "toolchain")
)
"""Fields kept of a problem's record; unknown ones could hold anything."""


COMPILED = "compiled"
_FOLDER = f"{COMPILED}/triton/"
_GROUP = "__grp__"
"""Start of the names of files in Triton's cache that list other files, by their paths."""
MAX_COMPILED_BYTES = 512 * 1024 * 1024
"""The most bytes of one file."""


def compiled_files(cache: Path) -> dict[str, bytes]:
    """The files in Triton's cache, by their path in a bundle. Raises `StoreError` where there is nothing."""
    results: dict[str, bytes] = {}
    for path in sorted(p for p in cache.glob("*/*") if p.is_file()):
        name = f"{path.parent.name}/{path.name}"
        if not is_plain_path(name) or path.suffix == ".lock" or ".tmp" in path.name:
            continue
        data = read_regular(path, MAX_COMPILED_BYTES)
        results[_FOLDER + name] = _placed_group(data) if path.name.startswith(_GROUP) else data
    if not results:
        raise StoreError(
            f"{cache} holds no compiled kernels: run the program once with TRITON_CACHE_DIR={cache}"
        )
    return results


def is_compiled(path: str) -> bool:
    """Whether a file of a bundle is one of these."""
    return path.startswith(_FOLDER) and path.count("/") == 3


def install_compiled(files: Mapping[str, bytes], cache: Path) -> int:
    """Put a bundle's compiled kernels into Triton's cache, where they are not there yet; returns how many files.

    Raises `StoreError` where it cannot be written.
    """
    count = 0
    # The lists of files come last: what they name is there by then.
    for path in sorted(files, key=lambda p: (p.rsplit("/", 1)[-1].startswith(_GROUP), p)):
        target = cache / path.removeprefix(_FOLDER)
        data = files[path]
        if target.name.startswith(_GROUP):
            data = _placed_group(data, str(target.parent.absolute()))
        try:
            if target.exists():
                continue
            write_atomically(target, data)
            if target.suffix == ".so":
                target.chmod(0o755)
        except OSError as error:
            raise StoreError(f"cannot write {target}: {error}") from error
        count += 1
    return count


def _placed_group(data: bytes, folder: str = "") -> bytes:
    """A list of files with their paths in a folder, or their names alone; other data unchanged."""
    try:
        group = json.loads(data)
        names = {str(n): os.path.basename(path) for n, path in group["child_paths"].items()}  # noqa: PTH119
        group["child_paths"] = {n: os.path.join(folder, name) for n, name in names.items()}  # noqa: PTH118
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return data
    return json.dumps(group).encode()


GRAPHS = "graphs"
GRAPHS_PATH = f"{GRAPHS}/mega_cache.bin"
_VERSION = (1).to_bytes(8, "big")


def graphs_file(path: Path) -> dict[str, bytes]:
    """The file by its path in a bundle.

    Raises `StoreError` where it is empty, too large, no regular file, or has another form.
    """
    try:
        data = read_regular(path, MAX_COMPILED_BYTES)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    if not data:
        raise StoreError(f"{path} is empty: write the bytes of torch.compiler.save_cache_artifacts() to it")
    if not _is_saved_cache(data):
        raise StoreError(
            f"{path} holds no compiled graphs: write the bytes of torch.compiler.save_cache_artifacts() to it"
        )
    return {GRAPHS_PATH: data}


def _is_saved_cache(data: bytes) -> bool:
    """Whether bytes have the form that torch writes: a version, before which later releases put a checksum."""
    return data.startswith(_VERSION) or zlib.crc32(data[4:]).to_bytes(4, "big") == data[:4]


def take_out_graphs(data: bytes, target: Path) -> None:
    """Write a bundle's compiled graphs to a file. Raises `StoreError` where it exists or cannot be written."""
    try:
        if target.exists():
            raise StoreError(f"{target} exists: name a new file")
        write_atomically(target, data)
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error}") from error


SOURCES = "sources"


@dataclass(frozen=True)
class BundleOptions:
    """Which rows and which code go into a bundle."""

    kernel: str = ""
    """Only kernels whose name contains this, in any case."""
    device: str = ""
    """Only device classes whose name contains this, in any case."""
    sources: bool = False
    """Whether kernels' sources and IR go along."""
    compiled: Path | None = None
    """Triton's cache whose compiled kernels go along."""
    graphs: Path | None = None
    """A file of `torch.compiler.save_cache_artifacts()` that goes along."""
    compilations: Sequence[Compilation] = ()
    """Recorded compilations that go along, for `warm` there."""


def write_bundle(source: RowSource, folder: Path, options: BundleOptions | None = None) -> Manifest:
    """Write a bundle into a new or empty folder, its manifest last.

    Decisions whose rows are missing are left out. Raises `StoreError` where the folder holds anything, where
    there is nothing to bundle, and where it cannot be written; the folder is then as it was.
    """
    options = options or BundleOptions()
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise StoreError(f"{folder} is not empty: name a new folder, a bundle holds nothing but itself")
        files, rows = _row_files(source, options)
        if options.compilations:
            files[COMPILATIONS] = _compilation_lines(options.compilations)
        if options.compiled is not None:
            files |= compiled_files(options.compiled)
        if options.graphs is not None:
            files |= graphs_file(options.graphs)
        manifest = _manifest(files, rows, options)
        _write_files(folder, files | {MANIFEST: manifest.to_bytes()})
    except OSError as error:
        raise StoreError(f"cannot write a bundle to {folder}: {error}") from error
    return manifest


def _compilation_lines(every: Iterable[Compilation]) -> bytes:
    """The lines of compilations, without paths on their machine: callers, and files that a library wrote there."""
    bare = (replace(c, caller="", file="", trouble=c.trouble or _OF_A_FILE * bool(c.file)) for c in every)
    return b"".join(sorted(encode(c.to_json()) for c in bare))


def _compilations_of(data: bytes) -> list[Compilation]:
    try:
        compilations = [Compilation.from_json(decode(line)) for line in data.splitlines()]
    except MALFORMED as error:
        raise BundleError(f"{COMPILATIONS} holds a line that is no record ({error})"[:300]) from error
    if _compilation_lines(compilations) != data:
        raise BundleError(f"{COMPILATIONS} is not as a bundle has it")
    return compilations


_OF_A_FILE = "a library wrote its module to a file, which no bundle carries"


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write these in their order, or none of them: half a bundle would be in the way of the next attempt."""
    is_new = not folder.exists()
    try:
        for path, data in files.items():
            write_atomically(folder / path, data)
    except BaseException:
        (folder / MANIFEST).unlink(missing_ok=True)
        for name in {path.split("/")[0] for path in files}:
            shutil.rmtree(folder / name, ignore_errors=True)
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _row_files(source: RowSource, options: BundleOptions) -> tuple[dict[str, bytes], list[KernelRows]]:
    files: dict[str, bytes] = {}
    results: list[KernelRows] = []
    for kernel in source.kernels():
        rows = source.rows(kernel)
        if not rows.problems or not _matches(rows, options):
            continue
        rows = _founded(rows if options.sources else without_code(rows))
        results.append(rows)
        files[rows_path(kernel)] = to_bytes(rows)
    if not files and not options.compilations:
        raise StoreError(f"{source.name} holds nothing of the kernels and devices asked for")
    return files, results


def _founded(rows: KernelRows) -> KernelRows:
    """The rows without decisions whose measurement is missing."""
    result = KernelRows(dict(rows.problems), dict(rows.measurements))
    for row in rows.decisions.values():
        single = KernelRows(rows.problems, rows.measurements, {row.problem: row})
        if not unfounded_decision(single):
            result.add(row)
    return result


def _matches(rows: KernelRows, options: BundleOptions) -> bool:
    problem = Problem.from_json(next(iter(rows.problems.values())).data)
    has_name = options.kernel.lower() in problem.kernel.name.lower()
    where = f"{problem.device.slug} {problem.device.name}".lower()
    return has_name and options.device.lower() in where


def _manifest(files: Mapping[str, bytes], rows: list[KernelRows], options: BundleOptions) -> Manifest:
    kinds = {SOURCES: options.sources, COMPILED: options.compiled, GRAPHS: options.graphs}
    carries = [name for name, value in kinds.items() if value]
    covers = sorted(map(coverage_of, rows), key=lambda c: (c.slug, c.kernel))
    return Manifest(
        release=__version__,
        newest=newest(rows),
        carries=tuple(carries),
        covers=tuple(covers),
        files={path: BundledFile.of(data) for path, data in files.items()},
        digest="",
    ).sealed()


class Bundle:
    """A bundle whose every byte was verified against its manifest when it was opened.

    Its results were read in that moment: changing the files later changes nothing here.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        rows: dict[KernelName, KernelRows],
        compilations: Sequence[Compilation] = (),
    ) -> None:
        self.path, self.manifest, self._rows = path, manifest, rows
        self.compilations = compilations
        """Compilations of the programs whose decisions these are."""

    @classmethod
    def open(cls, path: Path) -> Bundle:
        """Read and verify a bundle. Raises `BundleError` that names the bundle and the first thing wrong with it."""
        try:
            return cls._open(path)
        except BundleError as error:
            raise BundleError(f"the bundle {path} is refused: {error}") from error
        except OSError as error:
            message = error.strerror or str(error)
            raise BundleError(f"the bundle {path} is refused: {error.filename or path}: {message}") from error

    @classmethod
    def _open(cls, path: Path) -> Bundle:
        if not (path / MANIFEST).is_file():
            raise BundleError(f"there is no {MANIFEST}; `forecast-autotune store bundle` makes a bundle")
        manifest = Manifest.of_bytes(read_regular(path / MANIFEST))
        files = set(_files_below(path)) - {MANIFEST}
        if missing := sorted(manifest.files.keys() - files):
            raise BundleError(f"{missing[0]} is missing ({len(missing)} of {len(manifest.files)} files)")
        if extra := sorted(files - manifest.files.keys()):
            raise BundleError(f"{extra[0]!r:.120} does not belong to it ({len(extra)} such files)")
        rows: dict[KernelName, KernelRows] = {}
        compilations: list[Compilation] = []
        for name in sorted(manifest.files):
            kernel = kernel_at(name)
            limit = MAX_ROWS_BYTES if kernel is not None else MAX_COMPILED_BYTES
            data = _verified(path / name, name, manifest.files[name], limit)
            if kernel is not None:
                rows[kernel] = from_bytes(data, kernel)
            elif name == COMPILATIONS:
                compilations = _compilations_of(data)
            elif not is_compiled(name) and name != GRAPHS_PATH:
                raise BundleError(f"{name} is nothing that a bundle holds")
        _check_claims(manifest, rows)
        return cls(path, manifest, rows, compilations)

    @property
    def name(self) -> str:
        """The bundle's path."""
        return str(self.path)

    def kernels(self) -> list[KernelName]:
        """The kernels that it has rows of, in order."""
        return sorted(self._rows)

    def rows(self, kernel: KernelName) -> KernelRows:
        """All rows of a kernel."""
        return self._rows.get(kernel) or KernelRows()

    def compiled(self) -> dict[str, bytes]:
        """Its compiled kernels, by their paths in it, verified again. Raises `BundleError`."""
        return {
            name: _verified(self.path / name, name, entry, MAX_COMPILED_BYTES)
            for name, entry in self.manifest.files.items()
            if is_compiled(name)
        }

    def graphs(self) -> bytes | None:
        """Its compiled graphs of torch.compile, verified again; None where it has none. Raises `BundleError`."""
        entry = self.manifest.files.get(GRAPHS_PATH)
        if entry is None:
            return None
        return _verified(self.path / GRAPHS_PATH, GRAPHS_PATH, entry, MAX_COMPILED_BYTES)


def _verified(path: Path, name: str, entry: BundledFile, limit: int) -> bytes:
    if entry.size > limit:
        raise BundleError(f"{name} is said to have {entry.size} bytes; at most {limit} are read")
    data = read_regular(path, entry.size)
    if len(data) != entry.size:
        raise BundleError(f"{name} has {len(data)} bytes, not {entry.size}")
    if BundledFile.of(data) != entry:
        raise BundleError(f"{name} has other contents than were bundled")
    return data


def _check_claims(manifest: Manifest, rows: dict[KernelName, KernelRows]) -> None:
    """Raise `BundleError` where a manifest contradicts its files."""
    for kernel, kernel_rows in rows.items():
        if not kernel_rows.problems:
            raise BundleError(f"{rows_path(kernel)} describes no problem")
    covers = sorted(map(coverage_of, rows.values()), key=lambda c: (c.slug, c.kernel))
    if list(manifest.covers) != covers:
        raise BundleError("its manifest covers something else than its rows")
    if manifest.newest != newest(rows.values()):
        raise BundleError("its manifest gives another time than its newest row")
    if any(map(is_compiled, manifest.files)) != (COMPILED in manifest.carries):
        raise BundleError("its manifest does not say rightly whether it carries compiled kernels")
    if (GRAPHS_PATH in manifest.files) != (GRAPHS in manifest.carries):
        raise BundleError("its manifest does not say rightly whether it carries compiled graphs")
    kinds = set(manifest.carries)
    if not kinds <= {COMPILED, GRAPHS, SOURCES} or len(kinds) < len(manifest.carries):
        raise BundleError(f"its manifest names code of unknown kinds: {', '.join(manifest.carries):.100}")
    if SOURCES not in manifest.carries and any(map(_has_code, rows.values())):
        raise BundleError("it carries sources that its manifest does not tell of")


def _has_code(rows: KernelRows) -> bool:
    return without_code(rows).digests != rows.digests


def _files_below(path: Path) -> Iterator[str]:
    """Every file below a folder, by relative path; a linked folder is listed as if it were a file."""
    for folder, names, files in os.walk(path):
        links = [name for name in names if (Path(folder) / name).is_symlink()]
        empty = not names and not files and Path(folder) != path
        for name in [*files, *links, *([""] if empty else [])]:
            yield (Path(folder) / name).relative_to(path).as_posix()
