"""`doctor`'s rows: what one is, and the settings as they are shown beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, fields
from typing import Any

from forecast_autotune.errors import SettingsError
from forecast_autotune.settings import Settings, parse_directories
from forecast_autotune.store.files import is_bundle

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
    """`Settings.describe` in the words of the variables, without the text of a model that is refused.

    That text may hold a key. Of what is secret, it says whether it is set.
    """
    from forecast_autotune.llm.spec import parsed

    rows = [
        (name, _shown_flag(value, of) if isinstance(of.default, bool) else value, doc)
        for (name, value, doc), of in zip(settings.describe(), fields(settings), strict=True)
    ]
    try:
        if settings.llm:
            parsed(settings.llm)
    except SettingsError:
        return [(name, "(refused)" if name == MODEL_VARIABLE else value, doc) for name, value, doc in rows]
    return rows


def _shown_flag(value: str, of: Field[Any]) -> str:
    if of.metadata["parse"] is bool:
        return "set" if value == "True" else "not set"
    return "1" if value == "True" else "0"


def check_named_places(settings: Settings) -> Iterator[DoctorCheck]:
    """A warning for every bundle and model that a variable names and that is not there."""
    remedy = "name bundles of `forecast-autotune store bundle` in FORECAST_AUTOTUNE_STORES"
    try:
        folders = parse_directories(settings.stores)
    except SettingsError as error:
        yield DoctorCheck("bundles", "warn", str(error), remedy)
        folders = ()
    for folder in folders:
        if not is_bundle(folder):
            detail = f"{folder} {'is no bundle' if folder.exists() else 'is not there'}"
            yield DoctorCheck("bundles", "warn", detail, remedy)
    if settings.model is not None and not settings.model.is_file():
        remedy = "name a file of `forecast-autotune train surrogate` in FORECAST_AUTOTUNE_MODEL"
        yield DoctorCheck("model", "warn", f"{settings.model} is no file", remedy)
