"""Parts that other packages add to the core, found by entry point and loaded when they are first asked for.

The core imports none of the packages that build on it. They register under these groups:

| group | an entry is |
|---|---|
| `forecast_autotune.commands` | a function that adds commands to the command line's grammar |
| `forecast_autotune.checks` | a function that `doctor` calls for more rows |
| `forecast_autotune.models` | a module with the functions of `llm.providers.Provider` |
| `forecast_autotune.questions` | a function (options) -> questions of a kind, for `llm ask --export --kind NAME` |
| `forecast_autotune.frameworks` | a module with the functions of `frameworks.Framework` |
| `forecast_autotune.advice` | no object: the place of a file of that package (`store.installed_advice`) |
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from forecast_autotune.errors import PluginError

DISTRIBUTION = "forecast-autotune"
_PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def names(group: str) -> list[str]:
    """Names of a group's entries, in alphabetical order."""
    return sorted(_registered(group))


def load(group: str, name: str) -> Any:
    """The object behind an entry, imported now.

    Raises `PluginError` for a name that nobody registered, and whatever the import raises.
    """
    result = _registered(group)
    if name not in result:
        there = ", ".join(sorted(result)) or "nothing"
        raise PluginError(
            f"nothing is registered as {name!r} under {group} (there is: {there}): "
            f"reinstall {DISTRIBUTION}, or install the package that brings it"
        )
    return result[name].load()


@cache
def _registered(group: str) -> dict[str, EntryPoint]:
    """Entries by name; in a source checkout ours are read from its pyproject.toml, which is never stale."""
    checkout = _of_checkout(group)
    foreign = [
        entry
        for entry in entry_points(group=group)
        if not checkout or entry.dist is None or entry.dist.name != DISTRIBUTION
    ]
    return {entry.name: entry for entry in (*foreign, *checkout)}


def _of_checkout(group: str) -> list[EntryPoint]:
    return [EntryPoint(name, value, group) for name, value in _checkout().get(group, {}).items()]


@cache
def _checkout() -> dict[str, dict[str, str]]:
    """Name and value by group, as the source checkout around this file has them; empty where there is none."""
    if not _PROJECT.is_file():
        return {}
    import tomllib

    project = tomllib.loads(_PROJECT.read_text(encoding="utf-8")).get("project", {})
    results: dict[str, dict[str, str]] = project.get("entry-points", {})
    return results if project.get("name") == DISTRIBUTION else {}
