"""The probe of a trained model: prompts with the answers that its trainer saw, stored beside the weights.

A served model must answer the probe first. A tokenizer that cuts, a layer that is read in another way, an adapter
that was lost or merged wrongly, weights of another run: each gives other answers, and the model is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forecast_autotune.errors import RecordError
from forecast_autotune.file_access import open_named_output
from forecast_autotune.llm.backend import BackendResponse, LLMError
from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.tokenizer import ForecastTokenizer
from forecast_autotune.records.bounded_json import decode_bounded
from forecast_autotune.records.codec import Record
from forecast_autotune.records.named_lines import read_document

FILE = "forecast_probe.json"
"""Name of the probe's file in the folder of an adapter or a model."""
PROMPTS = 16
"""Most prompts of a probe."""
TOLERANCE = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.02, "": 0.25}
"""Most difference of log-probabilities from those in float32, by the dtype of the computation; the last is for an
engine that rounds logits, too: in bfloat16 those of 16 and more lie 0.125 apart."""
_LEAST_LOG_P = math.log(1e-4)
"""Less probable answers count as equal."""
MODEL_FILES = (
    *("*.safetensors", "config.json", "adapter_config.json", "tokenizer*", "vocab*", "merges.txt", "*.model"),
    *("special_tokens_map.json", "added_tokens.json", "*.jinja"),
)
"""Files of a folder that its answers rest on."""
_HUB_CACHES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
_REMEDY = "train again"


class ProbeMismatch(LLMError):
    """A model answers otherwise than its trainer saw; the message has the largest difference."""


@dataclass(frozen=True)
class ProbeQuestion(Record, label="question of a probe", remedy=_REMEDY):
    """A prefix and n candidates."""

    prefix: str
    suffixes: tuple[str, ...]
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[tuple[int, ...], ...]
    log_p: tuple[tuple[float, ...], ...]
    """Log-probabilities of the labels among themselves, computed in float32, [n][labels]."""

    def __post_init__(self) -> None:
        shape = (len(self.suffixes), len(BINS.labels))
        if len(self.suffix_ids) != shape[0] or np.shape(self.log_p) != shape:
            raise RecordError(f"a probe must hold ids and log-probabilities of shape {shape}: {_REMEDY}")
        if not np.allclose(np.exp(self.log_p).sum(axis=1), 1.0, atol=1e-3):
            raise RecordError(f"probabilities of a probe must sum to 1: {_REMEDY}")


@dataclass(frozen=True)
class Probe(
    Record, tag="llm_probe", schema=1, label="probe of a language model", complete=True, remedy=_REMEDY
):
    """See the module."""

    dtype: str
    """The dtype to serve in: bfloat16 where its rounding changes no answer by more than the tolerance, else float32."""
    label_ids: tuple[int, ...]
    questions: tuple[ProbeQuestion, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float32") or not self.questions:
            raise RecordError(f"a probe must hold questions, and bfloat16 or float32: {_REMEDY}")

    def check(
        self, name: str, forecast: Callable[[str, Sequence[str]], BackendResponse], *, dtype: str
    ) -> None:
        """Raises `ProbeMismatch` with the largest difference where a model answers otherwise than its trainer saw.

        `forecast` answers a prefix and n suffixes, computing in `dtype`.
        """
        worst = 0.0
        for q in self.questions:
            answer = forecast(q.prefix, q.suffixes)
            if not answer.answered.all():
                raise LLMError(
                    f"{name} left prompts of its probe without an answer: {'; '.join(answer.trouble)}"
                )
            has_value = answer.probabilities > 0  # a server returns the likeliest only
            both = np.log(answer.probabilities[has_value]), np.array(q.log_p)[has_value]
            apart = np.subtract(*(np.maximum(x, _LEAST_LOG_P) for x in both))
            worst = max(worst, float(np.nan_to_num(np.abs(apart), nan=math.inf).max()))
        most = TOLERANCE[dtype]
        if not worst <= most:
            count = sum(len(q.suffixes) for q in self.questions)
            raise ProbeMismatch(
                f"{name} must answer as it did where it was trained, and log-probabilities of {count} recorded "
                f"prompts differ by up to {worst:.3g} (at most {most:g} in {dtype or 'whatever it computes in'}): give "
                f"the model, the adapter and the tokenizer that belong together, try dtype=float32, or {_REMEDY}"
            )

    def check_tokens(self, name: str, tokens: ForecastTokenizer) -> None:
        """Raises `LLMError` where a tokenizer makes other numbers of the prompts."""
        pairs: list[tuple[Any, tuple[int, ...]]] = []
        for q in self.questions:
            pairs += [
                (tokens.prefix(q.prefix), q.prefix_ids),
                *zip(tokens.suffixes(q.suffixes), q.suffix_ids, strict=True),
                (tokens.labels(q.suffixes, BINS.labels), self.label_ids),
            ]
        for ours, theirs in pairs:
            if tuple(ours) != theirs:
                raise LLMError(
                    f"{name} must be read with the tokenizer that it was trained with, and this one makes "
                    f"{len(ours)} tokens of a text that were {len(theirs)}, or others: give the model's own "
                    f"tokenizer, or {_REMEDY}"
                )


def write_probe(folder: Path, probe: Probe) -> None:
    """Put it beside the weights, in one step."""
    with open_named_output(folder / FILE) as stream:
        stream.write(f"{json.dumps(probe.to_json(), allow_nan=False)}\n".encode())


def find_probe(*folders: str | Path | None) -> Probe | None:
    """The probe in the first of these folders, or models of the hub's cache, that has one.

    Raises `LLMError` for one that is damaged.
    """
    for folder in folders:
        path = model_folder(str(folder or "")) / FILE
        if folder and path.is_file():
            try:
                return Probe.from_json(decode_bounded(read_document(path)))
            except (RecordError, ValueError, OSError) as error:
                raise LLMError(f"{path}: no probe that can be read ({error}): {_REMEDY}") from error
    return None


def weights_identity(*folders: str | None) -> str:
    """A digest of what lies in each folder: of the probe where there is one, else of the weights and the tokenizer."""
    places = [model_folder(folder) for folder in folders if folder]
    return " ".join(files_digest(place, FILE) or files_digest(place, *MODEL_FILES) for place in places)


def model_folder(name: str) -> Path:
    """The folder of this name, else the one in the hub's cache; neither need be there."""
    folder = Path(name).expanduser()
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    cache = next((os.environ[v] for v in _HUB_CACHES if os.environ.get(v)), f"{home}/hub")
    folder_in_hub = Path(cache).expanduser() / f"models--{name.replace('/', '--')}"
    try:
        return (
            folder
            if folder.exists()
            else folder_in_hub / "snapshots" / (folder_in_hub / "refs/main").read_text("utf-8").strip()
        )
    except OSError:
        return folder


def files_digest(folder: str | Path, *patterns: str) -> str:
    """SHA-256 over names and contents of a folder's files; empty where there are none."""
    everything = hashlib.sha256()
    paths = sorted({p for glob in patterns for p in Path(folder).expanduser().glob(glob) if p.is_file()})
    for path in paths:
        with path.open("rb") as stream:
            everything.update(f"{path.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return everything.hexdigest() if paths else ""
