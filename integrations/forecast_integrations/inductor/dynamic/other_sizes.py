"""Times at the sizes of a range that Inductor does not take: after each of its rounds, with the same binaries."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from forecast_autotune.telemetry.spans import span
from forecast_integrations.inductor.choices.records import candidate_of
from forecast_integrations.inductor.dynamic.hints import replaced_hints
from forecast_integrations.inductor.dynamic.range_search import RangeSearch
from forecast_integrations.inductor.dynamic.resized_choice import resized_choice
from forecast_integrations.inductor.harvest import make_measurement
from forecast_integrations.inductor.rounds import outside_the_scheduler

if TYPE_CHECKING:
    from torch._inductor.ir import ChoiceCaller

Benchmark: TypeAlias = "Callable[[list[ChoiceCaller]], Mapping[ChoiceCaller, float]]"
"""Times choices for the hints in force: milliseconds, inf for failures."""


def time_other_sizes(search: RangeSearch, choices: Sequence[ChoiceCaller], benchmark: Benchmark) -> None:
    """Time those of the choices that run at the other measured sizes, too, and tell the search.

    A choice that fails at one size is out of the question for the range. Never raises: where sizes cannot be timed,
    the search goes on for the met one.
    """
    try:
        for size, problem in search.other_sizes:
            known = search.known_at(size)
            running = set(search.running([candidate_of(c) for c in choices]))
            wanted = [c for c in choices if (named := candidate_of(c)) in running and named not in known]
            if not wanted:
                continue
            with replaced_hints({search.sizes.symbol: size}), span("measure", candidates=len(wanted)):
                with outside_the_scheduler():
                    resized = [resized_choice(c) for c in wanted]
                times = benchmark(resized)
                rows = [
                    make_measurement(problem, choice, times.get(sized, math.inf), timed=sized)
                    for choice, sized in zip(wanted, resized, strict=True)
                ]
            for m in rows:
                search.session.snapshot.add(problem, m)
            search.session.snapshot.store.sync()
            search.session.tally.stored(len(rows))
            search.add_at(size, rows)
    except Exception as error:
        search.session.warn_once("time an operation at another size", error)
        search.give_up(f"{type(error).__name__}: {error}")
