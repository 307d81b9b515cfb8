"""`doctor`'s rows: what one is, and the settings as they are shown beside them."""

from __future__ import annotations

from dataclasses import dataclass

from forecast_autotune.errors import SettingsError
from forecast_autotune.settings import Settings

GROUP = "forecast_autotune.checks"
"""Entries are functions (settings, network) -> rows; without `network`, they contact nobody."""
MODEL_VARIABLE = "FORECAST_AUTOTUNE_LLM"


@dataclass(frozen=True)
class DoctorCheck:
    """One line: `status` is `ok`, `warn` (something is missing) or `fail` (tuning cannot work)."""

    name: str
    status: str
    detail: str
    remedy: str = ""


def shown_settings(settings: Settings) -> list[tuple[str, str, str]]:
    """`Settings.describe`, without the text of a model that is refused: it may hold a key."""
    from forecast_autotune.llm.spec import parsed

    rows = settings.describe()
    try:
        if settings.llm:
            parsed(settings.llm)
    except SettingsError:
        return [(name, "(refused)" if name == MODEL_VARIABLE else value, doc) for name, value, doc in rows]
    return rows
