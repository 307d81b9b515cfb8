"""Choices of one operation by candidate, those whose code Inductor has not generated yet included."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from forecast_autotune.records import Candidate
from forecast_integrations.inductor.choices.records import (
    candidate_of,
    is_extern,
    template_choice,
    unwrap_choice,
)

if TYPE_CHECKING:
    from torch._inductor.ir import ChoiceCaller
    from torch._inductor.kernel_template_choice import KernelTemplateChoice

    from forecast_integrations.inductor.choices.records import Choice

_RESERVE_ANNOTATION = "forecast_autotune"
"""Annotation of a template choice that leads to its group."""


ReservedChoices: TypeAlias = "dict[Candidate, KernelTemplateChoice]"
"""Template choices of one list that were kept from code generation, for later rounds."""


def annotate_choice(choice: KernelTemplateChoice, group: ReservedChoices) -> None:
    """Lead from a template choice to its group; its `ChoiceCaller` has the same annotations, where there are any."""
    if (annotations := getattr(choice, "annotations", None)) is not None:
        annotations[_RESERVE_ANNOTATION] = group


class ChoicePool(dict[Candidate, list["Choice"]]):
    """Choices by candidate, those whose code has not been generated yet included."""

    def __init__(self, choices: Sequence[ChoiceCaller]) -> None:
        from torch._inductor.select_algorithm import TritonTemplateCaller

        super().__init__()
        self.order = {id(choice): i for i, choice in enumerate(choices)}
        self.siblings: dict[int, Choice] = {}
        """A choice of the same list as a reserved one, by the reserved one's id: it has the final layout."""
        self.kinds = {
            TritonTemplateCaller if template_choice(c) is c else type(unwrap_choice(c)) for c in choices
        }
        groups: dict[int, tuple[ReservedChoices, KernelTemplateChoice]] = {}
        for choice in choices:
            self.setdefault(candidate_of(choice), []).append(choice)
            ktc = template_choice(choice)
            if ktc is not None and (group := ktc.annotations.get(_RESERVE_ANNOTATION)) is not None:
                groups.setdefault(id(group), (group, ktc))
        for group, sibling in groups.values():
            for candidate, reserve in group.items():
                if candidate not in self:
                    self[candidate] = [reserve]
                    self.siblings[id(reserve)] = sibling

    def externs(self) -> list[Candidate]:
        """The vendor library's candidates."""
        return [candidate for candidate, members in self.items() if is_extern(members[0])]

    def choices(
        self,
        candidates: Sequence[Candidate],
        drop: Callable[[Candidate], None],
        enough: int | None = None,
    ) -> list[ChoiceCaller]:
        """The choices of these candidates; code is generated where it is missing.

        Candidates that Inductor cannot make code for leave the pool, and `drop` is told. With `enough`, it
        stops after so many candidates.
        """
        result: list[ChoiceCaller] = []
        count = 0
        for candidate in candidates:
            callers = [c for member in self.get(candidate, ()) if (c := self._with_code(member)) is not None]
            if not callers:
                self.pop(candidate, None)
                drop(candidate)
                continue
            self[candidate] = callers
            result += callers
            count += 1
            if enough is not None and count >= enough:
                break
        return sorted(result, key=lambda choice: self.order.get(id(choice), len(self.order)))

    def _with_code(self, member: Choice) -> ChoiceCaller | None:
        """The choice with its code; None where Inductor cannot make any."""
        if (sibling := self.siblings.get(id(member))) is not None:
            member.layout = sibling.layout
        caller = _caller(member)
        self.order.setdefault(id(caller), self.order.get(id(member), len(self.order)))
        return caller


def late_choice(template: Any, arguments: Mapping[str, Any]) -> KernelTemplateChoice:
    """A choice that `maybe_append_choice` was to list, without its code."""
    from torch._inductor.kernel_template_choice import KernelTemplateChoice
    from torch._inductor.template_heuristics.params import DictKernelTemplateParams

    own = {name: value for name, value in arguments.items() if name not in ("input_nodes", "layout")}
    inputs = SimpleNamespace(nodes=lambda: arguments["input_nodes"])
    return KernelTemplateChoice(template, DictKernelTemplateParams(own), {}, arguments["layout"], inputs)


def with_code(choices: Iterable[Choice]) -> list[ChoiceCaller]:
    """The same choices, with the code of those that had none; without those that Inductor can make none for."""
    return [caller for choice in choices if (caller := _caller(choice)) is not None]


def _caller(choice: Any) -> ChoiceCaller | None:
    template: Any = template_choice(choice)
    return template.choice if template is choice else choice
