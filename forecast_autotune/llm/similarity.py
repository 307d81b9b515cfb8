"""How like the kernels a language model was calibrated on a problem is: its kind, and a distance.

Names of kernels mean nothing across authors, so both come from the IR.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.cost import CostBreakdown, FactColumns
from forecast_autotune.features.devices import device_spec
from forecast_autotune.features.feature_vectors import feature_matrix
from forecast_autotune.numerics import fast_median
from forecast_autotune.records import Candidate, Device
from forecast_autotune.records.codec import Record, json_option, reader_of

Array = npt.NDArray[np.float64]

MULTI_MATMUL, SINGLE_MATMUL, SCAN, REDUCTION, POINTWISE, UNKNOWN_KIND = (
    "products",
    "product",
    "scan",
    "reduction",
    "pointwise",
    "unread",
)
KERNEL_KINDS = (MULTI_MATMUL, SINGLE_MATMUL, SCAN, REDUCTION, POINTWISE, UNKNOWN_KIND)
"""Several matrix products per iteration (attention), one, a scan, a reduction, none of these; no IR."""


MIN_SCALE = 0.25
"""Least scale of a coordinate (most are log2): one in which a few kernels happen to agree decides nothing."""


def kernel_kind(facts: FactColumns | None) -> str:
    """What most candidates of a problem do, one of `KERNEL_KINDS`; `facts` as `Prior.facts` has them."""
    if facts is None:
        return UNKNOWN_KIND

    def usual(name: str) -> float:
        return float(fast_median(facts[name], axis=0))

    if usual("dot_flops") > 0:
        return MULTI_MATMUL if usual("dot_ops") >= 1.5 * max(1.0, usual("iterations")) else SINGLE_MATMUL
    if usual("scan_elements") > 0:
        return SCAN
    return REDUCTION if usual("reduce_elements") > 0 else POINTWISE


def problem_features(
    facts: FactColumns | None, costs: CostBreakdown | None, candidates: Sequence[Candidate], device: Device
) -> Array | None:
    """Where a problem lies among others: the mean of its candidates' features, [k]; None without IR."""
    if facts is None or costs is None:
        return None
    features, names = feature_matrix(facts, costs, [c.config for c in candidates], device_spec(device))
    return np.asarray(features[:, : len(names) // 2].mean(axis=0))


@dataclass(frozen=True)
class FittedProblems(Record, complete=True):
    """The places of the problems that something was fitted to."""

    places: tuple[tuple[float, ...], ...] = ()
    scale: tuple[float, ...] = ()
    """Standard deviation of each coordinate over the places."""
    reach: float = field(
        default=math.inf,
        metadata=json_option(
            read=lambda value: math.inf if value is None else reader_of(float)(value),
            write=lambda reach: None if math.isinf(reach) else reach,
        ),
    )
    """Distances up to this were met among them: beyond, nothing is known."""

    def distance(self, place: Array | None) -> float:
        """Root mean square difference to the nearest place, in standard deviations; inf without IR."""
        if place is None or not self.places or len(place) != len(self.scale):
            return math.inf
        gap = (np.array(self.places) - place) / np.maximum(np.array(self.scale), MIN_SCALE)
        return float(np.sqrt((gap**2).mean(axis=1)).min())

    def __post_init__(self) -> None:
        if any(len(p) != len(self.scale) for p in self.places):
            raise ValueError(f"every place has {len(self.scale)} coordinates")
