"""What is known of one language model's honesty and skill, fitted by `forecast-autotune train calibrate-llm`.

A model says what it likes; this record says what its answers have been worth: a temperature, monotone
corrections of its means and of its failures, how wide its intervals must be on each device, and how far an
ensemble should follow it, by kind of question and of kernel, by distance from the kernels it was tried on and
by how many measurements are known. It is JSON, beside the adapter or in the user's cache directory. A model
without one has weight 0: nobody knows what its answers are worth, so nobody asks it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forecast_autotune.errors import RecordError
from forecast_autotune.file_access import open_named_output
from forecast_autotune.llm.bins import BINS, Bins
from forecast_autotune.llm.question_kinds import (
    CONFIG,
    KNOWN_BOUNDS,
    QUESTION_KINDS,
    QuestionWeight,
    known_class,
)
from forecast_autotune.llm.similarity import KERNEL_KINDS, FittedProblems
from forecast_autotune.numerics import INTERVAL_LEVELS
from forecast_autotune.records import Problem, digest
from forecast_autotune.records.bounded_json import decode_bounded
from forecast_autotune.records.codec import Record, json_option, reader_of
from forecast_autotune.records.named_lines import read_document

Array = npt.NDArray[np.float64]

SCHEMA = 1
FILE = "forecast_calibration.json"
"""Its name in an adapter's folder."""
POOLED_KIND = "pooled"
RECALIBRATE_HINT = "write it again with `forecast-autotune train calibrate-llm`"
MIN_REMAINING_DOUBT = 0.2
"""No model takes more of the doubt away than down to this share of it."""
UNKNOWN_DEVICE_WIDENING = 1.3
"""What intervals are widened by on a device that nothing was recorded of."""
HALF_TRUST_SD = 0.6
"""Spread (log2) of an answer that is half as reliable as a sure one: half an octave either way."""
MAX_LENGTH_FACTOR = 2.0
"""A prompt may be longer than those that were tried by this factor ..."""


@dataclass(frozen=True)
class MonotoneCurve(Record):
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
        found = np.asarray(np.interp(values, self.x, self.y))
        if len(self.x) < 2:
            return found
        low = min(1.0, (self.y[1] - self.y[0]) / (self.x[1] - self.x[0]))
        high = min(1.0, (self.y[-1] - self.y[-2]) / (self.x[-1] - self.x[-2]))
        under, over = np.minimum(values - self.x[0], 0.0), np.maximum(values - self.x[-1], 0.0)
        return np.asarray(found + low * under + high * over)

    def to_json(self) -> Any:
        """Knots as pairs."""
        return [[a, b] for a, b in zip(self.x, self.y, strict=True)]

    @classmethod
    def from_json(cls, data: Any) -> MonotoneCurve:
        """Read pairs. Raises `RecordError` for anything else."""
        pairs = _read_knots(data)
        return cls(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


_read_knots = reader_of(tuple[tuple[float, float], ...])


@dataclass(frozen=True)
class BlendWeight(Record, complete=True):
    """How far to follow the model where it disagrees with the learned surrogate: a share of the way."""

    mean: float = 0.0
    sd: float = 0.0
    """Its uncertainty from kernel to kernel: what a problem's own measurements may correct it by."""

    def __post_init__(self) -> None:
        if not (0.0 <= self.mean <= 1.0 and 0.0 <= self.sd <= 2.0):
            raise RecordError(f"a weight is a share in [0, 1] with an sd in [0, 2], got {self}")

    def scaled_by(self, factor: float) -> BlendWeight:
        """The same weight where the model is worth only a part of it, or more."""
        return BlendWeight(min(1.0, self.mean * factor), min(2.0, self.sd * factor))


@dataclass(frozen=True)
class CalibrationScope(Record, complete=True):
    """What the calibration was fitted to; what lies outside is out of distribution."""

    devices: tuple[str, ...] = ()
    """Slugs."""
    languages: tuple[str, ...] = ()
    characters: int = 0
    """The longest prompt: prefix and one suffix."""
    mass: float = 0.0
    """Least probability that the labels together must have."""
    map: FittedProblems = field(default_factory=FittedProblems)

    def doubts(self, problem: Problem, characters: int, distance: float) -> list[str]:
        """Why this problem is like none that the model was calibrated on; empty if it is like some."""
        found = []
        if problem.kernel.language not in self.languages:
            found.append(f"calibrated on kernels in {', '.join(self.languages) or 'no language'}")
        if problem.device.slug not in self.devices:
            found.append(f"not calibrated on {problem.device.name}")
        if characters > MAX_LENGTH_FACTOR * self.characters:
            found.append(f"a prompt of {characters} characters, calibrated up to {self.characters}")
        if math.isfinite(distance) and distance > self.map.reach:
            found.append(f"a kernel unlike all it was calibrated on (distance {distance:.1f})")
        return found


@dataclass(frozen=True)
class ModelLatency(Record, unknown="refuse"):
    """How long the model took where it was calibrated; whoever has asked goes by that."""

    per_token_s: float = 0.0
    """Seconds per token of a prompt."""
    load_s: float = 0.0
    """Seconds until the first answer can be begun."""
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
    remedy=RECALIBRATE_HINT,
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
    """Mean of log2(time / reference) -> what was observed (isotonic regression)."""
    fails: MonotoneCurve = MonotoneCurve()
    """P(failure) -> how often it failed (isotonic regression)."""
    intervals: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Factors on half-widths by `INTERVAL_LEVELS` level, per device and pooled: group-wise split-conformal quantiles
    of |observed - mean| / sd over those of a normal."""
    weights: Mapping[str, BlendWeight] = field(default_factory=dict)
    """By kind of kernel (`similarity.KERNEL_KINDS`), and pooled for kinds that were not recorded."""
    decay: tuple[tuple[float, float], ...] = ()
    """(distance up to which it holds, factor on the weight), nearest first; beyond the last: its factor."""
    questions: Mapping[str, QuestionWeight] = field(
        default_factory=dict,
        metadata=json_option(default={}, when=attrgetter("questions")),
    )
    """By kind of question; the pooled weight is for kinds that were not recorded, and stands in older files."""
    known: tuple[float, ...] = field(default=(), metadata=json_option(default=(), when=attrgetter("known")))
    """Factors on the weight per class of `KNOWN_BOUNDS`; empty changes nothing."""
    remains: float = 1.0
    """Size of the learned forecast's errors when the model is followed, as a share of what they were: with a
    good model there is less left to be unsure about."""
    fail_weight: float = 0.0
    """The same share for the log odds of failing."""
    saved: float = 0.0
    """Share of the measurements that asking has saved at equal regret."""
    scope: CalibrationScope = CalibrationScope()
    pace: ModelLatency = ModelLatency()
    about: Mapping[str, Any] = field(default_factory=dict, metadata=json_option(default={}))
    """Where it comes from: problems, kernels, scores, date."""

    def __post_init__(self) -> None:
        if not 0.05 <= self.temperature <= 100.0:
            raise RecordError(f"a temperature lies in [0.05, 100], got {self.temperature}")
        rows = list(self.intervals.values())
        if any(len(row) != len(INTERVAL_LEVELS) or not all(0.0 < f < 1e3 for f in row) for row in rows):
            raise RecordError(
                f"intervals need {len(INTERVAL_LEVELS)} positive factors per group, got {self.intervals}"
            )
        if unknown := set(self.weights) - {*KERNEL_KINDS, POOLED_KIND}:
            raise RecordError(
                f"weights of unknown kinds {sorted(unknown)}: known are {[*KERNEL_KINDS, POOLED_KIND]}"
            )
        if unknown := set(self.questions) - {*QUESTION_KINDS}:
            raise RecordError(
                f"weights of unknown questions {sorted(unknown)}: known are {list(QUESTION_KINDS)}"
            )
        if self.known and (
            len(self.known) != len(KNOWN_BOUNDS) or not all(0.0 <= f < 1e3 for f in self.known)
        ):
            raise RecordError(f"known needs a factor per class {KNOWN_BOUNDS}, got {self.known}")
        shares = (self.saved, self.fail_weight, self.remains)
        if not all(0.0 <= share <= 1.0 for share in shares) or self.remains < MIN_REMAINING_DOUBT:
            raise RecordError(
                f"shares lie in [0, 1], remains from {MIN_REMAINING_DOUBT}; got {shares}: {RECALIBRATE_HINT}"
            )

    @property
    def skilled(self) -> bool:
        """Whether its answers have been worth anything anywhere."""
        followed = any(w.mean > 0 for w in self.weights.values())
        return followed or any(q.mean > 0 for q in self.questions.values())

    def temperature_scaled(self, probabilities: Array) -> Array:
        """The probabilities [n, labels] at the fitted temperature; rows of zeros stay zeros."""
        held = probabilities.sum(axis=1, keepdims=True) > 0.5
        logits = np.log(np.maximum(probabilities, 1e-12)) / self.temperature
        raised = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.where(held, raised / raised.sum(axis=1, keepdims=True), 0.0)

    def moments(self, probabilities: Array) -> tuple[Array, Array, Array]:
        """Calibrated mean and sd of log2(time / reference time) given that it runs, and P(fails); [n] each.

        `probabilities` [n, labels] are as the model stated them. The sd is not corrected: `factors` are for
        that.
        """
        mean, sd, p_fail = self.bins.moments(self.temperature_scaled(probabilities))
        return self.ratio(mean), sd, np.clip(self.fails(p_fail), 0.0, 1.0)

    def trust(self, probabilities: Array, mass: Array) -> Array:
        """How far each answer can be relied on, [n]: 0 for none, near 1 for a sure one.

        A row of zeros is no answer, and one whose labels have hardly any `mass` [n] was not understood.
        """
        _, sd, _ = self.bins.moments(self.temperature_scaled(probabilities))
        told = (probabilities.sum(axis=1) > 0.5) & np.isfinite(mass) & (mass >= self.scope.mass)
        return np.where(told, 1.0 / (1.0 + (sd / HALF_TRUST_SD) ** 2), 0.0)

    def interval_factors(self, device: str) -> tuple[float, ...]:
        """Interval factors on a device (slug); on one that was not recorded, the widest of all and more."""
        if device in self.intervals:
            return self.intervals[device]
        if not self.intervals:
            return (1.0,) * len(INTERVAL_LEVELS)
        return tuple(
            UNKNOWN_DEVICE_WIDENING * max(1.0, *column)
            for column in zip(*self.intervals.values(), strict=True)
        )

    def weight(self, kind: str, distance: float, question: str = CONFIG, known: int = 0) -> BlendWeight:
        """How far to follow the model on a kernel of a kind, at a distance from those it was tried on, in a kind of
        question and with so many measurements known."""
        pooled = self.weights.get(POOLED_KIND) or BlendWeight()
        found = self.weights.get(kind) or pooled
        if own := self.questions.get(question):
            # A kind of kernel is followed as much more or less in every kind of question.
            share = found.mean / pooled.mean if pooled.mean > 0 else 1.0
            found = BlendWeight(min(1.0, own.mean * share), own.sd)
        if self.decay and math.isfinite(distance):
            found = found.scaled_by(
                next((f for edge, f in self.decay if distance <= edge), self.decay[-1][1])
            )
        return found.scaled_by(self._factor(known))

    def _factor(self, known: int) -> float:
        return self.known[known_class(known)] if self.known else 1.0

    def saving(self, question: str, known: int = 0) -> float:
        """Share of the measurements that asking such a question saves at equal regret, with so many known."""
        own = self.questions.get(question)
        if own is not None and own.mean <= 0.0:
            return 0.0
        saved = self.saved if own is None or own.saved is None else own.saved
        return saved * min(1.0, self._factor(known))

    def regret_saved(self, question: str) -> float | None:
        """Regret that asking such a question saves where nothing is measured; None where nobody has looked."""
        own = self.questions.get(question)
        return None if own is None else own.regret

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
        raise RecordError(f"{path}: not JSON ({error}): {RECALIBRATE_HINT}") from error


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

    Raises `RecordError` for a file that is there and cannot be read, or was fitted for another prompt: going
    on without it in silence would make the model useless and not say why.
    """
    for path in places:
        if not path.is_file():
            continue
        found = read(path)
        if found.prompt != prompt or found.bins != BINS:
            raise RecordError(
                f"{path}: fitted for prompt {found.prompt!r}, this release asks with {prompt!r}: {RECALIBRATE_HINT}"
            )
        return found
    return LLMCalibration(model, prompt)
