"""Rich text out of what others wrote: on one line, without control characters, bounded."""

from __future__ import annotations

from rich.text import Text

from forecast_autotune.printable import LONGEST_TEXT, printable


def shown_text(text: object, style: str = "", *, limit: int = LONGEST_TEXT, lines: bool = False) -> Text:
    """`printable(text, limit)` in a style; with `lines`, its line breaks stay, and `limit` holds for each line.

    Markup in it is not read.
    """
    return Text(printable(text, limit, lines=lines), style=style)
