"""Candidates, grids and sources that cost nothing until they are read: a stored decision reads none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from forecast_autotune.records import Candidate
from forecast_autotune.variants.entry import CallGrid
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.protocols import LaunchConfig, NamedArguments, VariantKernel


class LazyCandidates(Sequence[Candidate]):
    """The candidates as a sequence that costs nothing until it is read."""

    def __init__(self, configs: Mapping[Candidate, LaunchConfig]) -> None:
        self._configs = configs
        self._list: list[Candidate] | None = None

    def _all(self) -> list[Candidate]:
        if self._list is None:
            self._list = list(self._configs)
        return self._list

    def __getitem__(self, index: int | slice) -> Any:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._configs)

    def __contains__(self, item: object) -> bool:
        return item in self._configs


class LazyGrids(Mapping[Candidate, tuple[int, ...]]):
    """Grids per candidate, computed when first asked for: a stored decision needs none."""

    def __init__(self, compute: Callable[[], dict[Candidate, tuple[int, ...]]]) -> None:
        self._compute = compute
        self._found: dict[Candidate, tuple[int, ...]] | None = None

    def _all(self) -> dict[Candidate, tuple[int, ...]]:
        if self._found is None:
            self._found = self._compute()
            self.close()
        return self._found

    def close(self) -> None:
        """Let go of the call: what has not been asked for by now will not be known."""
        self._compute = dict

    def __getitem__(self, candidate: Candidate) -> tuple[int, ...]:
        return self._all()[candidate]

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


class LazySources(Mapping[str, str]):
    """Source by variant, the base kernel's under `base`; only a language model reads any.

    `functions` are the other kernels of a call by variant name; one whose source cannot be found is absent.
    """

    def __init__(self, base: str, functions: Mapping[str, VariantKernel]) -> None:
        self._base, self._functions = base, functions

    def __getitem__(self, variant: str) -> str:
        found = self._base if variant == "base" else self._functions[variant].source
        if not found:
            raise KeyError(variant)
        return str(found)

    def __iter__(self) -> Iterator[str]:
        return (name for name in ("base", *self._functions) if self.get(name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def candidate_grids(
    call: KernelCall, grid: CallGrid, named: NamedArguments
) -> dict[Candidate, tuple[int, ...]]:
    """Launch grids of all candidates, as far as they depend on the config or are a variant's own."""
    own = {c: config for c, config in call.configs.items() if c.variant not in call.functions}
    found = describe.launch_grids(own, grid, named, call.tuner.fn)
    for candidate, config in call.configs.items():
        if candidate.variant in call.functions:
            extent = call.functions[candidate.variant].grid(grid, named, config)
            if extent is not None:
                found[candidate] = extent
    return found
