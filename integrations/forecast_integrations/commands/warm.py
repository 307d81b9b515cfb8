"""`warm`: tune recorded misses, and compile what programs were recorded to compile."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from forecast_autotune.commands.output import CommandError, Output, UsageError, require_packages
from forecast_autotune.commands.store_access import check_folder, open_store
from forecast_autotune.errors import ForecastAutotuneError, StoreError
from forecast_autotune.features.devices import target_device
from forecast_autotune.features.trace import trace_many
from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.policy import REFUSED
from forecast_autotune.records import Argument, Decision, Device, Problem
from forecast_autotune.records.compilation import PlannedCompilation, probable_compilations
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.store import Store
from forecast_autotune.store.misses import Miss
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.surrogates.protocol import Query
from forecast_autotune.tuning.compilations import UNKNOWN_S
from forecast_autotune.variants.entry import nested_arguments
from forecast_integrations.triton.problem.describe import (
    DESCRIPTOR,
    configs_by_candidate,
    launch_grids,
    pruned_configs,
    resized_problem,
)
from forecast_integrations.triton.problem.rebuilt_call import (
    RebuildError,
    call_again,
    find_tuner,
    infer_grids,
    is_stride,
    rebuilt_value,
    recorded_grid,
    resize_arguments,
)

_SURE_TO_LAUNCH = 0.25
"""P(failure) below which a candidate is said to launch."""
_MEASURED_SHARE = 0.25
"""Share of a problem's candidates, where no decision in the store says what is usual."""
_TIMING_S = 0.11
"""Seconds to time one of them."""


@dataclass
class WarmedMiss:
    """A recorded call, or one of it at other sizes, and its decision."""

    miss: Miss
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The sizes of a call that no program has made, by argument, as the command names them."""
    trouble: str = ""
    """Why it cannot be made or was not tuned, if so."""
    expected_s: float = 0.0
    decision: Decision | None = None
    is_known: bool = False
    """It needs no decision: it has one, or shares a key with another one."""
    elements: Mapping[str, int] = field(default_factory=dict)
    """Storage that tensors need at least, in elements, by argument."""
    launches: Mapping[str, int] = field(default_factory=dict)
    """Candidates that can launch on another device, that cannot, and of which nobody is sure."""

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        kernel = self.miss.problem.kernel
        data: dict[str, Any] = {
            "problem": self.miss.problem.id,
            "kernel": kernel.name,
            "module": kernel.extra.get("module", ""),
            "key": list(self.miss.problem.key),
            "candidates": self.miss.candidates,
            "expected_s": round(self.expected_s, 3),
        }
        if self.launches:
            data["launches"] = dict(self.launches)
        if self.sizes:
            data |= {"sizes": dict(self.sizes), "known": self.is_known}
        if self.decision is not None:
            data |= {"chosen": str(self.decision.chosen), "measured": self.decision.measured}
            data |= {"wall_s": self.decision.cost.wall_s, "risk": round(self.decision.stated_risk, 4)}
        return data | ({"trouble": self.trouble} if self.trouble else {})


def warm(options: argparse.Namespace, output: Output) -> int:
    """Tune every recorded miss of this device, then compile; exit status 1 where one could not be."""
    store, certify = open_store(options), options.certify
    if certify is not None:
        os.environ["FORECAST_AUTOTUNE_RISK"] = str(certify)
    source = store if options.misses is None else Store(check_folder("--misses", options.misses))
    misses = [m for m in source.misses.all() if _is_wanted(m, options.kernel, options.device)]
    elsewhere = None
    if options.plan and options.device and not misses:
        with contextlib.suppress(KeyError):  # a name of no device at all has no misses either
            elsewhere = target_device(options.device)
            misses = [m for m in source.misses.all() if _is_wanted(m, options.kernel, None)]
    entries = [WarmedMiss(m) for m in misses]
    if elsewhere is not None:
        for entry in entries:
            with _troubles(entry):
                entry.launches = launches_on(entry.miss, elsewhere)
    if options.shapes:
        miss_ids = {m.problem.id for m in misses}
        calls = [*misses, *stored_calls(store, options.kernel, options.device)]
        more = sized_misses(calls, options.shapes)
        entries += [entry for entry in more if entry.trouble or entry.miss.problem.id not in miss_ids]
    per_candidate_s = seconds_per_candidate(store) if entries else 0.0
    for entry in entries:
        if entry.sizes and not entry.trouble:
            decision = store.decision(entry.miss.problem)
            entry.is_known = decision is not None and (certify is None or decision.stated_risk <= certify)
        if not (entry.is_known or entry.trouble):
            entry.expected_s = per_candidate_s * entry.miss.candidates
    if not options.plan and any(not entry.trouble for entry in entries):
        require_packages("warm", "torch", "triton")
        tune_misses(entries, store, output)
        source.misses.remove(e.miss.problem.id for e in entries if e.decision is not None and not e.sizes)
    failures = [entry for entry in entries if entry.trouble]
    binaries = binaries_of(source, options.kernel)
    results = [] if options.plan else compile_binaries(binaries, store, output)
    data = {
        "compilations": [b.to_json() for b in results or binaries],
        "store": str(store.root),
        "misses": [entry.to_json() for entry in entries],
        "expected_s": round(sum(entry.expected_s for entry in entries), 3),
        "tuned": sum(entry.decision is not None for entry in entries),
        "known": sum(entry.is_known for entry in entries),
        "failed": len(failures),
    }
    if certify is not None:
        data["certified"] = _certificate([e.decision for e in entries if e.decision is not None], certify)
    lines = _lines(entries, options.plan, data) if entries or not binaries else []
    output.emit(data, *lines, *_compilation_lines(binaries, results, options.plan))
    # One that can never be compiled again was named; the program compiles it, as it always did.
    return 1 if failures or any(b.fails for b in results) else 0


def _certificate(decisions: Sequence[Decision], risk: float) -> dict[str, float]:
    """Count the decisions that state no more than a risk, with and without a clock, and the seconds of measuring."""
    with_clock = [d for d in decisions if d.measured]
    return {
        "risk": risk,
        "untimed": sum(d.stated_risk <= risk and not d.measured for d in decisions),
        "timed": sum(d.stated_risk <= risk for d in with_clock),
        "above": sum(d.stated_risk > risk for d in decisions),
        "seconds": round(sum(d.cost.wall_s for d in with_clock), 3),
    }


def launches_on(miss: Miss, device: Device) -> dict[str, int]:
    """Candidates of a recorded call that can launch on a device that is not here, that cannot, and the unsure ones.

    Kernels are traced for that target, and neither compiled nor run. Raises `RebuildError`.
    """
    import torch

    from forecast_integrations.triton.null_device import null_device

    problem = replace(miss.problem, device=device)
    values: dict[str, Any] = {}
    for a in problem.arguments:
        plain = a.kind == "tensor" and not a.extra.get(DESCRIPTOR)
        dtype = getattr(torch, a.dtype, torch.float16)
        values[a.name] = (
            torch.empty_strided(a.shape, a.stride, dtype=dtype, device="meta") if plain else rebuilt_value(a)
        )
    arguments = nested_arguments(values)
    with null_device(device=device):
        tuner: Any = find_tuner(problem.kernel)
        configs = configs_by_candidate(pruned_configs(tuner, arguments))
        grid: Any = recorded_grid(miss)
        grids = launch_grids(configs, grid, arguments, tuner.fn)
        assignments = {assignment_of(c): config.kwargs for c, config in configs.items()}
        texts = trace_many(tuner.fn, [], arguments, assignments.values())
        ttir = {name: text for name, text in texts if isinstance(text, str)}
    p_fail = default_surrogate().forecast(Query(problem, list(configs), grids, ttir=ttir)).p_fail
    cannot, can = int((p_fail >= REFUSED).sum()), int((p_fail < _SURE_TO_LAUNCH).sum())
    return {"can": can, "cannot": cannot, "unsure": len(p_fail) - cannot - can}


def binaries_of(store: Store, kernel: str | None) -> list[PlannedCompilation]:
    """The recorded compilations, the longest first, and then the probable ones."""
    bundled = (c for bundle in store.layers.bundles for c in bundle.compilations)
    compilations = {c.id: c for c in (*bundled, *store.compilations.all())}.values()
    # Compilations found in Triton's cache, or made for a tuner, have no recorded seconds.
    usual_s = statistics.median([c.seconds for c in compilations if c.seconds] or [UNKNOWN_S])
    every = [replace(c, seconds=c.seconds or usual_s) for c in compilations]
    chosen = [c for c in every if kernel is None or kernel.lower() in c.name.lower()]
    binaries = [PlannedCompilation(c, expected_s=c.seconds, trouble=c.trouble) for c in chosen]
    binaries.sort(key=lambda c: -c.expected_s)
    return binaries + probable_compilations(chosen)


def compile_binaries(
    binaries: Sequence[PlannedCompilation], store: Store, output: Output
) -> list[PlannedCompilation]:
    """Compile into Triton's cache, on all cores. Two processes that fill one cache do so one after the other.

    Records that newer ones of their kernels replace are removed.
    """
    if not binaries:
        return []
    require_packages("warm", "torch", "triton")
    from forecast_integrations.triton.compile.ahead import compile_ahead

    _find_modules_here()
    from triton import knobs

    lock: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    cache = Path(knobs.cache.dir)
    with contextlib.suppress(OSError):  # else Triton will say what is wrong with its cache
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache / "forecast-autotune.lock")
    with lock, output.progress("compiling") as note:
        compile_ahead(
            binaries,
            Settings.from_environment().worker_count(),
            lambda count, b: note(count, len(binaries), b.compilation.name),
        )
    current = {b.compilation.name for b in binaries if not b.trouble}
    old = [b for b in binaries if b.outdated and b.compilation.name in current]
    if old:
        with contextlib.suppress(StoreError):  # a store that is only read keeps them
            store.compilations.remove(b.compilation.id for b in old)
    return [b for b in binaries if b not in old]


def _find_modules_here() -> None:
    """Look for modules in the current folder first, as Python does for a script."""
    if "" not in sys.path and os.getcwd() not in sys.path:  # noqa: PTH109 - as Python itself writes it
        sys.path.insert(0, "")


def _compilation_lines(
    binaries: Sequence[PlannedCompilation], results: Sequence[PlannedCompilation], plan: bool
) -> list[str]:
    if not binaries:
        return []
    lines, forecast = list[str](), sum(b.forecast for b in binaries)
    good = [b for b in (binaries if plan else results) if not b.trouble]
    if plan:
        for b in binaries:
            chance = f"probability {b.probability:.2f}" if b.forecast else "recorded"
            outlook = f"not compiled, {b.trouble}" if b.trouble else f"{chance}, about {b.expected_s:.2f} s"
            lines.append(f"{b.compilation.name} ({b.compilation.shown_states}): {outlook}")
        seconds = sum(b.expected_s for b in good)
        used_s = sum(b.expected_s * b.probability for b in good)
        total = (
            f"{len(binaries)} binaries, {forecast} of them forecast: about {seconds:.1f} s of the compiler"
        )
        return [*lines, f"{total}, of which programs would spend {used_s:.1f} s"]
    failures = ((b.trouble, b.compilation.name) for b in results if b.trouble and not b.forecast)
    kernels = sorted(Counter(failures).items())
    for trouble, group in itertools.groupby(kernels, key=lambda item: item[0][0]):
        counts = ", ".join(f"{count} of {name}" for (_, name), count in group)
        lines.append(f"not compiled: {counts}: {trouble}")
    fresh = [b for b in good if not b.cached]
    compiler = f"{len(fresh)} compiled, {sum(b.seconds for b in fresh):.1f} s of the compiler"
    total = f"{len(good)} binaries of {len(results)} are in Triton's cache, {forecast} of all forecast: {compiler}"
    return [*lines, total]


def tune_misses(entries: Sequence[WarmedMiss], store: Store, output: Output) -> None:
    """Call every kernel again, in tune mode and with this store; the result is set in the entries.

    Every `triton.autotune` of this process is served from here on. Raises `CommandError` without a device.
    """
    from forecast_integrations.device import current_device, has_device
    from forecast_integrations.triton.patch import patch_triton
    from forecast_integrations.triton.publication import LISTENERS

    if not has_device():
        raise CommandError(
            "there is no accelerator here: run `warm` where the kernels will run; --plan needs none"
        )
    patch_triton()
    here = current_device().slug
    os.environ["FORECAST_AUTOTUNE_MODE"] = str(Mode.TUNE)
    os.environ["FORECAST_AUTOTUNE_CACHE_DIR"] = str(store.root)
    _find_modules_here()
    decisions: list[Decision] = []

    def note(name: str, decision: Decision) -> None:
        decisions.append(decision)

    LISTENERS.append(note)
    try:
        with output.progress("tuning") as progress:
            for count, entry in enumerate(entries, 1):
                if not entry.trouble and not entry.is_known:
                    decisions.clear()
                    _tune_entry(entry, here, store, decisions)
                progress(count, len(entries), entry.miss.problem.kernel.name)
    finally:
        LISTENERS.remove(note)


def _tune_entry(entry: WarmedMiss, here: str, store: Store, decisions: Sequence[Decision]) -> None:
    """Tune a call and set its decision; a size that is bucketed with another one needed none."""
    if entry.miss.problem.device.slug != here:
        entry.trouble = f"it was met on {entry.miss.problem.device.name}, not on what is here"
    else:
        with _troubles(entry):
            call_again(entry.miss, entry.elements)
    if entry.sizes:
        entry.decision = decisions[-1] if decisions and not entry.trouble else None
        entry.is_known = entry.decision is None and not entry.trouble
        return
    entry.decision = store.decision(entry.miss.problem)
    if entry.decision is None and not entry.trouble:
        entry.trouble = (
            "called with the same arguments it is another problem: its source or toolchain changed"
        )


@contextlib.contextmanager
def _troubles(entry: WarmedMiss) -> Iterator[None]:
    """Set the entry's trouble where a call cannot be rebuilt."""
    try:
        yield
    except (ForecastAutotuneError, RuntimeError, TypeError, ValueError, KeyError) as error:
        entry.trouble = f"{type(error).__name__}: {error}"[:300]


def seconds_per_candidate(store: Store) -> float:
    """Wall seconds that tuning takes per candidate of a list, by the decisions of this store if there are any."""
    decisions = (decision for _, decision in store.decisions())
    seconds = [d.cost.wall_s / d.candidates for d in decisions if d.cost.wall_s > 0 and d.candidates]
    if seconds:
        return statistics.median(seconds)
    workers = Settings.from_environment().worker_count()
    return _MEASURED_SHARE * (UNKNOWN_S / workers + _TIMING_S)


def _is_wanted(miss: Miss, kernel: str | None, device: str | None) -> bool:
    device_text = f"{miss.problem.device.slug} {miss.problem.device.name}".lower()
    name = miss.problem.kernel.name.lower()
    return (kernel is None or kernel.lower() in name) and (device is None or device.lower() in device_text)


def _lines(entries: Sequence[WarmedMiss], plan: bool, data: dict[str, Any]) -> list[str]:
    if not entries:
        return ["no misses are recorded: run the program with FORECAST_AUTOTUNE_MODE=frozen or skip first"]
    lines = []
    for entry in entries:
        sizes = [f"{name}={value}" for name, value in entry.sizes.items()]
        text = " ".join([entry.miss.problem.kernel.name, *(sizes or entry.miss.problem.key)])
        if entry.is_known:
            text += ": needs no decision"
        elif entry.trouble:
            text += f": not tuned, {entry.trouble}"
        elif entry.decision is not None:
            decision = entry.decision
            text += f": {decision.chosen}, {decision.measured} measured, {decision.stated_risk:.1%} risk"
        elif entry.launches:
            counts = ", ".join(f"{count} {name}" for name, count in entry.launches.items())
            text += f": {entry.miss.candidates} candidates, of which {counts} launch there"
        else:
            text += f": {entry.miss.candidates} candidates, about {entry.expected_s:.1f} s"
        lines.append(text)
    total = f"about {data['expected_s']:.1f} s" if plan else f"{data['tuned']} tuned, {data['failed']} not"
    what = "calls" if any(entry.sizes for entry in entries) else "misses"
    if (report := data.get("certified")) is not None and not plan:
        total += (
            f"; risk {report['risk']:.1%} or less: {report['untimed']} without a clock, {report['timed']} measured in "
            f"{report['seconds']:.1f} s, {report['above']} above it"
        )
    return [*lines, f"{len(entries)} {what}: {total}"]


MAX_SHAPES = 4096
"""Most calls of one command, all kernels together."""


def parse_shapes(text: str) -> tuple[str, tuple[int, ...]]:
    """`M=1..8192:pow2` (powers of two), `M=16..256:16` (every sixteenth) or `M=1,17,300`: name and values.

    Raises `UsageError` for anything else.
    """
    name, _, values = text.partition("=")
    try:
        if not name.isidentifier():
            raise ValueError
        if ".." in values:
            ends, _, step = values.partition(":")
            low, high = (int(end) for end in ends.split(".."))
            if low < 1 or low > high:
                raise ValueError
            values_of_range: Iterable[int]
            if step == "pow2":
                first = (low - 1).bit_length()
                values_of_range = (2**i for i in range(first, high.bit_length()) if low <= 2**i <= high)
            else:
                values_of_range = range(low, high + 1, int(step or 1))
            sizes = tuple(itertools.islice(values_of_range, MAX_SHAPES + 1))
        else:
            sizes = tuple(sorted({int(v) for v in values.split(",")}))
        if not sizes or sizes[0] < 1:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"{text!r:.80} are no shapes: write M=1..8192:pow2, M=16..256:16 or M=1,17,300, positive integers"
        ) from None
    return name, sizes


def sized_misses(calls: Sequence[Miss], shapes: Sequence[str]) -> list[WarmedMiss]:
    """Every combination of the shapes for one call of each kind among `calls`, which has these arguments.

    The largest of calls that differ in these arguments alone stands for all. Raises `UsageError` for shapes that
    are none, and `CommandError` for too many and where no call has such arguments.
    """
    axes = dict(map(parse_shapes, shapes))
    largest = _largest_of_each_kind([c for c in calls if _has_sizes(c.problem, axes)], axes)
    if not largest:
        raise CommandError(
            f"no recorded call has the integer argument{'s' if len(axes) > 1 else ''} {', '.join(axes)}: run the "
            "program once with FORECAST_AUTOTUNE_MODE=skip, and it is recorded"
        )
    count = len(largest) * math.prod(map(len, axes.values()))
    if count > MAX_SHAPES:
        raise CommandError(f"{count} calls are more than {MAX_SHAPES}: give fewer shapes, or --kernel")
    entries = [
        _resized_entry(call, dict(zip(axes, values, strict=True)))
        for call in largest
        for values in itertools.product(*axes.values())
    ]
    # Calls that differ in what follows from these sizes become the same.
    return list({(id(e) if e.trouble else e.miss.problem.id): e for e in entries}.values())


def stored_calls(store: Store, kernel: str | None, device: str | None) -> list[Miss]:
    """The problems that the store holds, as calls that can be made again; those of importable modules."""
    decisions: dict[str, Decision] = {p.id: d for p, d in store.decisions(kernel, device)}
    calls = []
    for table in store.tables(kernel, device):
        rows = table.by_candidate()
        if not rows or not table.problem.kernel.extra.get("module"):
            continue
        grids = {c: m.grid for c, m in rows.items() if m.grid is not None}
        decision = decisions.get(table.problem.id)
        count = len(rows) if decision is None else decision.candidates
        calls.append(Miss.of(table.problem, "tune", count, grids, ""))
    return calls


def _has_sizes(problem: Problem, axes: Mapping[str, object]) -> bool:
    values = {a.name: a.value for a in problem.arguments}
    return all(type(values.get(name)) is int for name in axes)


def _largest_of_each_kind(calls: Sequence[Miss], axes: Mapping[str, object]) -> list[Miss]:
    largest: dict[object, tuple[int, Miss]] = {}
    for call in calls:
        problem = call.problem
        size = math.prod(a.value for a in problem.arguments if a.name in axes and type(a.value) is int)
        kind = (
            problem.kernel.source_sha256,
            problem.device.slug,
            tuple((a.name, a.dtype, _rest(a)) for a in problem.arguments if a.name not in axes),
        )
        if kind not in largest or size > largest[kind][0]:
            largest[kind] = size, call
    return [call for _, call in largest.values()]


def _rest(argument: Argument) -> object:
    """The part of an argument that tells kinds of calls apart: not shapes, which may follow from the sizes."""
    return None if argument.kind == "tensor" or is_stride(argument.name) else argument.value


def _resized_entry(call: Miss, sizes: Mapping[str, int]) -> WarmedMiss:
    problem, arguments = call.problem, call.problem.arguments
    key = list(problem.key)
    elements: dict[str, int] = {}
    try:
        for name, value in sizes.items():
            old = next(a.value for a in arguments if a.name == name)
            arguments, storage = resize_arguments(arguments, name, value)
            elements |= {n: max(m, elements.get(n, 0)) for n, m in storage.items()}
            if str(old) in key:
                key[key.index(str(old))] = str(value)
        if sizes == {a.name: a.value for a in problem.arguments if a.name in sizes}:
            return WarmedMiss(call, sizes)
        if problem.grid is not None:
            grids = infer_grids((({}, problem.grid),), problem.arguments, arguments)
        else:
            grids = infer_grids(call.grids, problem.arguments, arguments)
    except RebuildError as error:
        return WarmedMiss(call, sizes, str(error))
    grid = grids[0][1] if problem.grid is not None else None
    problem = resized_problem(problem, arguments, key, grid)
    return WarmedMiss(replace(call, problem=problem, grids=() if grid else grids), sizes, elements=elements)
