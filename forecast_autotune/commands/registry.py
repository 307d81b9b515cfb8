"""Commands and their functions: every package adds its own, and each is loaded when it is called.

A package registers a function `add(commands)` in the group `forecast_autotune.commands`, one per command.
It describes the command's grammar and names its entry, `package.module:function`; that function gets the
parsed options and an `Output` and returns the exit status. Grammars load neither rich nor numpy: `--help`
must be instant."""

from __future__ import annotations

import argparse
import pkgutil
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from forecast_autotune.commands.output import Output, UsageError
from forecast_autotune.printable import meant_text, printable

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
_DEVICE = re.compile(r"cpu|cuda|[0-9]{1,4}")


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


def device_number(text: str) -> str:
    """An `argparse` type: `cpu`, `cuda` or a device's number. Raises `argparse.ArgumentTypeError`."""
    if not _DEVICE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be cpu, cuda or a device's number, got {_shown(text)}")
    return text


COUNT = IntegerRange(1, MOST_COUNT)
WORKERS = IntegerRange(1, MOST_WORKERS)
SEED = IntegerRange(0, MOST_SEED)
SECONDS = RealRange(0.0, MOST_SECONDS, above=True)


def _shown(text: str) -> str:
    return repr(printable(text, _SHOWN_CHARS))


GROUP = "forecast_autotune.commands"


class Parser(argparse.ArgumentParser):
    """`argparse` without abbreviations, with examples, and with errors that `main` prints."""

    def __init__(self, *, examples: Sequence[str] = (), **options: Any) -> None:
        # Abbreviations would change their meaning with every option that is added later.
        super().__init__(**{"allow_abbrev": False, **options})
        self.examples = [f"forecast-autotune {example}" for example in examples]

    def format_help(self) -> str:
        """The help of `argparse`, and the examples below it: a line each, ready to be copied."""
        first = [example for command in self._commands().values() for example in command.examples[:1]]
        lines = "".join(f"  {example}\n" for example in self.examples or first)
        return super().format_help() + (f"\nexamples:\n{lines}" if lines else "")

    def _print_message(self, message: str, file: Any = None) -> None:
        """As `argparse` does, but that a help that cannot be written is an error."""
        print(message, end="", file=file)

    def _commands(self) -> Mapping[str, Any]:
        choices = [a.choices for a in self._actions if isinstance(a, argparse._SubParsersAction)]
        return choices[0] if choices else {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As `argparse` does, but each command reports unknown words itself. Raises `UsageError`."""
        result, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown_text(unknown, list(args or ())))
        return result, unknown

    def _unknown_text(self, unknown: list[str], words: list[str]) -> str:
        option = next((word for word in unknown if word.startswith("-")), None)
        if option is None:
            return f"unrecognized arguments: {' '.join(unknown)}"
        # `argparse` took its value for another argument, but it belongs to this option.
        behind = words[words.index(option) + 1 :][:1] if option in words and "=" not in option else []
        value = [word for word in behind if not word.startswith("-")]
        hint = meant_text(option.partition("=")[0], self._option_string_actions)
        return f"unrecognized arguments: {' '.join([option, *value])}{hint}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As `argparse` does from Python 3.14 on: name the nearest choice."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            # `version` is an option, but asked for as a command.
            error.message += meant_text(
                str(value), [*map(str, action.choices or ()), *self._option_string_actions]
            )
            raise

    def error(self, message: str) -> NoReturn:
        """Leave printing to `main`, so that all errors look alike; of a missing word, with an example."""
        match = re.match(
            r"argument (?:\S+/)?(--\S+): expected | *(?:the following|one of the) arguments ", message
        )
        examples = [e for e in self.examples if match and f"{match[1] or ''} " in e][:1]
        more = "".join(f", as in `{example}`" for example in examples)
        if match and not match[1] and self._commands():
            more = f", one of {', '.join(self._commands())}"
        raise UsageError(f"{message}{more} (`{self.prog} --help` explains)")


class Commands:
    """The commands of a parser, or the subcommands of a command."""

    def __init__(self, parser: argparse.ArgumentParser, title: str, metavar: str) -> None:
        self._parsers = parser.add_subparsers(title=title, metavar=metavar, required=True)

    def add(self, name: str, entry: str, text: str, **options: Any) -> argparse.ArgumentParser:
        """Add a command; `entry` is `package.module:function`, and `options` go to its `Parser`."""
        parser: argparse.ArgumentParser = self._parsers.add_parser(
            name, help=text, description=text, **options
        )
        parser.set_defaults(entry=entry)
        parser.add_argument("--json", action="store_true", help="print one JSON object to stdout")
        return parser

    def group(self, name: str, text: str, title: str, metavar: str) -> Commands:
        """Add a command that has subcommands."""
        return Commands(self._parsers.add_parser(name, help=text), title, metavar)


def run(options: argparse.Namespace) -> int:
    """Carry out a parsed command; its exit status."""
    entry = pkgutil.resolve_name(options.entry)
    return int(entry(options, Output(options.json)))


def store_option(parser: argparse.ArgumentParser) -> None:
    """Add `--store`."""
    parser.add_argument(
        "--store",
        metavar="DIR",
        help="where measurements are kept (default: FORECAST_AUTOTUNE_CACHE_DIR, else the user's cache)",
    )


def filters(parser: argparse.ArgumentParser) -> None:
    """Add `--store`, `--kernel` and `--device`."""
    store_option(parser)
    parser.add_argument("--kernel", metavar="TEXT", help="only kernels whose name contains this")
    parser.add_argument("--device", metavar="TEXT", help="only devices whose name contains this")
