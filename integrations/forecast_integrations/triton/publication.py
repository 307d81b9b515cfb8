"""Publication of a decision: the tuner's attributes, Triton's listener and ours, and printed lines."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress

from forecast_autotune.records import Candidate, Decision, Evidence, Problem
from forecast_autotune.records.table import latest_labels
from forecast_autotune.store import Store
from forecast_autotune.tuning.loop import GuardedStore
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.problem.compilations import RECORDER
from forecast_integrations.triton.problem.source import innermost
from forecast_integrations.triton.protocols import Key, LaunchConfig, Times

LISTENERS: list[Callable[[str, Decision], None]] = []
"""Called with the kernel's name after every decision."""


def publish_decision(
    call: KernelCall,
    key: Key,
    config: LaunchConfig,
    store: GuardedStore,
    problem: Problem,
    decision: Decision,
    raw: Mapping[Candidate, Times] | None,
    seconds: float,
    *,
    say: bool,
    resets: bool = True,
) -> None:
    """Set the attributes and call the listeners that Triton would, and print the lines that are asked for.

    `config` is what is launched from now on. `raw` is what a user's own benchmark function returned, empty with
    ours; None where nothing was measured. Unless it `resets`, the call's arguments were not timed on, and stay as
    they are.
    """
    from triton import knobs

    fresh = raw is not None
    tuner = call.tuner
    tuner.bench_time = seconds
    if raw is not None:
        timings = _timings(call, store, problem, raw)
        if resets:
            tuner.pre_hook({**call.named_arguments(), **config.all_kwargs()}, reset_only=True)
    elif decision.median_ms is not None:
        timings = {config: [decision.median_ms] * 3}
    else:
        timings = {}
    tuner.configs_timings = timings
    listener = getattr(knobs.autotuning, "listener", None)
    if listener is not None and (fresh or decision.evidence is Evidence.STORED):
        listener(
            fn=innermost(tuner.fn),
            key=key,
            best_config=config,
            configs_timings=timings,
            duration=seconds if fresh else None,
            cache_hit=not fresh,
        )
    if knobs.autotuning.print and fresh:
        print(
            f"Triton autotuning for function {tuner.base_fn.__name__},\nwith key as {key},\n"
            f"finished after {seconds:.2f}s,\nbest config selected: {config};"
        )
    for listen in list(LISTENERS):
        listen(problem.kernel.name, decision)
    if knobs.autotuning.print or say:
        _print_summary(problem.kernel.name, decision)


def print_timed_candidate(call: KernelCall, candidate: Candidate) -> None:
    """Say which candidate is timed next, where Triton was asked to."""
    from triton import knobs

    if knobs.autotuning.print:
        name = call.tuner.base_fn.__name__
        print(f"Autotuning kernel {name} with config {call.configs[candidate]}")


def note_choice(store: Store, call: KernelCall, decision: Decision) -> None:
    """Keep for `warm` what a tuner has just chosen."""
    # Without a time this process may not have compiled it, and is not to before its launch.
    if decision.median_ms is not None:
        with suppress(Exception):
            RECORDER.note_choice(lambda: call.compile(decision.chosen), store)


def _print_summary(name: str, decision: Decision) -> None:
    try:
        from forecast_autotune.report.summary import summary_line  # most programs print nothing

        print(summary_line(name, decision), file=sys.stderr)
    except Exception as error:  # a line that nobody can read takes no launch back
        warnings.warn(f"no summary can be printed ({error!r:.300})", stacklevel=3)


def _timings(
    call: KernelCall, store: GuardedStore, problem: Problem, raw: Mapping[Candidate, Times]
) -> dict[LaunchConfig, Times]:
    """`configs_timings` as Triton has it: [median, 20 %, 80 %] in ms, inf for what did not run."""
    labels = latest_labels(store.measurements(problem))
    timings: dict[LaunchConfig, Times] = {}
    for candidate, config in call.configs.items():
        m = labels.get(candidate)
        if candidate in raw:
            timings[config] = raw[candidate]
        elif m is not None:
            timings[config] = (
                [m.median_ms, m.p20_ms or m.median_ms, m.p80_ms or m.median_ms]
                if m.ok
                else [float("inf")] * 3
            )
    return timings
