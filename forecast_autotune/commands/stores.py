"""`store merge`, `diff`, `check`, `gc`, `bundle` and `install`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from forecast_autotune.commands.output import CommandError, Output, UsageError
from forecast_autotune.commands.store_access import own_root
from forecast_autotune.errors import StoreError
from forecast_autotune.file_access import misplaced_file
from forecast_autotune.printable import count_text
from forecast_autotune.settings import parse_user_directory
from forecast_autotune.store import Store
from forecast_autotune.store.bundles import (
    Bundle,
    BundleError,
    BundleOptions,
    install_compiled,
    take_out_graphs,
    write_bundle,
)
from forecast_autotune.store.files import STORE_NAMES, is_bundle, newer_layout_text
from forecast_autotune.store.merging import (
    Complain,
    KernelDifference,
    RowSource,
    RowTarget,
    StoreFolder,
    compact,
    differences,
    merge,
)
from forecast_autotune.store.rows import KINDS


def merge_stores(options: argparse.Namespace, output: Output) -> int:
    """Add the rows of other stores to one."""
    into = _target(options.into, options, output.remark)
    sources = [row_source(text, output.remark) for text in options.sources]
    if any(source.name == into.name for source in sources):
        raise UsageError(f"{into.name} is a source and the target: name another --into")
    counts = merge(sources, into)
    data = {**vars(counts), "into": into.name, "sources": [source.name for source in sources]}
    output.emit(data, f"added {counts.added} of {count_text(counts.rows, 'row')} to {into.name}")
    return 0


def diff_stores(options: argparse.Namespace, output: Output) -> int:
    """Say how two stores differ."""
    first = row_source(options.first, output.remark)
    second = (
        own_rows(options, output.remark)
        if options.second is None
        else row_source(options.second, output.remark)
    )
    results = list(differences(first, second))
    data = {
        "first": first.name,
        "second": second.name,
        "kernels": [{**vars(d), "kernel": list(d.kernel)} for d in results],
    }
    lines = [_difference_line(d) for d in results] or ["the two hold the same"]
    output.emit(data, *lines)
    return 0


def check_stores(options: argparse.Namespace, output: Output) -> int:
    """Read everything in stores and bundles; report all faults."""
    places = options.places or [str(own_root(options, to_read=True))]
    entries = [_checked(place) for place in places]
    lines = []
    for entry in entries:
        wrong = entry["wrong"]
        kinds = ", ".join(count_text(entry[f"{noun}s"], noun) for noun in KINDS)
        rows = count_text(entry["rows"], "row") + (f" ({kinds})" if entry["rows"] else "")
        lines += [f"{entry['place']}: {rows}, {count_text(len(wrong), 'fault')}"]
        lines += [f"  {text}" for text in wrong[:20]]
    output.emit({"places": entries}, *lines)
    return 1 if any(entry["wrong"] for entry in entries) else 0


def compact_store(options: argparse.Namespace, output: Output) -> int:
    """Remove lines and files that no reader counts."""
    from forecast_autotune.report.table import shown_text

    root = own_root(options)
    counts = compact(StoreFolder(root))
    what = (
        f"removed {count_text(counts.lines, 'line')}, {count_text(counts.decisions, 'damaged decision')} and "
        f"{count_text(counts.parts, 'unfinished file')}"
    )
    remark = f"; kept {count_text(counts.newer, 'line')} of a newer release" if counts.newer else ""
    output.emit({**vars(counts), "store": str(root)}, f"{what}{remark}", shown_text(str(root), style="dim"))
    return 0


def row_source(text: str, complain: Complain) -> RowSource:
    """The rows behind a user's word: a bundle, a store's folder or a remote store.

    Raises `UsageError` for a place that is not there or holds neither, and `StoreError` for one that cannot be read.
    """
    if "://" in text:
        from forecast_autotune.store.remote.backends import remote_rows

        return remote_rows(text, to_read=True)
    path = parse_user_directory(text)
    if is_bundle(path):
        return Bundle.open(path)
    if message := misplaced_file(path):
        raise UsageError(f"{path} is {message}: name a store's folder or a bundle")
    if not path.is_dir():
        raise UsageError(f"{path}: there is no such folder")
    if not any((path / name).exists() for name in STORE_NAMES) and not newer_layout_text(path):
        raise UsageError(f"{path} holds neither a store nor a bundle")
    return StoreFolder(path, complain)


def _target(text: str | None, options: argparse.Namespace, complain: Complain) -> RowTarget:
    if text is None:
        return StoreFolder(own_root(options), complain)
    if "://" in text:
        from forecast_autotune.store.remote.backends import remote_rows

        return remote_rows(text)
    path = parse_user_directory(text)
    if is_bundle(path):
        raise UsageError(f"{path} is a bundle, which never changes: merge into a store, and bundle that")
    return StoreFolder(path.absolute(), complain)


def own_rows(options: argparse.Namespace, complain: Complain) -> RowSource:
    """The rows of the store of `--store`, which may be a bundle. Raises as `own_root` does."""
    root = own_root(options, to_read=True)
    return Bundle.open(root) if is_bundle(root) else StoreFolder(root, complain)


def _checked(place: str) -> dict[str, Any]:
    wrong: list[str] = []
    kernels, result = 0, dict.fromkeys(KINDS, 0)
    try:
        source = row_source(place, wrong.append)
        for kernel in source.kernels():
            kernels += 1
            for row in source.rows(kernel):
                result[row.kind] += 1
    except BundleError as error:
        wrong.append(f"{error}: copy it anew, or make it again with `store bundle`")
    except (StoreError, UsageError) as error:
        wrong.append(str(error))
    counts = {f"{kind}s": count for kind, count in result.items()}
    return {"place": place, "kernels": kernels, "rows": sum(result.values()), **counts, "wrong": wrong}


def _difference_line(difference: KernelDifference) -> str:
    counts = f"{difference.only_first} measurements only here, {difference.only_second} only there"
    totals = f"{difference.decided_by_first} and {difference.decided_by_second} decisions"
    return f"{'/'.join(difference.kernel)}: {counts}; {totals}, {len(difference.decided_otherwise)} decided otherwise"


def write_bundle_of_store(options: argparse.Namespace, output: Output) -> int:
    """Write a store's rows as a bundle, and read it back."""
    folder = parse_user_directory(options.folder).absolute()
    if message := misplaced_file(folder):
        raise UsageError(f"{folder} is {message}: name a new or empty folder")
    compilations = Store.default(own_root(options, to_read=True)).compilations.all()
    bundle_options = BundleOptions(
        compilations=[c for c in compilations if (options.kernel or "").lower() in c.name.lower()],
        kernel=options.kernel or "",
        device=options.device or "",
        sources=options.sources,
        compiled=_existing(options.compiled, "--compiled"),
        graphs=_existing(options.graphs, "--graphs"),
    )
    write_bundle(own_rows(options, output.remark), folder, bundle_options)
    manifest = Bundle.open(folder).manifest
    covers = [cover.to_json() for cover in manifest.covers]
    data = {
        "bundle": str(folder),
        "digest": manifest.digest,
        "files": len(manifest.files),
        "bytes": sum(entry.size for entry in manifest.files.values()),
        "carries": list(manifest.carries),
        "covers": covers,
    }
    lines = [
        f"{c.kernel} on {c.device}: {count_text(c.decisions, 'decision')}, "
        f"{count_text(c.measurements, 'measurement')}"
        for c in manifest.covers
    ]
    code = f", carries code: {', '.join(manifest.carries)}" if manifest.carries else ", carries no code"
    output.emit(data, *lines, f"{folder}: {count_text(len(manifest.files), 'file')}{code}", manifest.digest)
    return 0


def _existing(text: str | None, option: str) -> Path | None:
    """The path of an option, if it was given. Raises `UsageError` where there is nothing."""
    if text is None:
        return None
    path = parse_user_directory(text)
    if not path.exists():
        raise UsageError(f"{option} {text}: there is no such file or folder")
    return path


def install_bundle(options: argparse.Namespace, output: Output) -> int:
    """Put a bundle's compiled kernels into Triton's cache, and its compiled graphs where they are asked for."""
    bundle = Bundle.open(parse_user_directory(options.bundle))
    if options.digest is not None and options.digest != bundle.manifest.digest:
        raise CommandError(
            f"{bundle.path} has digest {bundle.manifest.digest}, not {options.digest}: nothing installed"
        )
    files, graphs = bundle.compiled(), bundle.graphs()
    if options.graphs and graphs is None:
        raise CommandError(f"{bundle.path} carries no compiled graphs: make it with `store bundle --graphs`")
    if not files and not options.graphs:
        remedy = (
            "name a file for its graphs with --graphs" if graphs else "make it with `store bundle --compiled`"
        )
        raise CommandError(f"{bundle.path} carries no compiled kernels: {remedy}")
    data: dict[str, Any] = {"digest": bundle.manifest.digest}
    lines = []
    if options.graphs and graphs is not None:  # first, since a file that exists is refused
        target = parse_user_directory(options.graphs).absolute()
        take_out_graphs(graphs, target)
        data["graphs"] = str(target)
        lines.append(f"wrote compiled graphs to {target}: torch.compiler.load_cache_artifacts() reads them")
    folder = os.environ.get("TRITON_CACHE_DIR") or "~/.triton/cache"
    cache = parse_user_directory(folder).absolute()
    count = install_compiled(files, cache)
    data |= {"installed": count, "files": len(files), "cache": str(cache)}
    if files:
        lines.append(f"installed {count} of {count_text(len(files), 'file')} in {cache}")
    output.emit(data, *lines)
    return 0
