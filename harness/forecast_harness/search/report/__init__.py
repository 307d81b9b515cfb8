"""A search told to people: an HTML page, and a live view in the terminal."""

from __future__ import annotations

from forecast_harness.search.state import SearchState

__all__ = ["page"]


def page(state: SearchState) -> str:
    """The search as one HTML file that needs nothing else. See `render_page`."""
    from forecast_harness.search.report.figures import build_report
    from forecast_harness.search.report.render import render_page as rendered

    return rendered(build_report(state))
