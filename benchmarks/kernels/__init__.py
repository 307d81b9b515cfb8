"""Tunable Triton kernels in the style people write them, with inputs, references and config lists.

A `Case` is one kernel at one shape: enough to tune it, to check what it computed and to know how much
work was useful. The recording script measures every config of a case; the live benchmark lets the
tuner decide. Every module below this package, at any depth, lists its cases in `CASES` and says in
`FAMILY` what it computes and in `HAND` in whose style it is written: forecasts are judged on families
and on hands that they have not seen. The modules of one folder are one hand.
"""

from __future__ import annotations

import importlib
import itertools
import math
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import torch
import triton

from forecast_autotune.records import digest

Data: TypeAlias = dict[str, Any]
"""What `Case.make` returns: `args` (tuple, positional), `kwargs` (dict, by name), `grid` (callable of the
meta-parameters) and `outputs` (tuple of tensors among the arguments)."""

Space: TypeAlias = dict[str, Any]
"""`kwargs` (name -> values), `num_warps`, `num_stages` and optionally `where`, a rule over all of them."""


@dataclass(frozen=True)
class Case:
    """One kernel at one shape."""

    name: str
    """`family/shape`, for example `matmul/4096x4096x4096`."""
    kernel: Any
    """The `@triton.jit` function, or `@triton.heuristics` over it; never autotuned."""
    key: tuple[str, ...]
    """Names of the arguments the autotune key is made of."""
    space: Space
    """The config list a person would have written."""
    make: Callable[..., Data]
    """`make(device, small=False)`: seeded inputs and unset outputs. `small` gives a shape with ragged
    edges that the interpreter runs in about a second; the device `meta` gives shapes without memory."""
    reference: Callable[[Data], tuple[torch.Tensor, ...]]
    """Expected outputs in higher precision, from inputs alone; same order and shapes as `outputs`."""
    tolerance: tuple[float, float]
    """(atol, rtol) that a correct config stays within."""
    reset_to_zero: tuple[str, ...] = ()
    """Names of the arguments the kernel adds into."""
    flops: float = 0
    """Useful floating-point operations, by hand: no masked lanes, no recomputation."""
    bytes: float = 0
    """Bytes that must cross the memory bus once: every input read, every output written."""
    wide: Space | None = None
    """A space of a thousand configs or more, for search beyond the hand-written list."""
    family: str = ""
    """What is computed, coarsely: `FAMILY` of the module."""
    hand: str = ""
    """In whose style: `HAND` of the module."""


def thinned(case: Case, each: int, after: int = 0) -> list[triton.Config]:
    """At most `each` configs of `case.space` less the first `after` of them, in the order of the space.

    The same ones for all shapes of a kernel.

    Chosen by a digest of kernel and config, so that shapes share binaries and nobody's taste decides.
    """
    listed = configs(case)
    kernel = case.name.partition("/")[0]
    order = sorted(range(len(listed)), key=lambda i: digest("thinned", kernel, str(listed[i])))
    return [listed[i] for i in sorted(order[after:each])]


def configs(case: Case, *, wide: bool = False) -> list[triton.Config]:
    """Every config of `case.space` (or `case.wide`), in the order of `itertools.product`.

    Meta-parameters vary slowest and in the order they are written, then warps, then stages. Raises
    `ValueError` if `wide` is asked of a case that has no wide space.
    """
    space = case.wide if wide else case.space
    if space is None:
        raise ValueError(
            f"{case.name} has no wide space; use the cases of matmul or attention, or wide=False"
        )
    names = [*space["kwargs"], "num_warps", "num_stages"]
    values = [*space["kwargs"].values(), space["num_warps"], space["num_stages"]]
    where: Callable[[dict[str, Any]], bool] = space.get("where", lambda _: True)
    found = []
    for point in itertools.product(*values):
        chosen = dict(zip(names, point, strict=True))
        if where(chosen):
            warps, stages = chosen.pop("num_warps"), chosen.pop("num_stages")
            found.append(triton.Config(chosen, num_warps=warps, num_stages=stages))
    return found


@cache
def every() -> tuple[Case, ...]:
    """All cases of all modules, founding modules first, then hand by hand."""
    found: list[Case] = []
    names = [m.name for m in pkgutil.walk_packages(__path__, f"{__name__}.") if not m.ispkg]
    for name in sorted(names, key=lambda n: (n.count("."), n)):
        module = importlib.import_module(name)
        if not hasattr(module, "FAMILY"):  # helpers of one hand, and kernels that are compiled alone
            continue
        found += [replace(c, family=module.FAMILY, hand=module.HAND) for c in module.CASES]
    return tuple(found)


def cases(names: Sequence[str] | None = None) -> list[Case]:
    """The cases with these names, or of these kernels (`name` up to its slash); all of them by default.

    Raises `ValueError` for a name that is neither, listing the kernels there are.
    """
    if names is None:
        return list(every())
    kernels = {c.name.partition("/")[0] for c in every()}
    if unknown := [n for n in names if n not in kernels | {c.name for c in every()}]:
        raise ValueError(f"no case or kernel is named {unknown}; there are {sorted(kernels)}")
    return [c for c in every() if c.name in names or c.name.partition("/")[0] in names]


def reset(case: Case, data: Data) -> None:
    """Clear what an earlier launch wrote, so that a later one cannot pass with its results.

    Arguments in `reset_to_zero` become zero, all other outputs NaN (integers: 77).
    """
    added = {n: dict(zip(case.kernel.arg_names, data["args"], strict=False))[n] for n in case.reset_to_zero}
    for output in data["outputs"]:
        output.fill_(math.nan if output.is_floating_point() else 77)
    for tensor in added.values():
        tensor.zero_()


def launch(case: Case, data: Data, config: triton.Config) -> Any:
    """Launch the kernel once with one config, without resetting anything; returns what Triton returns."""
    return case.kernel[data["grid"]](*data["args"], **data["kwargs"], **config.all_kwargs())


def mismatch(case: Case, data: Data, expected: Sequence[torch.Tensor] | None = None) -> str:
    """Say how the outputs differ from the reference; the empty string if all are within tolerance.

    `expected` saves computing the reference again for every config.
    """
    atol, rtol = case.tolerance
    for index, (got, want) in enumerate(
        zip(data["outputs"], case.reference(data) if expected is None else expected, strict=True)
    ):
        if got.shape != want.shape:
            return f"output {index} has shape {tuple(got.shape)}, the reference {tuple(want.shape)}"
        # A NaN compares false with everything, so it counts as wrong.
        error = (got.to(want.dtype) - want).abs()
        wrong = ~(error <= atol + rtol * want.abs())
        if wrong.any():
            where = tuple(int(n) for n in wrong.nonzero()[0])
            return (
                f"output {index}: {int(wrong.sum())} of {wrong.numel()} elements beyond atol={atol}, "
                f"rtol={rtol}; the first at {where} is {got[where].item()}, expected {want[where].item()}"
            )
    return ""


def normal(
    shape: Sequence[int],
    device: str,
    *,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
    scale: float = 1.0,
) -> torch.Tensor:
    """Normal numbers with standard deviation `scale`, the same for the same seed and device."""
    if device == "meta":
        return torch.empty(*shape, dtype=dtype, device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)


def integers(
    low: int, high: int, shape: Sequence[int], device: str, *, dtype: torch.dtype, seed: int = 0
) -> torch.Tensor:
    """Uniform integers in [low, high), the same for the same seed and device."""
    if device == "meta":
        return torch.empty(*shape, dtype=dtype, device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randint(low, high, tuple(shape), generator=generator, device=device, dtype=dtype)


def unset(shape: Sequence[int], device: str, *, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """An output full of NaN (integers: 77): an element that no program writes shows up as wrong."""
    return torch.full(tuple(shape), math.nan if dtype.is_floating_point else 77, dtype=dtype, device=device)
