"""What language models did in a search: asked or not and why, in a sentence."""

from __future__ import annotations

from collections import Counter

from forecast_harness.records import MODEL_NOTE
from forecast_harness.search.state import SearchState

_FORECASTER_MARK, _WRITER_MARK = "llm-", "llm:"


def model_text(state: SearchState) -> str:
    """Of forecasts and of proposals; empty where no model is named."""
    arms = {name: stats for name, stats in state.arms.items() if name.startswith(_WRITER_MARK)}
    forecasts = state.context.surrogate.startswith(_FORECASTER_MARK)
    if not arms and not forecasts:
        return ""
    told = [_forecast_text(state) if forecasts else "not asked for forecasts: --surrogate llm:SPEC asks one"]
    for name in sorted({n.partition("/")[0] for n in arms}):
        own = [stats for arm, stats in arms.items() if arm.partition("/")[0] == name]
        requests, proposals, measured = (
            sum(getattr(s, field) for s in own) for field in ("requests", "proposals", "measured")
        )
        asked = f"asked {requests} times for sources: {proposals} proposals, {measured} measured"
        told.append(f"{name} {asked if requests else 'not asked for sources: no batch was due'}")
    return "; ".join(told)


def _forecast_text(state: SearchState) -> str:
    answers = [b.forecasted for b in state.batches.values() if b.forecasted is not None]
    if not answers:
        return "not asked for forecasts: no batch had new sources"
    beliefs = [belief for answer in answers for belief in answer.beliefs.values()]
    heard = sum(MODEL_NOTE in belief.note for belief in beliefs)
    tokens, seconds = (sum(getattr(a.spent, f) for a in answers) for f in ("tokens", "wall_seconds"))
    text = f"asked for forecasts in {len(answers)} batches, moved {heard} of {len(beliefs)} forecasts, "
    text += f"{tokens:,} tokens, {seconds:.1f} s"
    if trouble := Counter(a.problem for a in answers if a.problem):
        text += f"; not heard: {', '.join(f'{why} ({n}x)' for why, n in trouble.most_common(3))}"
    return text
