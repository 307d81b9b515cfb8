"""Pruning of Inductor's choices: before code generation where it asks for that, else before compilation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from forecast_autotune.records import Candidate, Measurement
from forecast_autotune.settings import Mode
from forecast_autotune.telemetry.spans import DecisionSpan
from forecast_integrations.inductor.choices.graph_position import graph_position
from forecast_integrations.inductor.choices.pool import ChoicePool, annotate_choice, with_code
from forecast_integrations.inductor.choices.records import candidate_of, is_extern, problem_of
from forecast_integrations.inductor.operation_search import MIN_CHOICES, OperationSearch
from forecast_integrations.inductor.session import TuningSession

if TYPE_CHECKING:
    from torch._inductor.ir import ChoiceCaller, IRNode, Layout
    from torch._inductor.kernel_inputs import KernelInputs
    from torch._inductor.kernel_template_choice import KernelTemplateChoice

SEARCH_ATTRIBUTE = "forecast_autotune"
"""Attribute of a choice that leads to its search."""


@dataclass
class SelectionCall:
    """One call of Inductor's selection, and its state."""

    name: str
    input_nodes: Sequence[IRNode]
    layout: Layout | None
    generated_inputs: Mapping[int, object] | None = None
    """Inductor's functions that make inputs for benchmarks, by number."""
    tuned_by_all_ranks: bool = False
    """Whether ranks measure the operation together: they must not get different lists."""
    others_decide: bool = False
    """Whether a rule beside the clock takes one of the timed choices: a threshold, a user's own hook."""
    hooked: bool = False
    """Whether that rule is a hook, which sees every time: the list is left whole."""
    returns: bool = False
    """Whether the end of the selection reports Inductor's choice."""
    search: OperationSearch | None = None
    """The search that this selection has led to."""


TimeExterns: TypeAlias = (
    "Callable[[OperationSearch, Sequence[ChoiceCaller], SelectionCall], Sequence[Measurement]]"
)
"""Times the library's kernels of an operation in the middle of its lowering, where that can be done. Never raises."""


class UnplannedSpaceError(Exception):
    """A list from a wider space has no plan, and is too long to compile."""


def search_of(choices: Sequence[ChoiceCaller]) -> OperationSearch | None:
    """The search that these choices belong to."""
    for choice in choices:
        if (search := getattr(choice, SEARCH_ATTRIBUTE, None)) is not None:
            return search
    return None


def prune_before_codegen(
    session: TuningSession,
    op_name: str,
    kernel_inputs: KernelInputs,
    choices: list[KernelTemplateChoice],
    *,
    widened: bool = False,
    time_externs: TimeExterns | None = None,
) -> list[KernelTemplateChoice]:
    """The template choices of one list worth generating code for, in their order.

    Further choices of the operation (C++, CUTLASS, subgraphs) come later, so this is a draft: choices left out stay
    in reserve, and `prune_before_compilation` plans again over everything. Raises `UnplannedSpaceError` when there
    is no plan for a list from a `widened` space.
    """
    if not session.prunes or len(choices) <= MIN_CHOICES or has_multiple_size_hints() or is_hooked():
        return choices
    by_candidate: dict[Candidate, list[KernelTemplateChoice]] = {}
    for choice in choices:
        by_candidate.setdefault(candidate_of(choice), []).append(choice)
    if len(by_candidate) <= MIN_CHOICES:
        return choices
    # Inductor appends `-ah` where AutoHeuristic asks for more configs of the same operation.
    externs = [c for c, members in by_candidate.items() if is_extern(members[0])]
    name, nodes = op_name.removesuffix("-ah"), kernel_inputs.nodes()
    layout = choices[0].layout
    search = OperationSearch(problem_of(name, nodes, layout), list(by_candidate), externs, session)

    # Integers may be indices: only Inductor's whole list comes with functions that make valid ones.
    if all(node.get_dtype().is_floating_point for node in nodes):
        extern_choices = [member for c in externs for member in by_candidate[c]]
        operation = SelectionCall(name, nodes, layout)
        _time_ahead(search, time_externs, lambda: with_code(extern_choices), operation)
    candidates = set(search.first(draft=True, shares=not ranks_tune_together()))
    if search.failed and widened:
        raise UnplannedSpaceError
    group = {c: members[0] for c, members in by_candidate.items() if c not in candidates}
    remaining = [choice for choice in choices if candidate_of(choice) in candidates]
    for choice in remaining:
        annotate_choice(choice, group)
    return remaining


def _time_ahead(
    search: OperationSearch,
    time_externs: TimeExterns | None,
    callers: Callable[[], Sequence[ChoiceCaller]],
    operation: SelectionCall,
) -> None:
    """Let a search time its externs, the `callers`, first, by a clock of the device, and set its graph position."""
    try:
        search.library.position = graph_position(operation.layout, search.problem.device)
    except Exception as error:
        search.session.warn_once("see where an operation stands in its graph", error)
    if time_externs is None or not search.times_calls:
        return
    if is_deterministic() or ranks_tune_together():
        return
    search.library.time = lambda: time_externs(search, callers(), operation)


def prune_before_compilation(
    session: TuningSession,
    operation: SelectionCall,
    choices: list[ChoiceCaller],
    time_externs: TimeExterns | None = None,
) -> list[ChoiceCaller]:
    """The choices worth compiling, in their order; a single one if that needs no measurement at all."""
    # Deterministic mode takes the first extern choice, and collective operations are timed by all ranks
    # together; a single choice is not timed.
    if (
        operation.tuned_by_all_ranks
        or len(choices) < MIN_CHOICES
        or is_deterministic()
        or has_multiple_size_hints()
    ):
        return choices
    pool = ChoicePool(choices)
    problem = problem_of(operation.name, operation.input_nodes, operation.layout)
    search = OperationSearch(problem, list(pool), pool.externs(), session)
    operation.search, search.awaits_choice = search, operation.returns
    search.others_decide = operation.others_decide
    externs = [choice for choice in choices if is_extern(choice)]
    _time_ahead(search, time_externs, lambda: externs, operation)
    candidates = list(pool) if operation.hooked else search.first(shares=not ranks_tune_together())
    if search.failed and session.exhaustive_space:
        # Inductor itself would not have compiled the reserved choices.
        candidates = [c for c in candidates if id(pool[c][0]) in pool.order]
    if search.predecided is not None and ranks_tune_together():
        # All ranks number the operations that are tuned: this one has to stay among them.
        candidates = search.with_baselines(candidates, None)
    remaining = pool.choices(candidates, search.drop)
    if len(remaining) < min(MIN_CHOICES, len(candidates)):
        remaining = pool.choices(search.ranked(), search.drop, enough=MIN_CHOICES)
    if not remaining:
        return choices
    for choice in remaining:
        setattr(choice, SEARCH_ATTRIBUTE, search)
    search.pool = pool
    if search.predecided is not None and search.predecided not in map(candidate_of, remaining):
        search.predecided = None  # Inductor can make no code for it: the others are timed
    if len(remaining) == 1:
        # Inductor takes it without a measurement: there is no later call for this operation.
        search.predecided = candidate_of(remaining[0])
        record_decision(session, search)
    return remaining


def record_choice(session: TuningSession, search: OperationSearch, choice: ChoiceCaller | None) -> None:
    """Record the decision of a selection that has ended with this choice; None where Inductor chooses later."""
    search.awaits_choice, is_due = False, search.is_due
    if is_due:
        search.taken = None if choice is None else candidate_of(choice)
        record_decision(session, search)


def record_decision(session: TuningSession, search: OperationSearch) -> None:
    """Decide, count and print the decision; do nothing while we only listen. Never raises.

    During a selection the decision waits for its end, when Inductor's choice is known.
    """
    if search.awaits_choice:
        search.is_due = True
        return
    try:
        if session.settings.mode is Mode.LISTEN:
            return
        with DecisionSpan(search.problem, session.settings) as span:
            decision = search.decide()
            if decision is not None:
                span.conclude(decision)
        if decision is not None:
            session.tally.add_decision(search.label(), decision, session.prints_lines())
    except Exception as error:
        session.warn_once("keep what was decided of an operation", error)


def is_deterministic() -> bool:
    """Whether Inductor takes the same choice in every run, without timing any; torch 2.9 has no such mode."""
    from torch._inductor import config

    return bool(getattr(config, "deterministic", False))


def is_hooked() -> bool:
    """Whether a user's hook sees all times and takes one of the choices; torch 2.11 has no such hook."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    own = getattr(InductorChoices, "override_best_choice", None)
    return own is not None and getattr(type(V.choices), "override_best_choice", own) is not own


def has_multiple_size_hints() -> bool:
    """Whether Inductor picks a choice per size hint: every hint needs choices of its own."""
    from torch._inductor import config

    return bool(getattr(config, "multi_kernel_hints", None))


def ranks_tune_together() -> bool:
    """Whether the ranks of a job share the timing of every operation, in one order."""
    from torch._inductor import config

    if not getattr(config, "distributed_max_autotune_gemm", False):
        return False
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_initialized())
