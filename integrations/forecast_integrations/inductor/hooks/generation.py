"""Templates remember how a choice was made, so that it can be made for other sizes."""

from __future__ import annotations

import functools
from typing import Any

from forecast_integrations.inductor.dynamic.resized_choice import REGENERATE_ATTRIBUTE
from forecast_integrations.inductor.dynamic.size_range import dynamic_symbols
from forecast_integrations.inductor.hooks.context import HookContext
from forecast_integrations.inductor.hooks.patches import AnyFunction, PatchSet


def install(context: HookContext) -> PatchSet:
    """Hook the templates whose choices hold the sizes that they are timed at."""
    from torch._inductor.codegen.cpp_template import CppTemplate
    from torch._inductor.select_algorithm import TritonTemplate

    patches = PatchSet()
    for template in (TritonTemplate, CppTemplate):
        patches.replace(template, "generate", lambda f: _generate(f, context))
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
