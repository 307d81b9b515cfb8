"""Inductor's coordinate descent over a generated kernel's config: compiled ahead, and done once per store.

What it times and finds is Inductor's affair. The configs that it may ask for next compile side by side in
Inductor's workers; and where it ended is kept, because Inductor (torch 2.11) begins anew in every process for
kernels with a single config and for descents that ended where they began.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from forecast_autotune.records import Decision, Evidence, Problem
from forecast_autotune.settings import Mode
from forecast_autotune.tuning.task import utc_now
from forecast_integrations.inductor.descent.configs_ahead import inductor_workers
from forecast_integrations.inductor.descent.coordinate_descent import Descent, first_jobs
from forecast_integrations.inductor.hooks.context import HookContext
from forecast_integrations.inductor.hooks.patches import AnyFunction, PatchSet
from forecast_integrations.inductor.hooks.pointwise import KINDS, candidate_of, problem_of
from forecast_integrations.inductor.session import TuningSession
from forecast_integrations.triton.protocols import ConfigLauncher, LaunchConfig

if TYPE_CHECKING:
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

_SETTINGS = "coordinate descent"


def install(context: HookContext) -> PatchSet:
    """Hook the descent, the configs that it times, and the end of a graph's compilation."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    patches = PatchSet()
    patches.replace(CachingAutotuner, "coordinate_descent_tuning", lambda f: _descent(f, context))
    patches.replace(CoordescTuner, "call_func", lambda f: _call_func(f, context))
    patches.replace(AsyncCompile, "wait", lambda f: _wait(f, context))
    return patches


def _descent(original: AnyFunction, context: HookContext) -> AnyFunction:
    """`coordinate_descent_tuning`: from one launcher to a better one, at a kernel's first launch."""

    def coordinate_descent_tuning(
        self: CachingAutotuner, launcher: ConfigLauncher, *args: object, **kwargs: object
    ) -> Any:
        session, thread = context.session, context.thread
        if session is None or not session.prunes or not is_descended(self):
            return original(self, launcher, *args, **kwargs)
        problem: Problem | None = None
        descent: Descent | None = None
        try:
            problem = descent_problem(self)
            if (known := stored_config(session, problem, launcher.config)) is not None:
                return launcher_of(self, known)
            if (ahead := context.configs_ahead(inductor_workers)) is not None:
                descent = Descent(ahead, self, launcher.config)
        except Exception as error:
            session.warn_once("prepare the coordinate descent of a generated kernel", error)
        outer, thread.descent = thread.descent, descent
        try:
            found = original(self, launcher, *args, **kwargs)
        finally:
            thread.descent = outer
        try:
            if descent is not None:
                descent.end()
                session.tally.add_saved(descent.saved_s)
            if problem is not None:
                keep_config(session, problem, found.config, descent.timed if descent is not None else 0)
        except Exception as error:
            session.warn_once("keep the coordinate descent of a generated kernel", error)
        return found

    return coordinate_descent_tuning


def _call_func(original: AnyFunction, context: HookContext) -> AnyFunction:
    """`call_func`: the time of one config, where the descent does not have it yet."""

    def call_func(self: CoordescTuner, func: object, config: LaunchConfig) -> float:
        session, descent = context.session, context.thread.descent
        if session is None or descent is None or self.lookup_in_cache(config) is not None:
            found: float = original(self, func, config)
            return found
        try:
            descent.before(config)
        except Exception as error:
            session.warn_once("compile configs ahead", error)
            context.thread.descent = descent = None
        found = original(self, func, config)
        if descent is not None:
            descent.after(config, found)
        return found

    return call_func


def _wait(original: AnyFunction, context: HookContext) -> AnyFunction:
    """`AsyncCompile.wait`: all kernels of a module are there, and their first launches are still to come."""

    def wait(self: AsyncCompile, scope: dict[str, Any]) -> object:
        found = original(self, scope)
        session = context.session
        if session is not None and session.prunes:
            try:
                kernels = [k for k in scope.values() if _begins_descent(session, k)]
                if kernels and (ahead := context.configs_ahead(inductor_workers)) is not None:
                    for kernel in kernels:
                        ahead.add(first_jobs(kernel))
            except Exception as error:
                session.warn_once("compile configs of a graph's kernels ahead", error)
        return found

    return wait


# --- a kernel ---


def is_descended(kernel: CachingAutotuner) -> bool:
    """Whether coordinate descent is for this kernel, and what is compiled ahead would be found."""
    kind = getattr(kernel.heuristic_type, "name", str(kernel.heuristic_type))
    deterministic = getattr(kernel, "deterministic_mode", False)
    return bool(
        kind in KINDS
        and kernel.inductor_meta.get("coordinate_descent_tuning")
        and kernel.device_props.type == "cuda"
        and kernel.filename
        and not deterministic
    )


def _begins_descent(session: TuningSession, value: object) -> bool:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    if not isinstance(value, CachingAutotuner) or not value.launchers or not is_descended(value):
        return False
    if len(value.launchers) == 1 and getattr(value.launchers[0].config, "found_by_coordesc", False):
        return False
    return stored_config(session, descent_problem(value), value.launchers[0].config) is None


def launcher_of(kernel: CachingAutotuner, config: LaunchConfig) -> object:
    """A kernel's launcher for a config."""
    if kernel.fn.fn is None:  # it was compiled in a worker, and comes without its source
        kernel.fn = kernel._reload_kernel().fn
    with kernel.lock:
        return kernel._precompile_config(config).make_launcher()


# --- what is kept of it ---


def descent_problem(kernel: CachingAutotuner) -> Problem:
    """The problem of a generated kernel, by its source."""
    kind = getattr(kernel.heuristic_type, "name", str(kernel.heuristic_type))
    meta = {**kernel.triton_meta, "device": kernel.device_props}
    return problem_of(kernel.size_hints, meta, kind, str(kernel.filename))


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
    found: Any = copy.deepcopy(like)
    found.kwargs = {name: values[name] for name in like.kwargs}
    found.num_warps, found.num_stages = chosen.num_warps, chosen.num_stages
    found.found_by_coordesc = True
    return found


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
