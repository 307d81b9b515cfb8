"""`store bundle` and `store install`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from forecast_autotune.commands.output import CommandError, Output, UsageError
from forecast_autotune.commands.stores.merging import own_rows
from forecast_autotune.file_access import misplaced_file
from forecast_autotune.printable import count_text
from forecast_autotune.settings import parse_user_directory
from forecast_autotune.store.bundles import (
    Bundle,
    BundleOptions,
    install_compiled,
    take_out_graphs,
    write_bundle,
)


def write_bundle_of_store(options: argparse.Namespace, output: Output) -> int:
    """Write a store's rows as a bundle, and read it back."""
    folder = parse_user_directory(options.folder).absolute()
    if said := misplaced_file(folder):
        raise UsageError(f"{folder} is {said}: name a new or empty folder")
    wanted = BundleOptions(
        kernel=options.kernel or "",
        device=options.device or "",
        sources=options.sources,
        compiled=_existing(options.compiled, "--compiled"),
        graphs=_existing(options.graphs, "--graphs"),
    )
    write_bundle(own_rows(options, output.remark), folder, wanted)
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
    carried = f", carries code: {', '.join(manifest.carries)}" if manifest.carries else ", carries no code"
    output.emit(
        data, *lines, f"{folder}: {count_text(len(manifest.files), 'file')}{carried}", manifest.digest
    )
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
    named = options.cache or os.environ.get("TRITON_CACHE_DIR") or "~/.triton/cache"
    cache = parse_user_directory(named).absolute()
    count = install_compiled(files, cache)
    data |= {"installed": count, "files": len(files), "cache": str(cache)}
    if files:
        lines.append(f"installed {count} of {count_text(len(files), 'file')} in {cache}")
    output.emit(data, *lines)
    return 0
