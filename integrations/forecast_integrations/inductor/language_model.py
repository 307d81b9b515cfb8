"""FORECAST_AUTOTUNE_LLM inside torch.compile: a language model beside the surrogate, where ranks still agree.

The choices that Inductor compiles must follow from features and the frozen view alone wherever processes have to agree.
When a model answers is no such thing, so a process that is one of several (`is_distributed`) asks nobody: it hears
what was answered and kept before the view's moment, as every rank that shares the directory does. In
deterministic mode, which knows no files, there is no model at all. Elsewhere it is asked live; the gate of
`llm.gate` decides whether that is worth it, and the answer, given while Inductor compiles, counts from the
next round on. After any failure in here the surrogate answers alone.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from forecast_autotune.records import digest
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.surrogates.default import DefaultSurrogate, default_surrogate
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.protocol import Forecasts, Query, Surrogate
from forecast_integrations.inductor.choices import surrogate as inductor

if TYPE_CHECKING:
    from forecast_autotune.llm.gate import GateDecision, GateInputs
    from forecast_autotune.surrogates.language_model.ensemble import EnsembleSurrogate

_TIME_SHARE = 0.5
"""The model's part of the time that a forecast may take. Beyond all of it, the surrogate counts as hung."""
_CACHE_SIZE = 16
"""Queries whose objects are remembered."""


def surrogate_for_operations(settings: Settings, until: str, limit_s: float) -> Surrogate:
    """The surrogate for Inductor's own choices under these settings; nothing is loaded before its use.

    `until` is the view's moment (UTC, ISO 8601), `limit_s` the seconds that a forecast may take.
    """
    plain = inductor.default()
    if not settings.llm or not isinstance(plain, inductor.TemplateSurrogate):
        return plain
    beside = LLMAssistedSurrogate(SingleSurrogate(_fresh_copy(plain)), settings, until, limit_s)
    plain.delegate, plain.version, plain.answers_drafts_alike = beside, beside.version, False
    return plain


def surrogate_for_kernels(settings: Settings, until: str, limit_s: float) -> Surrogate:
    """The surrogate for a user's kernel in a graph; the same one for the same settings of a model."""
    plain = default_surrogate(settings.model)
    if not settings.llm:
        return plain
    names = ("llm", "cache_dir", "llm_timeout_s", "mode", "llm_trust")
    model = Settings(workers=settings.worker_count(), **{name: getattr(settings, name) for name in names})
    return _kernel_surrogate(plain, model, until, limit_s)


@lru_cache(maxsize=4)
def _kernel_surrogate(plain: DefaultSurrogate, settings: Settings, until: str, limit_s: float) -> Surrogate:
    return LLMAssistedSurrogate(plain, settings, until, limit_s)


def model_cache_key(settings: Settings) -> str:
    """A language model's part of the keys of compiled graphs; empty where there is none."""
    if not settings.llm or settings.mode is Mode.DETERMINISTIC or settings.llm_trust == "never":
        return ""
    forced = (settings.llm_trust,) if settings.llm_trust != "auto" else ()
    return digest(settings.llm, is_distributed(), *forced)


def is_distributed() -> bool:
    """Whether this process is one of several that must decide alike."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return bool(dist.get_world_size() > 1)
    # Before there is a group, launchers have said how many they started.
    return os.environ.get("WORLD_SIZE", "1").strip() not in ("", "0", "1")


class SingleSurrogate(DefaultSurrogate):
    """One analytic surrogate for every query: tables of other devices are not pooled here."""

    def __init__(self, single: AnalyticSurrogate) -> None:
        super().__init__(single)
        self.name, self.version = single.name, single.version

    def forecast(self, query: Query) -> Forecasts:
        """The forecast of `single`."""
        return self.single.forecast(query)

    def pools_relatives(self, query: Query) -> bool:
        """Never."""
        return False


class LLMAssistedSurrogate:
    """`plain` with a language model beside it, under the rules of this module. Never raises for the model."""

    def __init__(self, plain: DefaultSurrogate, settings: Settings, until: str, limit_s: float) -> None:
        self.plain, self.settings, self.until = plain, settings, until
        self.name = plain.name
        self.timeout_s = min(settings.llm_timeout_s, _TIME_SHARE * limit_s)
        self._mutex = threading.Lock()
        self._warned: set[str] = set()
        self._name, self._trouble = "FORECAST_AUTOTUNE_LLM", ""
        self._objects: deque[tuple[Hashable, Query]] = deque(maxlen=_CACHE_SIZE)
        self._pair = None if self._why_never() else self._made()
        # Ensembles have the plain one's version until a calibration has found their model of use.
        self.version = plain.version if self._pair is None else self._pair[0].version

    def forecast(self, query: Query) -> Forecasts:
        """Forecast all candidates of the query."""
        if self._pair is None:
            return self._unasked(query, self._why_never() or self._trouble)
        scope = self._pair[0].model.calibration.scope
        if scope.languages and query.problem.kernel.language not in scope.languages:
            languages = ", ".join(scope.languages)  # its answer would be discarded
            return self._unasked(query, f"calibrated on kernels in {languages}")
        try:
            live, kept = self._pair
            return (kept if is_distributed() else live).forecast(self._known(query))
        except Exception as error:
            self._warn_once(f"the language model failed ({error!r}): forecasts go on without it")
            return self.plain.forecast(query)

    def _why_never(self) -> str:
        if self.settings.mode is Mode.DETERMINISTIC:
            return "deterministic mode knows no files"
        return "FORECAST_AUTOTUNE_LLM_TRUST=never" if self.settings.llm_trust == "never" else ""

    def _unasked(self, query: Query, why: str) -> Forecasts:
        from forecast_autotune.records import LLMConsultation
        from forecast_autotune.surrogates.language_model.ensemble import with_consultation

        forecasts = self.plain.forecast(query)
        if query.provisional:
            return forecasts
        return with_consultation(forecasts, LLMConsultation(self._name, asked=False, why=why))

    def _made(self) -> tuple[EnsembleSurrogate, EnsembleSurrogate] | None:
        """The model as it is asked, and as it was heard before `until`; None where it cannot be used."""
        from forecast_autotune.llm.providers import provider
        from forecast_autotune.llm.spec import parsed
        from forecast_autotune.surrogates.factory import open_backend, with_language_model
        from forecast_integrations.models.cache import CacheOnlyBackend

        s = self.settings
        ensemble = partial(
            with_language_model,
            self.plain,
            s.llm,
            cache=s.cache_dir,
            timeout_s=self.timeout_s,
            workers=s.worker_count(),
            trust=s.llm_trust,
        )
        try:
            self._name = parsed(s.llm).shown
            provider().check(s.llm, contact=False)
            opened = open_backend(s.llm, s.cache_dir)
            if parsed(s.llm).kind == "recorded":
                return ensemble(), ensemble(patient=True)  # the same file answers every rank
            kept = CacheOnlyBackend(opened, self.until)
            return ensemble(), ensemble(patient=True, gate=_free_answer_gate, backend=kept)
        except Exception as error:
            self._trouble = str(error)
            self._warn_once(f"FORECAST_AUTOTUNE_LLM: {error}: compiling without it")
            return None

    def _known(self, query: Query) -> Query:
        """The same query of the objects of its first time: by these a decision's question is recognised."""
        relatives = tuple((r.problem.id, len(r.measurements)) for r in query.relatives)
        # What is measured comes in addition from round to round; the question is the same.
        mark = query.problem.id, tuple(query.candidates), relatives, tuple(query.ttir)
        with self._mutex:
            for known, first in self._objects:
                if known == mark:
                    return replace(
                        query,
                        problem=first.problem,
                        candidates=first.candidates,
                        relatives=first.relatives,
                        ttir=first.ttir,
                    )
            self._objects.append((mark, query))
        return query

    def _warn_once(self, text: str) -> None:
        if text in self._warned:
            return
        self._warned.add(text)
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        except RuntimeWarning:
            # Where warnings are errors, this one would cost the forecast.
            print(text, file=sys.stderr)


def _fresh_copy(plain: inductor.TemplateSurrogate) -> inductor.TemplateSurrogate:
    """One of the same kind, which remembers for itself."""
    if isinstance(plain, inductor.LearnedTemplateSurrogate):
        return inductor.LearnedTemplateSurrogate(plain.model, plain.hyper)
    return inductor.TemplateSurrogate(plain.hyper)


def _free_answer_gate(situation: GateInputs) -> GateDecision:
    """The gate where an answer costs nothing: only answers that are there are used."""
    from forecast_autotune.llm.gate import decide_asking

    return decide_asking(replace(situation, per_token_s=0.0, load_s=0.0, answer_s=0.0))
