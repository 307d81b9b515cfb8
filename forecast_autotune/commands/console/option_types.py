"""Numbers on the command line: every one has a range, which argparse checks before anything else happens."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import date

from forecast_autotune.printable import printable
from forecast_autotune.settings import Settings

MOST_COUNT = 1_000_000
"""Largest count of things that are made or measured one after another: a million take days."""
MOST_WORKERS = 1024
"""Largest number of processes, threads or lanes at once: more than any machine has cores."""
MOST_SEED = 2**32 - 1
"""Largest seed that all generators take, scikit-learn's among them."""
MOST_SECONDS = 1e8
"""Three years."""
_SHOWN_CHARS = 40
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_DEVICE = re.compile(r"cpu|[0-9]{1,4}")


@dataclass(frozen=True)
class IntegerRange:
    """An `argparse` type: decimal digits for an integer from `low` to `high`, both included."""

    low: int
    high: int

    def __call__(self, text: str) -> int:
        """The number. Raises `argparse.ArgumentTypeError` with the rule and what was given."""
        if not _WHOLE.fullmatch(text) or not self.low <= int(text) <= self.high:
            raise argparse.ArgumentTypeError(
                f"must be an integer from {self.low} to {self.high}, got {_shown(text)}"
            )
        return int(text)


@dataclass(frozen=True)
class RealRange:
    """An `argparse` type: a finite number from `low` to `high`; with `above`, more than `low`."""

    low: float
    high: float
    above: bool = False

    def __call__(self, text: str) -> float:
        """The number. Raises `argparse.ArgumentTypeError` with the rule and what was given."""
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not self.low <= value <= self.high or (self.above and value == self.low):
            low = f"above {self.low:g} and at most" if self.above else f"from {self.low:g} to"
            raise argparse.ArgumentTypeError(f"must be a number {low} {self.high:g}, got {_shown(text)}")
        return value


@dataclass(frozen=True)
class SettingText:
    """An `argparse` type: a text that obeys the rule of a setting, by the setting's field."""

    field: str

    def __call__(self, text: str) -> str:
        """The text itself. Raises `argparse.ArgumentTypeError` with the setting's rule and what was given."""
        parse: Callable[[str], object] = next(
            f.metadata["parse"] for f in fields(Settings) if f.name == self.field
        )
        try:
            parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}, got {_shown(text)}") from None
        return text


def device_number(text: str) -> str:
    """An `argparse` type: `cpu`, or a device's number. Raises `argparse.ArgumentTypeError`."""
    if not _DEVICE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be cpu or a device's number, got {_shown(text)}")
    return text


def day(text: str) -> str:
    """An `argparse` type: a date as ISO 8601 writes it, such as 2026-01-31. Raises `argparse.ArgumentTypeError`."""
    try:
        if date.fromisoformat(text).isoformat() == text:
            return text
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"must be a date such as 2026-01-31, got {_shown(text)}")


COUNT = IntegerRange(1, MOST_COUNT)
WORKERS = IntegerRange(1, MOST_WORKERS)
SEED = IntegerRange(0, MOST_SEED)
SECONDS = RealRange(0.0, MOST_SECONDS, above=True)


def _shown(text: str) -> str:
    return repr(printable(text, _SHOWN_CHARS))
