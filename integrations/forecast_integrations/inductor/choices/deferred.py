"""A template's choice whose code is generated when it is asked for.

Inductor generates the code of every choice that it lists, for about 5 ms each, where a few of some twenty are
compiled. Of matrix products it can list choices without code (`KernelTemplateChoice`), of convolutions it cannot.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._inductor.ir import ChoiceCaller, IRNode, Layout
    from torch._inductor.select_algorithm import TritonTemplate, TritonTemplateCaller

_UNSET = object()


class DeferredChoice:
    """Stands for a `TritonTemplateCaller` of the same name, description, inputs and layout.

    Whoever asks for anything else that its class or its constructor gives one has it generated, and is answered by it.
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
        found: ChoiceCaller | None = self._made
        return found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not _is_asked_of_callers(name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        choice = self.made()
        if choice is None:
            raise AttributeError(f"Inductor can make no code for {self.name}, which was asked for its {name}")
        return getattr(choice, name)


def with_code(choices: Iterable[Any]) -> list[ChoiceCaller]:
    """The same choices, with the code of those that had none; without those that Inductor can make none for."""
    made = (choice.made() if isinstance(choice, DeferredChoice) else choice for choice in choices)
    return [choice for choice in made if choice is not None]


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
    """What `TritonTemplate.generate` takes by name; anything else is a parameter of the template."""
    from torch._inductor.select_algorithm import TritonTemplate

    parameters = inspect.signature(TritonTemplate.generate).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD)


@cache
def _is_asked_of_callers(name: str) -> bool:
    """Whether a template's choice with code has this attribute."""
    from torch._inductor.select_algorithm import TritonTemplateCaller

    made_by = inspect.signature(TritonTemplateCaller.__init__).parameters
    return hasattr(TritonTemplateCaller, name) or name in made_by
