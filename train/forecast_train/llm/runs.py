"""The common parts of every training run: its TOML file, a folder that is its own, and a record of what was done."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from forecast_autotune.errors import ForecastAutotuneError, RecordError, SettingsError
from forecast_autotune.file_access import open_named_output
from forecast_autotune.llm.probe import MODEL_FILES, files_digest, model_folder
from forecast_autotune.records import digest
from forecast_autotune.records.named_lines import read_document

WEIGHTS_FOLDER = "trained"
"""Folder below a run's `out` that holds the adapter (or the model, for rank 0) and the tokenizer."""
_MAX_TOML_BYTES = 1_000_000
"""Most bytes of a run's description: a reader of TOML takes half a minute for a line of 32 MB."""

SettingsT = TypeVar("SettingsT")


class TrainingError(ForecastAutotuneError, RuntimeError):
    """A run that cannot start, go on or be taken up; the message names the remedy."""


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters (Hu et al., arXiv 2106.09685) on every linear layer; rank 0 trains all weights."""

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0

    def config(self) -> Any:
        """As peft takes it; None where all weights are trained."""
        if not self.rank:
            return None
        import peft

        return peft.LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )


def load_toml(kind: type[SettingsT], path: Path, parts: Mapping[str, type[Any]]) -> SettingsT:
    """A run from a TOML file with tables `parts`; `data`, `out` and a local `model` count from its folder.

    Raises `SettingsError` naming the file, the entry, its value and the rule.
    """
    try:
        table = tomllib.loads(read_document(path, limit=_MAX_TOML_BYTES))
    except (OSError, RecordError, tomllib.TOMLDecodeError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise SettingsError(f"{path}: no TOML file that can be read ({why})") from error
    here = path.absolute().parent
    try:
        inner: dict[str, Any] = {
            k: _parse_table(part, table.pop(k), k) for k, part in parts.items() if k in table
        }
        for name in ("data", "out", "model"):
            value = table.get(name)
            # A model may also be a name on the hub.
            if isinstance(value, str) and value and (name != "model" or (here / value).is_dir()):
                table[name] = str(here / value)
        return _parse_table(kind, {**table, **inner}, "")
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from error


_TYPES: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "bool": bool}


def _parse_table(kind: type[SettingsT], table: Any, where: str) -> SettingsT:
    if not isinstance(table, Mapping):
        raise SettingsError(f"[{where}] must be a table, got {table!r}")
    fields_by_name = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    place = f"{where}." if where else ""
    if unknown := sorted(set(table) - fields_by_name.keys()):
        raise SettingsError(f"{place}{unknown[0]} is not known; known are {', '.join(fields_by_name)}")
    for name, value in table.items():
        type_name = str(fields_by_name[name].type)
        is_right = isinstance(value, _TYPES.get(type_name, object)) and (type_name == "bool") == isinstance(
            value, bool
        )
        if type_name in _TYPES and not is_right:
            raise SettingsError(f"{place}{name} must be of type {type_name}, got {value!r}")
    required = [n for n, f in fields_by_name.items() if f.default is MISSING and f.default_factory is MISSING]
    if absent := [n for n in required if n not in table]:
        raise SettingsError(f"{where or 'a run'} needs {', '.join(required)}: add {', '.join(absent)}")
    return kind(**table)


def claim_run_folder(out: Path, settings: Mapping[str, Any], resume: bool) -> str:
    """Mark the folder as this run's, so that two runs never mix their checkpoints; returns the run's name.

    The name follows from the settings, but for where the run writes, and from the digests of the data and of a
    local model. Raises `TrainingError` where the folder is another run's, or holds checkpoints of this one and
    `resume` is not asked for; and where the model is an adapter alone.
    """
    model = str(settings.get("model", ""))
    if (model_folder(model) / "adapter_config.json").is_file():
        raise TrainingError(
            f"model must be a whole model, and {model} holds an adapter alone: name the model that it was trained "
            "on, or train that one with lora.rank = 0"
        )
    data = Path(str(settings.get("data", "")))
    rests = {"data": files_digest(data, "*.parquet"), "model": files_digest(model, *MODEL_FILES)}
    settings = {**settings, "sha256": {k: v for k, v in rests.items() if v}}
    name = digest({**settings, "out": ""})
    out.mkdir(parents=True, exist_ok=True)
    mark = out / "settings.json"
    if not mark.is_file():
        write_json(mark, {"run": name, **settings})
        return name
    try:
        holder = dict(json.loads(mark.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        holder = {}
    if holder.pop("run", None) != name:
        apart = [k for k, v in settings.items() if k != "out" and holder.get(k) != v]
        raise TrainingError(
            f"{out} holds another run ({', '.join(apart) or 'what it says of itself'} differ): choose another folder"
        )
    if any(out.glob("checkpoint-*")) and not resume:
        raise TrainingError(f"{out} holds checkpoints of this run: resume it, or choose another folder")
    return name


def finished_run(out: Path, name: str, resume: bool) -> dict[str, Any] | None:
    """The record of this run where it is over and its weights are there: a resume has nothing to do."""
    if not (resume and any((out / WEIGHTS_FOLDER).glob("*.safetensors")) and (out / "run.json").is_file()):
        return None
    record = json.loads((out / "run.json").read_text(encoding="utf-8"))
    return record if record.get("run") == name else None


def require_positions(config: Any, needed: int, remedy: str) -> None:
    """Raises `TrainingError` where a model of this config has fewer positions than its longest prompt needs."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or needed
    if positions < needed:
        raise TrainingError(
            f"the longest prompt needs {needed} positions and the model has {positions}: it would be trained and "
            f"then refused at every forecast; take a model with more, or {remedy}"
        )


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write one JSON object, atomically."""
    with open_named_output(path) as stream:
        stream.write(f"{json.dumps(data, indent=1, default=str)}\n".encode())


def run_trainer(trainer: Any, out: Path, *, resume: bool, remedy: str) -> tuple[str | None, float]:
    """Run a `transformers.Trainer`: (the checkpoint that was taken up, the mean loss of all steps of the run).

    It keeps off stdout, which belongs to the command (its bar goes to stderr). Raises `TrainingError` with the
    `remedy` at the first loss or gradient that is no number: `transformers` would log 0 and go on. Attention goes
    without cuDNN's kernels: where a mask is passed, a sequence ends 64 past a multiple of 128 and a row's scores
    lie below -88, as Qwen2.5's biases make them, their backward pass gives NaN (torch 2.11 on Hopper,
    pytorch#196678).
    """
    import transformers
    from torch.nn.attention import SDPBackend, sdpa_kernel

    class StopOnNonFinite(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            numbers = {k: logs[k] for k in ("loss", "eval_loss", "grad_norm") if k in (logs or {})}
            if any(not math.isfinite(float(v)) for v in numbers.values()):
                raise TrainingError(
                    f"no number any more after {state.global_step} steps, {numbers}: {remedy}"
                )

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            # A checkpoint of such weights would push the last good one out.
            weights = [p for p in model.parameters() if p.requires_grad] if control.should_save else []
            if not all(bool(p.isfinite().all()) for p in weights):
                raise TrainingError(
                    f"weights are no numbers any more after {state.global_step} steps: {remedy}"
                )

    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.add_callback(StopOnNonFinite())
    trainer.args.logging_nan_inf_filter = False
    newest = transformers.trainer_utils.get_last_checkpoint(str(out)) if resume else None
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        trainer.train(resume_from_checkpoint=newest)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    if not losses:
        raise TrainingError("not a single step was taken: give more data, or more steps")
    return newest, math.fsum(losses) / len(losses)
