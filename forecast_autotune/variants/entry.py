"""The entry of an imported variant, or of its base kernel: the launch, its grid, and the tensors to zero first.

Used by the launcher in a user's process and by the one in a sandbox, so that the verified code is the code that runs.
Knows neither triton nor torch: it is handed an imported module.
"""

from __future__ import annotations

import inspect
import sys
from collections import namedtuple
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.variants.contract import BASE_GRID, COUNTERS, MEMORY, WORKSPACE

Grid = tuple[int, ...]
CallGrid = Callable[[Mapping[str, Any]], Sequence[int]] | Sequence[int] | None
"""A call's own grid, as Triton takes it: numbers, or a function of the parameters by name."""


def heuristic_layers(fn: Any) -> list[dict[str, Callable[[dict[str, Any]], Any]]]:
    """The `values` of every `@heuristics` above a kernel, under a tuner or not, outermost first."""
    layers = []
    while hasattr(fn, "fn"):
        if isinstance(values := getattr(fn, "values", None), dict):
            layers.append(values)
        fn = fn.fn
    return layers


@dataclass(frozen=True)
class KernelEntry:
    """A kernel and how it wants to be launched."""

    kernel: Any
    """A `triton.jit` function, compiled or interpreted."""
    parameters: tuple[str, ...]
    """Runtime parameters in order, without those that a launch fills in."""
    meta: tuple[str, ...]
    """Constexpr parameters in order, without those that a launch fills in."""
    base: tuple[str, ...] = ()
    """Its parameters that are in `BASE_GRID`."""
    grid: Callable[..., Sequence[int]] | None = None
    """The module's own `grid`."""
    reset_to_zero: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    """`WORKSPACE` and `COUNTERS`, where it takes them."""
    workspace: Callable[..., Sequence[int]] | None = None
    """The module's own `workspace`."""

    @classmethod
    def of(cls, module: Mapping[str, Any], kernel: str) -> KernelEntry:
        """The entry of a module's names. Raises `RecordError` when it is not there."""
        result = module.get(kernel)
        if result is None:
            raise RecordError(f"the module defines no {kernel!r}")
        runtime, meta = signature(result)
        workspace = module.get("workspace")
        # A kernel's helper may have this name, too.
        size_function = workspace if inspect.isfunction(workspace) else None
        memory = tuple(name for name in runtime if size_function is not None and name in MEMORY)
        return cls(
            result,
            tuple(name for name in runtime if name not in BASE_GRID and name not in memory),
            tuple(name for name in meta if name not in BASE_GRID),
            tuple(name for name in (*runtime, *meta) if name in BASE_GRID),
            module.get("grid"),
            tuple(module.get("RESET_TO_ZERO", ())),
            memory,
            size_function,
        )

    def launch_grid(
        self, grid: CallGrid, named: Mapping[str, Any], meta: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Grid:
        """The launch grid for these arguments, meta-parameters and launch options (`num_warps` and the like).

        A module's own `grid` finds the options among the meta-parameters. Raises what a grid function raises.
        """
        if self.grid is None:
            return grid_extent(grid, named, meta)
        positional = {**options, **meta}, dict(named)  # the variant's function may change them
        own = (known(grid, named, meta),) if self._asks_for_base else ()
        return tuple(map(int, self.grid(*positional, *own)))

    @cached_property
    def is_direct(self) -> bool:
        """Whether nothing of its own precedes a launch but its grid and memory, which alone follow from the call's."""
        return not self.base and not self.reset_to_zero

    @cached_property
    def _leading(self) -> tuple[str, ...]:
        """The runtime parameters that precede all others."""
        return tuple(takewhile(self.parameters.__contains__, self.kernel.arg_names))

    @cached_property
    def _takes(self) -> frozenset[str]:
        return frozenset((*self.parameters, *self.meta))

    @cached_property
    def _asks_for_base(self) -> bool:
        return self.grid is not None and len(inspect.signature(self.grid).parameters) > 2

    def arguments(
        self, grid: CallGrid, named: Mapping[str, Any], meta: Mapping[str, Any], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Keyword arguments of a launch: this kernel's part of the call and the config.

        A meta-parameter of the config beats one of the call. Raises `RecordError` where a variant wants
        the call's own grid, and that cannot be evaluated with the variant's meta-parameters.

        Memory of a launch is none of the device's here: code that is only compiled needs its types alone, and is
        compiled in processes that cannot reach a device.
        """
        result = self._without_memory(grid, named, meta, options)
        return {**result, **self._memory_without_device()} if self.memory else result

    def _memory_without_device(self) -> dict[str, Any]:
        torch = sys.modules["torch"]  # of the call's tensors
        kinds = {WORKSPACE: torch.float32, COUNTERS: torch.int32}
        return {name: torch.empty(0, dtype=kinds[name], device="meta") for name in self.memory}

    def _without_memory(
        self, grid: CallGrid, args: Mapping[str, Any], meta: Mapping[str, Any], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        takes = self._takes
        results = {name: value for name, value in {**args, **meta}.items() if name in takes}
        if self.base:
            own = known(grid, args, meta)
            if own is None:
                raise RecordError(
                    f"the variant's {', '.join(self.base)} need the call's own grid, which cannot be "
                    f"evaluated with the meta-parameters {sorted(meta)}: keep those that it uses"
                )
            whole = (*own, 1, 1, 1)
            results |= {name: whole[BASE_GRID[name]] for name in self.base}
        return {**results, **options}

    def _allocated(self, args: Mapping[str, Any], elements: Sequence[int]) -> dict[str, Any]:
        """Memory of one launch, where the call's tensors lie, by parameter.

        Raises `RecordError` for a call without tensors, and for what `workspace` may not return.
        """
        beside = next((value for value in args.values() if hasattr(value, "new_zeros")), None)
        if beside is None:
            raise RecordError("a variant that asks for a workspace needs a tensor among the call's arguments")
        counts = [int(n) for n in elements]
        if len(counts) != 2 or min(counts) < 0:
            raise RecordError(
                f"workspace must return two numbers of elements, of float32 and of int32: {elements!r:.80}"
            )
        torch = sys.modules["torch"]  # whose tensor it is
        results = {}
        if WORKSPACE in self.memory:
            results[WORKSPACE] = beside.new_empty((counts[0],), dtype=torch.float32)
        if COUNTERS in self.memory:
            results[COUNTERS] = beside.new_zeros((counts[1],), dtype=torch.int32)
        return results

    def run(
        self,
        grid: CallGrid,
        named: Mapping[str, Any],
        meta: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> Any:
        """Zero `reset_to_zero` and launch once; returns Triton's result."""
        grid = self._asked_once(grid, named, meta)
        keywords = self._without_memory(grid, named, meta, options)
        zeros = [named[n] for n in self.reset_to_zero if named.get(n) is not None]
        where, memory = self.place(grid, named, meta, options)
        keywords |= memory
        for tensor in zeros:
            tensor.zero_()
        # Triton takes positions in a fraction of the time that it needs for names.
        first = list(map(keywords.pop, takewhile(keywords.__contains__, self._leading)))
        return self.kernel.run(*first, grid=where, warmup=False, **keywords)

    def place(
        self, grid: CallGrid, named: Mapping[str, Any], meta: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[Grid, dict[str, Any]]:
        """The grid of one launch, and its memory by parameter. Raises what the functions for these raise."""
        grid = self._asked_once(grid, named, meta)
        where = self.launch_grid(grid, named, meta, options)
        if self.workspace is None or not self.memory:
            return where, {}
        elements = self.workspace({**options, **meta}, dict(named), known(grid, named, meta) or (), where)
        return where, self._allocated(named, elements)

    def _asked_once(self, grid: CallGrid, args: Mapping[str, Any], meta: Mapping[str, Any]) -> CallGrid:
        """A call's grid; a grid function is evaluated here where its numbers are needed more than once."""
        return ((self.base or self._asks_for_base or self.memory) and known(grid, args, meta)) or grid

    def warmup(
        self,
        grid: CallGrid,
        named: Mapping[str, Any],
        meta: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> Any:
        """Compile without launching; returns Triton's result."""
        where = self.launch_grid(grid, named, meta, options)
        return self.kernel.warmup(grid=where, **self.arguments(grid, named, meta, options))


def nested_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the names of arguments; all `name.0` and so on become a tuple, all `name.field` a named one."""
    if not any("." in name for name in values):
        return dict(values)
    groups: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        outer, _, member = name.partition(".")
        groups.setdefault(outer, {})[member] = value
    return {
        name: members[""] if "" in members else _tuple_of(nested_arguments(members))
        for name, members in groups.items()
    }


def flat_arguments(values: Mapping[str, Any], constants: Collection[str]) -> Iterator[tuple[str, Any]]:
    """The inverse, as deep as tuples and lists go; those among the `constants` stay whole."""
    for name, value in values.items():
        if isinstance(value, tuple | list) and value and name not in constants:
            places = getattr(value, "_fields", range(len(value)))
            yield from flat_arguments({f"{name}.{p}": v for p, v in zip(places, value, strict=True)}, ())
        else:
            yield name, value


def _tuple_of(members: Mapping[str, Any]) -> Any:
    if next(iter(members)).isdecimal():
        return tuple(members.values())
    return namedtuple("Members", members)(**members)


def signature(kernel: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(runtime parameters, constexpr parameters) of a live kernel, each in order, `BASE_GRID` included."""
    python = kernel
    while hasattr(python, "fn"):
        python = python.fn
    runtime: list[str] = []
    meta: list[str] = []
    for name, parameter in inspect.signature(python).parameters.items():
        annotation = parameter.annotation
        text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
        (meta if "constexpr" in text else runtime).append(name)
    return tuple(runtime), tuple(meta)


def grid_extent(grid: CallGrid, named: Mapping[str, Any], meta: Mapping[str, Any]) -> Grid:
    """A call's own grid as numbers. Raises what the grid function raises."""
    if grid is None:
        raise RecordError("the call has no launch grid: call the kernel as kernel[grid](...)")
    result = grid({**named, **meta}) if callable(grid) else grid
    return tuple(map(int, result))


def known(grid: CallGrid, named: Mapping[str, Any], meta: Mapping[str, Any]) -> Grid | None:
    """A call's own grid, or None where these meta-parameters do not determine it."""
    try:
        return grid_extent(grid, named, meta)
    except Exception:
        # A user's function that asks for a meta-parameter this variant does not have.
        return None
