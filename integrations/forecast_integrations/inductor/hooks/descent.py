"""Coordinate descent over a generated kernel's config: in waves of our own, and done once per store.

Inductor descends at a kernel's first launch, one compilation after the other. We compile one config with the kernel
and the wave around it in Inductor's workers, launch that config first, and time others at later launches. Where it
ended is kept, because Inductor (torch 2.11) begins anew in every process for kernels with a single config and for
descents that ended where they began.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from forecast_autotune.printable import utc_now
from forecast_autotune.records import Argument, Candidate, Config, Decision, Device, Evidence, Kernel, Problem
from forecast_autotune.settings import Mode
from forecast_integrations.inductor.choice_timing import CollectedCalls, FusedKernelTiming
from forecast_integrations.inductor.config_worker import CompileTask, is_descended, kind_of
from forecast_integrations.inductor.descent import (
    PATIENCE_S,
    Descent,
    first_jobs,
    inductor_workers,
    job_of,
)
from forecast_integrations.inductor.hooks.context import AnyFunction, HookContext, PatchSet, behind_wait
from forecast_integrations.inductor.session import UNTIMED, TuningSession
from forecast_integrations.triton.device_access import LOCK, capturing_graph, harmless_to_captures
from forecast_integrations.triton.protocols import ConfigLauncher, LaunchConfig

if TYPE_CHECKING:
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

_SETTINGS = "coordinate descent"
_DESCENT = "forecast_descent"
"""Attribute of a kernel: its descent, while that is under way."""
_LATER_LAUNCHES = "forecast_later_launches"
"""Attribute of a kernel: whether a later launch may be as good as the first one to time configs."""


def install(context: HookContext) -> PatchSet:
    """Hook the descent, what workers compile of a kernel, and the end of a graph's compilation."""
    from torch._inductor import async_compile
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    patches = PatchSet()
    patches.replace(CachingAutotuner, "coordinate_descent_tuning", lambda f: _descent(f, context))
    patches.replace(async_compile, "_worker_compile_triton", lambda _: CompileTask(lambda: _is_ours(context)))
    patches.replace(async_compile.AsyncCompile, "wait", lambda f: _wait(f, context))
    return patches


def _is_ours(context: HookContext) -> bool:
    return context.session is not None and context.session.prunes


def _descent(original: AnyFunction, context: HookContext) -> AnyFunction:
    """`coordinate_descent_tuning`: from one launcher to a better one, at every launch until the config is marked."""

    def coordinate_descent_tuning(
        self: CachingAutotuner, launcher: ConfigLauncher, *args: object, **kwargs: object
    ) -> Any:
        session = context.session
        if session is None or not session.prunes:
            return original(self, launcher, *args, **kwargs)
        if not is_descended(self):
            best = original(self, launcher, *args, **kwargs)
            if kind_of(self) == "TEMPLATE":  # Inductor leaves these alone, and would ask at every launch
                best.config.found_by_coordesc = True
            return best
        if isinstance(context.thread.call_timing, FusedKernelTiming):
            return launcher  # a trial of a fusion: the kernel is forgotten after it
        try:
            better = _next_launcher(context, session, self, launcher, args, kwargs)
            return original(self, launcher, *args, **kwargs) if better is None else better
        except Exception as error:
            session.warn_once("descend over the configs of a generated kernel", error)
            if session.settings.mode not in UNTIMED:
                return original(self, launcher, *args, **kwargs)
            vars(launcher.config)["found_by_coordesc"] = True
            return launcher

    return coordinate_descent_tuning


def _wait(original: AnyFunction, context: HookContext) -> AnyFunction:
    def begin(session: TuningSession, values: Sequence[Any]) -> None:
        kernels = [k for k in values if _is_open(k)]
        if kernels and (ahead := context.configs_ahead(inductor_workers)) is not None:
            later = _has_later_launches()
            for kernel in kernels:
                config = kernel.launchers[0].config
                known = stored_config(session, descent_problem(kernel), config)
                if known is None:
                    setattr(kernel, _LATER_LAUNCHES, later and not kernel.inductor_meta.get("store_cubin"))
                    ahead.add(first_jobs(kernel))
                elif known != config:  # the first launch needs it: all of a graph's compile side by side
                    ahead.add([job_of(kernel.coordesc_tuner, str(kernel.filename), known)], urgent=True)

    return behind_wait(original, context, begin, "compile configs of a graph's kernels ahead")


def _has_later_launches() -> bool:
    """Whether the graph that is compiled launches its kernels from Python: not if it will be recorded, or exported."""
    from torch._inductor import config

    return not (config.triton.cudagraphs or config.cpp_wrapper or config.triton.autotune_at_compile_time)


# --- a kernel ---


def _is_open(value: object) -> bool:
    """Whether a value is a generated kernel whose config is not settled."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    if not isinstance(value, CachingAutotuner) or not value.launchers or not is_descended(value):
        return False
    return len(value.launchers) > 1 or not getattr(value.launchers[0].config, "found_by_coordesc", False)


def _next_launcher(
    context: HookContext,
    session: TuningSession,
    kernel: CachingAutotuner,
    launcher: ConfigLauncher,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> Any:
    """The launcher to go on with: at first the given one or the stored one, then the best so far of what is timed now.

    None where there are no workers.
    """
    descent: Descent | None = getattr(kernel, _DESCENT, None)
    if descent is None:
        ahead = context.configs_ahead(inductor_workers)
        if (known := stored_config(session, descent_problem(kernel), launcher.config)) is not None:
            if known == launcher.config:
                vars(launcher.config)["found_by_coordesc"] = True
                return launcher
            if ahead is not None:
                job = job_of(kernel.coordesc_tuner, str(kernel.filename), known)
                ahead.has_ended(job, time.perf_counter() + PATIENCE_S)
            return launcher_of(kernel, known)
        if ahead is None:
            return None
        later = getattr(kernel, _LATER_LAUNCHES, False) and session.settings.inductor_kernels == "later"
        descent = Descent(ahead, kernel, patient=not later or session.settings.mode is Mode.DETERMINISTIC)
        setattr(kernel, _DESCENT, descent)
        context.descending[id(kernel)] = kernel
        if not descent.patient:
            return launcher
    # Not the given one: another thread, which launches meanwhile, may have put an older one back.
    share, begin, before = context.launch_share, time.perf_counter(), descent.timed
    most = None if descent.patient else share.configs()
    if most == 0 or capturing_graph() or not descent.lock.acquire(blocking=False):
        return descent.launcher
    try:
        while (configs := descent.ready()[:most]) or descent.done:
            if configs:
                _time_wave(context, kernel, descent, configs, args, kwargs)
            if descent.done:
                context.descending.pop(id(kernel), None)
                _end(session, kernel, descent)
                break
            if not descent.patient:
                break
    finally:
        if not descent.patient:
            seconds, timed = time.perf_counter() - begin, descent.timed - before
            share.take(seconds, timed + bool(timed))
            session.tally.count(later_s=seconds)
        descent.lock.release()
    return descent.launcher


def _time_wave(
    context: HookContext,
    kernel: CachingAutotuner,
    descent: Descent,
    configs: Sequence[LaunchConfig],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> None:
    launchers, times = {descent.best: descent.launcher}, {}
    with LOCK, harmless_to_captures():  # later launches may come while other threads tune, or record a graph
        for config in configs:
            try:
                launchers[config] = launcher_of(kernel, config)
            except Exception:  # too much shared memory, say: Inductor's descent passes it over, too
                times[config] = math.inf
        times |= _in_turns(context, kernel, launchers, args, kwargs)
    descent.add_times(times)
    descent.launcher = launchers[descent.best]


def _in_turns(
    context: HookContext,
    kernel: CachingAutotuner,
    launchers: Mapping[LaunchConfig, ConfigLauncher],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> dict[LaunchConfig, float]:
    """Milliseconds of some launchers of a kernel with these arguments, as Inductor would call them; inf if it skips."""
    from forecast_integrations.triton.timer.timers import times_in_turns

    thread, collected = context.thread, CollectedCalls()
    calls, times = {}, {}
    outer, thread.call_timing = thread.call_timing, collected
    try:
        for config, launcher in launchers.items():
            ms = kernel.bench(launcher, *args, **kwargs)
            if (call := collected.take()) is None:
                times[config] = ms  # it spills too much; or somebody else's benchmarker has timed it
                continue
            try:
                call()
                calls[config] = call
            except Exception:
                times[config] = math.inf
    finally:
        thread.call_timing = outer
    if len(calls) > 1:
        samples = times_in_turns(list(calls.values()), one_stream=True)
        times |= zip(calls, map(statistics.median, samples), strict=True)
    else:
        times |= dict.fromkeys(calls, 0.0)  # nothing else can be launched
    return times


def _end(session: TuningSession, kernel: CachingAutotuner, descent: Descent) -> None:
    """The kernel is decided: Inductor does not ask again, and both keep it."""
    config: Any = descent.launcher.config
    config.found_by_coordesc = True
    delattr(kernel, _DESCENT)
    try:
        if kernel.save_cache_hook:
            kernel.save_cache_hook(config, kernel.autotune_time_taken_ns, found_by_coordesc=True)
        keep_config(session, descent_problem(kernel), config, descent.timed)
    except Exception as error:
        session.warn_once("keep the coordinate descent of a generated kernel", error)


def launcher_of(kernel: CachingAutotuner, config: LaunchConfig) -> ConfigLauncher:
    """A kernel's launcher for a config."""
    if kernel.fn.fn is None:  # it was compiled in a worker, and comes without its source
        kernel.fn = kernel._reload_kernel().fn
    with kernel.lock:
        launcher: ConfigLauncher = kernel._precompile_config(config).make_launcher()
    return launcher


# --- what is kept of it ---


SizeHints = Mapping[str, int] | Sequence[int]
"""Inductor's sizes of an iteration space: by prefix, or in order."""


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


def descent_problem(kernel: CachingAutotuner) -> Problem:
    """The problem of a generated kernel, by its source."""
    meta = {**kernel.triton_meta, "device": kernel.device_props}
    return problem_of(kernel.size_hints, meta, kind_of(kernel), str(kernel.filename))


def stored_config(session: TuningSession, problem: Problem, like: LaunchConfig) -> LaunchConfig | None:
    """Where an earlier descent ended, as a config; None where there was none."""
    if session.settings.mode is Mode.DETERMINISTIC:
        return None
    decision = session.snapshot.decision(problem)
    if decision is None or decision.settings != _SETTINGS:
        return None
    chosen = decision.chosen.config
    values = dict(chosen.kwargs)
    if values.keys() != like.kwargs.keys():
        return None
    config: Any = copy.deepcopy(like)
    config.kwargs = {name: values[name] for name in like.kwargs}
    config.num_warps, config.num_stages = chosen.num_warps, chosen.num_stages
    config.found_by_coordesc = True
    return config


def keep_config(session: TuningSession, problem: Problem, config: LaunchConfig, timed: int) -> None:
    """Keep where a descent has ended."""
    if session.settings.mode is not Mode.TUNE:
        return
    decision = Decision(
        problem=problem.id,
        chosen=candidate_of(config),
        evidence=Evidence.MEASURED,
        reason="Inductor's coordinate descent",
        stated_risk=0.0,
        tolerance=session.settings.tolerance,
        candidates=timed,
        measured=timed,
        settings=_SETTINGS,
        at=utc_now(),
    )
    session.snapshot.decide(problem, decision)
