"""`improve`: from a program to faster kernels that hold in it."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forecast_autotune.commands.output import Output, UsageError, output_path, require_packages
from forecast_autotune.file_access import misplaced_file, open_named_output

if TYPE_CHECKING:
    from forecast_harness.improve.session import Improvement, ImproveSession, ImproveSettings

_INTERRUPTED = 130
_PAGE = "improve.html"


def improve(options: argparse.Namespace, output: Output) -> int:
    """Record, search, prove and leave; 0 if it came to its end, 130 if it was interrupted."""
    from forecast_harness.improve.session import ImproveSession

    require_packages("improve", "torch")
    earlier_run = None if options.from_run is None else Path(options.from_run)
    words = _words(options, earlier_run)
    folder = Path(options.out or _folder_name(words) + ("" if earlier_run is None else "-again"))
    if options.patch is not None:
        output_path("--patch", options.patch, "")
    earlier = _earlier_improvement(folder, options.resume, words)
    session = ImproveSession(
        tuple(words), _settings(options), folder, (lambda line: None) if options.quiet else output.remark
    )
    display: contextlib.AbstractContextManager[object] = (
        contextlib.nullcontext() if options.quiet else output.at_work
    )
    if earlier is not None:
        session.adopt(earlier)
    is_new = not folder.exists()
    try:
        with display:
            result = earlier or session.look(earlier_run)
        session.save(result)
    except BaseException:
        if is_new:  # it would be in the way of the next one
            shutil.rmtree(folder, ignore_errors=True)
        raise
    try:
        with display:
            session.search(result)
            session.prove(result)
    except KeyboardInterrupt:
        _report(session, result, options, output)
        output.remark(f"interrupted. To go on: add --resume --out {shlex.quote(str(folder))}")
        return _INTERRUPTED
    _report(session, result, options, output)
    return 0


def _words(options: argparse.Namespace, earlier_run: Path | None) -> list[str]:
    """The program's words. Raises `UsageError` where there are none, or a script is not there."""
    from forecast_harness.improve.session import load_improvement

    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError(
            "improve starts the program itself, several times, and so cannot be a rank of a job: give it the launcher, "
            "as in `improve -m torch.distributed.run --nproc-per-node 2 train.py`, of which it improves rank 0"
        )
    words = ["-m", *options.module] if options.module else list(options.program)
    if earlier_run is not None and not words:
        earlier = load_improvement(earlier_run)
        if earlier is None:
            raise UsageError(
                f"--from-run {earlier_run}: that is no folder of `improve`; it holds no improve.json"
            )
        return list(earlier.words)
    if not words or words == ["-m"]:
        raise UsageError("improve needs a program, as in `improve train.py` or `improve -m package.train`")
    if words[0] != "-m" and not Path(words[0]).exists():
        raise UsageError(f"can't open file {words[0]!r}: no such file or directory")
    return words


def _folder_name(words: list[str]) -> str:
    last = words[1] if words[0] == "-m" else Path(words[0]).stem
    return "improve-" + (re.sub(r"[^\w.-]+", "-", last).strip("-.") or "program")


def _earlier_improvement(folder: Path, resume: bool, words: list[str]) -> Improvement | None:
    """The improvement that is to be gone on with. Raises `UsageError` for a folder that does not fit."""
    from forecast_harness.improve.session import load_improvement

    if problem := misplaced_file(folder):
        raise UsageError(f"--out must be a folder, and {folder} is {problem}: name a new one")
    earlier = load_improvement(folder)
    if earlier is None:
        if not resume and folder.is_dir() and any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty, and holds no improvement: name a new folder with --out")
        return None
    if not resume:
        raise UsageError(
            f"{folder} holds an improvement: go on with it by --resume, or name another with --out"
        )
    if list(earlier.words) != words:
        raise UsageError(
            f"{folder} holds the improvement of {shlex.join(earlier.words)}: name another with --out"
        )
    return earlier


def _settings(options: argparse.Namespace) -> ImproveSettings:
    """Raises `SettingsError` or `UsageError` for an author that is not there."""
    from forecast_autotune.commands.store_access import check_folder
    from forecast_autotune.llm.providers import provider
    from forecast_harness.authors import SPEC_FORMS
    from forecast_harness.clocks.devices import visible_devices
    from forecast_harness.improve.session import ImproveSettings

    further = []
    for name in ("surrogate", "samples", "gpu_budget"):
        if (value := getattr(options, name)) is not None:
            further += [f"--{name.replace('_', '-')}", str(value)]
    limits = {"tokens": options.tokens, "money": options.money, "device_seconds": options.gpu_seconds}
    proposers = ["mechanical", *(options.proposer or []), *(f"llm:{spec}" for spec in options.llm or [])]
    for spec in proposers:
        kind, _, where = spec.partition(":")
        if kind == "llm":
            provider().check(where)
        elif kind == "recorded":
            check_folder("--proposer recorded", where)
        elif kind not in ("mechanical", "files"):
            raise UsageError(f"a proposer is given as {SPEC_FORMS}, not as {spec!r:.80}")
    return ImproveSettings(
        options.device or ("cuda" if visible_devices() else "cpu"),
        options.seconds,
        options.kernels,
        options.step or "",
        options.check or "",
        tuple(proposers),
        {name: float(amount) for name, amount in limits.items() if amount is not None},
        tuple(further),
    )


def _report(session: ImproveSession, work: Improvement, options: argparse.Namespace, output: Output) -> None:
    """Leave what holds: variants, page, patch; and say so."""
    from rich.table import Table

    from forecast_autotune.report.table import shown_text
    from forecast_autotune.store import Store
    from forecast_harness.improve.page import HEADS, page, rows, step_text
    from forecast_harness.improve.patch import patch_text

    variants = session.leave(work, Store.default())
    with open_named_output(session.folder / _PAGE) as stream:
        stream.write(page(work).encode("utf-8", "replace"))
    parts = {p.name: p for p in work.parts if p.name in work.held}
    faster = {n: (f, work.searches[n].module(f)) for n, p in parts.items() if (f := p.function) is not None}
    kernels = {n: p.file for n, p in parts.items() if p.file}
    patch = patch_text(faster, kernels, Path.cwd())
    if options.patch is not None:
        with open_named_output(Path(options.patch)) as stream:
            stream.write(patch.encode())
    table = Table(*HEADS)
    for row in rows(work):
        table.add_row(*map(shown_text, row))
    data: dict[str, Any] = {
        "program": list(work.words),
        "step_s": work.step_s,
        "steps": work.step_how,
        "parts": [{**p.to_json(), "function": None} for p in work.parts],
        "searches": {n: s.to_json() for n, s in work.searches.items()},
        "proof": None if work.proof is None else work.proof.to_json(),
        "held": work.held,
        "variants": [v.name for v in variants],
        "folder": str(session.folder),
    }
    lines = [step_text(work)]
    if variants:
        lines.append(
            f"{len(variants)} variants in the store: served by `forecast-autotune run` with variants=store"
        )
    if patch and options.patch is None:
        lines.append("changes for your files: add --resume --patch FILE")
    if not work.parts:
        lines.append(_nothing_text(session.settings.device))
    output.emit(
        data, *([table] if work.parts else []), *map(shown_text, [*lines, f"page: {session.folder / _PAGE}"])
    )


def _nothing_text(device: str) -> str:
    missing = "calls no function of its own that takes and returns tensors"
    missing = missing if device == "cpu" else "launches no kernel on the GPU"
    return f"the program {missing}, nor does a rank 0 that it starts: there is nothing to improve"
