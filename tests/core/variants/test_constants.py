"""Compile-time constants that go to another process and come back."""

from __future__ import annotations

import enum
import json
import math
from typing import Any, NamedTuple

import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.variants.constants import decode_constant, encode_constant, exact_constant


class Pair(NamedTuple):
    first: object
    second: object


class Mode(enum.Enum):
    EXACT = 1
    ROUGH = "rough"


class Level(enum.IntEnum):
    LOW = 1


def travelled(value: object) -> Any:
    return decode_constant(json.loads(json.dumps(encode_constant(value), allow_nan=False)))


@pytest.mark.parametrize(
    "value", [None, True, 1, 2.5, -math.inf, "x", (), (1, (None, "x")), Pair(1, (2,)), Level.LOW]
)
def test_a_constant_arrives_as_it_was(value: object) -> None:
    assert travelled(value) == value
    assert type(travelled(value)).__name__ == type(value).__name__


def test_members_of_one_enum_stay_members_of_one_class() -> None:
    rough, exact = travelled(Mode.ROUGH), travelled(Mode.EXACT)
    assert (rough.name, rough.value) == ("ROUGH", "rough")
    assert type(rough) is type(exact)


def test_dtypes_and_constants_of_triton_arrive() -> None:
    torch, tl = pytest.importorskip("torch"), pytest.importorskip("triton.language")
    for value in (tl.float32, tl.bfloat16, tl.int1, torch.float16, (tl.float8e5, torch.int8)):
        assert travelled(value) == value
    assert travelled(tl.constexpr((tl.float16, 2))) == (tl.float16, 2)


@pytest.mark.parametrize(
    "said",
    [["function", "f", "raise SystemExit\n"], ["enum", "sys", "X", [], "x"], ["tuple"], ["import", "os"], 3],
)
def test_what_a_store_says_is_never_run(said: object) -> None:
    with pytest.raises(RecordError):
        decode_constant({"constant": said})


def test_what_cannot_be_told_has_no_exact_record() -> None:
    assert exact_constant({1: 2}) == exact_constant(3) == {}
    with pytest.raises(RecordError, match="a dict cannot be handed to another process"):
        encode_constant((1, {1: 2}))
