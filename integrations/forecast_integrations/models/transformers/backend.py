"""A language model in this process, by transformers: one forward pass per forecast, nothing is generated.

The common part of all candidates is read once and kept, their suffixes are read as a batch behind it (`prefill`), and
the answer is each label's share in the logits of the last positions.

A pass cannot be interrupted: the time limit is checked between passes.

Compiling children may be forked while a model loads or reads in another thread. A child inherits that thread's
locks, which stay locked for ever, but waits for none of them: it runs nothing of torch and imports nothing that is
still being imported. Weights for a GPU go there directly, so that the host's memory, which a fork copies page tables
of, stays small.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from forecast_autotune.llm.backend import Backend, BackendResponse, LLMError, Usage, exclusive
from forecast_autotune.llm.bins import BINS, AnswerLabel
from forecast_autotune.llm.probe import (
    FILE,
    MODEL_FILES,
    Probe,
    ProbeMismatch,
    files_digest,
    find_probe,
    model_folder,
    weights_identity,
)
from forecast_autotune.llm.tokenizer import ForecastTokenizer, Ids
from forecast_autotune.records import digest
from forecast_autotune.settings import Settings, cache_directory
from forecast_integrations.models.transformers.loading import ModelSource, load_model, unless_out_of_memory
from forecast_integrations.models.transformers.prefill import (
    EMPTY_PREFIX,
    Prefill,
    Prefix,
    common_prefix_length,
    open_prefill,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _ModelReader:
    """A loaded model with its tokenizer, and the way to read it."""

    model: PreTrainedModel
    tokens: ForecastTokenizer
    prefill: Prefill
    context: int


class TransformersBackend(Backend):
    """See `Backend`. Threads may share one: they take turns.

    `model` and `adapter` (LoRA) are folders or names on the Hugging Face hub, which is asked only for what
    is not on this machine. `device` and `dtype` are chosen by `loading` if they are not given. `memory_bytes` limits
    what a pass takes beside the weights.
    """

    def __init__(
        self,
        model: str,
        adapter: str | None = None,
        *,
        device: str | None = None,
        dtype: str | None = None,
        memory_bytes: int = 1 << 30,
    ) -> None:
        self.name = f"transformers:{model}" + (f"+{adapter}" if adapter else "")
        self._source = ModelSource(model, adapter, device, dtype)
        self._memory = float(memory_bytes)
        self._prefix = EMPTY_PREFIX
        """The prefix that was read last."""
        self._lock = Lock()
        self._reader: _ModelReader | None = None
        self._failure = ""

    def identity(self) -> str:
        """See `Backend`."""
        return f"{self.name} {weights_identity(self._source.adapter, self._source.model)}"

    def ready(self) -> bool:
        """Whether the model is loaded."""
        return self._reader is not None

    def prepare(self) -> None:
        """Load, and check how the model can be read.

        Raises `LLMError` when the model cannot be loaded; it is not tried again before `close`.
        """
        with self._lock:
            self._open_model()

    def close(self) -> None:
        """Give the memory back. A later forecast would load again."""
        with self._lock:
            if self._reader is not None:
                self._reader = None
                self._forget()
            self._failure = ""

    def forecast(
        self, prefix: str, suffixes: Sequence[str], labels: Sequence[AnswerLabel], *, timeout_s: float
    ) -> BackendResponse:
        """See `Backend.forecast`; loads first where `prepare` has not been called."""
        begin = time.monotonic()
        if not suffixes:
            return BackendResponse(np.zeros((0, len(labels))), np.zeros(0))
        busy = (
            f"the model was busy for {timeout_s:.3g} s, loading or reading for another thread: "
            "call `prepare` earlier, or allow more time"
        )
        with exclusive(self._lock, timeout_s, busy):
            return self._answer(self._open_model(), prefix, suffixes, labels, begin, begin + timeout_s)

    def _answer(
        self,
        reader: _ModelReader,
        prefix: str,
        suffixes: Sequence[str],
        labels: Sequence[AnswerLabel],
        begin: float,
        deadline: float,
    ) -> BackendResponse:
        with self._clean_torch_state(reader.model):
            ends = reader.tokens.labels(suffixes, labels)
            rows = reader.tokens.suffixes(suffixes)
            if not all(map(len, rows)):
                raise LLMError("a suffix must have a token at least: end it with the question's last word")
            past, cached_tokens = self._past(reader, reader.tokens.prefix(prefix), min(map(len, rows)))
            logits, totals, trouble = self._read(reader, past, rows, ends, deadline)
        prompt = len(past) + sum(map(len, rows))
        usage = Usage(1, prompt, cached_tokens, 0, time.monotonic() - begin)
        return _response(logits, totals, usage, trouble)

    def _open_model(self) -> _ModelReader:
        if self._failure:
            raise LLMError(self._failure)
        if self._reader is None:
            try:
                self._reader = self._load()
            except LLMError as error:
                self._failure = str(error)
                raise
        return self._reader

    def _load(self) -> _ModelReader:
        source = self._source
        probe = find_probe(source.adapter or source.model)
        if probe is not None and probe.dtype == "float32" and source.dtype is None:
            source = replace(source, dtype="float32")
        parts = load_model(source)
        if probe is None and find_probe(source.adapter or source.model) is not None:
            return self._load()  # it came with weights that were fetched
        model, tokens = parts.model, ForecastTokenizer(parts.tokenizer)
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
        with self._clean_torch_state(model):
            prefill = open_prefill(model, tokens)
            reader = _ModelReader(model, tokens, prefill, context)
            return reader if probe is None else self._probed_model(reader, probe)

    def _probed_model(self, reader: _ModelReader, probe: Probe) -> _ModelReader:
        """Return a way to read the model, behind a kept prefix or in full, that answers the probe as the trainer saw.

        Raises `ProbeMismatch` where neither does.
        """

        def check(way: _ModelReader) -> _ModelReader:
            self._forget()
            probe.check_tokens(self.name, way.tokens)
            marks: list[Path] = []
            for mark in self._marks(way):
                marks.append(mark)
                if mark.is_file():
                    break
            else:
                ask = partial(
                    self._answer, way, labels=BINS.labels, begin=time.monotonic(), deadline=math.inf
                )
                probe.check(self.name, ask, dtype=str(way.model.dtype).removeprefix("torch."))
            with contextlib.suppress(OSError):
                for mark in marks:
                    mark.parent.mkdir(parents=True, exist_ok=True)
                    mark.touch()
            return way

        try:
            return check(reader)
        except ProbeMismatch:
            # In 16 bits rounding is as likely a cause as the kept prefix.
            if not reader.prefill.keeps_prefix or reader.model.dtype.itemsize < 4:
                raise
            return check(replace(reader, prefill=Prefill(reader.model, keeps_prefix=False)))

    def _marks(self, reader: _ModelReader) -> Iterator[Path]:
        """Yield files whose presence says that the model, read this way, by these releases and here, passed its probe.

        On a CPU, the answers take longer than loading does. The first name is a digest of the files' paths and times,
        the second one of their contents, which are read for it.
        """
        import torch
        import transformers

        model = reader.model
        device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu"
        way = (device, str(model.dtype), reader.prefill.keeps_prefix)
        how = (*way, torch.__version__, transformers.__version__)
        folders = [model_folder(f).resolve() for f in (self._source.adapter, self._source.model) if f]
        paths = sorted({p for f in folders for pattern in (FILE, *MODEL_FILES) for p in f.glob(pattern)})
        states = [(str(p), p.stat()) for p in paths]
        files = [(p, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for p, s in states]
        marks = cache_directory(Settings.from_environment().cache_dir) / "llm" / "probes"
        yield marks / digest(files, how)
        yield marks / digest([files_digest(f, FILE, *MODEL_FILES) for f in folders], how)

    def _past(self, reader: _ModelReader, ids: Ids, shortest: int) -> tuple[Prefix, int]:
        """Return the prefix with the model's cache, and the number of its tokens that were cached before."""
        if len(ids) + shortest > reader.context:
            raise LLMError(
                f"a prompt must fit the model's {reader.context} positions; this one has {len(ids)} tokens "
                f"before and {shortest} or more of each candidate: shorten it, or use another model"
            )
        kept_prefix = self._prefix.cropped(common_prefix_length(self._prefix.ids, ids))
        cached_tokens = len(kept_prefix) if kept_prefix.layers else 0
        if len(kept_prefix) == len(ids):
            return kept_prefix, cached_tokens
        past = unless_out_of_memory(lambda: reader.prefill.extend(kept_prefix, ids[len(kept_prefix) :]))
        if past is None:
            self._forget()
            raise LLMError(
                f"there was not enough memory on {reader.model.device} to read a prefix of {len(ids)} tokens: "
                "free some, or choose a smaller model or another device"
            )
        self._prefix = past
        return past, cached_tokens

    def _read(
        self, reader: _ModelReader, past: Prefix, rows: Sequence[Ids], labels: list[int], deadline: float
    ) -> tuple[Array, Array, list[str]]:
        """Return logits [n, labels] and log sum exp of all logits [n], NaN where there are none; and the troubles."""
        import torch

        logits, totals = np.full((len(rows), len(labels)), np.nan), np.full(len(rows), np.nan)
        trouble: list[str] = []
        tokens = torch.as_tensor(labels, device=reader.model.device)
        queue = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        if len(past) + len(rows[queue[0]]) > reader.context:
            queue = [i for i in queue if len(past) + len(rows[i]) <= reader.context]
            trouble.append(f"a candidate's prompt is longer than the model's {reader.context} positions")
        while queue:
            if time.monotonic() > deadline:
                trouble.append("the time was over before the model had read all candidates")
                break
            sizes = [len(rows[i]) for i in queue]
            count = reader.prefill.rows_that_fit(len(past), sizes, self._memory)
            suffixes = [rows[i] for i in queue[:count]]
            result = unless_out_of_memory(partial(_read_to_host, reader.prefill, past, suffixes, tokens))
            if result is not None:
                logits[queue[:count]], totals[queue[:count]] = result
            else:
                self._forget()
                if count > 1:  # again, with half of it, from now on
                    pass_bytes = reader.prefill.pass_bytes(len(past), sizes[:count])
                    self._memory = min(self._memory, pass_bytes) / 2
                    continue
                trouble.append(f"there was not enough memory on {reader.model.device} to read a candidate")
            queue = queue[count:]
        return logits, totals, trouble

    def _forget(self) -> None:
        """Drop the kept prefix, and give back what the allocator holds free on a GPU."""
        import torch

        self._prefix = EMPTY_PREFIX
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def _clean_torch_state(self, model: PreTrainedModel) -> Iterator[None]:
        """Shield the model from the calling thread's settings of torch, and leave these as they are."""
        import torch

        try:
            with torch.inference_mode(), torch.autocast(model.device.type, enabled=False):
                yield
        except LLMError:
            raise
        except Exception as error:
            # A model's own code may raise anything, and a forecast is not worth a crash.
            raise LLMError(
                f"the model failed on {model.device} ({type(error).__name__}: {str(error)[:500]}): if the "
                "device is lost, start a new process; otherwise choose another device, dtype or model"
            ) from error


def _read_to_host(prefill: Prefill, past: Prefix, rows: Sequence[Ids], labels: Tensor) -> tuple[Array, Array]:
    """One pass; results are on the host."""
    logits, totals = prefill.read(past, rows, labels)
    return logits.cpu().numpy(), totals.cpu().numpy()


def _response(logits: Array, totals: Array, usage: Usage, trouble: list[str]) -> BackendResponse:
    """Return the labels' shares among themselves, and their common share of all tokens. Raises `LLMError` if no row
    has any."""
    finite = np.isfinite(logits).all(axis=1) & np.isfinite(totals)
    if not trouble and not finite.all():
        trouble = ["the model's logits were not finite: choose another dtype"]
    if not finite.any():
        raise LLMError(f"no candidate was read: {'; '.join(trouble)}")
    probabilities, mass = np.zeros(logits.shape), np.zeros(len(logits))
    top = logits[finite].max(axis=1, keepdims=True)
    odds = np.exp(logits[finite] - top)
    total = odds.sum(axis=1, keepdims=True)
    probabilities[finite] = odds / total
    # Not above 1: the sum over all tokens is rounded as the model's own numbers are.
    mass[finite] = np.minimum(np.exp((np.log(total) + top)[:, 0] - totals[finite]), 1.0)
    return BackendResponse(probabilities, mass, usage, tuple(trouble))
