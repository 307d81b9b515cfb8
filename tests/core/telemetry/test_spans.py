"""Who hears of spans, and what a bad exporter costs."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from forecast_autotune.printable import LONGEST_NAME
from forecast_autotune.telemetry import spans
from forecast_autotune.telemetry.exporter import Attributes
from tests.core.telemetry.recorder import Recorder


def test_without_exporters_every_span_is_the_same_and_takes_anything() -> None:
    first, second = spans.span("decide", kernel="k"), spans.span("measure")
    assert first is second
    with first as shown:
        shown.set(outcome=object())
    spans.record("compile", "compile", 1.0, 2.0)
    spans.count("hits", 1)


def test_spans_nest_and_say_what_ended_them(recorder: Recorder) -> None:
    def decide() -> None:
        with spans.span("decide", kernel="k"):
            with spans.span("measure", candidate=None) as inner:
                inner.set(outcome="ok", median_ms=0.5)
            raise KeyError

    with pytest.raises(KeyError):
        decide()
    assert recorder.spans == [
        ("measure", {"outcome": "ok", "median_ms": 0.5, "failed": False}, "decide"),
        ("decide", {"kernel": "k", "outcome": "KeyError", "failed": True}, ""),
    ]


def test_attributes_are_bounded_and_hold_no_control_characters(recorder: Recorder) -> None:
    with spans.span("decide", kernel="\x1b[31m" + "k" * 10_000, measured=3, quiet=True):
        pass
    (said,) = recorder.named("decide")
    assert "\x1b" not in said["kernel"]
    assert len(said["kernel"]) < LONGEST_NAME + 40
    assert (said["measured"], said["quiet"]) == (3, True)


class Broken(Recorder):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def begin(self, name: str, attributes: Attributes) -> object:
        if self.where == "begin":
            raise RuntimeError("no more")
        return super().begin(name, attributes)

    def end(self, token: object, attributes: Attributes, failed: bool) -> None:
        if self.where == "end":
            raise RuntimeError("no more")
        super().end(token, attributes, failed)

    def count(self, counter: str, amount: float, attributes: Attributes) -> None:
        if self.where == "count":
            raise RuntimeError("no more")
        super().count(counter, amount, attributes)

    def close(self) -> None:
        raise OSError("not even that")


@pytest.mark.parametrize("where", ["begin", "end", "count"])
def test_an_exporter_that_fails_is_dropped_with_a_warning_and_no_other(
    monkeypatch: pytest.MonkeyPatch, recorder: Recorder, where: str
) -> None:
    monkeypatch.setattr(spans._state, "exporters", (Broken(where), recorder))

    def decide() -> None:
        for _ in range(3):
            with spans.span("decide"):
                spans.count("hits", 1)

    with pytest.warns(RuntimeWarning) as caught:
        decide()
    told = [str(w.message) for w in caught]
    assert len([text for text in told if "Broken failed (RuntimeError('no more'))" in text]) == 1
    assert len(told) == 2, told  # it could not be closed, either
    assert len(recorder.named("decide")) == recorder.counted["hits"] == 3


def test_a_file_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    place = tmp_path / "absent" / "trace.json"
    with pytest.warns(RuntimeWarning, match=r"no trace is written to .*absent"):
        spans.configure("off", place, at_once=True)
    with warnings.catch_warnings(), spans.span("decide"):
        warnings.simplefilter("error")
        spans.configure("off", place)


def test_a_file_is_begun_by_the_first_event(tmp_path: Path) -> None:
    place = tmp_path / "trace.json"
    spans.configure("off", place)
    assert not place.exists()
    spans.count("hits", 1)
    assert place.exists()
    spans.configure("off", tmp_path / "absent" / "trace.json")

    def decide() -> None:
        for _ in range(3):
            spans.count("hits", 1)

    with pytest.warns(RuntimeWarning, match=r"TraceFile failed .*No such file") as caught:
        decide()
    assert len(caught) == 1


def test_what_is_asked_for_again_goes_on(tmp_path: Path) -> None:
    place = tmp_path / "trace.json"
    for _ in range(2):
        spans.configure("off", place)
        with spans.span("decide"):
            pass
    spans.configure("off", None)  # the settings of another decision end no trace
    with spans.span("decide"):
        pass
    spans.close()
    assert place.read_text(encoding="utf-8").count('"ph":"B"') == 3
