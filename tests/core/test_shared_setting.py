"""A setting of the interpreter is changed while it is used, and put back once, as far as nobody else set it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from forecast_autotune.shared_setting import SharedSetting


def made() -> tuple[dict[str, Any], SharedSetting[float]]:
    held = {"value": 1.0}
    return held, SharedSetting(
        lambda: held["value"], lambda value: held.update(value=round(value, 1)), lambda usual: usual + 0.26
    )


def test_it_is_put_back_when_the_last_user_is_done() -> None:
    held, setting = made()
    with setting.changed():
        with setting.changed():
            assert held["value"] == 1.3, "changed once, and rounded by its owner"
        assert held["value"] == 1.3
    assert held["value"] == 1.0
    held["value"] = 2.0
    with setting.changed():
        assert held["value"] == 2.3, "of what is usual now"
    assert held["value"] == 2.0


def test_what_is_set_meanwhile_stays() -> None:
    held, setting = made()
    with setting.changed():
        held["value"] = 7.0
    assert held["value"] == 7.0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_meanwhile_has_the_usual_value() -> None:
    held, setting = made()
    with setting.changed():
        child = os.fork()
        if not child:
            with setting.changed():
                inside = held["value"]
            os._exit(0 if (inside, held["value"]) == (1.3, 1.0) else 1)
    assert os.waitpid(child, 0)[1] == 0
