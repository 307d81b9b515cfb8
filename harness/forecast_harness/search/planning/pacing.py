"""How many batches of which size are under way at once."""

from __future__ import annotations

from dataclasses import replace

from forecast_harness.records import SearchSettings

NODES_AHEAD = 28
"""Measurements under way at once where kernels are compiled ahead of a device: what is decided now is timed much later,
and neither processors nor device should wait for the slowest source of a batch."""


def paced_ahead(settings: SearchSettings, parents: int | None) -> SearchSettings:
    """Settings of a search whose kernels are compiled ahead of the device that times them.

    `parents`: what the user has asked for; None: one, since of small batches each is decided on more results. As many
    measurements as before may pass without a better node before the search ends. The first results are known before
    that, however small batches are: until then there may be nothing new to develop.
    """
    own = parents or 1
    patience = max(settings.patience, round(settings.patience * SearchSettings().parents / own))
    depth = min(round(NODES_AHEAD / (settings.k * own)), patience - 1)
    return replace(settings, parents=own, depth=max(settings.depth, depth), patience=patience)


def paced_as(settings: SearchSettings, begun: SearchSettings, parents: int | None) -> SearchSettings:
    """Settings of a search that goes on, which may have begun on another path: of what no option says, its own."""
    return replace(settings, depth=begun.depth, patience=begun.patience, parents=parents or begun.parents)
