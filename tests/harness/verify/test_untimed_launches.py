"""Launches in a cell that was not told to time: what they took is waited for, and nothing else is done."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from forecast_harness.verify import inside


def test_a_launch_on_a_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(inside, "_synchronize", lambda: done.append("waited"))

    def launch() -> int:
        done.append("launched")
        return 7

    taken = inside._timed(launch, {"watch": "", "protocol": ""}, [], {"device": "cuda", "timer": None})
    assert done == ["launched", "waited"]
    assert (taken.result, taken.protocol) == (7, "host")
    assert 0 <= taken.seconds == taken.total_seconds
