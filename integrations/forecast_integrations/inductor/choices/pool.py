"""Choices of one operation by candidate, those whose code Inductor has not generated yet included."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from forecast_autotune.records import Candidate
from forecast_integrations.inductor.choices.records import (
    candidate_of,
    is_extern,
    template_choice,
    unwrap_choice,
)

if TYPE_CHECKING:
    from torch._inductor.ir import ChoiceCaller, IRNode, Layout
    from torch._inductor.kernel_template_choice import KernelTemplateChoice
    from torch._inductor.select_algorithm import TritonTemplate, TritonTemplateCaller

    from forecast_integrations.inductor.choices.records import Choice

_RESERVE_ANNOTATION = "forecast_autotune"
"""Annotation of a template choice that leads to its group."""


@dataclass
class ReservedChoices:
    """Template choices of one list that were kept from code generation, for later rounds."""

    reserve: dict[Candidate, KernelTemplateChoice] = field(default_factory=dict)


def annotate_choice(choice: KernelTemplateChoice, group: ReservedChoices) -> None:
    """Lead from a template choice to its group; its `ChoiceCaller` has the same annotations, where there are any."""
    if (annotations := getattr(choice, "annotations", None)) is not None:
        annotations[_RESERVE_ANNOTATION] = group


class ChoicePool(dict[Candidate, list["Choice"]]):
    """Choices by candidate, those whose code has not been generated yet included."""

    def __init__(self, choices: Sequence[ChoiceCaller]) -> None:
        super().__init__()
        self.order = {id(choice): i for i, choice in enumerate(choices)}
        self.siblings: dict[int, Choice] = {}
        """A choice of the same list as a reserved one, by the reserved one's id: it has the final layout."""
        self.kinds = set(map(_kind, choices))
        groups: dict[int, tuple[ReservedChoices, KernelTemplateChoice]] = {}
        for choice in choices:
            self.setdefault(candidate_of(choice), []).append(choice)
            ktc = template_choice(choice)
            if ktc is not None and (group := ktc.annotations.get(_RESERVE_ANNOTATION)) is not None:
                groups.setdefault(id(group), (group, ktc))
        for group, sibling in groups.values():
            for candidate, reserved in group.reserve.items():
                if candidate not in self:
                    self[candidate] = [reserved]
                    self.siblings[id(reserved)] = sibling

    def externs(self) -> list[Candidate]:
        """The vendor library's candidates."""
        return [candidate for candidate, members in self.items() if is_extern(members[0])]

    def choices(
        self,
        wanted: Sequence[Candidate],
        drop: Callable[[Candidate], None],
        enough: int | None = None,
    ) -> list[ChoiceCaller]:
        """The choices of these candidates; code is generated where it is missing.

        Candidates that Inductor cannot make code for leave the pool, and `drop` is told. With `enough`, it
        stops after so many candidates.
        """
        listed: list[ChoiceCaller] = []
        count = 0
        for candidate in wanted:
            callers = [c for member in self.get(candidate, ()) if (c := self._made(member)) is not None]
            if not callers:
                self.pop(candidate, None)
                drop(candidate)
                continue
            self[candidate] = callers
            listed += callers
            count += 1
            if enough is not None and count >= enough:
                break
        return sorted(listed, key=lambda choice: self.order.get(id(choice), len(self.order)))

    def _made(self, member: Choice) -> ChoiceCaller | None:
        """The choice with its code; None where Inductor cannot make any."""
        choice: Any = member
        if (sibling := self.siblings.get(id(member))) is not None:
            member.layout = sibling.layout
            choice = member.choice
        if isinstance(choice, DeferredChoice):
            caller = choice.made()
            if caller is not None and id(choice) in self.order:
                self.order[id(caller)] = self.order[id(choice)]
            return caller
        return choice


def _kind(choice: Choice) -> type:
    """The class of a choice, or of what it is made into."""
    inner = unwrap_choice(choice)
    return type(inner) if not isinstance(inner, DeferredChoice) else inner.kind


_UNSET = object()


class DeferredChoice:
    """Stands for a `TritonTemplateCaller` of the same name, description, inputs and layout.

    A request for anything else that its class or its constructor gives one has it generated, and is answered by it.
    """

    def __init__(self, template: TritonTemplate, append: Any, arguments: Mapping[str, Any]) -> None:
        """`append` is Inductor's `maybe_append_choice`, and `arguments` are what it was called with.

        Raises `KeyError` where these are not a template's.
        """
        self.input_nodes: Sequence[IRNode] = list(arguments["input_nodes"])
        self.layout: Layout = arguments["layout"]
        self.name = f"triton_{template.name}_0"
        self.description = describe(arguments)
        self.hint_override = None
        self._template, self._append, self._arguments = template, append, dict(arguments)
        self._made: Any = _UNSET
        self._own = frozenset(vars(self)) | {"_own"}
        self.annotations: dict[str, Any] = {}

    @property
    def kind(self) -> type[TritonTemplateCaller]:
        """The class of the choice that it is made into."""
        from torch._inductor.select_algorithm import TritonTemplateCaller

        return TritonTemplateCaller

    def made(self) -> ChoiceCaller | None:
        """The choice with its code, made once; None where Inductor can make none. Raises what that raises."""
        if self._made is _UNSET:
            listed: list[ChoiceCaller] = []
            self._append(self._template, listed, **self._arguments)
            self._made = listed[0] if listed else None
            if self._made is not None:
                # What somebody has set meanwhile was meant for it.
                vars(self._made).update({n: v for n, v in vars(self).items() if n not in self._own})
        choice: ChoiceCaller | None = self._made
        return choice

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not _is_asked_of_callers(name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        choice = self.made()
        if choice is None:
            raise AttributeError(f"Inductor can make no code for {self.name}, which was asked for its {name}")
        return getattr(choice, name)


def with_code(choices: Iterable[Any]) -> list[ChoiceCaller]:
    """The same choices, with the code of those that had none; without those that Inductor can make none for."""
    callers = (choice.made() if isinstance(choice, DeferredChoice) else choice for choice in choices)
    return [choice for choice in callers if choice is not None]


def describe(arguments: Mapping[str, Any]) -> str:
    """The description that a template gives a choice of these arguments.

    Source: `make_extra` in torch's `_inductor/select_algorithm.py`, the same in 2.9 to 2.13.
    """
    from torch._inductor import select_algorithm

    named = _named_arguments()
    own = sorted(name for name in arguments if name not in named)
    options = ["num_stages", "num_warps"]
    defaults: dict[str, Any] = {}
    if getattr(select_algorithm, "HAS_WARP_SPEC", False):
        defaults = {"num_consumer_groups": 0, "num_buffers_warp_spec": 0}
    parts = [f"{name}={arguments[name]!r}" for name in own]
    parts += [f"{name}={arguments[name]}" for name in options]
    parts += [f"{name}={arguments.get(name, default)}" for name, default in defaults.items()]
    return "-".join(parts).strip("-").replace("-", ", ")


@cache
def _named_arguments() -> frozenset[str]:
    """Arguments that `TritonTemplate.generate` names; anything else is a parameter of the template."""
    from torch._inductor.select_algorithm import TritonTemplate

    parameters = inspect.signature(TritonTemplate.generate).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD)


@cache
def _is_asked_of_callers(name: str) -> bool:
    """Whether a template's choice with code has this attribute."""
    from torch._inductor.select_algorithm import TritonTemplateCaller

    made_by = inspect.signature(TritonTemplateCaller.__init__).parameters
    return hasattr(TritonTemplateCaller, name) or name in made_by
