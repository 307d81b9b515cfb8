"""The decorator under test, the arguments of a launch, a scripted clock, and a launch recorder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

from tests.integrations.interpreted.kernels import double

VERSION = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:2])

Decorator = Callable[..., Callable[[Any], Autotuner]]


def decorator(implementation: str, *, exhaustive: bool = False) -> Decorator:
    """`triton.autotune` or ours with Triton's signature; ours keeps what it learns in memory only."""
    if implementation == "triton":
        return triton.autotune
    from forecast_autotune import autotune

    mode = "exhaustive" if exhaustive else None

    def ours(*args: Any, **kwargs: Any) -> Callable[[Any], Autotuner]:
        return autotune(*args, **kwargs, store=False, mode=mode)

    return ours


def blocks(*sizes: int, **options: Any) -> list[triton.Config]:
    """One config per BLOCK size."""
    return [triton.Config({"BLOCK": size}, **options) for size in sizes]


def number(scalar: Any) -> int:
    """A grid's scalar as an int: the interpreter hands it over as one of its own tensors.

    `int()` of that tensor fails with the interpreter of Triton 3.6 and a recent numpy.
    """
    return scalar if isinstance(scalar, int) else int(scalar.handle.data.item())


def grid(meta: Mapping[str, Any]) -> tuple[int]:
    """As many programs as cover `n`."""
    return (triton.cdiv(number(meta["n"]), meta["BLOCK"]),)


@dataclass
class Vector:
    """The arguments of the kernels in `kernels.py`, with a margin behind `n` that nobody may write."""

    n: int = 40
    x: torch.Tensor = field(init=False)
    out: torch.Tensor = field(init=False)
    tag: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.x = torch.arange(1.0, self.n + 257)
        self.out = torch.zeros(self.n + 256)
        self.tag = torch.zeros(2, dtype=torch.int32)

    @property
    def args(self) -> tuple[Any, ...]:
        """Positional arguments of `double`."""
        return self.x, self.out, self.tag, self.n

    @property
    def block(self) -> int:
        """BLOCK of the latest launch."""
        return int(self.tag[0])

    def doubled(self) -> bool:
        """Whether `out` is 2 x up to `n` and untouched behind it."""
        n = self.n
        return torch.equal(self.out[:n], 2 * self.x[:n]) and not bool(self.out[n:].any())


@dataclass
class Clock:
    """A `do_bench` that launches once and answers from a script, by the BLOCK it finds in `tag`.

    A time that is an exception is raised instead, after the launch.
    """

    tag: torch.Tensor
    ms: Mapping[int, float | Sequence[float] | BaseException] = field(default_factory=dict)
    timed: list[int] = field(default_factory=list)
    quantiles: list[Any] = field(default_factory=list)

    def __call__(self, kernel_call: Callable[[], object], quantiles: Any) -> Any:
        kernel_call()
        block = int(self.tag[0])
        self.timed.append(block)
        self.quantiles.append(quantiles)
        answer = self.ms.get(block, 1.0)
        if isinstance(answer, BaseException):
            raise answer
        return list(answer) if isinstance(answer, Sequence) else [answer] * 3


@dataclass
class Run:
    """A tuner over a kernel, the arguments of its calls, and its clock."""

    tuner: Any
    vector: Vector
    clock: Clock

    def launch(self, **extra: Any) -> Any:
        """Call it; returns what the kernel returns."""
        return self.tuner[grid](*self.vector.args, **extra)

    @property
    def timings(self) -> dict[int, list[float]]:
        """The times that the tuner shows, by BLOCK."""
        return {block_of(config): list(times) for config, times in self.tuner.configs_timings.items()}


def tuned(
    decorate: Decorator,
    configs: list[triton.Config],
    ms: Mapping[int, float | Sequence[float] | BaseException] | None = None,
    *,
    kernel: Any = None,
    n: int = 40,
    **options: Any,
) -> Run:
    """A tuner over `double` or another kernel, keyed by `n`, whose clock answers from `ms`."""
    vector = Vector(n)
    clock = Clock(vector.tag, ms or {})
    given = {"key": ["n"], "do_bench": clock, **options}
    return Run(decorate(configs=configs, **given)(kernel or double), vector, clock)


def launched(*args: Any, **options: Any) -> Run:
    """The same, called once."""
    run = tuned(*args, **options)
    run.launch()
    return run


def launch_timed(tuner: Any, vector: Vector, ms: Mapping[int, float | BaseException]) -> None:
    """Launch with a new clock on the tuner, one that answers from `ms` for this vector."""
    tuner.do_bench = Clock(vector.tag, ms)
    tuner[grid](*vector.args)


class Wrapper(KernelInterface):  # type: ignore[misc]
    """A kernel wrapper as libraries write them: calls `before`, launches, and returns a value of its own."""

    def __init__(self, fn: Any, before: Callable[[dict[str, Any]], object] | None = None) -> None:
        self.fn = fn
        self.arg_names = fn.arg_names
        self.before = before
        self.launches: list[dict[str, Any]] = []

    def run(self, *args: Any, **kwargs: Any) -> tuple[str, int]:
        self.launches.append(kwargs)
        if self.before is not None:
            self.before(kwargs)
        self.fn.run(*args, **kwargs)
        return ("launched", kwargs["BLOCK"])


def block_of(config: triton.Config) -> int:
    """The BLOCK of a config made by `blocks`."""
    return int(config.kwargs["BLOCK"])
