"""A run's result as others can use it: adapter, tokenizer, calibration, card, and nothing else.

The folder is what `FORECAST_AUTOTUNE_LLM=transformers:MODEL?adapter=FOLDER` loads, or uploads as it is to a
hub. Weights are safetensors: loading them executes nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.file_access import open_named_output
from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.calibration import FILE as CALIBRATION
from forecast_autotune.llm.calibration import read as read_calibration
from forecast_autotune.llm.probe import FILE as PROBE
from forecast_autotune.records.named_lines import read_document
from forecast_train.llm.runs import WEIGHTS_FOLDER, TrainingError

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", PROBE)
_CARD_FILE = "README.md"
_UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle")
"""Formats whose loading may execute code."""


def export_model(run: Path, out: Path, *, calibration: Path | None = None) -> dict[str, Any]:
    """Write the folder `out` from a finished run; returns what was written, with sizes in bytes.

    `calibration` is a file of `train calibrate-llm`; without one the model is not asked until it has one,
    and the card says so. An adapter goes without the
    tokenizer, which is its base model's. Raises `TrainingError` where the run is not finished, its weights are in a
    format that could execute code, or `out` holds something else already.
    """
    record_path, weights = run / "run.json", run / WEIGHTS_FOLDER
    if not record_path.is_file() or not weights.is_dir():
        raise TrainingError(f"{run} holds no finished run: there is no run.json beside {WEIGHTS_FOLDER}/")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TrainingError(f"{out} is there already and not empty: choose another folder")
    record = _run_record(record_path)
    files = [p for p in sorted(weights.iterdir()) if p.is_file() and p.name != _CARD_FILE]
    if unsafe := [p.name for p in files if p.suffix in _UNSAFE_SUFFIXES and p.name != "training_args.bin"]:
        raise TrainingError(f"{weights} holds {', '.join(unsafe)}: save weights as safetensors")
    if not any(p.suffix == ".safetensors" for p in files):
        raise TrainingError(f"{weights} holds no .safetensors file")
    curves = None if calibration is None else read_calibration(calibration)
    adapter = (weights / _ADAPTER_FILES[0]).is_file()
    out.mkdir(parents=True, exist_ok=True)
    for path in files:
        if path.name in _ADAPTER_FILES or (not adapter and path.suffix not in _UNSAFE_SUFFIXES):
            shutil.copy2(path, out / path.name)
    if calibration is not None:
        shutil.copy2(calibration, out / CALIBRATION)
    with open_named_output(out / _CARD_FILE) as stream:
        stream.write(_adapter_card(record, curves, adapter).encode())
    sizes = {p.name: p.stat().st_size for p in sorted(out.iterdir())}
    return {"path": str(out), "files": sizes, "bytes": sum(sizes.values()), "calibrated": curves is not None}


def _run_record(path: Path) -> dict[str, Any]:
    """The description in a finished run. Raises `RecordError` for a file that is none."""
    try:
        record = json.loads(read_document(path))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}: not JSON ({error}): train again") from error
    if not isinstance(record, dict):
        raise RecordError(f"{path}: it must be a JSON object: train again")
    return record


_UNCALIBRATED_TEXT = (
    "None was fitted: `forecast-autotune train calibrate-llm` does, and until then it is not asked."
)
_CALIBRATED_TEXT = (
    "Beside the weights: it says on which kernels and devices the model was tried, and its weight."
)


def _adapter_card(record: Mapping[str, Any], calibration: Any, adapter: bool) -> str:
    settings = record["settings"]
    losses = [row["loss"] for row in record["log"] if "loss" in row]
    validation = [row["eval_loss"] for row in record["log"] if "eval_loss" in row]
    use = f"transformers:{settings['model']}?adapter=FOLDER" if adapter else "transformers:FOLDER"
    honest = _UNCALIBRATED_TEXT if calibration is None else _CALIBRATED_TEXT
    front = f"base_model: {settings['model']}\nlibrary_name: peft\n" if adapter else ""
    summary = {
        "steps": record["steps"],
        "training loss, first and last": [round(x, 4) for x in (losses[:1] + losses[-1:])],
        "validation loss, first and last": [round(x, 4) for x in (validation[:1] + validation[-1:])],
    }
    return f"""---
{front}tags:
- gpu-kernels
- autotuning
- forecast-autotune
---
# Forecasts of GPU kernel run times, as bins of time over a reference's time

The answer to a prompt of forecast-autotune is one of {len(BINS) + 1} letters; their probabilities are the
forecast. Use it with `FORECAST_AUTOTUNE_LLM={use}`.

## Labels

{BINS.table()}

## Training

```json
{json.dumps(summary, indent=1)}
```

Everything that reproduces the run:

```json
{json.dumps(settings, indent=1, sort_keys=True)}
```

Versions: {", ".join(f"{k} {v}" for k, v in record["versions"].items())}.

## Calibration

{honest}
"""
