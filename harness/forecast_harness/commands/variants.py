"""`variants`: other sources of a kernel, made by rewrites, people or language models, and verified."""

from __future__ import annotations

import argparse
import contextlib
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forecast_autotune import frameworks
from forecast_autotune.commands.count_line import CountLine
from forecast_autotune.commands.output import CommandError, Output, UsageError, require_packages
from forecast_autotune.commands.store_access import open_store
from forecast_autotune.errors import RecordError
from forecast_autotune.printable import printable, utc_now
from forecast_autotune.records import Kernel
from forecast_autotune.records.named_lines import read_document
from forecast_autotune.records.table import read_tables
from forecast_autotune.shared_setting import rare_collections
from forecast_autotune.store import Store
from forecast_autotune.store.variants import without_checks
from forecast_autotune.variants import Check, Origin, Provenance, Variant
from forecast_autotune.variants.contract import read_contract
from forecast_autotune.variants.signature import INTERPRETER
from forecast_harness.commands.judge import COLOURS, build_plan, open_lane
from forecast_harness.records import Node, ProposalRequest
from forecast_harness.targets.kernels.user_kernel import UserKernel, check_syntax, is_covered

if TYPE_CHECKING:
    from forecast_harness.sandbox.lane_pools import LanePool
    from forecast_harness.targets.kernels.base_kernel import BaseKernel
    from forecast_harness.trials.variants.verify import VariantVerification
    from forecast_harness.verify.plan import VerificationPlan

_TITLE_WORDS = 4
"""Words of a model's note in the name of what it wrote."""


def variants(options: argparse.Namespace, output: Output) -> int:
    """List, show, or make and verify; 1 if all that was given or written was refused."""
    if options.what == "list":
        return _list(options, output)
    if options.what == "show":
        return _show(options, output)
    if options.name is not None:
        raise UsageError(f"{options.name} is one word too many: `variants KERNEL`, or `variants show NAME`")
    return _make(options, output)


def _make(options: argparse.Namespace, output: Output) -> int:
    began = time.monotonic()
    require_packages("variants", "torch", "triton")
    check_syntax(options.what)
    with contextlib.ExitStack() as stack:
        stack.enter_context(rare_collections())
        # Its file imports torch, which takes seconds.
        reading = stack.enter_context(contextlib.ExitStack())
        reading.enter_context(CountLine(output.errors, lambda: f"reading {options.what}"))
        lanes: _PlannedLanes | None = None
        if options.verify:
            lanes = _PlannedLanes.of(options)
            stack.enter_context(lanes.lanes)
            if Path(options.what.partition(":")[0]).is_file():
                lanes.lanes.open_ahead(1)  # it imports torch while the kernel's file does
        return _make_and_verify(options, output, lanes, began, reading)


@dataclass(frozen=True)
class _PlannedLanes:
    """The lanes that verify variants, and their plan."""

    plan: VerificationPlan
    lanes: LanePool

    @classmethod
    def of(cls, options: argparse.Namespace) -> _PlannedLanes:
        """Raises `UsageError` for a device or a level that is not there."""
        from forecast_harness.clocks.devices import ONE_QUEUE
        from forecast_harness.sandbox.lane_pools import LanePool
        from forecast_harness.trials.variants.verify import VARIANT_PLAN, verification_lanes

        plan = replace(build_plan(options), timed=VARIANT_PLAN.timed)
        return cls(plan, LanePool(lambda: open_lane(options, plan, ONE_QUEUE), verification_lanes()))


def _make_and_verify(
    options: argparse.Namespace,
    output: Output,
    lanes: _PlannedLanes | None,
    began: float,
    reading: contextlib.ExitStack,
) -> int:
    """`reading` ends once the kernel has been read."""
    if options.llm is not None:
        from forecast_autotune.llm.providers import provider

        provider().check(options.llm)
    store = open_store(options)
    target = UserKernel.of(options.what, store)
    if options.llm is not None:
        reading.close()  # writing takes minutes
    new, problems = _collect_variants(options, target, store)
    reading.close()
    wants_new = bool(options.mechanical or options.sources or options.llm)
    candidates = new if wants_new else store.variants(target.kernel.source_sha256)
    for variant in candidates if wants_new else ():
        store.put_variant(variant)
    for text in problems:
        output.remark(f"refused: {text}")
    results: list[tuple[Variant, VariantVerification]] = []
    seconds = {"reading": time.monotonic() - began}
    if lanes is not None and candidates:
        results, phases = _verify_variants(options, output, target, store, candidates, lanes)
        seconds |= phases
    if failures := [note for note in store.issued_warnings if "cannot be written" in note]:
        raise CommandError(failures[0])
    data = {
        "kernel": target.kernel.name,
        "base_sha256": target.kernel.source_sha256,
        "new": [v.name for v in new],
        "refused": problems,
        "verified": [
            {"name": v.name, **r.verdict.to_json(), "checks": [c.to_json() for c in r.checks]}
            for v, r in results
        ],
        "seconds": {name: round(s, 3) for name, s in seconds.items()},
        "store": str(store.root),
    }
    output.emit(data, *_render_results(target, new, candidates, results, store))
    return int(bool(problems) and not new)


def _collect_variants(
    options: argparse.Namespace, target: UserKernel, store: Store
) -> tuple[list[Variant], list[str]]:
    """New variants, and why others are none."""
    by_name: dict[str, Variant] = {}
    problems: list[str] = []
    for path in _expand_paths(options.sources):
        try:
            by_name |= {v.name: v for v in _read(path, target)}
        except RecordError as error:
            problems.append(f"{path}: {error}")
    if options.mechanical:
        from forecast_harness.authors.triton import variants_of

        name, sha = target.kernel.name, target.kernel.source_sha256
        for variant in variants_of(target.text, name, sha, limit=options.n, configs=target.configs):
            by_name[variant.name] = variant
    if options.llm is not None:
        texts, reasons = _written_variants(options.llm, options.n, target, store)
        by_name |= {v.name: v for v in texts}
        problems += reasons
    return list(by_name.values()), problems


def _written_variants(
    model: str, n: int, target: UserKernel, store: Store
) -> tuple[Iterator[Variant], Sequence[str]]:
    """Variants that a language model writes, and why others are none."""
    from forecast_harness.authors.author import new_nodes
    from forecast_harness.authors.llm import open_llm_author
    from forecast_harness.targets.kernels.base_kernel import BaseKernel
    from forecast_harness.targets.search_target import kernel_target

    kernel = target.kernel
    try:
        subjects = target.subjects(store)
    except CommandError:  # a model may write without knowing the sizes; verification will ask for them
        subjects = [BaseKernel(kernel.name, target.text, target.configs)]
    devices = [t.problem.device for t in store.tables(kernel.name)]
    question, base = kernel_target(target, subjects, devices[-1] if devices else None)
    # Whoever asks again wants other texts than those that are kept.
    request = ProposalRequest(uuid.uuid4().hex, 0, "llm/rewrite", question, (base,), {}, 0.0, n, 0)
    drafts, reasons, _ = open_llm_author(model, question).write(request)
    return (_variant_of(node, kernel) for node in new_nodes(request, drafts)), reasons


def _variant_of(node: Node, kernel: Kernel) -> Variant:
    words = re.findall(r"[a-z0-9]+", node.provenance.note.lower())
    return Variant.of(
        kernel.name,
        kernel.source_sha256,
        node.source,
        replace(node.provenance, at=utc_now()),
        title="-".join(["llm", *words[:_TITLE_WORDS]]),
        configs=read_contract(node.source, kernel.name).configs,
    )


def _expand_paths(names: Sequence[str]) -> Iterator[Path]:
    for name in names:
        path = Path(name)
        if path.is_dir():
            yield from sorted(p for p in path.iterdir() if p.suffix in (".py", ".jsonl", ".gz", ".xz"))
        elif path.is_file():
            yield path
        else:
            raise UsageError(f"{name}: there is no such file or folder")


def _read(path: Path, target: UserKernel) -> Iterator[Variant]:
    """Variants in one file: a source, or the variant lines of a table. Raises `RecordError`."""
    kernel = target.kernel
    base = read_contract(target.text, kernel.name)
    if path.suffix != ".py":
        lines: list[dict[str, Any]] = []
        read_tables(path, lines.append)
        records = [Variant.from_json(data) for data in lines if data.get("type") == "variant"]
        yield from without_checks(v for v in records if v.base_sha256 == kernel.source_sha256)
        return
    source = read_document(path)
    contract = read_contract(source, kernel.name)
    contract.require_fit(base, target.configs)
    origin = Provenance(Origin.HAND, note=f"read from {path.name}", at=utc_now())
    yield Variant.of(
        kernel.name,
        kernel.source_sha256,
        source,
        origin,
        title=path.stem.replace("_", "-"),
        configs=contract.configs,
    )


def _verify_variants(
    options: argparse.Namespace,
    output: Output,
    target: UserKernel,
    store: Store,
    candidates: Sequence[Variant],
    where: _PlannedLanes,
) -> tuple[list[tuple[Variant, VariantVerification]], dict[str, float]]:
    """Verify for every kind of call that is known, what has no check on this device yet; where the seconds went."""
    from forecast_harness.commands.variant_verification import VariantWork

    subjects, plan = target.subjects(store), where.plan
    device = INTERPRETER if plan.device == "cpu" else frameworks.triton().device_at(plan.index).slug
    work = VariantWork(output, where.lanes, plan, device)

    def missing_checks(subject: BaseKernel, signatures: Sequence[str]) -> list[Variant]:
        if is_covered(subject, signatures):
            return []
        return [v for v in candidates if not _has_check(v, subject, device)]

    results = work.verify(subjects, missing_checks, store.put_variant)
    closing = time.monotonic()
    where.lanes.close()
    seconds = {**work.seconds.to_json(), "closing": time.monotonic() - closing}
    if where.lanes.opened_s:
        seconds["all_lanes_open"] = where.lanes.opened_s[-1]
    return results, seconds


def _has_check(variant: Variant, subject: BaseKernel, device: str) -> bool:
    return is_covered(subject, [c.signature for c in variant.checks if c.device == device])


def _render_results(
    target: UserKernel,
    new: Sequence[Variant],
    candidates: Sequence[Variant],
    results: Sequence[tuple[Variant, VariantVerification]],
    store: Store,
) -> list[Any]:
    from forecast_autotune.report.table import shown_text

    lines = [
        shown_text(
            f"{target.kernel.name}: {len(new)} new, {len(candidates)} looked at, {len(results)} verified"
        )
    ]
    for variant, result in results:
        word = str(result.verdict.judgement)
        line = shown_text(f"  {variant.name}: ")
        line.append(word, style=COLOURS[word])
        line.append(f" ({result.verdict.trials} launches, {result.verdict.seconds:.1f} s)")
        lines.append(line)
        lines += [
            shown_text(f"    not varied: {text}") for text in result.verdict.facts.get("not_varied", ())
        ]
        lines += [shown_text(f"    {r.code}: {r.detail}") for r in result.verdict.reasons[:1]]
    return [*lines, shown_text(str(store.root), style="dim")]


def _list(options: argparse.Namespace, output: Output) -> int:
    store = open_store(options)
    rows = store.variants_of(options.kernel)
    data = {"store": str(store.root), "variants": [_summary(v) for v in rows]}
    if output.as_json:
        output.emit(data)
        return 0
    from rich.table import Table

    from forecast_autotune.report.table import shown_text

    table = Table("kernel", "variant", "by", "what", "passed on", "failed on")
    for v in rows:
        row = _summary(v)
        columns = (v.kernel, v.name, f"{row['origin']} {row['author']}".strip(), row["note"])
        table.add_row(
            *map(shown_text, columns), *(shown_text(", ".join(row[n])) for n in ("passed", "failed"))
        )
    output.emit(
        data, table if rows else "the store holds no variants", shown_text(str(store.root), style="dim")
    )
    return 0


def _summary(variant: Variant) -> dict[str, Any]:
    checks: dict[bool, set[str]] = {True: set(), False: set()}
    for check in variant.checks:
        checks[check.passed].add(check.device)
    origin = variant.provenance
    return {
        "kernel": variant.kernel,
        "name": variant.name,
        "base_sha256": variant.base_sha256,
        "origin": str(origin.origin),
        "author": origin.author,
        "parent": origin.parent,
        "note": origin.note,
        "passed": sorted(checks[True]),
        "failed": sorted(checks[False]),
    }


def _show(options: argparse.Namespace, output: Output) -> int:
    if options.name is None:
        raise UsageError("show needs NAME: `forecast-autotune variants list` lists them")
    store = open_store(options)
    every = store.variants()
    matches = [v for v in every if v.name == options.name] or [
        v for v in every if v.name.startswith(options.name)
    ]
    if len(matches) != 1:
        near = ", ".join(v.name for v in (matches or every)[:8]) or "none"
        raise CommandError(f"{len(matches) or 'no'} variants are called {options.name!r}; there are: {near}")
    (variant,) = matches
    if output.as_json:
        output.emit(variant.to_json())
        return 0
    from rich.syntax import Syntax

    from forecast_autotune.report.table import shown_text

    facts = [f"{name}: {value}" for name, value in _summary(variant).items() if value]
    facts += [f"{name}: {value}" for name, value in variant.provenance.to_json().items() if value]
    lines = [shown_text(fact) for fact in dict.fromkeys(facts)]
    lines += [shown_text(_check_line(c), style="green" if c.passed else "red") for c in variant.checks]
    output.emit(
        variant.to_json(),
        *lines,
        Syntax(printable(variant.source, lines=True), "python", background_color="default"),
    )
    return 0


def _check_line(check: Check) -> str:
    return f"{'passed' if check.passed else 'failed'} on {check.device} at {check.at}: {check.detail}"
