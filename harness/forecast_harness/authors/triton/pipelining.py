"""Options of `tl.range`: software pipelining of loads, unrolling, one loop made of two."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from forecast_harness.authors.triton.analysis.function_facts import FunctionFacts
from forecast_harness.authors.triton.analysis.loops import RangeLoop, loads_may_move, loops
from forecast_harness.authors.triton.analysis.source_unit import SourceUnit
from forecast_harness.authors.triton.protocol import RewriteContext, SourceEdit

STAGES = (3, 2, 4)
FACTORS = (2, 4)


def with_options(unit: SourceUnit, found: Sequence[RangeLoop], options: Mapping[str, int]) -> SourceUnit:
    """A copy whose loops are `tl.range` with these options on top of their own."""
    draft = unit.copy()
    for loop in found:
        head = draft.twin(loop.node).iter
        assert isinstance(head, ast.Call)
        head.func = ast.Attribute(ast.Name(unit.tl, ast.Load()), "range", ast.Load())
        head.keywords = [k for k in head.keywords if k.arg not in options]
        head.keywords += [ast.keyword(name, ast.Constant(value)) for name, value in options.items()]
    return draft


def pipeline(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """`num_stages` on loops without a dot: Triton pipelines loads there only when it is asked to.

    Loads of later iterations are issued before the stores of earlier ones, so a loop must not read what
    it writes.
    """
    found = []
    for function in unit.kernels:
        facts = FunctionFacts(unit, function)
        for loop in loops(unit, function):
            fits = (
                loop.innermost
                and not loop.has_dots
                and not loop.may_exit_early
                and "num_stages" not in loop.options
            )
            if fits and "load" in unit.effects(loop.node.body) and loads_may_move(facts, loop.node.body):
                found.append(loop)
    if not found:
        return
    for place, stages in enumerate(STAGES):
        yield SourceEdit(
            with_options(unit, found, {"num_stages": stages}),
            f"loads of {_count(found)} run {stages - 1} iterations ahead (tl.range num_stages={stages})",
            8.0 - 2.5 * place,
        )


def unroll(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """`loop_unroll_factor` on innermost loops with loads: more of them in flight, fewer branches."""
    found = []
    for function in unit.kernels:
        for loop in loops(unit, function):
            fits = loop.innermost and not loop.has_dots and not loop.may_exit_early and not loop.options
            if fits and "load" in unit.effects(loop.node.body):
                found.append(loop)
    if not found:
        return
    for place, factor in enumerate(FACTORS):
        yield SourceEdit(
            with_options(unit, found, {"loop_unroll_factor": factor}),
            f"{_count(found)} unrolled {factor} times (tl.range loop_unroll_factor={factor})",
            5.0 - 2.0 * place,
        )


def flatten(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """`flatten` on a loop over tiles around a dot loop: the pipeline is not drained between tiles."""
    found = []
    for function in unit.kernels:
        for loop in loops(unit, function):
            inside = [n for n in loop.node.body if isinstance(n, ast.For | ast.While)]
            nested = [x for x in loops(unit, function) if x.block is loop.node.body]
            fits = len(inside) == len(nested) == 1 and nested[0].innermost and nested[0].has_dots
            if fits and not loop.may_exit_early and "flatten" not in loop.options and not nested[0].options:
                found.append(loop)
    if found:
        yield SourceEdit(
            with_options(unit, found, {"flatten": True}),
            "tiles of a program follow one another without draining the pipeline (tl.range flatten)",
            5.0,
        )


def single_buffer(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """`disallow_acc_multi_buffer` on dot loops, for devices that keep accumulators in tensor memory."""
    found = [
        loop
        for function in unit.kernels
        for loop in loops(unit, function)
        if loop.innermost and loop.has_dots and "disallow_acc_multi_buffer" not in loop.options
    ]
    if found and context.arch >= 100:
        yield SourceEdit(
            with_options(unit, found, {"disallow_acc_multi_buffer": True}),
            "one accumulator in tensor memory leaves room for larger tiles",
            1.0,
        )


def specialise_warps(unit: SourceUnit, context: RewriteContext) -> Iterator[SourceEdit]:
    """`warp_specialize` on dot loops, where the compiler can: loads and dots in warps of their own."""
    found = [
        loop
        for function in unit.kernels
        for loop in loops(unit, function)
        if loop.innermost
        and loop.has_dots
        and not loop.may_exit_early
        and "warp_specialize" not in loop.options
    ]
    if found and context.arch >= 100:
        yield SourceEdit(
            with_options(unit, found, {"warp_specialize": True}),
            "loads and dots run in warps of their own (tl.range warp_specialize)",
            6.0,
        )


def _count(found: Sequence[RangeLoop]) -> str:
    return "the loop" if len(found) == 1 else f"{len(found)} loops"
