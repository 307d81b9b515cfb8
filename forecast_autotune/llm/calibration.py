"""Calibration of one language model, fitted by `forecast-autotune train calibrate-llm`.

A model says what it likes; this record says what its answers have been worth: a temperature and a monotone
correction of its means, and one weight, by which an ensemble follows it. It is JSON, beside the adapter or in
the user's cache directory. A model without one has weight 0: nobody knows what its answers are worth, so nobody
asks it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forecast_autotune.errors import RecordError
from forecast_autotune.file_access import open_named_output
from forecast_autotune.llm.bins import BINS, Bins
from forecast_autotune.llm.probe import FILE as PROBE
from forecast_autotune.llm.probe import files_digest
from forecast_autotune.records import Problem, digest
from forecast_autotune.records.bounded_json import decode_bounded
from forecast_autotune.records.codec import Knots, Record, json_option, reader_of
from forecast_autotune.records.named_lines import read_document

Array = npt.NDArray[np.float64]

SCHEMA = 2
FILE = "forecast_calibration.json"
"""Its name in an adapter's folder."""
_RECALIBRATE_HINT = "write it again with `forecast-autotune train calibrate-llm`"
_HALF_TRUST_SD = 0.6
"""Spread (log2) of an answer that is half as reliable as a sure one: half an octave either way."""
_MAX_LENGTH_FACTOR = 2.0
"""Factor by which a prompt may be longer than those of the calibration."""


@dataclass(frozen=True)
class MonotoneCurve(Knots):
    """A rising curve through knots, linear in between; empty changes nothing.

    Beyond its ends it goes on as it does next to them, but no steeper than the identity: the fastest
    candidates lie there, and must not all become alike.
    """

    x: tuple[float, ...] = ()
    y: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        rising = list(self.x) == sorted(set(self.x)) and list(self.y) == sorted(self.y)
        if len(self.x) != len(self.y) or not rising or not all(map(math.isfinite, (*self.x, *self.y))):
            raise RecordError(f"a monotone correction needs rising knots, got {self.x} and {self.y}")

    def __call__(self, values: Array) -> Array:
        """The corrected values, same shape."""
        if not self.x:
            return values
        result = np.asarray(np.interp(values, self.x, self.y))
        if len(self.x) < 2:
            return result
        low = min(1.0, (self.y[1] - self.y[0]) / (self.x[1] - self.x[0]))
        high = min(1.0, (self.y[-1] - self.y[-2]) / (self.x[-1] - self.x[-2]))
        under, over = np.minimum(values - self.x[0], 0.0), np.maximum(values - self.x[-1], 0.0)
        return np.asarray(result + low * under + high * over)


@dataclass(frozen=True)
class BlendWeight(Record, complete=True):
    """How far to follow the model where it disagrees with the learned surrogate: a share of the way."""

    mean: float = 0.0
    sd: float = 0.0
    """Standard deviation of `mean` from kernel to kernel, within which a problem's own measurements correct it."""

    def __post_init__(self) -> None:
        if not (0.0 <= self.mean <= 1.0 and 0.0 <= self.sd <= 2.0):
            raise RecordError(f"a weight is a share in [0, 1] with an sd in [0, 2], got {self}")


@dataclass(frozen=True)
class CalibrationScope(Record, complete=True):
    """The range that the calibration was fitted to; problems outside are out of distribution."""

    devices: tuple[str, ...] = ()
    """Slugs."""
    languages: tuple[str, ...] = ()
    characters: int = 0
    """The longest prompt: prefix and one suffix."""
    mass: float = 0.0
    """Least probability that the labels together must have."""

    def doubts(self, problem: Problem, characters: int) -> list[str]:
        """Why this problem is like none that the model was calibrated on; empty if it is like some."""
        reasons = []
        if problem.kernel.language not in self.languages:
            reasons.append(f"calibrated on kernels in {', '.join(self.languages) or 'no language'}")
        if problem.device.slug not in self.devices:
            reasons.append(f"not calibrated on {problem.device.name}")
        if characters > _MAX_LENGTH_FACTOR * self.characters:
            reasons.append(f"a prompt of {characters} characters, calibrated up to {self.characters}")
        return reasons


@dataclass(frozen=True)
class ModelLatency(Record):
    """How long the model took where it was calibrated; callers wait accordingly."""

    answer_s: float = 0.0
    """Median seconds of an answer; 0 where none was timed."""


def _read_bins(value: Any) -> Bins:
    return Bins(reader_of(tuple[float, ...])(value))


@dataclass(frozen=True)
class LLMCalibration(
    Record,
    tag="llm_calibration",
    schema=SCHEMA,
    label="calibration of a language model",
    complete=True,
    remedy=_RECALIBRATE_HINT,
):
    """See the module."""

    model: str
    """Name of the backend, with model and adapter."""
    prompt: str = ""
    """Version of the prompt."""
    bins: Bins = field(
        default=BINS, metadata=json_option(read=_read_bins, write=lambda bins: list(bins.ratios))
    )
    temperature: float = 1.0
    """Log probabilities are divided by this (Guo et al. 2017)."""
    ratio: MonotoneCurve = MonotoneCurve()
    """Mean of log2(time / reference) -> the observed one (isotonic regression)."""
    weight: BlendWeight = BlendWeight()
    """How far to follow it; 0 where its answers have been worth nothing."""
    saved: float = 0.0
    """Share of the measurements that asking has saved at equal regret."""
    scope: CalibrationScope = CalibrationScope()
    pace: ModelLatency = ModelLatency()
    about: Mapping[str, Any] = field(default_factory=dict, metadata=json_option(default={}))
    """Where it comes from: problems, kernels, scores, date."""

    def __post_init__(self) -> None:
        if not 0.05 <= self.temperature <= 100.0:
            raise RecordError(f"a temperature lies in [0.05, 100], got {self.temperature}")
        if not 0.0 <= self.saved <= 1.0:
            raise RecordError(f"a saving is a share in [0, 1], got {self.saved}: {_RECALIBRATE_HINT}")

    @classmethod
    def from_json(cls, data: Any) -> LLMCalibration:
        """Read the JSON of `to_json`; of schema 1, which had a weight per kind of kernel, the pooled one."""
        if isinstance(data, Mapping) and isinstance(weights := data.get("weights"), Mapping):
            data = {**data, "weight": weights.get("pooled", {"mean": 0.0, "sd": 0.0})}
        return super().from_json(data)

    @property
    def fitted(self) -> bool:
        """Whether it was fitted to anything, and so knows its own scope."""
        return bool(self.scope.languages)

    @property
    def skilled(self) -> bool:
        """Whether its answers have been worth anything."""
        return self.weight.mean > 0

    def temperature_scaled(self, probabilities: Array) -> Array:
        """The probabilities [n, labels] at the fitted temperature; rows of zeros stay zeros."""
        has_answer = probabilities.sum(axis=1, keepdims=True) > 0.5
        logits = np.log(np.maximum(probabilities, 1e-12)) / self.temperature
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.where(has_answer, powers / powers.sum(axis=1, keepdims=True), 0.0)

    def moments(self, probabilities: Array) -> tuple[Array, Array, Array]:
        """Mean (corrected) and sd of log2(time / reference time) given that it runs, and P(fails); [n] each.

        `probabilities` [n, labels] are as the model stated them.
        """
        mean, sd, p_fail = self.bins.moments(self.temperature_scaled(probabilities))
        return self.ratio(mean), sd, p_fail

    def trust(self, probabilities: Array, mass: Array) -> Array:
        """How far each answer can be relied on, [n]: 0 for none, near 1 for a sure one.

        A row of zeros is no answer, and one whose labels have hardly any `mass` [n] was not understood.
        """
        _, sd, _ = self.bins.moments(self.temperature_scaled(probabilities))
        has_answer = (probabilities.sum(axis=1) > 0.5) & np.isfinite(mass) & (mass >= self.scope.mass)
        return np.where(has_answer, 1.0 / (1.0 + (sd / _HALF_TRUST_SD) ** 2), 0.0)

    def mark(self) -> str:
        """A short name of everything it says but where it comes from."""
        plain = {k: v for k, v in self.to_json().items() if k not in ("about", "pace")}
        return digest(json.dumps(plain, sort_keys=True))[:8]


def read(path: Path) -> LLMCalibration:
    """The calibration in a file. Raises `RecordError` when it is not one, and `OSError`."""
    try:
        return LLMCalibration.from_json(decode_bounded(read_document(path)))
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error
    except ValueError as error:
        raise RecordError(f"{path}: not JSON ({error}): {_RECALIBRATE_HINT}") from error


def write(path: Path, calibration: LLMCalibration) -> None:
    """Put it there, in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(calibration.to_json(), indent=1, allow_nan=False) + "\n"
    with open_named_output(path) as stream:
        stream.write(text.encode())


def calibration_path(model: str, cache: Path) -> Path:
    """Where the calibration of a model is kept in a cache directory."""
    return cache / "llm" / "calibrations" / f"{digest(model)}.json"


def find_calibration(model: str, prompt: str, places: Sequence[Path]) -> LLMCalibration:
    """The first calibration of this model and prompt at one of these files, else one of weight 0.

    Raises `RecordError` for a file that is there and cannot be read, or was fitted for another prompt or to other
    weights: going on without it in silence would make the model useless and not say why.
    """
    for path in places:
        if not path.is_file():
            continue
        result = read(path)
        if result.prompt != prompt or result.bins != BINS:
            raise RecordError(
                f"{path}: fitted for prompt {result.prompt!r}, this release asks with {prompt!r}: {_RECALIBRATE_HINT}"
            )
        if (probe := result.about.get("probe", "")) and probe != probe_digest(places):
            raise RecordError(f"{path}: fitted to other weights than lie there: {_RECALIBRATE_HINT}")
        return result
    return LLMCalibration(model, prompt)


def probe_digest(places: Sequence[Path]) -> str:
    """A digest of the probe beside the weights whose calibration is at one of `places`; empty without one."""
    return next((digest for path in places if (digest := files_digest(path.parent, PROBE))), "")
