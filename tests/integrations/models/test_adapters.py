"""Adapters of local models: a folder, a name on the hub, or a name in the directory of FORECAST_AUTOTUNE_ASSETS."""

from __future__ import annotations

from pathlib import Path

import pytest

from forecast_autotune.errors import SettingsError
from forecast_autotune.llm.spec import parsed


def adapter_of(spec: str) -> str:
    return str(parsed(spec).options["adapter"])


@pytest.mark.parametrize("kind", ["transformers", "vllm"])
def test_where_an_adapter_is_looked_for(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path, then FORECAST_AUTOTUNE_ASSETS; ORG/NAME is left to the hub."""
    spec = f"{kind}:base?adapter=smollm2-135m"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORECAST_AUTOTUNE_ASSETS", str(tmp_path / "mine"))
    assert adapter_of(f"{kind}:base?adapter=me/other") == "me/other"
    assert adapter_of(f"{kind}:base?adapter=/no/such/folder") == "/no/such/folder"
    mine = tmp_path / "mine" / "adapters" / "smollm2-135m"
    mine.mkdir(parents=True)
    (mine / "adapter_config.json").write_text("{}")
    assert adapter_of(spec) == str(mine)
    Path("smollm2-135m").mkdir()
    assert adapter_of(spec) == "smollm2-135m"


def test_an_adapter_that_is_nowhere_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORECAST_AUTOTUNE_ASSETS", raising=False)
    with pytest.raises(
        SettingsError, match=r"smollm2 is none of these \(.*_ASSETS is not set\).* set FORECAST_"
    ):
        parsed("transformers:base?adapter=smollm2")
    monkeypatch.setenv("FORECAST_AUTOTUNE_ASSETS", str(tmp_path / "mine"))
    with pytest.raises(SettingsError, match="there is no ") as caught:
        parsed("transformers:base?adapter=smollm2")
    assert str(tmp_path / "mine" / "adapters" / "smollm2") in str(caught.value)
