"""Every number on the command line has a range, and what is outside of it is refused by one clear line."""

from __future__ import annotations

import argparse

import pytest

from forecast_autotune.commands import grammar, main
from forecast_autotune.commands.registry import (
    IntegerRange,
    RealRange,
    device_number,
)
from tests.core.captured_output import Capture, command_options

pytestmark = pytest.mark.usefixtures("root")

NUMBER_NAMES = {"N", "P", "SHARE", "S", "X", "PORT"}
"""What help calls a number."""
NEVER = ("nan", "text", "", "1e999", "0x10", "1_0", "٣", "9" * 400, "- 1", "1\x1b[2J", "½")
NEVER_WHOLE = ("inf", "1.5", "1e3", " 3", "3 ")


ALL = [(words, action) for words, action in command_options(grammar.build()) if action.nargs != 0]
NUMBERS = [
    (words, action) for words, action in ALL if action.metavar in NUMBER_NAMES or action.type is not None
]


def name_of(value: object) -> str:
    return "-".join(value) if isinstance(value, tuple) else str(getattr(value, "dest", value))


def test_every_option_that_takes_a_number_has_a_range() -> None:
    assert len(NUMBERS) > 40
    for words, action in NUMBERS:
        assert isinstance(action.type, IntegerRange | RealRange) or action.type is device_number, (
            words,
            action.dest,
        )
    for words, action in ALL:
        assert action.type not in (int, float), f"{words} --{action.dest} takes any number"


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("words", "action"), NUMBERS, ids=name_of)
def test_what_is_out_of_range_is_refused_by_name(
    words: tuple[str, ...], action: argparse.Action, capsys: Capture
) -> None:
    kind, name = action.type, action.option_strings[0]
    wrong = [*NEVER]
    if isinstance(kind, IntegerRange):
        wrong += [*NEVER_WHOLE, str(kind.low - 1), str(kind.high + 1), "1000000000000000000000"]
    elif isinstance(kind, RealRange):
        wrong += [str(kind.low - 1e-9), f"{kind.high * 1.001}", "inf", "-inf", *(["0"] if kind.above else [])]
    else:
        wrong += ["-1", "99999", "²", "cpu0"]
    for value in wrong:
        if value in ("1_0", "٣") and not isinstance(kind, IntegerRange) and kind is not device_number:
            continue  # Python's own ways to write the number
        assert main([*words, f"{name}={value}"]) == 2, value
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(
            f"forecast-autotune: error: argument {'/'.join(action.option_strings)}: must be "
        )
        assert captured.err.count("\n") == 1
        assert len(captured.err) < 400
        assert captured.err.removesuffix("\n").isprintable()


@pytest.mark.parametrize(("words", "action"), NUMBERS, ids=name_of)
def test_defaults_and_both_ends_are_inside(words: tuple[str, ...], action: argparse.Action) -> None:
    kind = action.type
    if isinstance(kind, IntegerRange):
        assert [kind(str(kind.low)), kind(str(kind.high)), kind(f"+{kind.high}")] == [
            kind.low,
            kind.high,
            kind.high,
        ]
    elif isinstance(kind, RealRange):
        assert kind(repr(kind.high)) == kind.high
        assert kind(repr(kind.low + 1e-6)) == kind.low + 1e-6
    if action.default is not None and isinstance(kind, IntegerRange | RealRange):
        assert kind(str(action.default)) == action.default
