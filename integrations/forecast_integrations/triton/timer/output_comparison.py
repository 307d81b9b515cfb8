"""Comparison of the outputs of timed configs, to find one that computes something else than all others.

Each config is launched once more, on stand-ins for the tensors that it writes: the program's own are not touched.
A stand-in that the kernel only writes is filled with NaN before, to reveal a config that leaves elements out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import triton

from forecast_autotune.features.ttir.flows import tensor_flows
from forecast_autotune.records import Candidate
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.problem.copied_tensors import (
    StorageCopies,
    UncopyableArgumentsError,
    converted,
)
from forecast_integrations.triton.problem.describe import call_arguments

if TYPE_CHECKING:
    import torch

MOST_BYTES = 256 << 20
"""Most bytes of written tensors that are compared: filling and comparing them takes about 1 ms."""
_MOST_MS = 20.0
"""Longest launch that is repeated for a comparison: a longer one would take a good part of the timing."""
_CHUNK = 1 << 23
"""Elements that are compared at a time: their differences take memory of the program's."""
_LEAST_TOLERANCE = 0.01
"""Share of the largest value: smaller differences may be another order of sums, TF32 or fp16 in between. For integers,
the share of elements that may differ by more than one."""
_SCATTER = 8.0
"""Multiple of the differences within a group that an outlier exceeds."""
_MOST_ALONE = 1 / 3
"""Share of the configs that may stand alone: if more do, outputs depend on the config by design."""
_MOST_AGREEMENTS = 4
"""Different results that are kept."""
_BIT_LAUNCHES = 3
"""Launches whose outputs have the same bits each, before they count as a config's."""
_UNWRITTEN = 113
"""Value of integers before a launch."""


@dataclass(eq=False)
class _Agreement:
    """Configs whose outputs agree with the first one's."""

    outputs: list[torch.Tensor]
    members: list[Candidate]
    scatter: float = 0.0
    """Their largest difference from the first one, in tolerances."""


class OutputComparison:
    """Compares the outputs of one call's candidates, unless that would cost much or run a user's hooks."""

    def __init__(self, call: KernelCall) -> None:
        self._call, self._stand_in_call = call, call
        self._outputs: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        """By name: the stand-in, and what it holds before a launch; None for NaN."""
        self._agreements: list[_Agreement] = []
        computes = getattr(triton.runtime.driver.active, "computes", True)  # a null device does not
        has_hooks = call.hears_failures() or any(c.pre_hook is not None for c in call.configs.values())
        self._is_over = has_hooks or not computes

    def prepare(self, kernel: object) -> None:
        """Make stand-ins, before the first launch of all; `kernel` is Triton's compiled one, if there is one."""
        text = getattr(kernel, "asm", {}).get("ttir") if self._call is self._stand_in_call else None
        if self._is_over or not isinstance(text, str):
            return
        call = self._call
        try:
            flows = tensor_flows(text, call_arguments(call.tuner.fn, call.arguments()))
            with _without_dispatch_modes():
                self._make(flows.written, flows.read)
        except Exception:  # not the candidate's fault, and timing does not need the comparison
            self._is_over = True

    def _make(self, written: Collection[str], read: Collection[str]) -> None:
        arguments, copies = self._call.named_arguments(), StorageCopies(MOST_BYTES)
        reset = set(self._call.tuner.reset_to_zero or ())
        if any("." in name for name in written):
            raise UncopyableArgumentsError("an output is a member of a tuple")
        stand_ins = {name: converted(arguments[name], copies.tensor) for name in written}
        for name, value in stand_ins.items():
            stand_in = getattr(value, "base", value) if not hasattr(value, "data_ptr") else value
            before = stand_in.clone() if name in read else None
            self._outputs[name] = stand_in, before.zero_() if before is not None and name in reset else before
        names = self._call.tuner.arg_names
        args = tuple(stand_ins.get(name, value) for name, value in zip(names, self._call.args, strict=False))
        self._stand_in_call = replace(
            self._call, args=args, kwargs={n: stand_ins.get(n, v) for n, v in self._call.kwargs.items()}
        )
        self._is_over = not stand_ins

    @property
    def is_undecided(self) -> bool:
        """Whether results differ and each stands alone: only another config can show which one is right."""
        sizes = [len(group.members) for group in self._agreements]
        return not self._is_over and len(sizes) > 1 == max(sizes)

    def compare(self, candidate: Candidate, ms: float) -> dict[Candidate, str]:
        """Launch a timed candidate, which took `ms`; returns the outliers so far, each with a reason."""
        if self._is_over or self._stand_in_call is self._call or ms > _MOST_MS:
            return {}
        try:
            with _without_dispatch_modes():
                is_first = not self._agreements
                self._sort_in(candidate, self._launch(candidate))
                # A candidate that differs from itself is no reference.
                if is_first and _distance(self._launch(candidate), self._agreements[0].outputs) > 1.0:
                    self._is_over = True
                return self._alone()
        except Exception:  # as above: it has run before
            self._is_over = True
            return {}

    def with_bits_of(self, before: Candidate, others: Sequence[Candidate]) -> tuple[Candidate | None, str]:
        """The first of the others whose outputs equal those of `before` bit for bit in every launch, else `before`.

        None, with a sentence, where `before` differs from itself; the sentence alone says that nothing was compared.
        """
        if self._stand_in_call is self._call:
            return before, "outputs of this call cannot be compared"
        with _without_dispatch_modes():
            outputs = [stand_in.clone() for stand_in in self._launch(before)]
            if not self._repeats(before, outputs):
                return None, f"{before} differs from itself from launch to launch"
            return next((c for c in others if self._repeats(c, outputs)), before), ""

    def _repeats(self, candidate: Candidate, outputs: list[torch.Tensor]) -> bool:
        return all(all(map(_same_bits, self._launch(candidate), outputs)) for _ in range(_BIT_LAUNCHES))

    def _launch(self, candidate: Candidate) -> list[torch.Tensor]:
        """Return the outputs of a launch, valid until the next one."""
        import torch

        for stand_in, before in self._outputs.values():
            whole = not (stand_in.is_floating_point() or stand_in.is_complex())
            stand_in.fill_(_UNWRITTEN if whole else math.nan) if before is None else stand_in.copy_(before)
        self._stand_in_call.launcher(candidate)()
        return [torch.view_as_real(t) if t.is_complex() else t for t, _ in self._outputs.values()]

    def _sort_in(self, candidate: Candidate, outputs: list[torch.Tensor]) -> None:
        for group in self._agreements:
            if (distance := _distance(outputs, group.outputs)) <= 1.0:
                group.members.append(candidate)
                group.scatter = max(group.scatter, distance)
                return
        self._agreements.append(_Agreement([output.clone() for output in outputs], [candidate]))
        self._is_over = self._is_over or len(self._agreements) > _MOST_AGREEMENTS

    def _alone(self) -> dict[Candidate, str]:
        main = max(self._agreements, key=lambda group: len(group.members))
        alone = [group for group in self._agreements if len(group.members) == 1]
        count = sum(len(group.members) for group in self._agreements)
        if len(main.members) < 2 or len(alone) > _MOST_ALONE * count:
            return {}
        outliers: dict[Candidate, str] = {}
        for group in alone:
            candidate, distance = group.members[0], _distance(group.outputs, main.outputs)
            elsewhere = math.isinf(distance)
            if distance <= _SCATTER * main.scatter or (elsewhere and not _vary(candidate, main.members)):
                continue
            share = 100 * distance * _tolerance(group.outputs[0].dtype)
            deviation = "are at other places" if elsewhere else f"differ by {share:.3g} %"
            outliers[candidate] = (
                f"it computes something else than {len(main.members)} other configs: its outputs {deviation}"
            )
            self._agreements.remove(group)
        return outliers


def _distance(outputs: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The largest difference of two results, in tolerances."""
    return max(map(_difference, outputs, others))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    import torch

    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return not _gap(a.view(whole), b.view(whole))


def _gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of two elements; NaN or infinite where one of them is.

    Two operations: torch loads a module of some 40 MB in 20 ms at the first use of each, and programs subtract, too,
    while a flush takes smallest and largest values, too.
    """
    return _largest(x - y for x, y in zip(_chunks(a), _chunks(b), strict=True))


def _chunks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return tensor.reshape(-1).split(_CHUNK)


def _largest(parts: Iterable[torch.Tensor]) -> float:
    """The largest absolute value; NaN where one is."""
    import torch

    ends = [abs(end.item()) for part in parts if part.numel() for end in torch.aminmax(part)]
    return math.nan if any(map(math.isnan, ends)) else max(ends, default=0.0)


def _without_dispatch_modes() -> Any:
    """Hide our operations from the caller's dispatch modes: they are none of the program's."""
    import torch

    return torch._C._DisableTorchDispatch()


def _vary(candidate: Candidate, others: Collection[Candidate]) -> bool:
    """Whether the others vary in every parameter whose value is the candidate's alone."""
    values: dict[str, set[object]] = {}
    for other in others:
        for name, value in other.config.kwargs:
            values.setdefault(name, set()).add(value)
    return all(
        value in values.get(name, ()) or len(values.get(name, ())) > 1
        for name, value in candidate.config.kwargs
    )


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the difference of two outputs in tolerances; more than one where `a` lacks elements and equals the rest.

    Infinite where an element is finite in `a` alone, or where `a` lacks elements and differs in the rest.
    """
    import torch

    if _same_bits(a, b):
        return 0.0
    tolerance, count, absent, added = _tolerance(a.dtype), a.numel(), 0, 0
    if not a.is_floating_point():
        return float(((a.double() - b.double()).abs() > 1).sum()) / count / tolerance
    if a.element_size() == 1:
        a, b = a.float(), b.float()
    if math.isfinite(gap := _gap(a, b)):
        return gap / max(_largest(_chunks(a)), _largest(_chunks(b)), 1e-300) / tolerance
    gap, scale, wide = 0.0, 1e-300, torch.promote_types(a.dtype, torch.float32)
    for x, y in zip(_chunks(a), _chunks(b), strict=True):
        here, there = x.isfinite(), y.isfinite()
        absent, added = absent + int((there & ~here).sum()), added + int((here & ~there).sum())
        x, y = (v.to(wide).where(here & there, 0.0) for v in (x, y))
        gap, scale = max(gap, _gap(x, y)), max(scale, _largest((x, y)))
    distance = gap / scale / tolerance
    if not absent + added:
        return distance
    return math.inf if added or distance > 1.0 else max(absent / count / tolerance, 2.0)


def _tolerance(dtype: torch.dtype) -> float:
    import torch

    return max(_LEAST_TOLERANCE, 2.0 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0)
