"""JSON of other hands: numbers, depth and texts within bounds, whatever Python itself would take."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Config
from forecast_autotune.records.bounded_json import MAX_DEPTH, decode_bounded, decode_document, without_halves
from forecast_autotune.records.json_fields import LARGEST_PARAMETER, to_scalar


@pytest.mark.parametrize(
    "value", [LARGEST_PARAMETER, -LARGEST_PARAMETER, 10**37, 0, 1e300, "9" * 400, [{"a": 1.5}]]
)
def test_what_is_within_bounds_is_read_as_it_is(value: Any) -> None:
    assert decode_bounded(json.dumps(value)) == value
    assert decode_document(json.dumps(value)) == value


@pytest.mark.parametrize("text", ["9" * 400, "-" + "9" * 5000, str(2**128), "1e999", "NaN", "-Infinity"])
def test_other_numbers_are_refused_and_in_documents_left_to_their_records(text: str) -> None:
    with pytest.raises(RecordError):
        decode_bounded('{"a": ' + text + "}")
    (value,) = decode_document("[" + text + "]")
    assert isinstance(value, float)
    assert not abs(value) < 1e308


def nested(depth: int, opening: str, closing: str) -> str:
    return opening * depth + "1" + closing * depth


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_depth_is_bounded(opening: str, closing: str) -> None:
    levels = len(opening.replace('"a":', ""))
    for decode in (decode_bounded, decode_document):
        decode(nested(MAX_DEPTH // levels, opening, closing))
        for depth in (MAX_DEPTH // levels + 1, 500, 100_000):
            with pytest.raises(RecordError, match="too deeply"):
                decode(nested(depth, opening, closing))
    wide = [[1]] * 1000
    assert decode_bounded(json.dumps(wide)) == wide, "many brackets need not be deep"


def test_half_of_a_surrogate_pair() -> None:
    text = json.dumps({"m\udcff": "a\ud800b", "whole": "\U0001f600", "escaped": "\\ud800"})
    with pytest.raises(ValueError, match="surrogates not allowed"):
        decode_bounded(text)
    repaired = {"m\ufffd": "a\ufffdb", "whole": "\U0001f600", "escaped": "\\ud800"}
    assert decode_bounded(text, repair=True) == decode_document(text) == repaired
    assert without_halves("a\ud800") == "a\ufffd"
    assert without_halves("\U0001f600") == "\U0001f600"


def test_documents_have_a_bound_of_values() -> None:
    with pytest.raises(RecordError, match="values"):
        decode_document("[" + "[]," * 3_000_000 + "1]")


@pytest.mark.parametrize("value", [10**400, -(10**5000), 2**128], ids=["400", "5000", "128 bits"])
def test_a_parameter_that_no_table_could_hold_becomes_its_text(value: int) -> None:
    assert to_scalar(value) == hex(value)
    config = Config.of({"N": value})
    assert Config.from_json(json.loads(json.dumps(config.to_json()))) == config
