"""What can be said of the search without Helion: what is left behind where it cannot be made, and its configs."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from forecast_autotune.errors import RecordError
from forecast_integrations.helion.search import enable_helion
from forecast_integrations.helion.tracing import to_config


def test_a_helion_without_the_base_class_keeps_its_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithms: dict[str, Any] = {"Theirs": object}
    monkeypatch.setitem(sys.modules, "helion", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "helion.autotuner", SimpleNamespace(search_algorithms=algorithms))
    monkeypatch.setitem(sys.modules, "helion.autotuner.base_search", None)
    with pytest.raises(ImportError):
        enable_helion()
    assert algorithms == {"Theirs": object}


def test_a_config_is_spread_as_in_imported_logs() -> None:
    given = {"block_sizes": [16, [32, 64]], "indexing": "pointer", "num_warps": 8, "num_stages": None}
    made = to_config(SimpleNamespace(config=given), stages=3)
    assert dict(made.kwargs) == {
        "block_sizes[0]": 16,
        "block_sizes[1][0]": 32,
        "block_sizes[1][1]": 64,
        "indexing": "pointer",
    }
    assert (made.num_warps, made.num_stages) == (8, 3)
    with pytest.raises(RecordError, match="128 bits"):
        to_config(SimpleNamespace(config={"block_sizes": [10**60]}))
