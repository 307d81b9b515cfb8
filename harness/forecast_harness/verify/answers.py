"""The form of every answer that a cell may give, checked in one place, before any of it is used.

The cell's own code never gives an answer of another form: the candidate did, so what is refused here is forged.
Types, ranges and lengths are checked; the caller checks whether the answer is true.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from forecast_harness.sandbox.cell import CandidateFault
from forecast_harness.sandbox.jobs import CellAnswer, Fault, byte_size

Check = Callable[[Any, str], None]

ANSWER_ERRORS = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
)
"""Exceptions that computing with the values of an answer can raise."""
_LEAST_SECONDS, _MAX_SECONDS = 1e-12, 1e7
_MAX_ERROR = 1e308
_MAX_OUTPUTS = 256
_MOST_BATCHED = 256
_MAX_DIMENSIONS = 32
_MAX_ELEMENTS = 1 << 42
_MAX_COUNT = 1 << 48
_MAX_NAMES = 4096
_MAX_TEXT = 4000
_PROTOCOL_CHARACTERS = 64


def check_answer(question: str, answer: CellAnswer, block_bytes: int | None = None) -> None:
    """Refuse an answer that does not have the form of `question` (a function of `launch_cell`).

    With `block_bytes`, the answer has to have a block of so many bytes.
    Raises `CandidateFault` (`Fault.FORGED`) with the field and its value.
    """
    with malformed_answers_as_forgery((ValueError,)):
        _FORMS[question](answer.value, "the answer")
        if block_bytes is not None and (block_bytes,) != _shape_of(answer, "block"):
            raise ValueError(
                f"the block has the shape {_shape_of(answer, 'block')!r:.80}, not [{block_bytes}]"
            )
        for name, array in answer.arrays.items():
            number = name.removeprefix("out")
            if name != "block" and not (number.isdecimal() and str(int(number[:9])) == number):
                raise ValueError(f"an array is named {name!r:.40}")
            if array.dtype != "uint8" or len(array.shape) != 1:
                raise ValueError(f"array {name} is {array.dtype}{list(array.shape)!r:.80}, not bytes")


def read_times(answer: CellAnswer, count: int) -> list[float]:
    """The `seconds` of so many launches. Raises `CandidateFault` for values that are no times."""
    with malformed_answers_as_forgery((ValueError,)):
        _object({"seconds": _list_of(_number(_LEAST_SECONDS, _MAX_SECONDS), count)})(
            answer.value, "the answer"
        )
        if len(answer.value["seconds"]) != count:
            raise ValueError(f"{len(answer.value['seconds'])} times of {count} launches")
    return [float(s) for s in answer.value["seconds"]]


def read_error(answer: CellAnswer) -> float:
    """The `error` of a comparison, from 0 on. Raises `CandidateFault` for a value that is none."""
    with malformed_answers_as_forgery((ValueError,)):
        _object({"error": _number(0.0, _MAX_ERROR)})(answer.value, "the answer")
    return float(answer.value["error"])


def _shape_of(answer: CellAnswer, name: str) -> tuple[int, ...] | None:
    return answer.arrays[name].shape if name in answer.arrays else None


@contextmanager
def malformed_answers_as_forgery(errors: tuple[type[Exception], ...] = ANSWER_ERRORS) -> Iterator[None]:
    """Take errors of the body for a forged answer: the cell's own code never gives one that raises these."""
    try:
        yield
    except errors as error:
        answer = error if isinstance(error, ValueError) else repr(error)
        raise CandidateFault(Fault.FORGED, f"an answer makes no sense: {answer}") from error


def check_described_output(value: Any, what: str) -> None:
    """Refuse a value that does not describe an output: `problem`, or `dtype`, `shape`, `stride` and `alias`.

    Raises `ValueError`.
    """
    if isinstance(value, dict) and "problem" in value:
        _object({"problem": _text(_MAX_TEXT)})(value, what)
        return
    _object({"dtype": _text(40), "shape": _sizes, "stride": _sizes, "alias": _boolean})(value, what)
    byte_size(value["dtype"], ())  # a `ValueError` for a dtype that is none
    if len(value["shape"]) != len(value["stride"]):
        raise ValueError(f"{what} has {len(value['shape'])} sizes and {len(value['stride'])} strides")
    if math.prod(value["shape"]) > _MAX_ELEMENTS:
        raise ValueError(f"{what} has more than {_MAX_ELEMENTS} elements")


# --- checks: each takes a value and its name in messages, and raises `ValueError` ---


def _number(low: float, high: float) -> Check:
    def check(value: Any, what: str) -> None:
        # Compared before anything is converted: an integer may have more digits than a float can hold.
        if type(value) not in (int, float) or not low <= value <= high:
            raise ValueError(f"{what} must be a number from {low:g} to {high:g}, not {_excerpt(value)}")

    return check


def _integer(low: int, high: int) -> Check:
    def check(value: Any, what: str) -> None:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{what} must be an integer from {low} to {high}, not {_excerpt(value)}")

    return check


def _text(longest: int) -> Check:
    def check(value: Any, what: str) -> None:
        if type(value) is not str or len(value) > longest:
            raise ValueError(f"{what} must be a text of at most {longest} characters, not {_excerpt(value)}")

    return check


def _boolean(value: Any, what: str) -> None:
    if type(value) is not bool:
        raise ValueError(f"{what} must be true or false, not {_excerpt(value)}")


def _list_of(check_item: Check, longest: int) -> Check:
    def check(value: Any, what: str) -> None:
        if type(value) is not list or len(value) > longest:
            raise ValueError(f"{what} must be a list of at most {longest}, not {_excerpt(value)}")
        for n, item in enumerate(value):
            check_item(item, f"{what}[{n}]")

    return check


def _mapping_of(check_item: Check, longest: int = _MAX_NAMES) -> Check:
    def check(value: Any, what: str) -> None:
        if type(value) is not dict or len(value) > longest:
            raise ValueError(f"{what} must be an object of at most {longest} names, not {_excerpt(value)}")
        for name, item in value.items():
            _text(_MAX_TEXT)(name, f"a name in {what}")
            check_item(item, f"{what}[{name[:40]!r}]")

    return check


def _object(fields: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """An object of exactly these fields, but for the optional ones."""
    every = {**fields, **(optional or {})}

    def check(value: Any, what: str) -> None:
        if type(value) is not dict or not fields.keys() <= value.keys() <= every.keys():
            result = sorted(map(str, value))[:20] if type(value) is dict else value
            raise ValueError(f"{what} must have the fields {', '.join(fields)}, not {_excerpt(result)}")
        for name, item in value.items():
            every[name](item, f"{what}.{name}")

    return check


def _excerpt(value: Any) -> str:
    """A few characters of a value; the size of a number that is too long to be written out."""
    if type(value) is int and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return f"{value!r:.60}"


_sizes = _list_of(_integer(0, _MAX_COUNT), _MAX_DIMENSIONS)
_names = _list_of(_text(_MAX_TEXT), _MAX_NAMES)
_harness = _object({"patched": _names, "flags": _mapping_of(_text(_MAX_TEXT)), "threads": _names})
_outputs = _list_of(check_described_output, _MAX_OUTPUTS)
_digests = _list_of(_integer(-(1 << 63), (1 << 63) - 1), 2 * _MAX_OUTPUTS + 1)
_seconds = _number(-_MAX_SECONDS, _MAX_SECONDS)
_count = _integer(0, _MAX_COUNT)
_launch_fields: dict[str, Check] = {
    "seconds": _seconds,
    "whole": _seconds,
    "protocol": _text(_PROTOCOL_CHARACTERS),
    "operations": _mapping_of(_count),
    "kernels": _count,
    "compiled": _count,
    "outputs": _outputs,
    "harness": _harness,
}
_report_form = _object({"harness": _harness})
_batch_outputs = _list_of(_outputs, _MOST_BATCHED)
_batch_places = _list_of(_list_of(_integer(0, (1 << 63) - 1), _MAX_OUTPUTS), _MOST_BATCHED)
_window_form = _object(
    {name: check for name, check in _launch_fields.items() if name != "harness"}
    | {"places": _list_of(_integer(0, (1 << 63) - 1), _MAX_OUTPUTS)},
    {"harness": _harness},
)
_launch_form = _object(_launch_fields, {"digests": _digests})
_again_form = _object({"harness": _harness, "outputs": _outputs}, {"digests": _digests})
_idle_form = _object({"harness": _harness}, {"outputs": _outputs, "digests": _digests})
_FORMS: dict[str, Check] = {
    "prepare": _report_form,
    "place": _report_form,
    "share": _object({}),
    "build": _object({}),
    "launch": _launch_form,
    "window": _window_form,
    "arm": _report_form,
    "attach": _object({}),
    "arm_batch": _object(
        {"outputs": _batch_outputs, "places": _batch_places, "recorded": _boolean, "harness": _harness}
    ),
    "batch": _object({}, {"outputs": _batch_outputs, "places": _batch_places}),
    "report": _report_form,
    "again": _again_form,
    "idle": _idle_form,
}
