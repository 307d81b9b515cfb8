"""Variants on disk: one JSON file each, below the hash of the base kernel they may stand in for.

Layout below the root: `variants/<base source hash>/<name>.json`. A file is replaced whole, so a kill leaves
the old one or the new one. Adding a check reads, adds and replaces under a lock of the folder. Reading
executes nothing; a source is not imported before a check in it admits it, so anyone who can write here can have code
run where variants are switched on: share a store only with people whose kernels you would run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from forecast_autotune.file_access import space_remedy
from forecast_autotune.store.files import (
    VARIANTS,
    StoreNotes,
    acquire_lock,
    encode,
    list_files,
    list_folders,
    make_store_folder,
    problem_file,
    read_record,
    release_lock,
    remove_file,
    write_atomically,
)
from forecast_autotune.variants.records import Check, Variant

_LOCK_TIMEOUT_S = 10.0
_DIGEST = "source_sha256"
"""In a file: sha256 of the source that the checks were made of."""


class VariantFiles:
    """The variants of a store. `root` None: memory only."""

    def __init__(self, root: Path | None, notes: StoreNotes) -> None:
        self._path = None if root is None else root / VARIANTS
        self._notes = notes
        self._in_memory: dict[tuple[str, str], Variant] = {}
        """Variants that are not on disk, by base hash and name."""

    def of(self, base_sha256: str | None = None) -> list[Variant]:
        """Variants of one base source, or all, by kernel and name. Damaged files are noted and skipped."""
        results = {(v.base_sha256, v.name): v for v in self._read(base_sha256)}
        for key, variant in self._in_memory.items():
            if base_sha256 in (None, key[0]):
                results[key] = _merge_checks(results.get(key), variant)
        return sorted(results.values(), key=lambda v: (v.kernel, v.base_sha256, v.name))

    def put(self, variant: Variant) -> None:
        """Keep a variant, with the checks that are held of the same source already.

        One of the same name and another source takes its place, without its checks. Where the disk
        refuses, it is kept in memory, with a note. Raises `RecordError` for values JSON cannot hold.
        """
        payload = _encoded(variant)
        key = variant.base_sha256, variant.name
        if self._path is None:
            self._in_memory[key] = _merge_checks(self._in_memory.get(key), variant)
            return
        path = self._file(self._path, *key)
        lock = None
        try:
            make_store_folder(path.parent, self._path.parent)
            try:
                lock = acquire_lock(path.parent / ".lock", _LOCK_TIMEOUT_S, 0.002)
            except TimeoutError:
                self._notes.add(
                    f"{path.parent}: locked for {_LOCK_TIMEOUT_S:.0f} s by another process, ignored"
                )
            variants = self._read_file(path)
            for earlier in (variants, self._in_memory.get(key)):
                payload = _encoded(variant := _merge_checks(earlier, variant))
            write_atomically(path, payload)
            self._in_memory.pop(key, None)
        except OSError as error:
            self._in_memory[key] = _merge_checks(self._in_memory.get(key), variant)
            self._notes.add(
                f"variants cannot be written to {path.parent} ({error}); they stay in memory only: "
                f"{space_remedy(error)}",
                topic="unsaved variants",
            )
        finally:
            release_lock(lock)

    def clear(self, variants: Iterable[Variant]) -> int:
        """Remove these; returns how many. Raises `StoreError` if a file cannot be removed."""
        count = 0
        for variant in variants:
            key = variant.base_sha256, variant.name
            existed = self._in_memory.pop(key, None) is not None
            if self._path is not None:
                existed = remove_file(self._file(self._path, *key)) or existed
            count += existed
        return count

    @staticmethod
    def _file(path: Path, base_sha256: str, name: str) -> Path:
        return path / problem_file(base_sha256) / f"{problem_file(name)}.json"

    def _read(self, base_sha256: str | None) -> Iterator[Variant]:
        if self._path is None:
            return
        if base_sha256 is None:
            folders = list_folders(self._path, self._notes)
        else:
            folders = [self._path / problem_file(base_sha256)]
        for path in (p for folder in folders for p in list_files(folder, "[!.]*.json", self._notes)):
            variant = self._read_file(path)
            if variant is None:
                continue
            if path != self._file(self._path, variant.base_sha256, variant.name):
                self._notes.add(f"{path}: ignored, it is not filed under its own base and name")
            else:
                yield variant

    def _read_file(self, path: Path) -> Variant | None:
        variant = read_record(path, Variant.from_json, "not a variant", self._notes)
        if variant is None:
            return None
        digest = variant.extra.get(_DIGEST)
        if digest != _digest(variant) and variant.checks:
            self._notes.add(f"{path}: its source is not the one that was checked: the checks do not count")
            variant = replace(variant, checks=())
        return replace(variant, extra={k: v for k, v in variant.extra.items() if k != _DIGEST})


def without_checks(variants: Iterable[Variant]) -> list[Variant]:
    """Variants of others without their checks: runs on their machines prove nothing to this one."""
    return [replace(v, checks=()) for v in variants]


def with_checks(variant: Variant, checks: Sequence[Check]) -> Variant:
    """The variant with these checks as well; an equal one counts once."""
    return replace(variant, checks=tuple(dict.fromkeys((*variant.checks, *checks))))


def _merge_checks(earlier: Variant | None, variant: Variant) -> Variant:
    if earlier is None or earlier.source != variant.source:
        return variant
    return with_checks(replace(variant, checks=earlier.checks), variant.checks)


def _digest(variant: Variant) -> str:
    return hashlib.sha256(variant.source.encode("utf-8", "surrogatepass")).hexdigest()


def _encoded(variant: Variant) -> bytes:
    return encode({**variant.to_json(), _DIGEST: _digest(variant)})
