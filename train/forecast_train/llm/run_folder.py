"""What every training run keeps: a folder that is its own, settings, and a record of what was done."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.file_access import open_named_output
from forecast_autotune.records import digest

WEIGHTS_FOLDER = "trained"
"""Folder below a run's `out` that holds the adapter (or the model, for rank 0) and the tokenizer."""


class TrainingError(ForecastAutotuneError, RuntimeError):
    """A run that cannot start, go on or be taken up; the message names the remedy."""


def claim_run_folder(out: Path, settings: Mapping[str, Any], resume: bool) -> str:
    """Mark the folder as this run's, so that two runs never mix their checkpoints; returns the run's name.

    The name follows from the settings, but for where the run writes. Raises `TrainingError` where the folder
    is another run's, or holds checkpoints of this one and `resume` is not asked for.
    """
    name = digest({**settings, "out": ""})
    out.mkdir(parents=True, exist_ok=True)
    mark = out / "settings.json"
    if not mark.is_file():
        write_json(mark, {"run": name, **settings})
        return name
    try:
        found = json.loads(mark.read_text(encoding="utf-8")).get("run")
    except (ValueError, AttributeError):
        found = None
    if found != name:
        raise TrainingError(f"{out} holds another run (its settings differ): choose another folder")
    if any(out.glob("checkpoint-*")) and not resume:
        raise TrainingError(f"{out} holds checkpoints of this run: resume it, or choose another folder")
    return name


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write one JSON object, atomically."""
    with open_named_output(path) as stream:
        stream.write(f"{json.dumps(data, indent=1, default=str)}\n".encode())


def attention_without_cudnn() -> AbstractContextManager[None]:
    """A `with` block in which attention goes without cuDNN's kernels.

    Where a mask is passed, a sequence ends 64 past a multiple of 128 and a row's scores lie below -88, as
    Qwen2.5's biases make them, their backward pass gives NaN (torch 2.11 on Hopper, pytorch#196678).
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    found: AbstractContextManager[None] = sdpa_kernel(others)
    return found


def run_trainer(trainer: Any, out: Path, *, resume: bool) -> tuple[str | None, Any]:
    """Run a `transformers.Trainer`: (the checkpoint that was taken up, what its `train` returned).

    It keeps off stdout, which belongs to the command (its bar goes to stderr), and shows a loss that is no
    number as it is: `transformers` would log 0 and go on, and `timing.Finite` would not hear of it.
    """
    import transformers

    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.args.logging_nan_inf_filter = False
    newest = transformers.trainer_utils.get_last_checkpoint(str(out)) if resume else None
    with attention_without_cudnn():
        return newest, trainer.train(resume_from_checkpoint=newest)
