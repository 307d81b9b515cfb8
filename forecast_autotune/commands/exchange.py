"""`export`, `import` and `clear`: measurements out of the store, into it, and gone."""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forecast_autotune import frameworks, plugins
from forecast_autotune.commands.output import CommandError, Output, UsageError, is_installed, output_path
from forecast_autotune.commands.store_access import open_named_store, open_store
from forecast_autotune.errors import RecordError
from forecast_autotune.printable import count_text, printable
from forecast_autotune.records import Device
from forecast_autotune.records.named_lines import Refuse
from forecast_autotune.records.table import Table, read_tables, write_tables
from forecast_autotune.settings import parse_user_directory
from forecast_autotune.store.directory import StoredCounts, imported_name
from forecast_autotune.store.exports import EXPORT_FORMATS, write_export
from forecast_autotune.store.files import VERSION, StoreWarning, is_bundle
from forecast_autotune.store.importers import (
    device_from_name,
    holds_timings,
    import_flaggems,
    import_helion,
    import_kernel_tuner,
    import_triton_cache,
    is_flaggems_cache,
    is_helion_log,
    is_kernel_tuner_cache,
)
from forecast_autotune.store.variants import without_checks
from forecast_autotune.variants import Variant

if TYPE_CHECKING:
    from rich.text import Text

    from forecast_autotune.store import Store

_SHOWN = 3
"""Refusals said one by one, of each file; garbage cannot flood a terminal."""


class Refusals:
    """Counts what is refused, and says the first of each file as `StoreWarning`s."""

    def __init__(self) -> None:
        self.rows = 0
        self.files = 0
        """Files that were refused as a whole."""
        self._of_file = 0

    def begin_file(self) -> None:
        """The rows refused from here on are those of another file."""
        self._of_file = 0

    def refuse_row(self, error: RecordError) -> None:
        """Count a row, which the others of its file do without."""
        self.rows += 1
        self._of_file += 1
        if self._of_file <= _SHOWN:
            warnings.warn(f"refused: {error}", StoreWarning, stacklevel=3)

    def refuse_file(self, error: Exception) -> None:
        """Count a file, which the other files do without."""
        self.files += 1
        warnings.warn(f"refused: {error}", StoreWarning, stacklevel=3)

    def summary(self) -> str:
        """How much was refused, in words; empty for nothing."""
        counts = [(self.rows, "row"), (self.files, "file")]
        return " and ".join(count_text(n, noun) for n, noun in counts if n)


IMPORTERS = "forecast_autotune.importers"
"""Entries are functions (path, device's name, what takes rows that break a rule) -> tables, or None for a file that
is not theirs."""
KNOWN_FORMATS = (
    "tables of `export`, caches of Kernel Tuner, Inductor or FlagGems, logs of Helion, Triton's cache"
)
_TABLES = (".jsonl", ".jsonl.gz", ".jsonl.xz")


_OTHERS = (
    (is_helion_log, import_helion),
    (is_flaggems_cache, import_flaggems),
    (is_kernel_tuner_cache, import_kernel_tuner),
)
"""Tests for other tools' files, each with its reader; the first that knows a file reads it."""


def export(options: argparse.Namespace, output: Output) -> int:
    """Write tables to a file or to stdout, or other tools' files into a folder; exit status 1 if there are none."""
    name: str = options.file
    form = options.format or ("parquet" if name.lower().endswith(".parquet") else "jsonl")
    if form in EXPORT_FORMATS:
        return _export_for_others(options, output, form)
    if name == "-" and form == "parquet":
        raise UsageError("parquet is not written to stdout: give FILE")
    if name == "-" and output.as_json:
        raise UsageError("the table itself goes to stdout, which --json needs: give FILE")
    # A format that is asked for may go to a file of any name.
    suffixes = ("",) if options.format or name == "-" else (*_TABLES, ".parquet")
    path = output_path("FILE", name, *suffixes)
    store = open_named_store(options)
    tables = list(store.tables(options.kernel, options.device))
    variants = [] if form == "parquet" else store.variants_of(options.kernel)
    if not tables and not variants:
        filtered = " that --kernel and --device choose" if options.kernel or options.device else ""
        raise CommandError(f"nothing to export: the store at {store.place} holds no measurement{filtered}")
    if form == "parquet":
        from forecast_autotune.store.exports import write_parquet

        count = write_parquet(path, tables)
    else:
        if name == "-" and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # as the format has it, whatever the terminal's
        count = write_tables(path, tables, [v.to_json() for v in variants])
    of = f"{count_text(len(tables), 'problem')}{_variants_note(len(variants))}"
    shown = f"{count_text(count, 'measurement')} of {of}"
    if name == "-":
        output.remark(shown)
        return 0
    data = {"file": name, "format": form, "problems": len(tables), "measurements": count}
    output.emit({**data, "variants": len(variants)}, f"wrote {shown}", _dim_text(name))
    return 0


def _export_for_others(options: argparse.Namespace, output: Output, form: str) -> int:
    """Write files of another tool's format into a folder."""
    folder = Path(options.file)
    if options.file == "-" or folder.is_file():
        raise UsageError(f"{form} writes files into a folder: name one as FILE, not {options.file!r}")
    store = open_named_store(options)
    chosen = store.tables(options.kernel, options.device)
    report = write_export(form, folder, chosen, store.decisions(options.kernel, options.device))
    for left in report.left_out:
        output.remark(printable(f"left out: {left}"))
    data = {"folder": str(folder), "format": form, "files": [str(p) for p in report.files]}
    counts = {"problems": report.problems, "measurements": report.measurements, "left_out": report.left_out}
    shown = f"wrote {count_text(len(report.files), 'file')} of {count_text(report.problems, 'problem')}"
    output.emit({**data, **counts}, shown, _dim_text(str(folder)))
    return 0 if report.files else 1


def import_(options: argparse.Namespace, output: Output) -> int:
    """Read table files and other tuners' timings; add what the store does not hold."""
    if not options.files and options.triton_cache is None:
        raise UsageError(f"nothing to import: give {KNOWN_FORMATS}, or --triton-cache")
    files, caches = _files_and_caches(options.files)
    if options.triton_cache is not None:
        caches.append(_triton_cache(options.triton_cache))
    refused = Refusals()
    tables: list[Table] = []
    variants: list[Variant] = []
    for path in files:
        try:
            tables += _read_file(path, options.device_name, variants, refused)
        except RecordError as error:
            if len(files) == 1 and not caches:
                raise
            refused.refuse_file(error)
    if caches:
        device = _device(options.device_name)
        tables += [table for cache in caches for table in import_triton_cache(cache, device)]
    store = open_store(options)
    rows = [imported_name(m) for table in tables for m in table.measurements]
    distinct, problems = len(set(rows)), len({table.problem.id for table in tables})
    added = store.import_tables(tables)
    for variant in without_checks(variants):
        store.put_variant(variant)
    store.sync()
    _check_saved(store)
    counts = {"problems": problems, "measurements": distinct, "added": added, "variants": len(variants)}
    data = {**counts, "store": store.place}
    of = f"{count_text(problems, 'problem')}{_variants_note(len(variants))}"
    noun = "measurement" if distinct == len(rows) else "distinct measurement"
    new = f"added {count_text(added, noun)} of {of}"
    known = "" if distinct == added else f"; {distinct - added} known already"
    output.emit(data, new + known, _dim_text(store.place))
    if text := refused.summary():
        raise UsageError(f"{text} refused, as the warnings say; everything else was taken")
    return 0


def _files_and_caches(names: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """The files that were named, those of known formats in folders among them, and Triton's caches.

    Raises `UsageError` for a folder that holds neither, and for stores and bundles.
    """
    files: list[Path] = []
    caches: list[Path] = []
    for path in map(Path, names):
        if not path.is_dir():
            files.append(path)
        elif is_bundle(path) or (path / VERSION).is_dir():
            kind = "bundle" if is_bundle(path) else "store"
            raise UsageError(f"{path} is a {kind}: `forecast-autotune store merge {path}` adds what it holds")
        elif holds_timings(path):
            caches.append(path)
        elif inside := [p for p in sorted(path.rglob("*")) if p.is_file() and _is_known(p)]:
            files += inside
        else:
            raise UsageError(f"{path}: no file in it is of the known formats ({KNOWN_FORMATS})")
    return files, caches


def _is_known(path: Path) -> bool:
    if path.name.endswith(_TABLES) or any(is_theirs(path) for is_theirs, _ in _OTHERS):
        return True
    importers = (plugins.load(IMPORTERS, name) for name in plugins.names(IMPORTERS))
    try:
        return any(read(path, "", lambda error: None) is not None for read in importers)
    except RecordError:
        return True  # theirs, and what is wrong with it is told when it is imported


def _read_file(path: Path, device: str | None, variants: list[Variant], refused: Refusals) -> list[Table]:
    """The tables of a file, whose variants join `variants`. Raises `RecordError` where neither came of it."""
    rows: list[RecordError] = []
    before = len(variants)

    def other(data: dict[str, Any]) -> None:
        if data.get("type") == "variant":
            variants.append(Variant.from_json(data))

    tables = read_any_table(path, device, other, rows.append)
    if not tables and len(variants) == before:
        first = f"; of {count_text(len(rows), 'refused row')} the first: {rows[0]}" if rows else ""
        raise RecordError(
            f"{path}: of none of the known formats ({KNOWN_FORMATS}), or without a measurement{first}"
        )
    refused.begin_file()
    for error in rows:
        refused.refuse_row(error)
    return tables


def read_any_table(
    path: Path,
    device: str | None,
    other: Callable[[dict[str, Any]], None] | None = None,
    refuse: Refuse | None = None,
) -> list[Table]:
    """The tables of one file, ours or of a tool that `import` knows; standard input is always ours.

    `device` says where another tool measured; `other` gets the lines of our files that are of other types, and
    `refuse` rows that break a rule, which are raised without it.
    """
    if str(path) == "-":
        return read_tables(path, other, refuse)
    for is_theirs, read in _OTHERS:
        if is_theirs(path):
            return read(path, device_from_name(device) if device else None, refuse=refuse)
    for name in plugins.names(IMPORTERS):
        tables: list[Table] | None = plugins.load(IMPORTERS, name)(path, device, refuse)
        if tables is not None:
            return tables
    return read_tables(path, other, refuse)


def clear(options: argparse.Namespace, output: Output) -> int:
    """Remove measurements and decisions, or variants, advice or captured calls instead, after asking."""
    if options.variants + options.advice + options.captures > 1:
        raise UsageError("--variants, --advice and --captures exclude each other: clear one, then the other")
    if options.captures:
        return _clear_captures(options, output)
    if options.variants:
        return _clear_variants(options, output)
    if options.advice:
        if options.device:
            raise UsageError("advice belongs to no device: leave --device out")
        return clear_advice(options, output)
    store = open_named_store(options, to_read=False)
    held = store.counts(options.kernel, options.device)
    if held != StoredCounts() and not options.yes:
        kernels = {table.problem.kernel.name for table in store.tables(options.kernel, options.device)}
        of = f" of {count_text(len(kernels), 'kernel')}"
        if not _ask_confirmation(f"{_shown_counts(held, of)} from {store.place}", output):
            output.remark("nothing removed")
            return 1
    store.clear(options.kernel, options.device)
    output.emit(
        {**vars(held), "store": store.place}, f"removed {_shown_counts(held)}", _dim_text(store.place)
    )
    return 0


def _clear_variants(options: argparse.Namespace, output: Output) -> int:
    if options.device:
        raise UsageError("variants belong to no device: leave --device out")
    store = open_named_store(options, to_read=False)
    held = len(store.variants_of(options.kernel))
    return _clear_kept(options, output, store, "variants", held, store.clear_variants, "variant")


def _clear_captures(options: argparse.Namespace, output: Output) -> int:
    if options.device:
        raise UsageError("captured calls are cleared whatever their device: leave --device out")
    store = open_named_store(options, to_read=False)
    files = store.captures
    held = sum(1 for _ in files.every()) if files is not None else 0
    return _clear_kept(options, output, store, "captures", held, store.clear_captures, "captured call")


def clear_advice(options: argparse.Namespace, output: Output) -> int:
    """Remove advice on kernels whose name contains `--kernel`, after asking."""
    store = open_named_store(options, to_read=False)
    held = len(store.advice_of(options.kernel))
    return _clear_kept(
        options, output, store, "advice", held, store.clear_advice, "kernel source", "advice on "
    )


def _clear_kept(
    options: argparse.Namespace,
    output: Output,
    store: Store,
    key: str,
    held: int,
    clear: Callable[[str | None], int],
    noun: str,
    before: str = "",
) -> int:
    """Remove what a store keeps beside its measurements, after asking; `key` names the count in the JSON."""
    what = f"{before}{count_text(held, noun)} from {store.place}"
    if held and not options.yes and not _ask_confirmation(what, output):
        output.remark("nothing removed")
        return 1
    removed = clear(options.kernel)
    data = {key: removed, "store": store.place}
    output.emit(data, f"removed {before}{count_text(removed, noun)}", _dim_text(store.place))
    return 0


def _shown_counts(held: StoredCounts, of: str = "") -> str:
    """The counts in words; `of` follows the measurements."""
    shown = f"{count_text(held.measurements, 'measurement')}{of} and {count_text(held.decisions, 'decision')}"
    unread = [(held.unread_lines, "line"), (held.unread_decisions, "file")]
    if any(count for count, _ in unread):
        listed = " and ".join(count_text(count, noun) for count, noun in unread if count)
        shown += f", with {listed} that this release cannot read"
    return shown


def _ask_confirmation(what: str, output: Output) -> bool:
    if output.as_json or sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(f"this would remove {what}: pass --yes where nobody can be asked")
    print(f"Remove {printable(what)}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _triton_cache(given: str) -> Path:
    cache = parse_user_directory(given or os.environ.get("TRITON_CACHE_DIR") or "~/.triton/cache")
    if not cache.is_dir():
        raise UsageError(f"{cache} is no directory: name the Triton cache, as in TRITON_CACHE_DIR")
    if not holds_timings(cache):
        raise UsageError(
            f"{cache} holds no *.autotune.json: triton.autotune writes them with cache_results=True, or with "
            "TRITON_CACHE_AUTOTUNING=1"
        )
    return cache


def _device(name: str | None) -> Device:
    if name:
        return Device(name)
    remedy = "say where the cache was measured: --device-name 'NVIDIA H100 80GB HBM3', for example"
    if not (is_installed("torch") and is_installed("triton")):
        raise UsageError(f"the device cannot be asked without torch and triton; {remedy}")
    triton = frameworks.triton()
    if not triton.has_device():
        raise UsageError(f"there is no accelerator here; {remedy}")
    return triton.current_device()


def _check_saved(store: Store) -> None:
    unsaved = [note for note in store.issued_warnings if "cannot write" in note]
    if unsaved:
        raise CommandError(unsaved[0])


def _variants_note(variants: int) -> str:
    return f" and {count_text(variants, 'variant')}" if variants else ""


def _dim_text(text: str) -> Text:
    """A path as dim text: never read as markup."""
    from forecast_autotune.report.table import shown_text

    return shown_text(text, style="dim")
