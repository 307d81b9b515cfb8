"""`demo`: the claim of this project, tried on the GPU at hand."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from forecast_autotune.commands.output import CommandError, Output, is_installed

if TYPE_CHECKING:
    from forecast_integrations.demo import Comparison


def demo(options: argparse.Namespace, output: Output) -> int:
    """Tune a matmul with both tuners and print what each took and chose."""
    missing = [name for name in ("torch", "triton") if not is_installed(name)]
    instead = "`forecast-autotune replay` shows the same on recorded tables, without a GPU"
    if missing:
        raise CommandError(f"the demo needs {' and '.join(missing)}, not installed here; {instead}")
    from forecast_integrations.device import has_device

    if not has_device():
        raise CommandError(f"the demo needs a GPU, and torch sees none; {instead}")
    from forecast_integrations.demo import compare

    with output.errors.status("") as status:

        def say(text: str) -> None:
            status.update(text)
            if not output.errors.is_terminal:
                output.remark(text)

        comparison = compare(size=options.size, say=say)
    if output.as_json:
        output.emit(comparison.to_json())
    else:
        _show(comparison, output)
    return 0


def _show(found: Comparison, output: Output) -> None:
    from rich.text import Text

    from forecast_autotune.report.chart import bar, milliseconds, percent, seconds
    from forecast_autotune.report.table import plain_table, shown_text

    output.console.print(
        shown_text(
            f"matmul {found.size}x{found.size}x{found.size} fp16, {found.candidates} configs, {found.device}",
            "bold",
        )
    )
    table = plain_table("", ">measured", "tuning", ">", "chosen", ">its time")
    longest = max(found.forecast.seconds, found.exhaustive.seconds)
    plain = output.console.options.ascii_only
    for name, side, colour in (
        ("forecast_autotune", found.forecast, "green"),
        ("triton.autotune", found.exhaustive, "white"),
    ):
        table.add_row(
            shown_text(name, "bold"),
            f"{side.measured} of {found.candidates}",
            shown_text(bar(side.seconds / longest, 16, plain=plain), colour),
            seconds(side.seconds),
            shown_text(side.config),
            milliseconds(side.ms),
        )
    output.console.print(table)
    if found.forecast.config == found.exhaustive.config:
        choice = "the same config chosen"
    else:
        choice = f"a config {percent(abs(found.regret))} {'slower' if found.regret > 0 else 'faster'} chosen"
    output.console.print(Text.assemble((f"{found.speedup:.1f}x faster tuning", "bold"), f", {choice}"))
    output.console.print(shown_text(f"because: {found.reason}", "dim"))
