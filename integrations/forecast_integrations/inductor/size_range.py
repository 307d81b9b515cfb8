"""Which size of an operation is dynamic, in what range, and what Inductor would do at another size.

The range is what the program declared, or what the user has set.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from forecast_autotune.errors import SettingsError
from forecast_autotune.ranges.robust import Robust, spread_points
from forecast_integrations.inductor.choices.records import size_hints, unwrap_choice

if TYPE_CHECKING:
    from torch._inductor.ir import ChoiceCaller, IRNode, Layout


MEASURED = 4
"""Sizes of a range that are measured, the one that was met among them, or one more."""
_GUARDED_STEPS = 64
"""How far from a size that guards rule out another one is looked for."""
DECLARED, HINT = "declared", "hint"
"""Words of the setting `inductor_dynamic`; else it is a range."""


def dynamic_sizes_text(given: str | tuple[int, int] | None) -> str | None:
    """The option `dynamic_sizes` as the setting has it. Raises `SettingsError` for what is no range."""
    if given is None or isinstance(given, str):
        return given
    try:
        low, high = given
    except (TypeError, ValueError):
        low = high = -1
    if type(low) is not int or type(high) is not int or low < 1:
        raise SettingsError(f"dynamic_sizes is {DECLARED}, {HINT} or (lowest, highest), got {given!r:.60}")
    return f"{low}..{high}"


class NoRangeError(Exception):
    """An operation has a dynamic size, and is tuned at the one that was met: why."""


@dataclass(frozen=True)
class SizeRange:
    """The one dynamic size of an operation that has a range."""

    symbol: Symbol
    low: int
    high: int
    hint: int
    """The size that was met, for which Inductor tunes."""
    measured: tuple[int, ...]
    """Sizes that are measured, ascending; the hint is one of them."""

    @property
    def label(self) -> str:
        """`2..512`."""
        return f"{self.low}..{self.high}"

    def robust(self) -> Robust:
        """The points that the range is judged at, and how they count."""
        return Robust(str(self.symbol), (self.low, self.high), at=self.measured)


def size_range(input_nodes: Sequence[IRNode], layout: Layout | None, setting: str) -> SizeRange | None:
    """The range of an operation's dynamic size; None where all of its sizes are static.

    `setting` is that of FORECAST_AUTOTUNE_INDUCTOR_DYNAMIC. Needs an active graph. Raises `NoRangeError` where there
    are dynamic sizes, and the operation is tuned at the one that was met nevertheless.
    """
    symbols = sorted(dynamic_symbols(input_nodes, layout), key=str)
    if not symbols:
        return None
    if setting == HINT:
        raise NoRangeError("the setting says so")
    from torch._inductor.virtualized import V

    environment = V.graph.sizevars.shape_env
    bounds = _declared_bounds(environment)
    if setting != DECLARED:
        low, _, high = setting.partition("..")
        bounds = {**dict.fromkeys(symbols, (int(low), int(high))), **bounds}
    ranged = [s for s in symbols if s in bounds]
    names = ", ".join(map(str, symbols))
    if not ranged:
        raise NoRangeError(f"no range is declared for {names}: mark_dynamic(tensor, dim, min=..., max=...)")
    if len(ranged) > 1:
        raise NoRangeError(f"{len(ranged)} of its sizes have ranges ({names}), and one is served")
    return _measured_range(environment, ranged[0], *bounds[ranged[0]])


def _measured_range(environment: Any, symbol: Symbol, low: int, high: int) -> SizeRange:
    (hint,) = size_hints([symbol])
    known = environment.var_to_range.get(symbol)
    low, high = max(1, low, _as_int(known, "lower") or 1), min(high, _as_int(known, "upper") or high)
    if not low <= hint <= high:
        raise NoRangeError(f"the size that was met, {hint}, lies outside {low}..{high}")
    if low == high:
        raise NoRangeError("its range is a single size")
    spread = spread_points(range(low, high + 1), MEASURED)
    # The hint is measured in any case, and stands for an inner size that is near to it.
    far = [n for n in spread if n in (low, high) or abs(math.log2(n / hint)) > 1]
    near = (_nearest_served(environment, symbol, n, range(low, high + 1)) for n in far)
    measured = sorted({hint, *(n for n in near if n is not None)})
    if len(measured) < 2:
        raise NoRangeError(f"the program's guards serve no size near {', '.join(map(str, far))}")
    return SizeRange(symbol, measured[0], measured[-1], hint, tuple(measured))


def _nearest_served(environment: Any, symbol: Symbol, wanted: int, values: range) -> int | None:
    """The size nearest to the wanted one that the compiled graph would serve, as far as guards on it alone say."""
    import sympy  # type: ignore[import-untyped]

    alone = [g.expr for g in getattr(environment, "guards", ()) if g.expr.free_symbols == {symbol}]
    for step in range(_GUARDED_STEPS):
        for value in (wanted - step, wanted + step):
            given = {symbol: sympy.Integer(value)}
            if value in values and all(expr.xreplace(given) != sympy.false for expr in alone):
                return value
    return None


def dynamic_symbols(input_nodes: Sequence[IRNode], layout: Layout | None) -> set[Symbol]:
    """The symbols in the sizes, strides and offsets of an operation's operands and result."""
    from torch._inductor.virtualized import V

    symbols: set[Symbol] = set()
    for expression in _extents(input_nodes, layout):
        if getattr(expression, "free_symbols", None):
            sizes: Any = V.graph.sizevars
            symbols |= sizes.simplify(sizes.remove_precomputed_replacements(expression)).free_symbols
    return symbols


def _extents(input_nodes: Iterable[IRNode], layout: Layout | None) -> Iterator[Any]:
    for node in input_nodes:
        yield from (*node.get_size(), *node.get_stride())
    if layout is not None and hasattr(layout, "size"):
        yield from (*layout.size, *layout.stride)


def _declared_bounds(environment: Any) -> dict[Symbol, tuple[int, int]]:
    """Ranges that `mark_dynamic(..., min=, max=)` declared, by symbol; guards narrow the symbol's own range, too."""
    bounds_of: dict[Symbol, tuple[int, int]] = {}
    for tracked in getattr(environment, "tracked_fakes", None) or ():
        constraints = getattr(getattr(tracked, "symbolic_context", None), "constraint_sizes", None) or ()
        for size, constraint in zip(getattr(tracked.fake, "shape", ()), constraints, strict=False):
            bounds, node = getattr(constraint, "vr", None), getattr(size, "node", None)
            high = _as_int(bounds, "upper")
            if node is None or high is None:
                continue
            symbol = environment.simplify(node.expr)
            if getattr(symbol, "is_Symbol", False):
                bounds_of[symbol] = (_as_int(bounds, "lower") or 1, high)
    return bounds_of


def _as_int(bounds: Any, name: str) -> int | None:
    """An end of a range of values; None where it has none."""
    value: Any = getattr(bounds, name, None)
    return int(value) if getattr(value, "is_Integer", False) or type(value) is int else None


Symbol: TypeAlias = Any
"""A sympy symbol that stands for a size."""

_HINT_METHODS = ("optimization_hint", "size_hint")
"""Methods that every other question for hints goes through: one of them until torch 2.9, both or the first later."""


@contextlib.contextmanager
def replaced_hints(values: Mapping[Symbol, int]) -> Iterator[None]:
    """While it lasts, the active graph's hints are those of these values of its symbols.

    Only hints are answered so. Guards are evaluated with the sizes that were met, as ever, so no guard
    comes of it. Raises `LookupError` where this release of torch asks for hints in another way.
    """
    from torch._inductor.virtualized import V

    sizes: Any = V.graph.sizevars
    names = [name for name in _HINT_METHODS if hasattr(type(sizes), name)]
    before = {name: vars(sizes)[name] for name in names if name in vars(sizes)}
    for name in names:
        setattr(sizes, name, _with_values(sizes, getattr(sizes, name), values))
    try:
        ask = getattr(sizes, "optimization_hints", None) or sizes.size_hints
        if tuple(ask(list(values))) != tuple(values.values()):
            raise LookupError("this release of torch has other size hints than those that are known")
        yield
    finally:
        for name in names:
            if name in before:
                setattr(sizes, name, before[name])
            else:
                delattr(sizes, name)


def _with_values(sizes: Any, original: Any, values: Mapping[Symbol, int]) -> Any:
    def hint(expr: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(expr, "free_symbols", None):
            # A symbol may stand for a precomputed size, or be equal to another one.
            expr = sizes.simplify(sizes.remove_precomputed_replacements(expr))
            if getattr(expr, "free_symbols", None):
                expr = expr.xreplace(dict(values))
        return original(expr, *args, **kwargs)

    return hint


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
