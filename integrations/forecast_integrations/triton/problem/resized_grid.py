"""A launch grid at another size: a user's grid function, with what it has closed over replaced."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import CellType, FunctionType, ModuleType
from typing import Any

from forecast_autotune.records import Argument
from forecast_autotune.variants.entry import CallGrid
from forecast_integrations.triton.problem.inferred_grid import infer_grids
from forecast_integrations.triton.problem.rebuilt_call import RebuildError, RecordedGrids
from forecast_integrations.triton.problem.resized_call import ResizedArguments
from forecast_integrations.triton.protocols import is_tensor


class _ReadNames(dict[str, Any]):
    """A dict that remembers which of its names were read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def resize_grid(
    grid: CallGrid,
    name: str,
    resized: ResizedArguments,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    parameters: Mapping[str, Any],
) -> CallGrid:
    """The launch grid at another size.

    Numbers follow the argument `name` if they are equal to it, or to the elements of a tensor that follows it. A
    function may read the argument, or such a tensor, from the parameters that it is given, or have one of them in its
    closure, among its defaults or as a global; there they are replaced. `before` and `after` are the arguments by name
    at both sizes, `parameters` the meta-parameters of some config, to see what the function reads. Raises
    `RebuildError` where it depends on what may follow the argument in a way that cannot be seen.
    """
    if isinstance(grid, RecordedGrids):
        return RecordedGrids(infer_grids(grid.known, resized.before, resized.arguments))
    sizes = _sizes(resized.before)
    if isinstance(grid, Sequence):
        if strange := [n for n in grid if n not in resized.changed and n not in sizes]:
            raise RebuildError(
                f"the launch grid {grid} is fixed, and how {strange[0]} follows cannot be told"
            )
        return tuple(resized.changed.get(n, n) for n in grid)
    if not isinstance(grid, FunctionType):
        raise RebuildError("the launch grid is no plain function, so that what it depends on cannot be seen")
    tensors = {id(value): after[n] for n, value in before.items() if is_tensor(value) and n in after}
    count = 0
    unseen: list[str] = []

    def moved(value: object, called: str) -> object:
        nonlocal count
        new = value
        if is_tensor(value):
            new = tensors.get(id(value), value)
            known = id(value) in tensors
        elif type(value) is int:
            own = before.get(called)
            is_own = type(own) is int and own == value
            new = after.get(called, value) if is_own else resized.changed.get(value, value)
            known = is_own or value in sizes
        else:
            known = callable(value) or isinstance(value, ModuleType | str | float | bool | type(None))
        count += new is not value
        if new is value and not known:
            unseen.append(called)
        return new

    made = rebound_function(grid, moved)
    follows = count or _reads(grid, {**before, **parameters}) & _following(name, before, after)
    if unseen and not follows:
        raise RebuildError(
            f"the launch grid does not follow {name}, as far as can be seen, but depends on {', '.join(unseen)}: let "
            f"it read {name} from its parameters, or give `rebuild=`"
        )
    return made


def _sizes(arguments: Sequence[Argument]) -> set[int]:
    """Numbers that are no riddle in a launch grid: sizes of the call, and what is no size."""
    found = {0, 1}
    for a in arguments:
        if a.kind == "tensor":
            found |= {*a.shape, *a.stride, math.prod(a.shape)}
        elif type(a.value) is int:
            found.add(a.value)
    return found


def rebound_function(function: FunctionType, moved: Callable[[object, str], object]) -> FunctionType:
    """A copy of a function in which `moved(value, name)` stands for whatever it has closed over, or reads by default
    or from its module; the function itself stays as it is."""
    code = function.__code__
    cells = tuple(
        CellType(moved(_content(cell), called))
        for called, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)
    )
    named = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    new_defaults = tuple(
        moved(value, called)
        for called, value in zip(named[len(named) - len(defaults) :], defaults, strict=True)
    )
    read = function.__globals__
    shared = {n: new for n in code.co_names if n in read and (new := moved(read[n], n)) is not read[n]}
    made = FunctionType(
        code, {**read, **shared} if shared else read, function.__name__, new_defaults or None, cells or None
    )
    made.__kwdefaults__ = {n: moved(v, n) for n, v in (function.__kwdefaults__ or {}).items()} or None
    return made


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _reads(grid: Callable[[Mapping[str, Any]], Any], parameters: Mapping[str, Any]) -> set[str]:
    shown = _ReadNames(parameters)
    try:
        grid(shown)
    except Exception as error:
        raise RebuildError(
            f"the launch grid cannot be asked ({type(error).__name__}: {error})"[:300]
        ) from error
    return shown.read


def _following(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Names of arguments that differ between the sizes."""

    def shape(value: Any) -> object:
        return tuple(value.shape) if is_tensor(value) else value

    return {name} | {n for n in before if n in after and shape(before[n]) != shape(after[n])}
