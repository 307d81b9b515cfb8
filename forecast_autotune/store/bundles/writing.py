"""`store bundle`: make a bundle of a store's rows."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forecast_autotune.errors import StoreError
from forecast_autotune.records import Problem
from forecast_autotune.store.bundles import contents
from forecast_autotune.store.bundles.compiled import COMPILED, compiled_files
from forecast_autotune.store.bundles.graphs import GRAPHS, graphs_file
from forecast_autotune.store.bundles.manifest import BundledFile, Manifest
from forecast_autotune.store.files import MANIFEST, write_atomically
from forecast_autotune.store.merging.row_stores import RowSource
from forecast_autotune.store.merging.rows import KernelRows
from forecast_autotune.version import __version__

SOURCES = "sources"


@dataclass(frozen=True)
class BundleOptions:
    """What goes into a bundle."""

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


def write_bundle(source: RowSource, folder: Path, options: BundleOptions | None = None) -> Manifest:
    """Write a bundle into a new or empty folder, its manifest last.

    Decisions whose rows are missing are left out. Raises `StoreError` where the folder holds anything, where
    there is nothing to bundle, and where it cannot be written; the folder is then as it was.
    """
    options = options or BundleOptions()
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise StoreError(f"{folder} is not empty: name a new folder, a bundle holds nothing but itself")
        files, made = _row_files(source, options)
        if options.compiled is not None:
            files |= compiled_files(options.compiled)
        if options.graphs is not None:
            files |= graphs_file(options.graphs)
        manifest = _manifest(files, made, options)
        _write_files(folder, files | {MANIFEST: manifest.to_bytes()})
    except OSError as error:
        raise StoreError(f"cannot write a bundle to {folder}: {error}") from error
    return manifest


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
    made: list[KernelRows] = []
    for kernel in source.kernels():
        rows = source.rows(kernel)
        if not rows.problems or not _matches(rows, options):
            continue
        rows = _founded(rows if options.sources else contents.without_code(rows))
        made.append(rows)
        files[contents.rows_path(kernel)] = contents.to_bytes(rows)
    if not files:
        raise StoreError(f"{source.name} holds nothing of the kernels and devices asked for")
    return files, made


def _founded(rows: KernelRows) -> KernelRows:
    """Without the decisions that rest on times that are not there."""
    kept = KernelRows(dict(rows.problems), dict(rows.measurements))
    for row in rows.decisions.values():
        one = KernelRows(rows.problems, rows.measurements, {row.problem: row})
        if not contents.unfounded_decision(one):
            kept.add(row)
    return kept


def _matches(rows: KernelRows, options: BundleOptions) -> bool:
    problem = Problem.from_json(next(iter(rows.problems.values())).data)
    named = options.kernel.lower() in problem.kernel.name.lower()
    where = f"{problem.device.slug} {problem.device.name}".lower()
    return named and options.device.lower() in where


def _manifest(files: Mapping[str, bytes], made: list[KernelRows], options: BundleOptions) -> Manifest:
    asked = {SOURCES: options.sources, COMPILED: options.compiled, GRAPHS: options.graphs}
    carries = [name for name, given in asked.items() if given]
    covers = sorted(map(contents.coverage_of, made), key=lambda c: (c.slug, c.kernel))
    return Manifest(
        release=__version__,
        newest=contents.newest(made),
        carries=tuple(carries),
        covers=tuple(covers),
        files={path: BundledFile.of(data) for path, data in files.items()},
        digest="",
    ).sealed()
