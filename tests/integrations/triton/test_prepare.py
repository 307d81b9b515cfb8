"""Keys decided before a capture, and keys that are met inside one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import forecast_autotune
from forecast_autotune import allow_capture_misses, prepare
from forecast_autotune.errors import CaptureError
from forecast_autotune.records import Evidence
from forecast_autotune.store import Store
from forecast_integrations.triton import device_access, engine
from forecast_integrations.triton import prepare as preparing
from tests.integrations.null import configs, double, fresh, launch

pytestmark = pytest.mark.usefixtures("shared_cache")

LISTED = configs((2, 4), (3,))


def tuned(store: Path | bool = False, **options: Any) -> Any:
    """A tuner that knows nothing yet, of a kernel of which nothing is compiled."""
    return forecast_autotune.autotune(LISTED, key=["n"], store=store, **{"mode": "exhaustive", **options})(
        fresh(double)
    )


def call(n: int) -> dict[str, Any]:
    """An example call."""
    x = torch.ones(n)
    return {"x": x, "out": x, "n": n, "grid": lambda meta: (triton.cdiv(n, meta["BLOCK"]),)}


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The current stream records a graph until this is undone, as far as it can be asked without a GPU."""
    with monkeypatch.context() as patched:
        for asking in (engine, device_access, preparing):
            patched.setattr(asking, "capturing_graph", lambda: True)
        yield patched


def test_keys_are_decided_without_touching_what_the_program_has(device: Any, tmp_path: Path) -> None:
    tuner = tuned(tmp_path, reset_to_zero=["out"])
    calls = [call(128), call(4096), call(4096)]
    done = prepare(tuner, calls)
    assert [one.status for one in done.keys] == ["decided", "decided", "known"]
    assert str(done) == "double: 2 decided, 1 known"
    assert done.keys[0].decision is not None
    assert done.keys[0].decision.measured == 2
    assert all(bool((one["out"] == 1).all()) for one in calls), "neither launched on nor zeroed"
    before = device.launches
    launch(tuner, 4096)
    assert device.launches == before + 1
    again = prepare(tuned(tmp_path), [call(128)])
    assert (again.count("stored"), again.failed) == (1, ())


def test_a_call_that_cannot_be_decided_is_reported_beside_the_others(device: Any) -> None:
    without_grid = {name: value for name, value in call(64).items() if name != "grid"}
    odd = {**call(64), "x": [1, 2]}
    done = prepare(tuned(), [without_grid, odd, call(64)])
    assert [one.status for one in done.keys] == ["failed", "failed", "decided"]
    assert "grid" in done.failed[0].trouble
    assert "nobody knows how to copy an argument of type list" in done.failed[1].trouble


def test_what_is_no_kernel_of_ours_is_refused(device: Any) -> None:
    with pytest.raises(TypeError, match="is no tuned kernel"):
        prepare(fresh(double), [])
    with pytest.raises(TypeError, match="is tuned by Triton itself"):
        prepare(triton.autotune(LISTED, key=["n"])(fresh(double)), [])


def test_one_config_and_background_mode_are_no_trouble(device: Any) -> None:
    alone = forecast_autotune.autotune(LISTED[:1], key=["n"])(fresh(double))
    assert prepare(alone, [call(64)]).count("single") == 1
    later = tuned(mode="background")
    assert prepare(later, [call(64)]).count("decided") == 1


def test_a_miss_inside_a_capture_is_an_error_that_says_what_to_do(device: Any, capturing: Any) -> None:
    with pytest.raises(CaptureError, match=r"prepare\(\).*allow_capture_misses\(\)"):
        launch(tuned(), 64)
    with pytest.raises(CaptureError):
        prepare(tuned(), [call(64)])


def test_a_miss_inside_a_capture_may_be_recorded_and_launched(
    device: Any, tmp_path: Path, capturing: pytest.MonkeyPatch
) -> None:
    tuner = tuned(tmp_path)
    with allow_capture_misses() as met, allow_capture_misses() as inner:
        before = device.launches
        launch(tuner, 64)
        launch(tuner, 64)
        assert device.launches == before + 2, "nothing but the program's own launches"
    assert [(one.kernel, one.key[0], one.decision.evidence) for one in met] == [
        ("double", "64", Evidence.FORECAST)
    ]
    assert inner == met
    assert [m.problem.key[0] for m in Store(tmp_path).misses.all()] == ["64"]
    launch(tuner, 64)  # it has a choice for graphs from here on
    with pytest.raises(CaptureError):
        launch(tuner, 128)
    capturing.undo()
    assert not tuner.cache, "a forecast is for graphs alone"


def test_after_a_capture_a_key_is_tuned_as_ever(device: Any, capturing: pytest.MonkeyPatch) -> None:
    tuner = tuned()
    with allow_capture_misses():
        launch(tuner, 64)
    capturing.undo()
    launch(tuner, 64)
    assert tuner.decision.evidence is Evidence.MEASURED
