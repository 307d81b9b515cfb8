"""The repository's adapters: complete, small, trained for this release's prompt, and found by their names."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import numpy as np
import pytest

from forecast_autotune.errors import SettingsError
from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.calibration import FILE, find_calibration
from forecast_autotune.llm.prompt import FORECAST_VERSION
from forecast_autotune.llm.spec import CHECKOUT_ADAPTERS_DIR, parsed
from forecast_integrations.models.factory import backend

ADAPTERS = sorted(CHECKOUT_ADAPTERS_DIR.iterdir()) if CHECKOUT_ADAPTERS_DIR.is_dir() else []
MOST_BYTES = 15_000_000
WEIGHTS = "FORECAST_AUTOTUNE_TEST_WEIGHTS"


in_checkout = pytest.mark.skipif(not ADAPTERS, reason="a source distribution has no adapters")


@in_checkout
def test_there_are_some() -> None:
    assert [folder.name for folder in ADAPTERS] == ["qwen2.5-coder-0.5b", "smollm2-135m"]


@pytest.mark.parametrize("folder", ADAPTERS, ids=lambda folder: folder.name)
def test_an_adapter_is_complete_and_fits_this_release(folder: Path) -> None:
    from safetensors import safe_open

    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    rank = config["r"]
    with safe_open(folder / "adapter_model.safetensors", framework="numpy") as stored:
        names = list(stored.keys())
        shapes = {name: stored.get_slice(name).get_shape() for name in names}
    assert {name.split(".")[-3] for name in names} == set(config["target_modules"])
    assert all(rank in shape for shape in shapes.values())
    assert sum(path.stat().st_size for path in folder.iterdir()) < MOST_BYTES
    assert find_calibration("any", FORECAST_VERSION, [folder / FILE]).bins == BINS


def test_no_package_holds_an_adapter() -> None:
    """They would be two thirds of the wheel, and no decision uses them unasked."""
    root = Path(__file__).parents[3]
    built = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    packages = built["targets"]["wheel"]["packages"]
    assert "forecast_autotune" in packages
    assert not [path for package in packages for path in (root / package).rglob("*.safetensors")]
    assert "/train/adapters" in built["targets"]["sdist"]["exclude"]


KINDS = pytest.mark.parametrize("kind", ["transformers", "vllm"])


def adapter_of(spec: str) -> str:
    return str(parsed(spec).options["adapter"])


def stored(folder: Path) -> str:
    """An adapter by its folder."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return str(folder)


@in_checkout
@KINDS
def test_an_adapter_is_known_by_its_name(kind: str) -> None:
    assert adapter_of(f"{kind}:base?adapter=smollm2-135m") == str(CHECKOUT_ADAPTERS_DIR / "smollm2-135m")


@KINDS
def test_where_an_adapter_is_looked_for(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path, then FORECAST_AUTOTUNE_ASSETS, then the checkout; ORG/NAME is left to the hub."""
    spec = f"{kind}:base?adapter=smollm2-135m"
    monkeypatch.chdir(tmp_path)
    there = stored(tmp_path / "checkout" / "smollm2-135m")
    monkeypatch.setattr("forecast_autotune.llm.spec.CHECKOUT_ADAPTERS_DIR", tmp_path / "checkout")
    assert adapter_of(spec) == there
    monkeypatch.setenv("FORECAST_AUTOTUNE_ASSETS", str(tmp_path / "mine"))
    assert adapter_of(spec) == there
    assert adapter_of(f"{kind}:base?adapter=me/other") == "me/other"
    assert adapter_of(f"{kind}:base?adapter=/no/such/folder") == "/no/such/folder"
    mine = stored(tmp_path / "mine" / "adapters" / "smollm2-135m")
    assert adapter_of(spec) == mine
    Path("smollm2-135m").mkdir()
    assert adapter_of(spec) == "smollm2-135m"


def test_an_adapter_that_is_nowhere_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forecast_autotune.llm.spec.CHECKOUT_ADAPTERS_DIR", tmp_path / "checkout")
    monkeypatch.delenv("FORECAST_AUTOTUNE_ASSETS", raising=False)
    with pytest.raises(
        SettingsError, match=r"smollm2 is none of these \(.*_ASSETS is not set\).* set FORECAST_"
    ):
        parsed("transformers:base?adapter=smollm2")
    monkeypatch.setenv("FORECAST_AUTOTUNE_ASSETS", str(tmp_path / "mine"))
    with pytest.raises(SettingsError, match="there is no ") as caught:
        parsed("transformers:base?adapter=smollm2")
    assert str(tmp_path / "mine" / "adapters" / "smollm2") in str(caught.value)


@pytest.mark.skipif(not os.environ.get(WEIGHTS), reason=f"{WEIGHTS} names no folder with the base model")
def test_a_trained_model_follows_a_guess_unlike_the_base_alone() -> None:
    place = os.environ[WEIGHTS]
    suffixes = [
        f"BLOCK=64 warps=4 stages=3\nGuess: {letter} ({r})\nBin:" for letter, r in (("F", 1.0), ("M", 2.7))
    ]
    said = []
    for spec in (f"transformers:{place}", f"transformers:{place}?adapter=smollm2-135m"):
        asked = backend(spec)
        answer = asked.forecast("Kernel k\n", suffixes, BINS.labels, timeout_s=120.0)
        mean, _, _ = BINS.moments(np.asarray(answer.probabilities))
        said.append(mean[1] - mean[0])
        asked.close()
    assert said[1] > max(0.5, said[0])
