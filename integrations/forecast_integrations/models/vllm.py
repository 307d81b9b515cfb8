"""A language model in this process, by vLLM: shared prefixes are computed once, nothing is generated.

vLLM's log-probabilities are those of the whole vocabulary. The labels' own tokens are asked for
(`logprob_token_ids`, vLLM >= 0.22.1) and made to sum to 1 here; asking for the likeliest tokens of a
restricted choice would bring others back among them.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from forecast_autotune.llm.backend import Backend, BackendResponse, LLMError, Usage, exclusive
from forecast_autotune.llm.bins import BINS, AnswerLabel
from forecast_autotune.llm.probe import find_probe, weights_identity
from forecast_autotune.llm.tokenizer import ForecastTokenizer

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

DEFAULT_MEMORY_SHARE = 0.3
"""Share of the GPU's memory: vLLM's own default, 0.9, leaves nothing for the program whose kernels are tuned."""
_MULTIPROCESSING_VARIABLE = "VLLM_ENABLE_V1_MULTIPROCESSING"


class VLLMBackend(Backend):
    """See `Backend`. Threads may share one: they take turns.

    Args:
        model: a folder or a name on the Hugging Face hub.
        adapter: folder of a LoRA adapter.
        dtype: of the weights; by default the model's own.
        memory: share of the GPU's memory, weights included.
        length: most tokens of a prompt; by default the model's own limit.
    """

    def __init__(
        self,
        model: str,
        adapter: str | None = None,
        *,
        dtype: str | None = None,
        memory: float = DEFAULT_MEMORY_SHARE,
        length: int | None = None,
    ) -> None:
        self.name = f"vllm:{model}" + (f"+{adapter}" if adapter else "")
        self._model, self._adapter = model, adapter
        self._options = {"dtype": dtype or "auto", "gpu_memory_utilization": memory, "max_model_len": length}
        self._lock = Lock()
        self._engine: LLMEngine | None = None
        self._tokens: ForecastTokenizer | None = None
        self._failure: LLMError | None = None
        self._numbers = itertools.count()

    def identity(self) -> str:
        """See `Backend`."""
        return f"{self.name} {weights_identity(self._adapter, self._model)}"

    def ready(self) -> bool:
        """Whether the model is loaded."""
        return self._engine is not None

    def prepare(self) -> None:
        """Load. Raises `LLMError` when that is impossible; it is not tried again before `close`."""
        with self._lock:
            self._open_engine()

    def close(self) -> None:
        """Give the memory back. A later forecast would load again."""
        with self._lock:
            if self._engine is not None:
                self._engine.engine_core.shutdown()
            self._engine = self._tokens = self._failure = None

    def forecast(
        self, prefix: str, suffixes: Sequence[str], labels: Sequence[AnswerLabel], *, timeout_s: float
    ) -> BackendResponse:
        """See `Backend.forecast`; loads first where `prepare` has not been called."""
        begin = time.monotonic()
        if not suffixes:
            return BackendResponse(np.zeros((0, len(labels))), np.zeros(0))
        busy = f"the model was busy for {timeout_s:.3g} s: allow more time, or ask less at a time"
        with exclusive(self._lock, timeout_s, busy):
            return self._answer(*self._open_engine(), prefix, suffixes, labels, begin, begin + timeout_s)

    def _answer(
        self,
        engine: LLMEngine,
        tokens: ForecastTokenizer,
        prefix: str,
        suffixes: Sequence[str],
        labels: Sequence[AnswerLabel],
        begin: float,
        deadline: float,
    ) -> BackendResponse:
        ids = tokens.labels(suffixes, labels)
        start = [int(i) for i in tokens.prefix(prefix)]
        prompts = [start + [int(i) for i in end] for end in tokens.suffixes(suffixes)]
        try:
            outputs = self._run(engine, prompts, ids, deadline)
        except Exception as error:
            raise LLMError(
                f"vLLM failed on {self.name} ({type(error).__name__}: {str(error)[:300]}): shorten the "
                "prompt, or use another backend"
            ) from error
        return _response(outputs, ids, time.monotonic() - begin)

    def _open_engine(self) -> tuple[LLMEngine, ForecastTokenizer]:
        if self._failure is not None:
            raise self._failure
        if self._engine is None or self._tokens is None:
            try:
                parts = self._load()
                if (probe := find_probe(self._adapter or self._model)) is not None:
                    ask = partial(
                        self._answer, *parts, labels=BINS.labels, begin=time.monotonic(), deadline=math.inf
                    )
                    dtype = "float32" if self._options["dtype"] == "float32" else ""
                    probe.check_tokens(self.name, parts[1])
                    probe.check(self.name, ask, dtype=dtype)
                self._engine, self._tokens = parts
            except LLMError as error:
                self._failure = error
                raise
        return self._engine, self._tokens

    def _load(self) -> tuple[LLMEngine, ForecastTokenizer]:
        try:
            import vllm
        except ImportError as error:
            raise LLMError(
                f"{self.name} needs vLLM in this environment ({error}): install it, or serve the model and "
                "give the server's URL"
            ) from error
        more: dict[str, bool | int] = {}
        before = os.environ.get(_MULTIPROCESSING_VARIABLE)
        # Its engine in a process of its own would start the user's main module anew.
        os.environ[_MULTIPROCESSING_VARIABLE] = "0"
        try:
            if self._adapter:
                config = json.loads((Path(self._adapter) / "adapter_config.json").read_text(encoding="utf-8"))
                more = {
                    "enable_lora": True,
                    "max_loras": 1,
                    "max_lora_rank": _supported_rank(int(config["r"])),
                }
            # Forecasts are prefills, which CUDA graphs do not serve: capturing them would only take time.
            llm = vllm.LLM(
                self._model, enable_prefix_caching=True, enforce_eager=True, **self._options, **more
            )
            # The first request compiles, on some machines for seconds.
            self._run(llm.llm_engine, [[0, 1]], list(range(16)), math.inf)
            return llm.llm_engine, ForecastTokenizer(llm.get_tokenizer())
        except Exception as error:
            raise LLMError(
                f"vLLM cannot load {self.name} ({type(error).__name__}: {str(error)[:300]}): see its log "
                "above, or use transformers:"
            ) from error
        finally:
            if before is None:
                del os.environ[_MULTIPROCESSING_VARIABLE]
            else:
                os.environ[_MULTIPROCESSING_VARIABLE] = before

    def _run(
        self, engine: LLMEngine, prompts: Sequence[list[int]], ids: list[int], deadline: float
    ) -> list[RequestOutput | None]:
        """One output per prompt, None where the time was over."""
        import vllm
        from vllm.lora.request import LoRARequest

        params = vllm.SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=ids, detokenize=False)
        lora = LoRARequest("adapter", 1, self._adapter) if self._adapter else None
        rows: dict[str, int] = {}
        outputs: list[RequestOutput | None] = [None] * len(prompts)
        try:
            for row, prompt in enumerate(prompts):
                name = f"forecast-{next(self._numbers)}"
                engine.add_request(name, {"prompt_token_ids": prompt}, params, lora_request=lora)
                rows[name] = row
            while engine.has_unfinished_requests() and time.monotonic() < deadline:
                for output in engine.step():
                    if output.finished and output.request_id in rows:
                        outputs[rows.pop(output.request_id)] = output
        finally:
            if rows:
                engine.abort_request(list(rows))
        return outputs


def _supported_rank(needed: int) -> int:
    """The smallest rank that vLLM has kernels for."""
    return next((rank for rank in (8, 16, 32, 64, 128, 256, 320, 512) if rank >= needed), needed)


def _response(outputs: Sequence[RequestOutput | None], ids: Sequence[int], seconds: float) -> BackendResponse:
    """Shares of the labels. Raises `LLMError` if no candidate has any."""
    probabilities, mass = np.zeros((len(outputs), len(ids))), np.zeros(len(outputs))
    prompt = cached = 0
    for row, output in enumerate(outputs):
        if output is None:
            continue
        prompt += len(output.prompt_token_ids)
        cached += output.num_cached_tokens or 0
        logprobs = output.outputs[0].logprobs[0]
        weights = np.array([math.exp(logprobs[i].logprob) if i in logprobs else math.nan for i in ids])
        if np.isfinite(weights).all() and weights.sum() > 0:
            mass[row] = min(float(weights.sum()), 1.0)
            probabilities[row] = weights / weights.sum()
    missing = int((mass == 0).sum())
    trouble = (f"vLLM read {len(outputs) - missing} of {len(outputs)} candidates in time",) if missing else ()
    if missing == len(outputs):
        raise LLMError(f"no candidate was read within {seconds:.3g} s: allow more time")
    return BackendResponse(
        probabilities, mass, Usage(1, prompt, cached, len(outputs) - missing, seconds), trouble
    )
