"""Which nodes to expand next: pure functions of what a search has seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from forecast_autotune.errors import SettingsError
from forecast_harness.search.archives.greedy import BeamArchive, GreedyArchive
from forecast_harness.search.archives.islands import IslandArchive
from forecast_harness.search.archives.puct import PuctArchive
from forecast_harness.search.interfaces import Archive

ARCHIVES: Mapping[str, Callable[[], Archive]] = {
    "puct": PuctArchive,
    "islands": IslandArchive,
    "greedy": GreedyArchive,
    "beam": BeamArchive,
}


def open_archive(name: str) -> Archive:
    """The archive of this name. Raises `SettingsError` listing those there are."""
    if name not in ARCHIVES:
        raise SettingsError(f"an archive must be one of {', '.join(ARCHIVES)}, not {name!r}")
    return ARCHIVES[name]()
