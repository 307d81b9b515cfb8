"""Who hears of spans, and what a bad exporter costs."""

from __future__ import annotations

import pytest

from forecast_autotune.printable import LONGEST_NAME
from forecast_autotune.telemetry import spans
from forecast_autotune.telemetry.spans import Attributes
from tests.core.telemetry.recorder import Recorder


def test_attributes_are_bounded_and_hold_no_control_characters(recorder: Recorder) -> None:
    with spans.span("decide", kernel="\x1b[31m" + "k" * 10_000, measured=3, quiet=True):
        pass
    (message,) = recorder.named("decide")
    assert "\x1b" not in message["kernel"]
    assert len(message["kernel"]) < LONGEST_NAME + 40
    assert (message["measured"], message["quiet"]) == (3, True)


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


@pytest.mark.parametrize("where", ["begin", "end", "count"])
def test_an_exporter_that_fails_is_dropped_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(spans._state, "exporter", Broken(where))

    def decide() -> None:
        for _ in range(3):
            with spans.span("decide"):
                spans.count("hits", 1)

    with pytest.warns(RuntimeWarning) as caught:
        decide()
    (text,) = (str(w.message) for w in caught)
    assert "Broken failed (RuntimeError('no more'))" in text
