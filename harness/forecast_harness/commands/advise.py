"""`advise`: a language model writes down, once per kernel source, what its time depends on."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forecast_autotune import frameworks
from forecast_autotune.commands.output import CommandError, Output, UsageError, output_path, require_packages
from forecast_autotune.commands.store_access import open_store
from forecast_autotune.errors import RecordError
from forecast_autotune.file_access import open_named_output
from forecast_autotune.llm.advice.asking import ask_for_advice, check_function
from forecast_autotune.llm.advice.language import without_comments
from forecast_autotune.llm.advice.record import MAX_FUNCTIONS, Advice
from forecast_autotune.llm.advice.subject import AdviceError
from forecast_autotune.llm.backend import LLMError, TextGenerator, Usage
from forecast_autotune.printable import printable, utc_now
from forecast_autotune.records.table import read_tables
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.store.files import ADVICE
from forecast_autotune.store.installed_advice import GROUP, SUFFIX, place_of
from forecast_autotune.tuning.advice_samples import stored_samples, tables_of_source
from forecast_harness.targets.kernels.advised_kernels import AdvisedKernel, library_kernels
from forecast_harness.targets.kernels.user_kernel import UserKernel

_MAX_SHOWN_SKIPS = 5


def advise(options: argparse.Namespace, output: Output) -> int:
    """Ask for advice, take it from files, or list it; 1 if any was refused or there was nothing to ask about."""
    modes = {
        "KERNEL": options.what is not None,
        "--stored": options.stored,
        "--library": options.library is not None,
        "--from": bool(options.sources),
        "--list": options.list,
    }
    if sum(modes.values()) != 1:
        names = " and ".join(name for name, is_set in modes.items() if is_set) or "none"
        raise UsageError(f"advise takes one of {', '.join(modes)}; given: {names}")
    if options.list:
        return _list(options, output)
    if options.to is not None:
        return _write_layer(options, output)
    return _take(options, output) if options.sources else _ask(options, output)


def _write_layer(options: argparse.Namespace, output: Output) -> int:
    """Write the store's advice on a library's kernels as a layer that the library can ship."""
    from forecast_autotune.report.table import shown_text

    if options.library is None:
        raise UsageError("--to writes the advice on a library's kernels: give --library PKG, too")
    path, store = output_path("--to", options.to, SUFFIX), open_store(options)
    advice = {a.source_sha256: a for a in store.advice_of(options.kernel)}
    targets = library_kernels(options.library, advice).kernels
    release = _release_of(options.library)
    own = [t for t in targets if t.kernel.source_sha256 in advice]
    records = [layer_record(advice[t.kernel.source_sha256], t, release) for t in own]
    if not records:
        raise CommandError(
            f"{store.root} holds no advice on kernels of {options.library} as it is installed: have it written first, "
            f"`forecast-autotune advise --library {options.library}`"
        )
    with open_named_output(path) as stream:
        stream.write(layer_of(records))
    missing = sorted({t.kernel.name for t in targets if t.kernel.source_sha256 not in advice and t.configs})
    lines = [f"advice on {len(records)} kernels written to {path}"]
    lines += [f"without advice: {', '.join(missing)}"] if missing else []
    lines.append(
        f'ship it: [project.entry-points."{GROUP}"] {options.library} = "{options.library}.FOLDER.{path.stem}"'
    )
    data = {"path": str(path), "written": len(records), "missing": missing}
    output.emit(data, shown_text("\n".join(map(printable, lines)), lines=True))
    return 0


def layer_record(advice: Advice, target: UserKernel, release: Mapping[str, str]) -> Advice:
    """Advice as a layer holds it: with the release of its package and by what other releases find it.

    Comments are left out of its text: they may quote the kernel's.
    """
    package = str(target.kernel.extra.get("module", "")).partition(".")[0]
    parameters = {name for config in target.configs for name, _ in config.kwargs}
    form = frameworks.triton().normal_form_hash(target.fn)
    place = place_of(package, target.kernel.name, parameters)
    text, *rest = map(without_comments, (advice.text, *advice.others))
    return replace(
        advice,
        text=text,
        others=tuple(rest),
        extra={**advice.extra, **release, "normal_sha256": form, "place": place},
    )


def _release_of(package: str) -> dict[str, str]:
    """The distribution of an installed package, its version and its licence, as far as they are known."""
    from importlib.metadata import metadata, packages_distributions

    names = packages_distributions().get(package, [])
    if not names:
        return {"package": package}
    about = metadata(names[0]).json
    licence = str(about.get("license_expression") or about.get("license") or "").partition("\n")[0][:80]
    return {"package": names[0], "package_version": str(about["version"]), "license": licence}


def layer_of(records: Sequence[Advice]) -> bytes:
    """Records as a layer's bytes, whenever they were written; those of one place in the order of releases."""

    def order(record: Advice) -> tuple[object, ...]:
        release = re.findall(r"\d+", str(record.extra.get("package_version", "")))
        return record.kernel, list(map(int, release)), record.source_sha256

    lines = (
        json.dumps(r.to_json(), separators=(",", ":"), allow_nan=False) for r in sorted(records, key=order)
    )
    return "".join(f"{line}\n" for line in lines).encode()


def _ask(options: argparse.Namespace, output: Output) -> int:
    spec = options.llm or Settings.from_environment().llm
    if not spec:
        raise UsageError(
            "advise asks a language model: name it by --llm or FORECAST_AUTOTUNE_LLM, as in "
            "--llm 'http://localhost:8000/v1?model=NAME'"
        )
    from forecast_autotune.llm.providers import provider

    provider().check(spec)
    total = Usage()

    def add_usage(usage: Usage) -> None:
        nonlocal total
        total += usage

    store = open_store(options)
    session = _AdvisingSession(
        provider().text_generator(spec, on_usage=add_usage),
        provider().model_name(spec),
        store,
        options.again,
    )
    rows: list[dict[str, Any]] = []
    try:
        with output.progress("advising") as advance:
            for number, (name, kernel) in enumerate(_kernels(options, store, output)):
                advance(number, number + 1, name)
                rows.append(session.advise(name, kernel))
                if why := rows[-1].get("why"):
                    output.remark(f"{name}: {why}")
    except KeyboardInterrupt:
        count = sum(r["outcome"] == "written" for r in rows)
        output.remark(f"interrupted: the {count} written so far are kept in {store.root}")
        raise
    if not rows:
        raise CommandError(_no_kernel_text(options, store))
    usage = {
        "requests": total.requests,
        "prompt_tokens": total.prompt_tokens,
        "output_tokens": total.output_tokens,
        "seconds": round(total.seconds, 3),
        "money": total.money,
    }
    return _report(rows, {"model": session.model, "usage": usage}, store, output)


class _AdvisingSession:
    """One run of the command: a model, and what it is asked about each kernel."""

    def __init__(self, generate: TextGenerator, model: str, store: Store, again: bool) -> None:
        self.generate, self.model, self.store = generate, model, store
        self.again = again

    def advise(self, name: str, kernel: AdvisedKernel | str) -> dict[str, Any]:
        """Ask about one kernel, or say why not: an entry of the command's JSON."""
        if isinstance(kernel, str):
            return {"kernel": name, "outcome": "skipped", "why": kernel}
        row: dict[str, Any] = {"kernel": name, "source_sha256": kernel.kernel.source_sha256}
        earlier = usable_advice(self.store, kernel.kernel.source_sha256)
        if earlier is not None and not self.again:
            return {**row, "outcome": "kept", **describe_advice(earlier)}
        begin = time.perf_counter()
        try:
            about = {"source": kernel.source, "model": self.model, "at": utc_now()}
            advice = ask_for_advice(self.generate, kernel.kernel, kernel.samples, **about)
        except (AdviceError, LLMError) as error:
            return {**row, "outcome": "refused", "why": str(error)}
        self.store.put_advice(advice)
        seconds = round(time.perf_counter() - begin, 3)
        return {**row, "outcome": "written", "seconds": seconds, **describe_advice(advice)}


def _kernels(
    options: argparse.Namespace, store: Store, output: Output
) -> Iterator[tuple[str, AdvisedKernel | str]]:
    """Names and kernels, or why one cannot be asked about."""
    if options.what is not None or options.library is not None:
        require_packages("advise on kernels that are not stored", "torch", "triton")
    if options.what is not None:
        target = UserKernel.of(options.what)
        yield target.kernel.name, AdvisedKernel.of(target, store)
        return
    if options.stored:
        yield from ((k.kernel.name, k) for k in AdvisedKernel.of_tables(store.tables(options.kernel)))
        return
    sources = {t.problem.kernel.source_sha256 for t in store.tables()}
    kernels = library_kernels(options.library, sources)
    for text in kernels.skipped[:_MAX_SHOWN_SKIPS]:
        output.remark(f"skipped: {text}")
    if len(kernels.skipped) > _MAX_SHOWN_SKIPS:
        output.remark(f"skipped: {len(kernels.skipped) - _MAX_SHOWN_SKIPS} others, too")
    part = (options.kernel or "").lower()
    for target in kernels.kernels:
        if part not in target.kernel.name.lower():
            continue
        try:
            yield target.kernel.name, AdvisedKernel.of(target, store)
        except CommandError as error:
            yield target.kernel.name, str(error)


def _no_kernel_text(options: argparse.Namespace, store: Store) -> str:
    some = f" whose name contains {options.kernel!r}" if options.kernel else ""
    if options.stored:
        return (
            f"--stored needs kernels in the store, and {store.root} holds no source{some}: run a program under "
            "`forecast-autotune run`, or give --store"
        )
    return f"--library needs kernels with a list of configs, and {options.library} has none{some}"


def _take(options: argparse.Namespace, output: Output) -> int:
    """Advice from files of records, tables and stores; checked as an answer is."""
    store = open_store(options)
    rows = []
    for name in options.sources:
        for advice in read_advice(Path(name)):
            if (options.kernel or "").lower() not in advice.kernel.lower():
                continue
            row = {"kernel": advice.kernel, "source_sha256": advice.source_sha256}
            earlier = usable_advice(store, advice.source_sha256)
            if earlier is not None and not options.again:
                rows.append({**row, "outcome": "kept", **describe_advice(earlier)})
                continue
            try:
                samples = stored_samples(tables_of_source(store, advice.kernel, advice.source_sha256))
                for function in advice.functions if samples else ():
                    check_function(function, samples)
                about = describe_advice(advice)
            except AdviceError as error:
                output.remark(f"{name}: {advice.kernel}: {error}")
                rows.append({**row, "outcome": "refused", "why": str(error)})
                continue
            store.put_advice(advice)
            rows.append({**row, "outcome": "written", **about})
    if not rows:
        raise CommandError(f"{', '.join(options.sources)}: there is no advice in it")
    return _report(rows, {}, store, output)


def read_advice(path: Path) -> list[Advice]:
    """Advice in a file of records or tables, or in a store's directory; records on one source are joined.

    Raises `RecordError` for a file that is neither, and for a record that is damaged.
    """
    if path.is_dir():
        return Store(path).advice_of()
    lines: list[dict[str, Any]] = []
    tables = read_tables(path, lines.append)
    data = [line for line in lines if line.get("type") == ADVICE]
    data += [t.problem.extra[ADVICE] for t in tables if t.problem.extra.get(ADVICE) is not None]
    by_source: dict[str, list[Advice]] = {}
    for advice in map(Advice.from_json, data):
        by_source.setdefault(advice.source_sha256, []).append(advice)
    return [_join(group) for group in by_source.values()]


def _join(group: Sequence[Advice]) -> Advice:
    """Independent cost functions of one source as one record, which are followed together."""
    texts = dict.fromkeys(text for advice in group for text in (advice.text, *advice.others))
    models = dict.fromkeys(advice.model for advice in group if advice.model)
    return replace(group[0], others=tuple(texts)[1:MAX_FUNCTIONS], model=", ".join(models))


def _report(rows: Sequence[dict[str, Any]], more: dict[str, Any], store: Store, output: Output) -> int:
    from forecast_autotune.report.table import shown_text

    if failures := [note for note in store.issued_warnings if "advice cannot be written" in note]:
        raise CommandError(failures[0])
    count = {
        word: sum(r["outcome"] == word for r in rows) for word in ("written", "kept", "refused", "skipped")
    }
    lines = [f"{r['kernel']}: {r['outcome']}: {r.get('summary') or r.get('why', '')}" for r in rows]
    counts = f"{count['written']} written, {count['kept']} there already"
    counts += "".join(f", {count[word]} {word}" for word in ("refused", "skipped") if count[word])
    usage = more.get("usage", {})
    if count["written"] and (tokens := usage.get("prompt_tokens", 0) + usage.get("output_tokens", 0)):
        counts += f"; {tokens / count['written']:,.0f} tokens each"
    data = {"advice": rows, **count, **more, "store": str(store.root)}
    output.emit(
        data,
        shown_text("\n".join([*map(printable, lines), counts]), lines=True),
        shown_text(str(store.root), style="dim"),
    )
    return 1 if count["refused"] or not count["written"] + count["kept"] else 0


def _list(options: argparse.Namespace, output: Output) -> int:
    from forecast_autotune.report.table import shown_text

    store = open_store(options)
    rows, lines = [], []
    for advice in store.advice_of(options.kernel):
        row: dict[str, Any] = {"kernel": advice.kernel, "source_sha256": advice.source_sha256}
        try:
            row |= describe_advice(advice)
        except RecordError as error:
            row |= {"model": advice.model, "summary": f"not within the language: {error}"}
        rows.append(row)
        line = f"{advice.kernel} ({advice.source_sha256[:12]}), {advice.model or 'unknown'}: {row['summary']}"
        lines.append(shown_text(line))
    output.emit(
        {"store": str(store.root), "advice": rows},
        *(lines or [shown_text("the store holds no advice")]),
        shown_text(str(store.root), style="dim"),
    )
    return 0


def usable_advice(store: Store, source_sha256: str) -> Advice | None:
    """The advice on a source, unless this release cannot read it."""
    advice = store.advice(source_sha256)
    try:
        return advice if advice is not None and advice.functions else None
    except AdviceError:
        return None


def describe_advice(advice: Advice) -> dict[str, Any]:
    """Advice as JSON. Raises `AdviceError` for a text that is not within the language."""
    function = advice.function
    return {
        "summary": function.summary,
        "confidence": function.confidence,
        "functions": len(advice.functions),
        "terms": list(function.labels),
        "constants": {c.name: c.value for c in function.constants},
        "model": advice.model,
        "at": advice.at,
        "provenance": advice.provenance,
    }
