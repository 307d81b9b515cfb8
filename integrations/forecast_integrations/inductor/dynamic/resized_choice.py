"""A choice as it would be timed at another size: the same code, launched for other sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forecast_integrations.inductor.choices.records import size_hints, unwrap_choice

if TYPE_CHECKING:
    from torch._inductor.ir import ChoiceCaller

REGENERATE_ATTRIBUTE = "forecast_autotune_regenerate"
"""Attribute of a template's choice: a function that makes it anew, for the hints then in force."""
RESIZABLE_KINDS = frozenset(
    ("ExternKernelCaller", "TritonTemplateCaller", "CppTemplateCaller", "SubgraphChoiceCaller")
)
"""Classes of choices that can be timed at another size."""


class NotResizableError(Exception):
    """A choice cannot be timed at another size: why."""


def resized_choice(choice: ChoiceCaller) -> ChoiceCaller:
    """The choice for the sizes that are hints now (see `replaced_hints`), to be timed and nothing else.

    Raises `NotResizableError` where it cannot be made, or its code would be another one: the code that is compiled
    for the size that was met is what runs at all sizes.
    """
    inner: Any = unwrap_choice(choice)
    kind = type(inner).__name__
    if kind == "ExternKernelCaller":  # called with tensors alone
        return choice
    if kind == "SubgraphChoiceCaller":
        if not hasattr(inner, "sym_input_values"):
            raise NotResizableError("this release of torch times graphs at the met size only")
        other = _copied(inner)
        other.sym_input_values = list(size_hints(inner.sym_inputs))
        return other
    regenerate = getattr(inner, REGENERATE_ATTRIBUTE, None)
    if regenerate is None:
        raise NotResizableError(f"choices of class {kind} are timed at the met size only")
    other = regenerate()
    if other is None or other.hash_key() != inner.hash_key():
        raise NotResizableError(f"{choice.name} has other code at other sizes")
    if hasattr(inner, "_benchmark_with_cudagraphs"):
        other._benchmark_with_cudagraphs = inner._benchmark_with_cudagraphs
    if inner is choice:
        return other
    wrapper = _copied(choice)
    wrapper._wrapped = other
    return wrapper


def _copied(choice: Any) -> Any:
    """A second object with the same attributes; wrappers of C++ templates hand `copy` on to what they wrap."""
    other = object.__new__(type(choice))
    vars(other).update(vars(choice))
    return other
