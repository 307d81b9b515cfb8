"""Advice in the background: after a decision of a kernel without any, a model is asked beside the program's work.

FORECAST_AUTOTUNE_ADVICE=background asks for it. One question at a time, in a daemon thread: no launch and no exit
waits for it, and the next decision of the kernel follows what it said.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from collections.abc import Callable

from forecast_autotune.errors import RecordError
from forecast_autotune.llm.advice.asking import ask_for_advice
from forecast_autotune.llm.providers import provider
from forecast_autotune.llm.spec import parsed
from forecast_autotune.printable import utc_now
from forecast_autotune.records import Kernel
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.store.installed_advice import advice_for
from forecast_autotune.tuning.advice_samples import stored_samples, tables_of_source
from forecast_integrations.triton.problem.source import standalone_source
from forecast_integrations.triton.protocols import KernelFunction

WRITING_KINDS = ("chat", "recorded")
"""Kinds of models: one in this process would share the device with what is being timed."""


class AdviceWriter:
    """Asks about each kernel source once per process, one after another."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything: after a fork, the thread is another process's."""
        self._mutex = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._seen: set[str] = set()
        self._said: set[str] = set()
        self._working = False

    def offer(self, settings: Settings, store: Store, kernel: Kernel, fn: KernelFunction) -> None:
        """Have advice written on a kernel that was just decided, if there is none and a model may be asked."""
        if not kernel.source_sha256 or settings.llm_trust == "never":
            return
        with self._mutex:
            if kernel.source_sha256 in self._seen:
                return
            self._seen.add(kernel.source_sha256)
            self._waiting.append(lambda: self._write(settings, store, kernel, fn))
            if self._working:
                return
            self._working = True
        threading.Thread(target=self._work, name="forecast-advice", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._mutex:
                if not self._waiting:
                    self._working = False
                    return
                job = self._waiting.popleft()
            job()

    def _write(self, settings: Settings, store: Store, kernel: Kernel, fn: KernelFunction) -> None:
        try:
            if advice_for(store, kernel) is not None:
                return
            _require_writer(settings)
            samples = stored_samples(tables_of_source(store, kernel.name, kernel.source_sha256))
            if not samples:
                return
            generate, model = (
                provider().text_generator(settings.llm, settings=settings),
                provider().model_name(settings.llm),
            )
            about = {"source": _whole_source(kernel, fn), "model": model, "at": utc_now()}
            store.put_advice(ask_for_advice(generate, kernel, samples, **about))
        except Exception as error:  # nobody waits for advice, so nothing may fail for want of it
            self._say(f"{error}")

    def _say(self, trouble: str) -> None:
        if trouble not in self._said:
            self._said.add(trouble)
            text = f"advice was not written: {trouble}; FORECAST_AUTOTUNE_ADVICE=stored asks for none"
            warnings.warn(text, stacklevel=2)


def _require_writer(settings: Settings) -> None:
    named = parsed(settings.llm, writing=True).kind if settings.llm else "none"
    if named not in WRITING_KINDS:
        raise RecordError(
            "FORECAST_AUTOTUNE_ADVICE=background needs a model that writes, and FORECAST_AUTOTUNE_LLM names "
            f"{named}: name a server with kind=chat, or recorded:FILE"
        )


def _whole_source(kernel: Kernel, fn: KernelFunction) -> str:
    try:
        return standalone_source(fn)
    except RecordError:
        return kernel.source


WRITER = AdviceWriter()
"""This process's."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=WRITER.reset)
