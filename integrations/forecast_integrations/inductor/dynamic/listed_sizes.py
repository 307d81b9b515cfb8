"""Template choices that Inductor would list at other sizes of a range: it scales its blocks to the size hint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forecast_integrations.inductor.choices.records import candidate_of
from forecast_integrations.inductor.dynamic.hints import replaced_hints
from forecast_integrations.inductor.dynamic.operations import tunable_range
from forecast_integrations.inductor.dynamic.size_range import NoRangeError
from forecast_integrations.inductor.session import TuningSession

if TYPE_CHECKING:
    from torch._inductor.choices import InductorChoices
    from torch._inductor.kernel_inputs import KernelInputs
    from torch._inductor.kernel_template_choice import KernelTemplateChoice


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
        found: list[KernelTemplateChoice] = []
        for size in {min(sizes.measured), max(sizes.measured)} - {sizes.hint}:
            with replaced_hints({sizes.symbol: size}):
                for template in templates:
                    for choice in handler.get_ktc(
                        kernel_inputs, template, op_name, overrides.get(template.uid, {})
                    ):
                        if (candidate := candidate_of(choice)) not in known:
                            known.add(candidate)
                            found.append(choice)
        return found
    except NoRangeError:
        return []
    except Exception as error:
        session.warn_once("list an operation's choices at other sizes", error)
        return []
