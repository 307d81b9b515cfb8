"""An operation's search: for a range of sizes where it has one, else for the sizes that were met."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forecast_autotune.records import Candidate, Problem
from forecast_autotune.settings import Mode
from forecast_integrations.inductor.choices.records import problem_of
from forecast_integrations.inductor.dynamic.hints import replaced_hints
from forecast_integrations.inductor.dynamic.range_search import RangeSearch, SizedProblems
from forecast_integrations.inductor.dynamic.resized_choice import RESIZABLE_KINDS
from forecast_integrations.inductor.dynamic.size_range import (
    HINT,
    NoRangeError,
    SizeRange,
    dynamic_symbols,
    size_range,
)
from forecast_integrations.inductor.operation_search import OperationSearch
from forecast_integrations.inductor.session import TuningSession

if TYPE_CHECKING:
    from torch._inductor.ir import IRNode, Layout

_MEMORY_SHARE = 0.8
"""Of the free memory, for the tensors of one size."""


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
    """What decides an operation. `kinds` are the classes of its choices, as far as they are made.

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
    found = size_range(input_nodes, layout, session.settings.inductor_dynamic)
    if found is None:
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
    return found


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
    found: dict[int, Problem] = {}
    for size in sizes.measured:
        with replaced_hints({sizes.symbol: size}):
            problem = problem_of(name, input_nodes, layout)
        if size == sizes.hint or _fits(problem):
            found[size] = problem
    if len(found) < 2:
        raise NoRangeError("tensors of no other size fit into the device's memory")
    found[sizes.hint] = met
    kept = SizeRange(sizes.symbol, sizes.low, sizes.high, sizes.hint, tuple(sorted(found)))
    largest = found[max(found)]
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
    return SizedProblems(kept, whole, found)


def _layouts(input_nodes: Sequence[IRNode], layout: Layout | None) -> Iterator[tuple[Any, Any]]:
    for node in input_nodes:
        yield node.get_size(), node.get_stride()
    if layout is not None and hasattr(layout, "size"):
        yield layout.size, layout.stride


def _renamed(extents: Sequence[Any], names: Mapping[str, str]) -> list[str]:
    """Sizes as text, the dynamic one by a name that does not change from run to run."""
    from torch._inductor.virtualized import V

    sizes: Any = V.graph.sizevars
    found = []
    for extent in extents:
        known = {s: names[str(s)] for s in getattr(extent, "free_symbols", ()) if str(s) in names}
        found.append(str(sizes.simplify(extent).subs(known)) if known else str(extent))
    return found


def _fits(problem: Problem) -> bool:
    """Whether tensors of these sizes fit beside what the program holds."""
    import torch

    if problem.device.backend != "cuda" or not torch.cuda.is_available():
        return True
    need = 0
    for argument in problem.arguments:
        if argument.kind == "tensor":
            span = 1 + sum((n - 1) * abs(s) for n, s in zip(argument.shape, argument.stride, strict=True))
            need += max(span, math.prod(argument.shape)) * _bytes_of(argument.dtype)
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return need <= _MEMORY_SHARE * free


def _bytes_of(dtype: str | None) -> int:
    import torch

    found = getattr(torch, str(dtype), None)
    return found.itemsize if isinstance(found, torch.dtype) else 8
