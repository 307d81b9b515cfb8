"""A bundle opened for reading: verified whole, or refused whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from forecast_autotune.file_access import read_regular
from forecast_autotune.store.bundles import contents
from forecast_autotune.store.bundles.compiled import COMPILED, MAX_COMPILED_BYTES, is_compiled
from forecast_autotune.store.bundles.graphs import GRAPHS, GRAPHS_PATH
from forecast_autotune.store.bundles.manifest import BundledFile, BundleError, Manifest
from forecast_autotune.store.bundles.writing import SOURCES
from forecast_autotune.store.files import MANIFEST, KernelName
from forecast_autotune.store.merging.rows import KernelRows


class Bundle:
    """A bundle whose every byte was verified against its manifest when it was opened.

    What it hands out was read in that moment: changing the files later changes nothing here.
    """

    def __init__(self, path: Path, manifest: Manifest, rows: dict[KernelName, KernelRows]) -> None:
        self.path, self.manifest, self._rows = path, manifest, rows

    @classmethod
    def open(cls, path: Path) -> Bundle:
        """Read and verify a bundle. Raises `BundleError` that names the bundle and the first thing wrong with it."""
        try:
            return cls._open(path)
        except BundleError as error:
            raise BundleError(f"the bundle {path} is refused: {error}") from error
        except OSError as error:
            said = error.strerror or str(error)
            raise BundleError(f"the bundle {path} is refused: {error.filename or path}: {said}") from error

    @classmethod
    def _open(cls, path: Path) -> Bundle:
        if not (path / MANIFEST).is_file():
            raise BundleError(f"there is no {MANIFEST}; `forecast-autotune store bundle` makes a bundle")
        manifest = Manifest.of_bytes(read_regular(path / MANIFEST))
        found = set(_files_below(path)) - {MANIFEST}
        if missing := sorted(manifest.files.keys() - found):
            raise BundleError(f"{missing[0]} is missing ({len(missing)} of {len(manifest.files)} files)")
        if extra := sorted(found - manifest.files.keys()):
            raise BundleError(f"{extra[0]!r:.120} does not belong to it ({len(extra)} such files)")
        rows: dict[KernelName, KernelRows] = {}
        for name in sorted(manifest.files):
            kernel = contents.kernel_at(name)
            limit = contents.MAX_ROWS_BYTES if kernel is not None else MAX_COMPILED_BYTES
            data = _verified(path / name, name, manifest.files[name], limit)
            if kernel is not None:
                rows[kernel] = contents.from_bytes(data, kernel)
            elif not is_compiled(name) and name != GRAPHS_PATH:
                raise BundleError(f"{name} is nothing that a bundle holds")
        _check_claims(manifest, rows)
        return cls(path, manifest, rows)

    @property
    def name(self) -> str:
        """Its path."""
        return str(self.path)

    def kernels(self) -> list[KernelName]:
        """What it has rows of, in order."""
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
    """Whether a manifest says of its files what they say themselves."""
    for kernel, held in rows.items():
        if not held.problems:
            raise BundleError(f"{contents.rows_path(kernel)} describes no problem")
    covers = sorted(map(contents.coverage_of, rows.values()), key=lambda c: (c.slug, c.kernel))
    if list(manifest.covers) != covers:
        raise BundleError("its manifest covers something else than its rows")
    if manifest.newest != contents.newest(rows.values()):
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
    return contents.without_code(rows).digests != rows.digests


def _files_below(path: Path) -> Iterator[str]:
    """Every file below a folder, by relative path; a linked folder is listed as if it were a file."""
    for folder, names, files in os.walk(path):
        linked = [name for name in names if (Path(folder) / name).is_symlink()]
        empty = not names and not files and Path(folder) != path
        for name in [*files, *linked, *([""] if empty else [])]:
            yield (Path(folder) / name).relative_to(path).as_posix()
