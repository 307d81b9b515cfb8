"""`warm`: tune recorded misses, and compile what programs were recorded to compile."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from forecast_autotune.commands.output import CommandError, Output, require_packages
from forecast_autotune.commands.store_access import check_folder, open_store
from forecast_autotune.errors import ForecastAutotuneError, StoreError
from forecast_autotune.features.devices import target_device
from forecast_autotune.features.trace import trace_many
from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.policy import REFUSED
from forecast_autotune.records import Decision, Device
from forecast_autotune.records.compilation import PlannedCompilation, probable_compilations
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.store import Store
from forecast_autotune.store.misses import Miss
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.surrogates.protocol import Query
from forecast_autotune.tuning.compilations import UNKNOWN_S
from forecast_autotune.tuning.host_seconds import HOST_TIMING_S
from forecast_autotune.variants.entry import nested_arguments
from forecast_integrations.triton.problem.describe import (
    DESCRIPTOR,
    configs_by_candidate,
    launch_grids,
    pruned_configs,
)
from forecast_integrations.triton.problem.rebuilt_call import (
    find_tuner,
    rebuilt_value,
    recorded_grid,
)

_SURE_TO_LAUNCH = 0.25
"""P(failure) below which a candidate is said to launch."""
_MEASURED_SHARE = 0.25
"""Share of a problem's candidates, where no decision in the store says what is usual."""


@dataclass
class WarmedMiss:
    """A recorded call, and its decision."""

    miss: Miss
    trouble: str = ""
    """Why it cannot be made or was not tuned, if so."""
    expected_s: float = 0.0
    decision: Decision | None = None
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
    listed = [WarmedMiss(m) for m in misses]
    if elsewhere is not None:
        for entry in listed:
            try:
                entry.launches = launches_on(entry.miss, elsewhere)
            except (ForecastAutotuneError, RuntimeError, TypeError, ValueError, KeyError) as error:
                entry.trouble = f"{type(error).__name__}: {error}"[:300]
    per_candidate_s = seconds_per_candidate(store) if listed else 0.0
    for entry in listed:
        if not entry.trouble:
            entry.expected_s = per_candidate_s * entry.miss.candidates
    if not options.plan and any(not entry.trouble for entry in listed):
        require_packages("warm", "torch", "triton")
        tune_misses(listed, store, output)
        source.misses.remove(e.miss.problem.id for e in listed if e.decision is not None)
    failed = [entry for entry in listed if entry.trouble]
    binaries = binaries_of(source, options.kernel)
    compiled = [] if options.plan else compile_binaries(binaries, store, output)
    data = {
        "compilations": [one.to_json() for one in compiled or binaries],
        "store": str(store.root),
        "misses": [entry.to_json() for entry in listed],
        "expected_s": round(sum(entry.expected_s for entry in listed), 3),
        "tuned": sum(entry.decision is not None for entry in listed),
        "failed": len(failed),
    }
    if certify is not None:
        data["certified"] = _certificate([e.decision for e in listed if e.decision is not None], certify)
    lines = _lines(listed, options.plan, data) if listed or not binaries else []
    output.emit(data, *lines, *_compilation_lines(binaries, compiled, options.plan))
    # One that can never be compiled again was named; the program compiles it, as it always did.
    return 1 if failed or any(one.fails for one in compiled) else 0


def _certificate(decisions: Sequence[Decision], risk: float) -> dict[str, float]:
    """How many decisions state no more than a risk, with and without a clock, and what measuring took."""
    timed = [d for d in decisions if d.measured]
    return {
        "risk": risk,
        "untimed": sum(d.stated_risk <= risk and not d.measured for d in decisions),
        "timed": sum(d.stated_risk <= risk for d in timed),
        "above": sum(d.stated_risk > risk for d in decisions),
        "seconds": round(sum(d.cost.wall_s for d in timed), 3),
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
    named = nested_arguments(values)
    with null_device(device=device):
        tuner: Any = find_tuner(problem.kernel)
        configs = configs_by_candidate(pruned_configs(tuner, named))
        grid: Any = recorded_grid(miss)
        grids = launch_grids(configs, grid, named, tuner.fn)
        assignments = {assignment_of(c): config.kwargs for c, config in configs.items()}
        texts = trace_many(tuner.fn, [], named, assignments.values())
        ttir = {name: text for name, text in texts if isinstance(text, str)}
    stated = default_surrogate().forecast(Query(problem, list(configs), grids, ttir=ttir)).p_fail
    cannot, can = int((stated >= REFUSED).sum()), int((stated < _SURE_TO_LAUNCH).sum())
    return {"can": can, "cannot": cannot, "unsure": len(stated) - cannot - can}


def binaries_of(store: Store, kernel: str | None) -> list[PlannedCompilation]:
    """The recorded compilations, the longest first, and then the probable ones."""
    bundled = (one for bundle in store.layers.bundles for one in bundle.compilations)
    every = {one.id: one for one in (*bundled, *store.compilations.all())}.values()
    known = [c for c in every if kernel is None or kernel.lower() in c.name.lower()]
    recorded = [PlannedCompilation(c, expected_s=c.seconds, trouble=c.trouble) for c in known]
    recorded.sort(key=lambda one: -one.expected_s)
    return recorded + probable_compilations(known)


def compile_binaries(
    listed: Sequence[PlannedCompilation], store: Store, output: Output
) -> list[PlannedCompilation]:
    """Compile them into Triton's cache, on all cores. Two processes that fill one cache do so one after the other.

    Records that newer ones of their kernels stand for are forgotten.
    """
    if not listed:
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
    with lock, output.progress("compiling") as done:
        compile_ahead(
            listed,
            Settings.from_environment().worker_count(),
            lambda count, one: done(count, len(listed), one.compilation.name),
        )
    current = {one.compilation.name for one in listed if not one.trouble}
    old = [one for one in listed if one.outdated and one.compilation.name in current]
    if old:
        with contextlib.suppress(StoreError):  # a store that is only read keeps them
            store.compilations.remove(one.compilation.id for one in old)
    return [one for one in listed if one not in old]


def _find_modules_here() -> None:
    """Look for modules in the current folder first, as Python does for a script."""
    if "" not in sys.path and os.getcwd() not in sys.path:  # noqa: PTH109 - as Python itself writes it
        sys.path.insert(0, "")


def _compilation_lines(
    binaries: Sequence[PlannedCompilation], compiled: Sequence[PlannedCompilation], plan: bool
) -> list[str]:
    lines = []
    if plan:
        for one in binaries:
            chance = f"probability {one.probability:.2f}" if one.forecast else "recorded"
            chance = (
                f"not compiled, {one.trouble}" if one.trouble else f"{chance}, about {one.expected_s:.2f} s"
            )
            lines.append(f"{one.compilation.name} ({one.compilation.shown_states}): {chance}")
    troubles: dict[str, dict[str, int]] = {}
    for one in compiled:
        if one.trouble and not one.forecast:
            kernels = troubles.setdefault(one.trouble, {})
            kernels[one.compilation.name] = kernels.get(one.compilation.name, 0) + 1
    for trouble, kernels in troubles.items():
        named = ", ".join(f"{count} of {name}" for name, count in kernels.items())
        lines.append(f"not compiled: {named}: {trouble}")
    if not binaries:
        return lines
    forecast = sum(one.forecast for one in binaries)
    if plan:
        seconds = sum(one.expected_s for one in binaries if not one.trouble)
        return [
            *lines,
            f"{len(binaries)} binaries, {forecast} of them forecast: about {seconds:.1f} s of the compiler",
        ]
    good = [one for one in compiled if not one.trouble]
    fresh = [one for one in good if not one.cached]
    return [
        *lines,
        f"{len(good)} binaries of {len(compiled)} are in Triton's cache, {forecast} of all forecast: "
        f"{len(fresh)} compiled, {sum(one.seconds for one in fresh):.1f} s of the compiler",
    ]


def tune_misses(listed: Sequence[WarmedMiss], store: Store, output: Output) -> None:
    """Call every kernel again, in tune mode and with this store; the result is set in the entries.

    Every `triton.autotune` of this process is served from here on. Raises `CommandError` without a device.
    """
    from forecast_integrations.device import current_device, has_device
    from forecast_integrations.triton.patch import patch_triton

    if not has_device():
        raise CommandError(
            "there is no accelerator here: run `warm` where the kernels will run; --plan needs none"
        )
    patch_triton()
    here = current_device().slug
    os.environ["FORECAST_AUTOTUNE_MODE"] = str(Mode.TUNE)
    os.environ["FORECAST_AUTOTUNE_CACHE_DIR"] = str(store.root)
    _find_modules_here()
    with output.progress("tuning") as done:
        for count, entry in enumerate(listed, 1):
            if not entry.trouble:
                _tune_entry(entry, here)
                entry.decision = store.decision(entry.miss.problem)
                if entry.decision is None and not entry.trouble:
                    entry.trouble = (
                        "called with equal arguments it is another problem: source or toolchain changed"
                    )
            done(count, len(listed), entry.miss.problem.kernel.name)


def _tune_entry(entry: WarmedMiss, here: str) -> None:
    from forecast_integrations.triton.problem.rebuilt_call import call_again

    if entry.miss.problem.device.slug != here:
        entry.trouble = f"it was met on {entry.miss.problem.device.name}, not on what is here"
        return
    try:
        call_again(entry.miss)
    except (ForecastAutotuneError, RuntimeError, TypeError, ValueError, KeyError) as error:
        entry.trouble = f"{type(error).__name__}: {error}"[:300]


def seconds_per_candidate(store: Store) -> float:
    """Wall seconds that tuning takes per candidate of a list, by the decisions of this store if there are any."""
    decisions = (decision for _, decision in store.decisions())
    known = [d.cost.wall_s / d.candidates for d in decisions if d.cost.wall_s > 0 and d.candidates]
    if known:
        return statistics.median(known)
    workers = Settings.from_environment().worker_count()
    return _MEASURED_SHARE * (UNKNOWN_S / workers + HOST_TIMING_S)


def _is_wanted(miss: Miss, kernel: str | None, device: str | None) -> bool:
    where = f"{miss.problem.device.slug} {miss.problem.device.name}".lower()
    named = miss.problem.kernel.name.lower()
    return (kernel is None or kernel.lower() in named) and (device is None or device.lower() in where)


def _lines(listed: Sequence[WarmedMiss], plan: bool, data: dict[str, Any]) -> list[str]:
    if not listed:
        return ["no misses are recorded: run the program with FORECAST_AUTOTUNE_MODE=frozen or skip first"]
    lines = []
    for entry in listed:
        shown = " ".join([entry.miss.problem.kernel.name, *entry.miss.problem.key])
        if entry.trouble:
            shown += f": not tuned, {entry.trouble}"
        elif entry.decision is not None:
            decision = entry.decision
            shown += f": {decision.chosen}, {decision.measured} measured, {decision.stated_risk:.1%} risk"
        elif entry.launches:
            counts = ", ".join(f"{count} {name}" for name, count in entry.launches.items())
            shown += f": {entry.miss.candidates} candidates, of which {counts} launch there"
        else:
            shown += f": {entry.miss.candidates} candidates, about {entry.expected_s:.1f} s"
        lines.append(shown)
    total = f"about {data['expected_s']:.1f} s" if plan else f"{data['tuned']} tuned, {data['failed']} not"
    if (known := data.get("certified")) is not None and not plan:
        total += (
            f"; risk {known['risk']:.1%} or less: {known['untimed']} without a clock, {known['timed']} measured in "
            f"{known['seconds']:.1f} s, {known['above']} above it"
        )
    return [*lines, f"{len(listed)} misses: {total}"]
