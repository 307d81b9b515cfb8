"""Templates generate the code of a choice when it is wanted, and remember how to make it for other sizes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forecast_integrations.inductor.choices.pool import DeferredChoice
from forecast_integrations.inductor.choices.records import candidate_of, is_user_code
from forecast_integrations.inductor.hooks.context import AnyFunction, HookContext, PatchSet
from forecast_integrations.inductor.pruning import (
    has_multiple_size_hints,
    is_deterministic,
    ranks_tune_together,
)
from forecast_integrations.inductor.size_range import REGENERATE_ATTRIBUTE, dynamic_symbols

if TYPE_CHECKING:
    from torch._inductor.ir import IRNode
    from torch._inductor.select_algorithm import TritonTemplate


def install(context: HookContext) -> PatchSet:
    """Hook the templates whose choices hold the sizes that they are timed at."""
    from torch._inductor.codegen.cpp_template import CppTemplate
    from torch._inductor.select_algorithm import TritonTemplate

    patches = PatchSet()
    for template in (TritonTemplate, CppTemplate):
        patches.replace(template, "generate", lambda f: _generate(f, context))
    patches.replace(TritonTemplate, "maybe_append_choice", lambda f: _append(f, context))
    return patches


def _generate(original: AnyFunction, context: HookContext) -> AnyFunction:
    def generate(self: object, *args: Any, **kwargs: Any) -> Any:
        choice = original(self, *args, **kwargs)
        session = context.session
        if session is not None and choice is not None:
            try:
                if dynamic_symbols(choice.input_nodes, choice.layout):
                    again = functools.partial(original, self, *args, **kwargs)
                    setattr(choice, REGENERATE_ATTRIBUTE, again)
            except Exception as error:
                session.warn_once("remember how a choice was made", error)
        return choice

    return generate


def _append(original: AnyFunction, context: HookContext) -> AnyFunction:
    """`maybe_append_choice`: a template lists one choice of an operation; which are wanted is known later."""
    named_alike: dict[str, bool] = {}
    """Whether a template's choices are the candidates that they are said to be before they are made."""

    def append(self: TritonTemplate, choices: list[Any], **kwargs: Any) -> Any:
        session, deferred = context.session, None
        if session is not None:
            try:
                if named_alike.get(_name(self), True) and _comes_to_us(self, kwargs, context):
                    deferred = DeferredChoice(self, original, kwargs)
                    if _name(self) in named_alike and all(map(_has_settled_layout, kwargs["input_nodes"])):
                        choices.append(deferred)
                        return None
            except Exception as error:
                session.warn_once("put off the code of a choice", error)
        before = len(choices)
        answer = original(self, choices, **kwargs)
        if session is not None and deferred is not None:
            try:
                for choice in choices[before:]:
                    named_alike[self.name] = candidate_of(choice) == candidate_of(deferred)
            except Exception as error:
                session.warn_once("compare a choice with its description", error)
        return answer

    return append


def _has_settled_layout(node: IRNode) -> bool:
    """Whether an input's strides are what they will be: those of one that is computed, the first code settles.

    A template asks for strides, and requested ones are padded and kept: the operation's own name depends on it.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    settled = getattr(V.graph, "buffer_layout_constraints", {})
    return not isinstance(node.get_layout(), ir.FlexibleLayout) or node.get_name() in settled


def _name(template: Any) -> str:
    return str(getattr(template, "name", ""))


def _comes_to_us(template: Any, arguments: Mapping[str, Any], context: HookContext) -> bool:
    """Whether a choice of these arguments is sure to come to us before anybody needs its code."""
    from torch._inductor import config
    from torch._inductor.select_algorithm import TritonTemplate, get_algorithm_selector_cache

    session = context.session
    if session is None or not session.prunes or not isinstance(template, TritonTemplate):
        return False
    # What a user's graph computes is told by the code alone; what has symbols is made for the sizes of the moment.
    if is_user_code(template.name) or any(arguments.get(name) for name in ("subgraphs", "mutated_inputs")):
        return False
    if arguments.get("hint_override") is not None or has_multiple_size_hints():
        return False
    if is_deterministic() or ranks_tune_together():
        return False
    if dynamic_symbols(arguments["input_nodes"], arguments["layout"]):
        return False
    if config.run_autoheuristic("mm"):
        return False  # it looks at every choice's own name
    listed = context.preprocessing in get_algorithm_selector_cache().preprocessing_fns
    return listed and not context.others_choose()
