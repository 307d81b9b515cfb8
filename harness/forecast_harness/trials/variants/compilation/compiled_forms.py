"""What Triton compiles a kernel anew for, and which of it a verification has compiled already."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from forecast_autotune.records import Argument, Config

_INT32 = 1 << 31


def call_form(arguments: Sequence[Argument], scalars: Mapping[str, Any]) -> Hashable:
    """What of a call decides how a kernel is compiled for it, beside the config: calls of one form share a binary.

    Dtypes and alignment of tensors; of whole numbers whether they are one, multiples of sixteen and how long; every
    other value as it is. Too fine a form costs a compilation, and is no mistake.
    """
    tensors = [(a.name, a.dtype, a.aligned) for a in arguments if a.kind == "tensor"]
    constants = {a.name for a in arguments if a.kind == "constexpr"}
    numbers = [(name, _scalar_form(value, name in constants)) for name, value in scalars.items()]
    return tuple(tensors), tuple(sorted(numbers, key=lambda item: item[0]))


def _scalar_form(value: Any, constant: bool) -> Hashable:
    if isinstance(value, int) and not isinstance(value, bool) and not constant:
        return value == 1, value % 16 == 0, -_INT32 <= value < _INT32
    if isinstance(value, float) and not constant:
        return "float"
    return repr(value)


class CompiledForms:
    """Which configs a variant was compiled with for which calls, and how often each was launched."""

    def __init__(self) -> None:
        self._forms: dict[Config, set[Hashable]] = {}
        self._launches: Counter[Config] = Counter()

    def note(self, config: Config, form: Hashable | None) -> None:
        """It is launched so, and compiled for that; None where it cannot be."""
        if form is not None:
            self._forms.setdefault(config, set()).add(form)
        self._launches[config] += 1

    def instead_of(
        self, config: Config, among: Sequence[Config], form_with: Callable[[Config], Hashable | None]
    ) -> Config:
        """The config to launch a call with that was drawn for `config`: itself, if it was compiled for such a call.

        Else the least launched of `among` that was, and whose tiles are no larger: sizes were drawn to go beyond
        these, too. Itself where there is none. `form_with`: the call's form under a config; None where it has none.
        """
        own = form_with(config)
        if own is None or own in self._forms.get(config, ()):
            return config
        limit = largest_tile(config)
        able = [
            c
            for c in among
            if c in self._forms and largest_tile(c) <= limit and form_with(c) in self._forms[c]
        ]
        return min(able, key=lambda c: self._launches[c], default=config)


def largest_tile(config: Config) -> int:
    """The largest whole number among a config's meta-parameters; 0 without one."""
    numbers = [v for _, v in config.kwargs if isinstance(v, int) and not isinstance(v, bool)]
    return max(numbers, default=0)
