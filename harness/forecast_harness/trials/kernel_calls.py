"""The calls at which variants of a kernel are timed: at real sizes, one per subject. Runs in the judge.

A cell gets a call as plain data: tensors by dtype and extent, to be filled there, as they are too large to
travel; those that a user's `inputs(random)` drew come as bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from forecast_autotune.records import Config
from forecast_autotune.records.problem import ADDRESS
from forecast_autotune.variants.contract import read_contract
from forecast_autotune.variants.signature import memory_span
from forecast_harness.sandbox.api import TensorBytes
from forecast_harness.sandbox.jobs import tensor_to_bytes
from forecast_harness.targets.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.targets.kernels.grids import fit_grid
from forecast_harness.targets.kernels.user_kernel import is_covered
from forecast_harness.trials.variants.base_runner import encode_scalars
from forecast_harness.trials.variants.call_sampling import (
    CapturedCalls,
    DrawnCall,
    UserCalls,
    check_drawable,
    heuristics_of,
    recorded_grid,
    scalar_value,
    with_heuristics,
)

_MOST_RELATIVE_ERROR = 0.1
"""Error at real sizes, relative to the largest value, that only a wrong kernel shows, whatever its tensors are."""
_ROUNDINGS = 2.0
"""Roundings to the coarsest floating dtype of a call that its results may be off by: the base may round intermediate
results to that."""
_LEAST_LIMIT, _NARROW_LIMIT, _NARROW = 1e-4, 0.002, re.compile("dot|float16|float8")
"""The least limit, which sums of a million numbers keep in any order; and the one of a base that rounds float32 values
further, in products, as TF32, or by conversion."""
_INPUT_SEED = 20
"""The seed of the one call of a user's `inputs` that is timed: every candidate gets the same."""


def error_limits(tensors: Mapping[str, str], source: str) -> dict[str, float]:
    """The allowed error of each tensor (dtype by name) of a base `source`, relative to its largest value.

    Verification is exact, but at drawn sizes, and later: these limits show faults at the timed calls, such as an
    offset that overflows. Integers have the loosest limit, as ties of a rounding or of an order go either way.
    """
    dtypes = {name: getattr(torch, dtype) for name, dtype in tensors.items()}
    coarsest = max((torch.finfo(d).eps for d in dtypes.values() if d.is_floating_point), default=1.0)
    least = _NARROW_LIMIT if _NARROW.search(source) else _LEAST_LIMIT
    limit = min(_MOST_RELATIVE_ERROR, max(least, _ROUNDINGS * coarsest))
    return {n: limit if d.is_floating_point else _MOST_RELATIVE_ERROR for n, d in dtypes.items()}


@dataclass(frozen=True)
class TimedCall:
    """One subject's call."""

    subject: BaseKernel
    drawn: DrawnCall
    """The call with its tensors, whose memory is on no device where the cell fills it."""
    has_values: bool
    """Whether the memory holds the user's own values."""

    @classmethod
    def of(cls, subject: BaseKernel) -> TimedCall:
        """The recorded call at its recorded sizes, or one that the user's `inputs` draws.

        Raises `RecordError` for tensor descriptors, which cannot be made from a record.
        """
        if subject.inputs or subject.captured:
            source = UserCalls(subject) if subject.inputs else CapturedCalls(subject, "cuda")
            return cls(subject, source.draw("normal", torch.Generator().manual_seed(_INPUT_SEED)), True)
        arguments = subject.calls[0]
        tensors = [a for a in arguments if a.kind == "tensor"]
        check_drawable(tensors)
        memory = {
            a.name: torch.empty(memory_span(a), dtype=getattr(torch, a.dtype), device="meta") for a in tensors
        }
        scalars = {a.name: scalar_value(a) for a in arguments if a.kind != "tensor"}
        return cls(
            subject,
            DrawnCall(
                arguments,
                memory,
                scalars,
                partial(recorded_grid, subject, fit_grid(subject.launches), arguments),
            ),
            False,
        )

    def to_payload(self, updates: Sequence[str] = ()) -> dict[str, Any]:
        """The data from which a cell makes the tensors. `updates`: those that a launch changes in place."""
        least = min((n for a in self._tensors for n in a.shape if n > 1), default=2)
        return {
            "tensors": [
                {
                    "name": a.name,
                    "dtype": a.dtype,
                    "span": memory_span(a),
                    "shape": list(a.shape),
                    "stride": list(a.stride),
                    "late": a.elements_ahead(getattr(torch, a.dtype).itemsize),
                    "extra": {n: v for n, v in a.extra.items() if n != ADDRESS},
                    "zeroed": a.name in self.subject.zeroed,
                    "kept": a.name in updates and a.name not in self.subject.zeroed,
                }
                for a in self._tensors
            ],
            "least": least,
            "given": self.has_values,
        }

    def arrays(self, number: int) -> dict[str, TensorBytes]:
        """The user's own values, by `<number>.<name>`; none where the cell draws them."""
        return (
            {f"{number}.{n}": tensor_to_bytes(t) for n, t in self.drawn.memory.items()}
            if self.has_values
            else {}
        )

    def launch(self, source: str, config: Config) -> dict[str, Any]:
        """The launch of a source with a config: its scalars, the call's own grid, meta and options."""
        contract = read_contract(source, self.subject.kernel)
        parameters = (*contract.parameters, *contract.meta)
        meta = config.parameters()
        scalars = with_heuristics(self.drawn, heuristics_of(self.subject), meta, parameters)
        grid = self.drawn.grid({**scalars, **meta})
        kwargs = dict(config.kwargs)
        return {
            "scalars": encode_scalars(scalars),
            "grid": None if grid is None else list(grid),
            "meta": kwargs,
            "options": {n: v for n, v in meta.items() if n not in kwargs},
        }

    @property
    def _tensors(self) -> list[Any]:
        return [a for a in self.drawn.arguments if a.kind == "tensor"]


@dataclass(frozen=True)
class CallKinds:
    """The calls of a target, by the surveys of the base kernel."""

    verified: tuple[tuple[BaseKernel, KernelSurvey], ...]
    """Calls that a variant is verified for: each covers what its survey's signature says."""
    covering: tuple[KernelSurvey, ...]
    """The survey that covers each call of the target, in order."""

    @classmethod
    def surveyed(
        cls, subjects: Sequence[BaseKernel], survey: Callable[[BaseKernel], KernelSurvey]
    ) -> CallKinds:
        """Survey one call after the other, but for those that an earlier survey covers.

        A verification draws its own sizes: two calls that differ only by sizes which the base kernel takes freely
        would be verified at the same ones. Raises what `survey` raises.
        """
        kinds: list[tuple[BaseKernel, KernelSurvey]] = []
        covering: list[KernelSurvey] = []
        for subject in subjects:
            known = next((k for _, k in kinds if is_covered(subject, [k.signature])), None)
            if known is None:
                known = survey(subject)
                kinds.append((subject, known))
            covering.append(known)
        return cls(tuple(kinds), tuple(covering))
