"""Shipped adapters: complete, small, trained for this release's prompt, and known by their names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.calibration import FILE, find_calibration
from forecast_autotune.llm.prompt import FORECAST_VERSION
from forecast_autotune.llm.spec import SHIPPED_ADAPTERS_DIR, parsed
from forecast_integrations.models.factory import backend

SHIPPED = sorted(SHIPPED_ADAPTERS_DIR.iterdir())
MOST_BYTES = 15_000_000
WEIGHTS = "FORECAST_AUTOTUNE_TEST_WEIGHTS"


def test_there_are_some() -> None:
    assert [folder.name for folder in SHIPPED] == ["qwen2.5-coder-0.5b", "smollm2-135m"]


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
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


@pytest.mark.parametrize("kind", ["transformers", "vllm"])
def test_an_adapter_is_known_by_its_name(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed(f"{kind}:base?adapter=smollm2-135m").options["adapter"] == str(
        SHIPPED_ADAPTERS_DIR / "smollm2-135m"
    )
    assert parsed(f"{kind}:base?adapter=me/other").options["adapter"] == "me/other"
    monkeypatch.chdir(tmp_path)
    Path("smollm2-135m").mkdir()  # a folder of the user's own comes first
    assert parsed(f"{kind}:base?adapter=smollm2-135m").options["adapter"] == "smollm2-135m"


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
