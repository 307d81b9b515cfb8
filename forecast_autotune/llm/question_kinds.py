"""What kind of question a language model is asked, and what stacking it with the learned surrogate was worth there."""

from __future__ import annotations

from dataclasses import dataclass

from forecast_autotune.errors import RecordError
from forecast_autotune.features.devices import is_known_device
from forecast_autotune.records import Device
from forecast_autotune.records.codec import Record

CONFIG, SOURCE, NO_IR, UNKNOWN_DEVICE = "config", "source", "no_ir", "unknown_device"
QUESTION_KINDS = (CONFIG, SOURCE, NO_IR, UNKNOWN_DEVICE)
"""Configs of one source; candidates of several sources; no IR was read; nothing is known of the device's speeds."""
KNOWN_BOUNDS = (0, 1, 4)
"""Lower ends of the classes of measurements that a question's problem has: 0, 1 to 3, 4 and more."""


def question_kind(device: Device, informed: bool, sources: int) -> str:
    """The kind of a question: an unknown device outweighs that no IR was read, that the number of sources."""
    if not is_known_device(device):
        return UNKNOWN_DEVICE
    if not informed:
        return NO_IR
    return SOURCE if sources > 1 else CONFIG


def known_class(measured: int) -> int:
    """Which class of `KNOWN_BOUNDS` so many measurements fall in."""
    return sum(measured >= least for least in KNOWN_BOUNDS) - 1


@dataclass(frozen=True)
class QuestionWeight(Record, label="weight of a kind of question"):
    """How far to follow a model in one kind of question, and what that gained in families that were left out."""

    mean: float = 0.0
    """Share of the way from the learned forecast, which is always in, to the model's."""
    sd: float = 0.0
    """Its uncertainty from kernel to kernel."""
    problems: int = 0
    families: int = 0
    log_score: float = 0.0
    """Nats per candidate that following it gains."""
    regret: float = 0.0
    """Regret that it saves where nothing is measured, a share of the best time; negative where it costs some."""
    saved: float | None = None
    """Share of the measurements that asking saves at equal regret; None where nothing was replayed."""

    def __post_init__(self) -> None:
        if not (0.0 <= self.mean <= 1.0 and 0.0 <= self.sd <= 2.0):
            raise RecordError(f"a weight is a share in [0, 1] with an sd in [0, 2], got {self}")
        if self.saved is not None and not 0.0 <= self.saved <= 1.0:
            raise RecordError(f"a saving is a share in [0, 1], got {self.saved}")
