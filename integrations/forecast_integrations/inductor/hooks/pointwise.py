"""Generated pointwise and reduction kernels: their configs, before a worker compiles them.

`cached_autotune` runs in the compile workers and again in the parent, and both must keep the same configs:
the choice depends on the configs, the size hints and the surrogate alone, never on the store.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from forecast_autotune.policy import TuningState
from forecast_autotune.records import (
    Argument,
    Candidate,
    Config,
    Device,
    Kernel,
    Measurement,
    Outcome,
    Problem,
)
from forecast_autotune.surrogates.protocol import Query
from forecast_autotune.tuning.task import utc_now
from forecast_integrations.inductor.descent.config_worker import KINDS
from forecast_integrations.inductor.harvest import PROTOCOL
from forecast_integrations.inductor.hooks.context import HookContext
from forecast_integrations.inductor.hooks.patches import AnyFunction, PatchSet
from forecast_integrations.inductor.session import TuningSession
from forecast_integrations.triton.protocols import ConfigLauncher, LaunchConfig

if TYPE_CHECKING:
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

SizeHints = Mapping[str, int] | Sequence[int]
"""Inductor's sizes of an iteration space: by prefix, or in order."""

_MIN_CONFIGS = 2
"""Lists up to this long are left alone."""
_MIN_SPREAD = 1e-9
"""Forecasts that differ by less, in log2, say nothing: the list is left alone."""


def install(context: HookContext) -> PatchSet:
    """Hook the run-time autotuner of generated kernels."""
    from torch._inductor.runtime import triton_heuristics

    patches = PatchSet()
    patches.replace(triton_heuristics, "cached_autotune", lambda f: _cached_autotune(f, context))
    patches.replace(
        triton_heuristics.CachingAutotuner, "benchmark_all_configs", lambda f: _benchmark_all(f, context)
    )
    return patches


def _cached_autotune(original: AnyFunction, context: HookContext) -> AnyFunction:
    def cached_autotune(
        size_hints: SizeHints | None,
        configs: Sequence[LaunchConfig],
        triton_meta: Mapping[str, object],
        heuristic_type: object,
        *args: object,
        **kwargs: object,
    ) -> object:
        session = context.session
        if session is not None and session.settings.inductor_pointwise and session.prunes:
            filename = args[0] if args else kwargs.get("filename")
            try:
                kind = getattr(heuristic_type, "name", str(heuristic_type))
                configs = choose_configs(session, size_hints, list(configs), triton_meta, kind, filename)
            except Exception as error:
                session.warn_once("choose among the configs of a generated kernel", error)
        return original(size_hints, configs, triton_meta, heuristic_type, *args, **kwargs)

    return cached_autotune


def choose_configs(
    session: TuningSession,
    size_hints: SizeHints | None,
    configs: list[LaunchConfig],
    triton_meta: Mapping[str, object],
    kind: str,
    filename: object,
) -> list[LaunchConfig]:
    """The configs worth compiling, in their order: the plan's, and the first, Inductor's own default.

    All of them where the list is short, where another heuristic owns it, or where the forecasts are all
    alike.
    """
    if kind not in KINDS or len(configs) <= _MIN_CONFIGS or not filename:
        return configs
    problem = problem_of(size_hints, triton_meta, kind, str(filename))
    named = {candidate_of(config): config for config in reversed(configs)}
    candidates = list(dict.fromkeys(candidate_of(config) for config in configs))
    forecasts = session.ask(Query(problem, candidates))
    if forecasts is None or float(forecasts.mean.max() - forecasts.mean.min()) < _MIN_SPREAD:
        return configs
    s = session.settings
    state = TuningState(
        forecasts, {}, tolerance=s.tolerance, risk=s.risk, budget=s.budget, seed=s.seed, problem=problem.id
    )
    kept = {*session.policy.plan(state).measure, candidates[0]}
    return [named[c] for c in candidates if c in kept]


def problem_of(
    size_hints: SizeHints | None, triton_meta: Mapping[str, object], kind: str, filename: str
) -> Problem:
    """The problem of one generated kernel. Its file is named by the hash of its source."""
    import torch

    sizes = size_hints.items() if isinstance(size_hints, Mapping) else enumerate(size_hints or ())
    arguments = [Argument(f"{name}numel", "scalar", value=int(n)) for name, n in sizes]
    signature = triton_meta.get("signature")
    for name, dtype in signature.items() if isinstance(signature, Mapping) else ():
        text = str(dtype)
        arguments.append(
            Argument(str(name), "tensor" if text.startswith("*") else "scalar", text.lstrip("*"))
        )
    kernel = Kernel(f"inductor_{kind.lower()}", "inductor", source_sha256=PurePath(filename).stem)
    tools = {"torch": torch.__version__.split("+")[0]}
    return Problem.of(kernel, arguments, _device(triton_meta.get("device")), toolchain=tools)


def _device(properties: DeviceProperties | None) -> Device:
    """The device of Inductor's `DeviceProperties`: a compile worker must not ask the driver."""
    kind = str(getattr(properties, "type", "unknown"))
    arch = str(getattr(properties, "cc", "") or "")
    count = int(getattr(properties, "multi_processor_count", 0) or 0)
    return Device(
        name=f"{kind} {arch} with {count} multiprocessors",
        backend=kind,
        arch=arch,
        multiprocessors=count,
        registers_per_multiprocessor=int(getattr(properties, "regs_per_multiprocessor", 0) or 0),
        threads_per_multiprocessor=int(getattr(properties, "max_threads_per_multi_processor", 0) or 0),
        warp_size=int(getattr(properties, "warp_size", 0) or 32),
    )


def candidate_of(config: LaunchConfig) -> Candidate:
    """The candidate of one `triton.Config` of a generated kernel."""
    return Candidate(
        Config.of(config.kwargs, num_warps=int(config.num_warps), num_stages=int(config.num_stages)),
        "inductor::generated",
    )


def _benchmark_all(original: AnyFunction, context: HookContext) -> AnyFunction:
    def benchmark_all_configs(
        self: CachingAutotuner, *args: object, **kwargs: object
    ) -> dict[ConfigLauncher, float]:
        timings: dict[ConfigLauncher, float] = original(self, *args, **kwargs)
        session = context.session
        if session is not None and session.settings.inductor_pointwise:
            try:
                kind = getattr(self.heuristic_type, "name", str(self.heuristic_type))
                if kind in KINDS and self.filename:
                    problem = problem_of(self.size_hints, self.triton_meta, kind, self.filename)
                    save_pointwise_timings(
                        session,
                        problem,
                        [(launcher.config, ms, launcher) for launcher, ms in timings.items()],
                    )
            except Exception as error:
                session.warn_once("keep the timings of a generated kernel", error)
        return timings

    return benchmark_all_configs


def save_pointwise_timings(
    session: TuningSession, problem: Problem, timings: Sequence[tuple[LaunchConfig, float, object]]
) -> None:
    """File the times (milliseconds) of a generated kernel's (config, time, launcher) triples."""
    for config, ms, launcher in timings:
        facts = {"registers": "n_regs", "spills": "n_spills", "shared": "shared"}
        extra = {
            ours: v for ours, theirs in facts.items() if (v := getattr(launcher, theirs, None)) is not None
        }
        ok = math.isfinite(ms) and ms > 0
        outcome = Outcome.OK if ok else Outcome.OUT_OF_RESOURCES
        median = float(ms) if ok else None
        m = Measurement(
            problem.id, candidate_of(config), outcome, median, protocol=PROTOCOL, at=utc_now(), extra=extra
        )
        session.snapshot.add(problem, m)
    session.snapshot.store.sync()
    session.tally.stored(len(timings))
