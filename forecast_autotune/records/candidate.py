"""A trial's config (`Config`, `Candidate`), its outcome (`Outcome`, `Measurement`), and `Evidence` of a choice."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.printable import utc_now
from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.json_fields import (
    LARGEST_INTEGER,
    LARGEST_MS,
    LARGEST_S,
    SCHEMA,
    Extra,
    Scalar,
    digest,
    or_null,
    read_integer,
    read_text,
    to_scalar,
)


class Outcome(StrEnum):
    """The outcome of one candidate that was tried for real. Only `OK` has a time."""

    OK = "ok"
    OUT_OF_RESOURCES = "out_of_resources"
    """More shared memory, registers or threads than the device has."""
    COMPILE_ERROR = "compile_error"
    RUNTIME_ERROR = "runtime_error"
    INCORRECT = "incorrect"
    TIMEOUT = "timeout"
    INFRASTRUCTURE = "infrastructure"
    """The harness failed, not the candidate: never a label, never a reason to skip it later."""

    @property
    def is_label(self) -> bool:
        """Whether a surrogate may learn from it and a later process may rely on it."""
        return self is not Outcome.INFRASTRUCTURE


class Evidence(StrEnum):
    """The evidence of a decision."""

    MEASURED = "measured"
    """The chosen candidate was timed for this decision."""
    FORECAST = "forecast"
    """The chosen candidate was never timed; the surrogate chose it."""
    STORED = "stored"
    """An earlier decision or earlier measurements were enough; nothing was timed now."""
    ONLY = "only"
    """There was one candidate, so there was nothing to decide."""


LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""Options of a launch that a config holds beside the meta-parameters."""


def _pairs(kwargs: Mapping[str, object]) -> tuple[tuple[str, Scalar], ...]:
    return tuple(sorted([(str(name), to_scalar(value)) for name, value in kwargs.items()]))


def _read_kwargs(value: object) -> tuple[tuple[str, Scalar], ...]:
    if type(value) is not dict and not isinstance(value, Mapping):
        raise RecordError(f" must be an object, not {type(value).__name__}")
    return _pairs(value)


_ANY_SIGN = json_option(read=or_null(lambda number: read_integer(number, "", -LARGEST_INTEGER)))
"""An option that a list may give any value: the compiler refuses it, or takes it, as it takes -1 stages."""
OVERRIDE_DIGEST = "#sha256="
"""In `Config.ir_override`, between the path of a file and the digest of its contents."""


@dataclass(frozen=True, slots=True)
class Config(Record, label="config", lenient=True):
    """Launch and meta-parameters of one candidate, the JSON-able twin of `triton.Config`.

    `kwargs` holds sorted (name, value) pairs, so equal configs are equal keys whatever the order in
    which a user spelled them.
    """

    kwargs: tuple[tuple[str, Scalar], ...] = field(
        default=(), metadata=json_option(read=_read_kwargs, write=dict)
    )
    num_warps: int = field(default=4, metadata=_ANY_SIGN)
    num_stages: int = field(default=3, metadata=_ANY_SIGN)
    num_ctas: int = field(default=1, metadata=_ANY_SIGN)
    maxnreg: int | None = field(default=None, metadata=_ANY_SIGN)
    ir_override: str | None = field(default=None, metadata=json_option(read=read_text, omit_null=True))
    """Path of a file of IR that takes the place of the compiler's, with a digest of its contents."""

    @classmethod
    def of(
        cls,
        kwargs: Mapping[str, object],
        *,
        num_warps: int = 4,
        num_stages: int = 3,
        num_ctas: int = 1,
        maxnreg: int | None = None,
        ir_override: str | None = None,
    ) -> Config:
        """Build a config from a mapping of meta-parameters (any order, any value type)."""
        return cls(_pairs(kwargs), num_warps, num_stages, num_ctas, maxnreg, ir_override)

    @property
    def override_path(self) -> str | None:
        """The file that `ir_override` names."""
        return self.ir_override and self.ir_override.partition(OVERRIDE_DIGEST)[0]

    def parameters(self) -> dict[str, Scalar]:
        """Every meta-parameter and launch option by name, as `triton.Config.all_kwargs` gives them."""
        launch: dict[str, Scalar] = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "num_ctas": self.num_ctas,
            "maxnreg": self.maxnreg,
            "ir_override": self.override_path,
        }
        return {**dict(self.kwargs), **{k: v for k, v in launch.items() if v is not None}}

    def __str__(self) -> str:
        parts = [f"{name}={value}" for name, value in self.kwargs]
        parts += [f"warps={self.num_warps}", f"stages={self.num_stages}"]
        if self.num_ctas != 1:
            parts.append(f"ctas={self.num_ctas}")
        if self.maxnreg is not None:
            parts.append(f"maxnreg={self.maxnreg}")
        return " ".join(parts)


HOOK_VARIANT_PREFIX = "base hook "
"""Start of the variant name of a candidate whose config differs from another in its `pre_hook` alone."""


def is_base_variant(variant: str) -> bool:
    """Whether candidates of this variant run the user's own source; configs that differ in hooks alone do."""
    return variant == "base" or variant.startswith(HOOK_VARIANT_PREFIX)


@dataclass(frozen=True, slots=True)
class Candidate(Record, label="candidate", lenient=True, order=("variant", "config")):
    """A (variant, config) pair not yet judged. `variant` is `base` for the user's own source."""

    config: Config
    variant: str = "base"

    def __str__(self) -> str:
        return str(self.config) if self.variant == "base" else f"{self.variant}: {self.config}"

    @property
    def is_base_variant(self) -> bool:
        """Whether it runs the user's own source; see `is_base_variant`."""
        return is_base_variant(self.variant)

    @property
    def id(self) -> str:
        """A stable name, used where a candidate is a JSON key."""
        return digest(self.variant, self.config.to_json())


_SHORTAGE = re.compile(r"out of resource: (.{1,200}?),? Required: (\d+),? Hardware limit: ?(\d+)")
"""In messages of Triton, and of Inductor, which names the kernel in place of the resource."""
_LEAST_SHARED_LIMIT = 10_000
"""No other resource has limits above it."""
IN_TURNS = "-turns"
"""End of the protocol's name for times that were taken side by side."""


@lru_cache(64)
def _cache_state(protocol: str) -> str:
    state = re.match(r"(?:events|graph)-(l2[a-z]+|noflush)", protocol)
    return state[1] if state else ""


@dataclass(frozen=True)
class Measurement(Record, tag="measurement", schema=SCHEMA, lenient=True):
    """One candidate tried for real: an outcome, and times in milliseconds if it ran."""

    problem: str
    candidate: Candidate = field(metadata=json_option(flat=True))
    outcome: Outcome
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    repeats: int = 0
    compile_s: float | None = None
    """Wall seconds spent compiling; None when the binary was already there."""
    protocol: str = ""
    """Which timing protocol gave the times; only equal protocols are compared closely."""
    at: str = ""
    """UTC time, ISO 8601."""
    grid: tuple[int, ...] | None = field(default=None, metadata=json_option(omit_null=True))
    extra: Extra = field(default_factory=dict, compare=False, repr=False)
    """Unknown fields, and free-form facts such as `message`, `registers`, `spills`, `shared`."""

    @classmethod
    def of_times(
        cls, problem: str, candidate: Candidate, times: Sequence[float], **about: Any
    ) -> Measurement:
        """An `ok` measurement from milliseconds of launches; 0, which some clocks return, counts as a little more."""
        import statistics  # takes milliseconds to load

        tenths = statistics.quantiles(times if len(times) > 1 else [*times] * 2, n=10, method="inclusive")
        low, middle, high = (max(t, 1e-9) for t in (tenths[1], statistics.median(times), tenths[7]))
        return cls(problem, candidate, Outcome.OK, middle, low, high, len(times), at=utc_now(), **about)

    def __post_init__(self) -> None:
        times = (self.median_ms, self.p20_ms, self.p80_ms)
        if self.outcome is Outcome.OK:
            if self.median_ms is None or not all(t is None or 0 < t <= LARGEST_MS for t in times):
                raise RecordError(f"an ok measurement needs finite positive times, got {times}")
        elif any(t is not None for t in times):
            raise RecordError(f"a measurement with outcome {self.outcome} cannot carry a time, got {times}")
        if self.compile_s is not None and not 0 <= self.compile_s <= LARGEST_S:
            raise RecordError(f"compile_s must be finite and at least 0, or None, got {self.compile_s}")

    @property
    def ok(self) -> bool:
        """Whether the candidate ran and has a time."""
        return self.outcome is Outcome.OK

    @property
    def shared_bytes(self) -> int | None:
        """Bytes of shared memory of the compiled candidate, from its metadata or the failure's message."""
        size = self.extra.get("shared")
        if isinstance(size, int) and not isinstance(size, bool):
            return size
        shortage = _SHORTAGE.search(str(self.extra.get("message", "")))
        if self.outcome is not Outcome.OUT_OF_RESOURCES or shortage is None:
            return None
        memory = "shared memory" in shortage[1] or int(shortage[3]) > _LEAST_SHARED_LIMIT
        return int(shortage[2]) if memory else None

    @property
    def in_turns(self) -> bool:
        """Whether it was timed side by side with others."""
        return self.protocol.endswith(IN_TURNS)

    @property
    def cache_state(self) -> str:
        """The L2's state when our own clock took the times, `l2read` for instance; "" for other clocks and failures."""
        return _cache_state(self.protocol) if self.ok else ""

    @property
    def ms(self) -> float:
        """The median in milliseconds; raises `RecordError` for a failure."""
        if self.median_ms is None:
            raise RecordError(f"{self.candidate} has outcome {self.outcome} and therefore no time")
        return self.median_ms

    @property
    def error_ms(self) -> float:
        """Standard error of the median; 0 where the spread of the launches is not known."""
        if self.p20_ms is None or self.p80_ms is None or self.repeats < 2:
            return 0.0
        # A normal distribution's: 1.253 deviations of the mean, and 1.683 deviations between the quantiles.
        return 1.253 / 1.683 * max(0.0, self.p80_ms - self.p20_ms) / math.sqrt(self.repeats)
