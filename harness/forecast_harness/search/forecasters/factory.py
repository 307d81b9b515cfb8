"""`open_forecaster`: what forecasts nodes before they run, by its name on the command line."""

from __future__ import annotations

from pathlib import Path

from forecast_autotune.errors import SettingsError
from forecast_harness.records import SearchTarget, TargetKind
from forecast_harness.search.forecasters.lineage import LineageForecaster
from forecast_harness.search.interfaces import Forecaster

SPEC_FORMS = (
    "auto, none, lineage, triton, recorded:FILE with judgements of sources, or llm:SPEC with a model as in "
    "FORECAST_AUTOTUNE_LLM"
)


def open_forecaster(spec: str, target: SearchTarget) -> Forecaster | None:
    """The forecaster that `spec` names; None for `none`.

    `lineage` learns from the search's own results, in any language. `triton` adds the shipped surrogate where the
    target is in Triton, as packs on a device and kernels are. `auto` is `triton` there, else `lineage`. `llm:SPEC`
    blends a language model with `auto`, `recorded:FILE` a file of judgements. Raises `SettingsError` for anything
    else, and for `triton` where there is nothing to trace.
    """
    if spec == "none":
        return None
    if spec.startswith("llm:"):
        from forecast_autotune.llm.providers import provider
        from forecast_harness.search.forecasters.llm import LLMNodeForecaster

        return LLMNodeForecaster(provider().backend(spec.removeprefix("llm:")), _without_llm("auto", target))
    if spec.startswith("recorded:"):
        from forecast_autotune.variants.judgement import read_judgements
        from forecast_harness.search.forecasters.recorded import RecordedForecaster

        judgements = read_judgements(Path(spec.removeprefix("recorded:")))
        return RecordedForecaster(judgements, _without_llm("auto", target))
    return _without_llm(spec, target)


def _without_llm(spec: str, target: SearchTarget) -> Forecaster:
    traceable = target.kind is TargetKind.KERNEL or target.language == "triton"
    if spec == "lineage" or (spec == "auto" and not traceable):
        return LineageForecaster()
    if spec in ("auto", "triton"):
        if not traceable:
            raise SettingsError(
                f"triton forecasts what launches Triton kernels on a CUDA device; {target.name} is searched "
                f"for sources in {target.language}: use lineage"
            )
        from forecast_harness.search.forecasters.triton import TritonForecaster

        return TritonForecaster(target)
    raise SettingsError(f"no forecaster is called {spec!r}; there are {SPEC_FORMS}")
