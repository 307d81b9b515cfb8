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

        comparison = compare(say=say)
    if output.as_json:
        output.emit(comparison.to_json())
    else:
        _show(comparison, output)
    return 0


def _show(comparison: Comparison, output: Output) -> None:
    from rich.text import Text

    from forecast_autotune.report.chart import bar, milliseconds, percent, seconds
    from forecast_autotune.report.table import plain_table, shown_text

    output.console.print(
        shown_text(
            f"matmul {comparison.size}x{comparison.size}x{comparison.size} fp16, "
            f"{comparison.candidates} configs, {comparison.device}",
            "bold",
        )
    )
    table = plain_table("", ">measured", "tuning", ">", "chosen", ">its time")
    longest = max(comparison.forecast.seconds, comparison.exhaustive.seconds)
    plain = output.console.options.ascii_only
    for name, side, colour in (
        ("forecast_autotune", comparison.forecast, "green"),
        ("triton.autotune", comparison.exhaustive, "white"),
    ):
        table.add_row(
            shown_text(name, "bold"),
            f"{side.measured} of {comparison.candidates}",
            shown_text(bar(side.seconds / longest, 16, plain=plain), colour),
            seconds(side.seconds),
            shown_text(side.config),
            milliseconds(side.ms),
        )
    output.console.print(table)
    if comparison.forecast.config == comparison.exhaustive.config:
        choice = "the same config chosen"
    else:
        choice = f"a config {percent(abs(comparison.regret))} {'slower' if comparison.regret > 0 else 'faster'} chosen"
    output.console.print(Text.assemble((f"{comparison.speedup:.1f}x faster tuning", "bold"), f", {choice}"))
    output.console.print(shown_text(f"because: {comparison.reason}", "dim"))
