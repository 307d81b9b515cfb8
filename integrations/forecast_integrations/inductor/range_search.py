"""The search for one operation's choice, for a range of sizes where it has one, else for the sizes that were met."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forecast_autotune.ranges.tuning import (
    RangePlan,
    RangePoint,
    RangeRows,
    RangeSlowdowns,
    RangeSurrogate,
    range_slowdowns,
    slowdown_text,
)
from forecast_autotune.records import Candidate, Measurement, Problem
from forecast_autotune.records.table import latest_labels
from forecast_autotune.settings import Mode
from forecast_autotune.surrogates.protocol import Forecasts, Query
from forecast_integrations.device import fits_memory
from forecast_integrations.inductor.choices.records import candidate_of, problem_of
from forecast_integrations.inductor.operation_search import OperationSearch
from forecast_integrations.inductor.policy import default_policy
from forecast_integrations.inductor.session import TuningSession
from forecast_integrations.inductor.size_range import (
    HINT,
    RESIZABLE_KINDS,
    NoRangeError,
    SizeRange,
    dynamic_symbols,
    replaced_hints,
    size_range,
)

if TYPE_CHECKING:
    from torch._inductor.choices import InductorChoices
    from torch._inductor.ir import IRNode, Layout
    from torch._inductor.kernel_inputs import KernelInputs
    from torch._inductor.kernel_template_choice import KernelTemplateChoice


MAX_SHARE = 0.3
"""Most candidates that are measured, a share: the best for all sizes is harder to forecast than the best for one."""


@dataclass(frozen=True)
class SizedProblems:
    """An operation at the sizes of a range."""

    sizes: SizeRange
    problem: Problem
    """The operation for the whole range, under which its decision is filed."""
    measured: Mapping[int, Problem]
    """The operation at each measured size: ordinary problems."""


class RangeSearch(OperationSearch):
    """Forecasts, plans and decides by the mean time over a range of sizes.

    Inductor times the size that was met; `choice_timing` adds the other measured sizes, with the same binaries. Where
    that fails, `give_up` makes an ordinary search of it.
    """

    def __init__(
        self,
        sized: SizedProblems,
        candidates: Sequence[Candidate],
        externs: Collection[Candidate],
        session: TuningSession,
    ) -> None:
        self.sizes = sized.sizes
        self._plan_of_range = plan = _range_plan(sized)
        shares = [float(x) for x in plan.weights @ plan.shares]
        self._range = RangeRows(
            sized.problem.id, plan.points, plan.measured, shares, [[] for _ in plan.points]
        )
        self._by_size: dict[int, list[Measurement]] = {size: [] for size in self.sizes.measured}
        self._given_up = False
        super().__init__(sized.problem, candidates, externs, session)
        self.timed_problem = sized.measured[self.sizes.hint]
        if session.policy == default_policy():  # which measures more for a range
            self.policy = replace(default_policy(), share=MAX_SHARE)

    @property
    def given_up(self) -> bool:
        """Whether it has become a search for the met size alone."""
        return self._given_up

    @property
    def other_sizes(self) -> list[tuple[int, Problem]]:
        """The measured sizes that Inductor does not time, with their problems, nearest to the met one first."""
        others = [
            (size, self._range.points[i].problem)
            for i, size in zip(self._range.measured, self.sizes.measured, strict=True)
            if size != self.sizes.hint
        ]
        return sorted(others, key=lambda pair: abs(math.log2(pair[0] / self.sizes.hint)))

    def give_up(self, why: str) -> None:
        """Go on as a search for the size that was met, and say why."""
        if not self._given_up:
            self._given_up = True
            self.policy = self.session.policy
            self.problem = self.timed_problem
            self.note = f"for {self.sizes.symbol} = {self.sizes.hint} alone: {why}"
            self.refresh()

    def refresh(self) -> None:
        """Read again what is known of all measured sizes."""
        if self._given_up:
            super().refresh()
            return
        self.of_other_clock.clear()
        for i, size in zip(self._range.measured, self.sizes.measured, strict=True):
            problem = self._range.points[i].problem
            stored = self.stored_rows(problem)
            own = self._own if size == self.sizes.hint else self._by_size[size]
            self._range.rows[i] = [*stored, *(m for m in own if m not in stored)]
        self.rows = self._range.combined()
        self.measured = latest_labels(self.rows)

    def known_at(self, size: int) -> set[Candidate]:
        """Candidates that need not be timed at a measured size."""
        return set(self._range.labels(self._range.measured[self.sizes.measured.index(size)]))

    def add_at(self, size: int, measurements: Sequence[Measurement]) -> None:
        """Take in what was timed at one of the other sizes."""
        self._by_size[size].extend(measurements)
        self.refresh()

    def running(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those of the candidates that have failed at no size so far."""
        failed = {m.candidate for m in self.measured.values() if not m.ok}
        failed |= {m.candidate for m in self.tried.values() if not m.ok}
        return [c for c in candidates if c not in failed]

    def _forecast(self, query: Query) -> Forecasts | None:
        if self._given_up:
            return super()._forecast(query)
        try:
            return RangeSurrogate(_Asked(self.session), self._range).forecast(query)
        except _NoForecastError:
            return None

    def _reason(self, chosen: Candidate) -> str:
        if self._given_up or (slowdowns := self.slowdowns(chosen)) is None:
            return super()._reason(chosen)
        return f"{slowdown_text(slowdowns, self._plan_of_range)}; {super()._reason(chosen)}"

    def slowdowns(self, chosen: Candidate) -> RangeSlowdowns | None:
        """How much slower the chosen one is than the best measured at each size; None where it is not measured."""
        known = self.known_everywhere()
        timed = [c for c, m in self.measured.items() if m.ok and c in known]
        if chosen not in timed:
            return None
        slowdowns = range_slowdowns(timed, self._plan_of_range, self._range)
        return next(s for s in slowdowns if s.candidate == chosen)

    def known_everywhere(self) -> set[Candidate]:
        """Candidates that are known at all measured sizes."""
        return set.intersection(*(self.known_at(size) for size in self.sizes.measured))

    def told_timings(self, timings: Mapping[Candidate, float]) -> dict[Candidate, float]:
        """Times in proportion to those of the range, on the scale of the met size; infinite for most others.

        Inductor fuses what follows into several of the fastest templates and takes the fastest of them at the size that
        was met. So it is told of one template alone, and of the library's kernels, which it needs to fall back on.
        """
        times = {c: m.ms if m.ok else math.inf for c in timings if (m := self.measured.get(c)) is not None}
        times = {**timings, **times}
        if self._given_up:
            return times
        chosen = self.predecided or self._incumbent()
        if chosen is None or not math.isfinite(times.get(chosen, math.inf)):
            return dict(timings)
        met = self._range.labels(self._range.measured[self.sizes.measured.index(self.sizes.hint)]).get(chosen)
        scale = met.ms / times[chosen] if met is not None and met.ok else 1.0
        templates = [c for c in times if c not in self.library.candidates]
        finite = {chosen, *self.library.candidates}
        if chosen in self.library.candidates and templates:
            finite.add(min(templates, key=lambda c: times[c]))
        return {c: ms * scale if c in finite else math.inf for c, ms in times.items()}

    def label(self) -> str:
        """The operation as a log line shows it, with its range."""
        if self._given_up:
            return super().label()
        return f"{super().label()} for {self.sizes.symbol} in {self.sizes.label}"


class _NoForecastError(Exception):
    """The surrogate had no answer about one of the sizes."""


class _Asked:
    """The session's surrogate, which answers None instead of raising, as one that raises."""

    version = ""
    name = "session"

    def __init__(self, session: TuningSession) -> None:
        self._session = session

    def forecast(self, query: Query) -> Forecasts:
        """Forecasts. Raises `_NoForecastError`."""
        forecasts = self._session.ask(query)
        if forecasts is None:
            raise _NoForecastError
        return forecasts


def _range_plan(sized: SizedProblems) -> RangePlan:
    robust = sized.sizes.robust()
    sizes = robust.points()
    # Between measured sizes only the label is ever read.
    points = [
        RangePoint(sized.measured.get(size, sized.problem), f"{sized.sizes.symbol}={size}") for size in sizes
    ]
    measured = [i for i, size in enumerate(sizes) if size in sized.measured]
    return RangePlan(points, measured, robust.weights(), robust.shares())


def operation_search(
    session: TuningSession,
    name: str,
    input_nodes: Sequence[IRNode],
    layout: Layout | None,
    candidates: Sequence[Candidate],
    externs: Collection[Candidate],
    *,
    kinds: Collection[type] = (),
    generated_inputs: Mapping[int, object] | None = None,
) -> OperationSearch:
    """The search that decides an operation. `kinds` are the classes of its choices, as far as they are made.

    `generated_inputs` are Inductor's functions that make inputs for benchmarks, by number. Never raises for want of a
    range: then it is a search for the met sizes, whose `note` says why.
    """
    problem = problem_of(name, input_nodes, layout)
    why = ""
    try:
        sizes = tunable_range(session, input_nodes, layout)
        if sizes is not None:
            _require_resizable(input_nodes, kinds, generated_inputs or {})
            return RangeSearch(
                _sized(name, input_nodes, layout, problem, sizes), candidates, externs, session
            )
    except NoRangeError as error:
        why = str(error)
    except Exception as error:
        session.warn_once("serve the range of a dynamic size", error)
        why = f"{type(error).__name__}: {error}"
    search = OperationSearch(problem, candidates, externs, session)
    if why and session.settings.inductor_dynamic != HINT:
        search.note = f"for the sizes that were met alone: {why}"
    return search


def tunable_range(
    session: TuningSession, input_nodes: Sequence[IRNode], layout: Layout | None
) -> SizeRange | None:
    """The range that one choice of an operation can be tuned for; None where its sizes are static.

    Raises `NoRangeError` where there is none to tune for.
    """
    sizes = size_range(input_nodes, layout, session.settings.inductor_dynamic)
    if sizes is None:
        return None
    from torch._inductor import config
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    if not session.prunes:
        raise NoRangeError(f"{session.settings.mode} mode leaves the choice to Inductor")
    if getattr(config, "multi_kernel_hints", None):
        raise NoRangeError("with multi_kernel_hints, Inductor takes a choice for each hint")
    if session.settings.mode is Mode.TUNE:
        if not hasattr(AlgorithmSelectorCache, "do_autotuning"):
            raise NoRangeError("this release of torch times choices where no other size can be added")
        if getattr(config, "pipeline_max_autotune_gemm", False):
            raise NoRangeError("with pipelined tuning, Inductor times the met size in another process")
        if getattr(config, "distributed_max_autotune_gemm", False):
            raise NoRangeError("ranks share the timing of every operation at the met size")
    return sizes


def _require_resizable(
    input_nodes: Sequence[IRNode], kinds: Collection[type], generated: Mapping[int, object]
) -> None:
    """Raise `NoRangeError` where a choice, or an input, could not be made for another size."""
    others = sorted(kind.__name__ for kind in kinds if kind.__name__ not in RESIZABLE_KINDS)
    if others:
        raise NoRangeError(f"choices of class {', '.join(others)} are timed at the met size only")
    for number in generated:
        if dynamic_symbols([input_nodes[number]], None):
            raise NoRangeError(
                f"input {number}, of dynamic size, is made by a function of the operation's own"
            )


def _sized(
    name: str, input_nodes: Sequence[IRNode], layout: Layout | None, met: Problem, sizes: SizeRange
) -> SizedProblems:
    """The operation at each measured size that fits, and as a whole."""
    problems: dict[int, Problem] = {}
    for size in sizes.measured:
        with replaced_hints({sizes.symbol: size}):
            problem = problem_of(name, input_nodes, layout)
        if size == sizes.hint or _fits(problem):
            problems[size] = problem
    if len(problems) < 2:
        raise NoRangeError("tensors of no other size fit into the device's memory")
    problems[sizes.hint] = met
    kept = SizeRange(sizes.symbol, sizes.low, sizes.high, sizes.hint, tuple(sorted(problems)))
    largest = problems[max(problems)]
    # Whichever size was met and whatever the symbol is called, it is the same operation for the same range.
    named = {str(sizes.symbol): "n"}
    whole = Problem.of(
        largest.kernel,
        largest.arguments,
        largest.device,
        key=[*largest.key, f"n={sizes.label}"],
        toolchain=dict(largest.toolchain),
        identity=[
            [(a.name, a.kind, a.dtype, a.aligned) for a in largest.arguments],
            [[_renamed(e, named) for e in extents] for extents in _layouts(input_nodes, layout)],
        ],
    )
    return SizedProblems(kept, whole, problems)


def _layouts(input_nodes: Sequence[IRNode], layout: Layout | None) -> Iterator[tuple[Any, Any]]:
    for node in input_nodes:
        yield node.get_size(), node.get_stride()
    if layout is not None and hasattr(layout, "size"):
        yield layout.size, layout.stride


def _renamed(extents: Sequence[Any], names: Mapping[str, str]) -> list[str]:
    """Sizes as text, the dynamic one by a name that does not change from run to run."""
    from torch._inductor.virtualized import V

    sizes: Any = V.graph.sizevars
    texts = []
    for extent in extents:
        known = {s: names[str(s)] for s in getattr(extent, "free_symbols", ()) if str(s) in names}
        texts.append(str(sizes.simplify(extent).subs(known)) if known else str(extent))
    return texts


def _fits(problem: Problem) -> bool:
    """Whether tensors of these sizes fit beside what the program holds."""
    if problem.device.backend != "cuda":
        return True
    need = 0
    for argument in problem.arguments:
        if argument.kind == "tensor":
            span = 1 + sum((n - 1) * abs(s) for n, s in zip(argument.shape, argument.stride, strict=True))
            need += max(span, math.prod(argument.shape)) * _bytes_of(argument.dtype)
    return fits_memory(need)


def _bytes_of(dtype: str | None) -> int:
    import torch

    torch_dtype = getattr(torch, str(dtype), None)
    return torch_dtype.itemsize if isinstance(torch_dtype, torch.dtype) else 8


def further_choices(
    session: TuningSession,
    handler: InductorChoices,
    kernel_inputs: KernelInputs,
    op_name: str,
    given: Sequence[object],
    choices: Sequence[KernelTemplateChoice],
) -> list[KernelTemplateChoice]:
    """Those of the range's ends that are not among `choices`; none where the operation is not tuned for a range.

    `given` are the arguments of `_finalize_template_configs`: the templates and what overrides their parameters are
    found by kind. Never raises.
    """
    if not choices or not hasattr(handler, "get_ktc"):
        return []
    try:
        sizes = tunable_range(session, kernel_inputs.nodes(), choices[0].layout)
        if sizes is None:
            return []
        from torch._inductor.select_algorithm import ExternKernelChoice

        listed: Sequence[Any] = next(a for a in given if isinstance(a, list))
        templates = [
            t for t in listed if not isinstance(t, ExternKernelChoice)
        ]  # they are listed in any case
        mappings = [a for a in given if isinstance(a, Mapping)]
        overrides: Mapping[str, Any] = mappings[1] if len(mappings) > 1 else {}
        known = set(map(candidate_of, choices))
        further: list[KernelTemplateChoice] = []
        for size in {min(sizes.measured), max(sizes.measured)} - {sizes.hint}:
            with replaced_hints({sizes.symbol: size}):
                for template in templates:
                    for choice in handler.get_ktc(
                        kernel_inputs, template, op_name, overrides.get(template.uid, {})
                    ):
                        if (candidate := candidate_of(choice)) not in known:
                            known.add(candidate)
                            further.append(choice)
        return further
    except NoRangeError:
        return []
    except Exception as error:
        session.warn_once("list an operation's choices at other sizes", error)
        return []
