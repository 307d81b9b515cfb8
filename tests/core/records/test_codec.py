"""`records.codec`: dataclasses to JSON and back, by their annotations and by what a class says of itself."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Literal

import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.records.codec import Record, json_option, reader_of
from forecast_autotune.records.json_fields import one_of, rounded, significant, tuple_of


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(Enum):
    LOW = 1


@dataclass(frozen=True)
class Point:
    x: int
    y: float = 0.5


@dataclass(frozen=True, slots=True)
class Shape(Record):
    name: str
    colour: Colour
    points: tuple[Point, ...] = ()
    pair: tuple[int, str] = (0, "")
    by_name: Mapping[str, Point] = field(default_factory=dict)
    level: Level = Level.LOW
    closed: bool = False
    weight: float | None = None
    size: int | str = 0
    word: Literal["a", "b"] = "a"
    rest: Any = None
    counts: list[int] = field(default_factory=list)


FULL = Shape(
    "s", Colour.BLUE, (Point(1), Point(2, 3.0)), (4, "p"), {"q": Point(5)}, Level.LOW, True, 1.5, "big", "b",
    {"any": [1, None]}, [7],
)  # fmt: skip


def test_a_record_survives_json_with_its_fields_in_order() -> None:
    text = json.dumps(FULL.to_json(), allow_nan=False)
    assert text == (
        '{"name": "s", "colour": "blue", "points": [{"x": 1, "y": 0.5}, {"x": 2, "y": 3.0}], "pair": [4, "p"], '
        '"by_name": {"q": {"x": 5, "y": 0.5}}, "level": 1, "closed": true, "weight": 1.5, "size": "big", '
        '"word": "b", "rest": {"any": [1, null]}, "counts": [7]}'
    )
    assert Shape.from_json(json.loads(text)) == FULL


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": 3}, "Shape.name must be a text, not 3"),
        ({"colour": "green"}, "Shape.colour must be one of red, blue, not 'green'"),
        ({"colour": ["red"]}, "Shape.colour must be one of red, blue"),
        ({"level": 2}, "Shape.level must be one of 1, not 2"),
        ({"points": "ab"}, "Shape.points must be a list, not 'ab'"),
        (
            {"points": [{"x": 1}, {"x": True}]},
            "Shape.points[1].x must be an integer from 0 to 2^63, not True",
        ),
        ({"points": [{"y": 1}]}, "Shape.points[0] needs the field 'x'; it has y"),
        ({"points": [{}]}, "Shape.points[0] needs the field 'x'; it has none"),
        ({"points": [3]}, "Shape.points[0] must be an object, not 3"),
        ({"by_name": {"q": {"x": 1, "y": math.nan}}}, "Shape.by_name.q.y must be finite, not nan"),
        ({"by_name": {"q": {"x": 1, "y": 10**400}}}, "Shape.by_name.q.y must be finite"),
        ({"by_name": {"q": {"x": 1, "y": True}}}, "Shape.by_name.q.y must be a number, not True"),
        ({"by_name": []}, "Shape.by_name must be an object, not []"),
        ({"pair": [1]}, "Shape.pair must have 2 entries, not 1"),
        ({"pair": [1, 2]}, "Shape.pair[1] must be a text, not 2"),
        ({"closed": 1}, "Shape.closed must be true or false, not 1"),
        ({"weight": "1"}, "Shape.weight must be a number"),
        ({"weight": None}, None),
        ({"name": None}, "Shape.name must be a text, not None"),
        ({"size": 1.5}, "Shape.size must be an integer"),
        ({"word": "c"}, "Shape.word must be one of a, b, not 'c'"),
        ({"counts": [2**63]}, "Shape.counts[0] must be an integer from 0 to 2^63"),
        ({"counts": [-1]}, "Shape.counts[0] must be an integer from 0 to 2^63"),
    ],
)
def test_what_breaks_a_rule_is_named_by_its_path(change: dict[str, Any], said: str | None) -> None:
    data = {**FULL.to_json(), **change}
    if said is None:
        Shape.from_json(data)
        return
    with pytest.raises(RecordError) as caught:
        Shape.from_json(data)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("data", [None, 3, "text", [], [("name", "s")]])
def test_what_is_no_object_is_refused(data: object) -> None:
    with pytest.raises(RecordError, match="Shape must be an object"):
        Shape.from_json(data)


@dataclass(frozen=True)
class Inner(Record, lenient=True, order=("variant", "config")):
    config: Mapping[str, int]
    variant: str = "base"


@dataclass(frozen=True)
class Line(
    Record, tag="line", schema=2, lenient=True, order=("id", "inner", "half", "twice", "note", "grid")
):
    id: str
    inner: Inner = field(metadata=json_option(flat=True))
    note: str = ""
    grid: tuple[int, ...] | None = field(default=None, metadata=json_option(omit_null=True))
    half: float = field(default=0.0, metadata=json_option(write=rounded(2)))
    secret: int = field(default=7, metadata=json_option(private=True))
    twice: str = field(default="", metadata=json_option(when=lambda line: line.note))
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)


def test_a_line_has_its_header_the_fields_of_its_flat_record_and_what_was_unknown() -> None:
    data = {
        "new": [1],
        "type": "line",
        "schema": 2,
        "id": "i",
        "variant": "v",
        "config": {"b": 1},
        "half": 0.12,
    }
    line = Line.from_json({**data, "note": None, "half": 0.12})
    assert line == Line("i", Inner({"b": 1}, "v"), half=0.12)
    assert line.extra == {"new": [1]}
    assert json.dumps(line.to_json()) == json.dumps({**data, "note": ""})
    noted = Line("i", Inner({}), "n", (1, 2), 0.126, 8, "t").to_json()
    assert list(noted) == ["type", "schema", "id", "variant", "config", "half", "twice", "note", "grid"]
    assert (noted["half"], noted["grid"]) == (0.13, [1, 2])
    assert Line.from_json({**noted, "secret": 9}).secret == 7


def test_a_lenient_record_takes_any_value_for_a_text_and_null_for_a_missing_field() -> None:
    data = {"type": "line", "id": 5, "config": {}, "variant": None, "note": [1]}
    assert Line.from_json(data) == Line("5", Inner({}), "[1]")
    with pytest.raises(RecordError, match=r"line needs the field 'config'; it has type, id$"):
        Line.from_json({"type": "line", "id": "i"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"type": "other"}, 'line: expected a line of type "line"'),
        ({"schema": 3}, "reads up to 2: upgrade"),
        ({"schema": "2"}, "reads up to 2: upgrade"),
        ({"config": {"b": "1"}}, r"line\.config\.b must be an integer"),
        ({"grid": [1, "2"]}, r"line\.grid\[1\] must be an integer"),
    ],
)
def test_a_line_of_another_type_or_release_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(RecordError, match=said):
        Line.from_json({"type": "line", "id": "i", "config": {}, **change})


@dataclass(frozen=True)
class Knots(Record):
    """JSON that is no object of the fields."""

    x: tuple[float, ...] = ()

    def to_json(self) -> Any:
        return list(self.x)

    @classmethod
    def from_json(cls, data: Any) -> Knots:
        return cls(reader_of(tuple[float, ...])(data))


@dataclass(frozen=True)
class Model(
    Record, schema=1, label="model", unknown="refuse", complete=True, remedy="fit it again",
    derived={"knots": lambda model: len(model.curve.x)},
):  # fmt: skip
    curve: Knots = Knots()
    kinds: tuple[str, ...] = field(default=(), metadata=json_option(read=tuple_of(one_of("ab"))))
    share: float = field(default=0.0, metadata=json_option(write=significant(2)))
    about: Mapping[str, Any] = field(default_factory=dict, metadata=json_option(default={}))

    def __post_init__(self) -> None:
        if self.share > 1:
            raise RecordError(f"a share lies in [0, 1], got {self.share}")


MODEL = {"schema": 1, "curve": [1.0], "kinds": ["a"], "share": 0.12}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"curve": [1.0, "x"]}, "model.curve[1] must be a number"),
        ({"kinds": ["a", "c"]}, "model.kinds[1] must be one of a, b, not 'c'"),
        ({"share": 2}, "model: a share lies in [0, 1], got 2.0"),
        ({"schema": 2}, "model.schema must be 1, not 2"),
        (
            {"strange": 0},
            "model has unknown fields ['strange']; known are about, curve, kinds, knots, schema, share",
        ),
    ],
)
def test_every_message_ends_with_the_remedy(change: dict[str, Any], said: str) -> None:
    with pytest.raises(RecordError) as caught:
        Model.from_json({**MODEL, **change})
    assert str(caught.value).startswith(said)
    assert str(caught.value).endswith(": fit it again")
