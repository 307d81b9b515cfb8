"""`export`, `import` and `clear`: measurements out of the store, into it, and gone."""

from __future__ import annotations

import argparse
import io
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence, Sized
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forecast_autotune import frameworks
from forecast_autotune.commands.output import CommandError, Output, UsageError, is_installed, output_path
from forecast_autotune.commands.store_access import open_named_store, open_store
from forecast_autotune.errors import RecordError
from forecast_autotune.printable import count_text, printable
from forecast_autotune.records import Device
from forecast_autotune.records.table import write_tables
from forecast_autotune.shared_setting import rare_collections
from forecast_autotune.store.directory import StoredCounts
from forecast_autotune.store.exports import EXPORT_FORMATS, write_export
from forecast_autotune.store.files import VERSION, StoreWarning, is_bundle
from forecast_autotune.store.formats import FORMATS, SUFFIXES, TABLE, choices, format_of
from forecast_autotune.store.formats.protocol import Format, Reading, device_from_name
from forecast_autotune.store.importing import Importer
from forecast_autotune.store.variants import without_checks
from forecast_autotune.variants import Variant

if TYPE_CHECKING:
    from rich.text import Text

    from forecast_autotune.store import Store

_SHOWN = 3
"""Refusals said one by one, of each file; garbage cannot flood a terminal."""


def _known_formats() -> str:
    tools = dict.fromkeys(f.tool for f in FORMATS if f.holds and f is not TABLE)
    return "tables of `export`, files of " + ", ".join(tools)


def export(options: argparse.Namespace, output: Output) -> int:
    """Write tables to a file or to stdout, or other tools' files into a folder; exit status 1 if there are none."""
    name: str = options.file
    form = options.format or "jsonl"
    if form in EXPORT_FORMATS:
        return _export_for_others(options, output, form)
    if name == "-" and output.as_json:
        raise UsageError("the table itself goes to stdout, which --json needs: give FILE")
    # A format that is asked for may go to a file of any name.
    suffixes = ("",) if options.format or name == "-" else SUFFIXES
    path = output_path("FILE", name, *suffixes)
    store = open_named_store(options)
    tables = list(store.tables(options.kernel, options.device))
    variants = store.variants_of(options.kernel)
    if not tables and not variants:
        filters = " that --kernel and --device choose" if options.kernel or options.device else ""
        raise CommandError(f"nothing to export: the store at {store.place} holds no measurement{filters}")
    if name == "-" and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # as the format has it, whatever the terminal's
    count = write_tables(path, tables, [v.to_json() for v in variants])
    of = f"{count_text(len(tables), 'problem')}{_variants_note(len(variants))}"
    text = f"{count_text(count, 'measurement')} of {of}"
    if name == "-":
        output.remark(text)
        return 0
    data = {"file": name, "format": form, "problems": len(tables), "measurements": count}
    output.emit({**data, "variants": len(variants)}, f"wrote {text}", _dim_text(name))
    return 0


def _export_for_others(options: argparse.Namespace, output: Output, form: str) -> int:
    """Write files of another tool's format into a folder."""
    folder = Path(options.file)
    if options.file == "-" or folder.is_file():
        raise UsageError(f"{form} writes files into a folder: name one as FILE, not {options.file!r}")
    store = open_named_store(options)
    tables = store.tables(options.kernel, options.device)
    report = write_export(form, folder, tables, store.decisions(options.kernel, options.device))
    for remark in report.left_out:
        output.remark(printable(f"left out: {remark}"))
    data = {"folder": str(folder), "format": form, "files": [str(p) for p in report.files]}
    counts = {"problems": report.problems, "measurements": report.measurements, "left_out": report.left_out}
    text = f"wrote {count_text(len(report.files), 'file')} of {count_text(report.problems, 'problem')}"
    output.emit({**data, **counts}, text, _dim_text(str(folder)))
    return 0 if report.files else 1


def import_(options: argparse.Namespace, output: Output) -> int:
    """Read table files and other tuners' timings; add the rows that are new to the store."""
    files, skips = _files(options.files)
    variants: list[Variant] = []
    store = open_store(options)
    intake = _Taken(store.importer(), options.device_name, variants)
    for path, form in files:
        try:
            intake.take(path, form)
        except RecordError as error:
            if len(files) == 1:
                raise
            intake.refuse("file", [error])
    if not +intake.kinds and not intake.refused:
        raise RecordError(next(iter(intake.left_out)))
    for variant in without_checks(variants):
        store.put_variant(variant)
    store.sync()
    _check_saved(store)
    for remark in intake.left_out:
        output.remark(printable(f"left out: {remark}"))
    if skips:
        names = ", ".join(p.name for p in skips[:_SHOWN]) + (", ..." if len(skips) > _SHOWN else "")
        output.remark(printable(f"passed over {count_text(len(skips), 'file')} of no known format: {names}"))
    count = intake.importer.count
    counts = {"problems": len(count.problems), "measurements": count.distinct, "added": count.added}
    data: dict[str, Any] = {**counts, "variants": len(variants)}
    if len(files) > 1 or skips:
        output.remark(
            "read " + ", ".join(f"{count_text(n, 'file')} of {kind}" for kind, n in (+intake.kinds).items())
        )
        data["kinds"] = dict(+intake.kinds)
    of = f"{count_text(len(count.problems), 'problem')}{_variants_note(len(variants))}"
    noun = "measurement" if count.distinct == count.rows else "distinct measurement"
    new = f"added {count_text(count.added, noun)} of {of}"
    duplicates = "" if count.distinct == count.added else f"; {count.distinct - count.added} known already"
    output.emit({**data, "store": store.place}, new + duplicates, _dim_text(store.place))
    if intake.refused:
        text = " and ".join(count_text(n, noun) for noun, n in sorted(intake.refused.items(), reverse=True))
        raise UsageError(f"{text} refused, as the warnings say; everything else was taken")
    return 0


def _files(names: Sequence[str]) -> tuple[list[tuple[Path, Format]], list[Path]]:
    """The files that were named and those of known formats in folders, with these; and the other files there.

    Raises `UsageError` for a folder with none, and for stores and bundles.
    """
    files: list[tuple[Path, Format]] = []
    skips: list[Path] = []
    for path in map(Path, names):
        if not path.is_dir():
            files.append((path, TABLE if str(path) == "-" else format_of(path) or TABLE))
            continue
        if is_bundle(path) or (path / VERSION).is_dir():
            kind = "bundle" if is_bundle(path) else "store"
            raise UsageError(f"{path} is a {kind}: `forecast-autotune store merge {path}` adds what it holds")
        inside = [(p, format_of(p)) for p in sorted(path.rglob("*")) if p.is_file()]
        if not any(form for _, form in inside):
            raise UsageError(f"{path}: no file in it is of the known formats ({_known_formats()})")
        files += [(p, form) for p, form in inside if form is not None]
        # Triton's cache holds thousands of files that are not of its tuner, in folders named by a hash.
        of_triton = {p for p, _ in inside if len(p.parent.name) == 52 and p.parent.name.isupper()}
        skips += [p for p, form in inside if form is None and p not in of_triton]
    return files, skips


class _Taken:
    """The files of an import, and the rows that it left out."""

    def __init__(self, importer: Importer, device: str | None, variants: list[Variant]) -> None:
        self.importer = importer
        self.kinds: Counter[str] = Counter()
        """Files by format."""
        self.refused: Counter[str] = Counter()
        """Rows, which the others of their file do without, and whole files."""
        self.left_out: list[str] = []
        self._device = device_from_name(device) if device else None
        self._variants = variants

    def take(self, path: Path, form: Format) -> None:
        """Read one file into the store. Raises `RecordError` for a damaged file, and for one without any row."""
        importer, count = self.importer, self.importer.count
        name = importer.name_of_contents(path, f"{form.name}|{self._device}")
        if importer.is_known(name):
            self.kinds[form.name] += 1
            return
        rows: list[RecordError] = []
        before, variants = count.distinct, len(self._variants)
        reading = Reading(path, self._device, rows.append, self._take_variant, _device_here)
        with rare_collections():
            count_added = importer.add(form.rows(reading))
        whole = form is choices.FORMAT
        remarks = [f"{path} {why}" if whole else f"{path}: {n} {why}" for why, n in reading.left_out.items()]
        if not count_added and len(self._variants) == variants and not remarks:
            first = f"; of {count_text(len(rows), 'refused row')} the first: {rows[0]}" if rows else ""
            raise RecordError(
                f"{path}: of none of the known formats ({_known_formats()}), or without a measurement{first}"
            )
        self.left_out += remarks
        self.kinds[form.name] += bool(count_added) or len(self._variants) > variants
        self.refuse("row", rows)
        if not (rows or remarks or reading.companions or len(self._variants) > variants):
            importer.note(name, count.distinct - before)

    def refuse(self, noun: str, errors: Sequence[RecordError]) -> None:
        """Count the refused rows of one file, and report the first few."""
        self.refused += Counter({noun: len(errors)})
        for error in errors[:_SHOWN]:
            warnings.warn(f"refused: {error}", StoreWarning, stacklevel=3)

    def _take_variant(self, data: dict[str, Any]) -> None:
        if data.get("type") == "variant":
            self._variants.append(Variant.from_json(data))


@cache
def _device_here() -> Device | None:
    """The accelerator of this machine, else its CPU; None where neither can be asked."""
    if not (is_installed("torch") and is_installed("triton")):
        return None
    return frameworks.triton().current_device()


def clear(options: argparse.Namespace, output: Output) -> int:
    """Remove measurements and decisions, or variants, advice or captured calls instead, after asking."""
    if options.variants + options.advice + options.captures > 1:
        raise UsageError("--variants, --advice and --captures exclude each other: clear one, then the other")
    for name in _KEPT:
        if getattr(options, name):
            return _clear_kept(name, options, output)
    store = open_named_store(options, to_read=False)
    counts = store.counts(options.kernel, options.device)
    if counts != StoredCounts() and not options.yes:
        kernels = {table.problem.kernel.name for table in store.tables(options.kernel, options.device)}
        of = f" of {count_text(len(kernels), 'kernel')}"
        if not _ask_confirmation(f"{_shown_counts(counts, of)} from {store.place}", output):
            output.remark("nothing removed")
            return 1
    store.clear(options.kernel, options.device)
    output.emit(
        {**vars(counts), "store": store.place}, f"removed {_shown_counts(counts)}", _dim_text(store.place)
    )
    return 0


_KEPT = {
    "variants": ("variants belong to no device", "variant"),
    "captures": ("captured calls are cleared whatever their device", "captured call"),
    "advice": ("advice belongs to no device", "kernel source"),
}
"""Contents of a store besides measurements: the error where --device is given, and the noun of the count."""


def _clear_kept(name: str, options: argparse.Namespace, output: Output) -> int:
    """Remove the variants, advice or captures of kernels whose name contains `--kernel`, after asking."""
    why, noun = _KEPT[name]
    if options.device:
        raise UsageError(f"{why}: leave --device out")
    store = open_named_store(options, to_read=False)
    listings: dict[str, Callable[[str | None], Sized]] = {
        "variants": store.variants_of,
        "advice": store.advice_of,
        "captures": lambda _: [] if store.captures is None else list(store.captures.every()),
    }
    count = len(listings[name](options.kernel))
    before = "advice on " if name == "advice" else ""
    what = f"{before}{count_text(count, noun)} from {store.place}"
    if count and not options.yes and not _ask_confirmation(what, output):
        output.remark("nothing removed")
        return 1
    removals = getattr(store, f"clear_{name}")(options.kernel)
    data = {name: removals, "store": store.place}
    output.emit(data, f"removed {before}{count_text(removals, noun)}", _dim_text(store.place))
    return 0


def _shown_counts(c: StoredCounts, of: str = "") -> str:
    """The counts in words; `of` follows the measurements."""
    text = f"{count_text(c.measurements, 'measurement')}{of} and {count_text(c.decisions, 'decision')}"
    unread = [(c.unread_lines, "line"), (c.unread_decisions, "file")]
    if any(count for count, _ in unread):
        nouns = " and ".join(count_text(count, noun) for count, noun in unread if count)
        text += f", with {nouns} that this release cannot read"
    return text


def _ask_confirmation(what: str, output: Output) -> bool:
    if output.as_json or sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(f"this would remove {what}: pass --yes where nobody can be asked")
    print(f"Remove {printable(what)}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _check_saved(store: Store) -> None:
    if any("cannot write" in note for note in store.issued_warnings):
        raise CommandError(
            f"not all was saved in {store.root}, as the warning above says: give --store a writable directory"
        )


def _variants_note(variants: int) -> str:
    return f" and {count_text(variants, 'variant')}" if variants else ""


def _dim_text(text: str) -> Text:
    """A path as dim text: never read as markup."""
    from forecast_autotune.report.table import shown_text

    return shown_text(text, style="dim")
