"""The view of a running search in a terminal: one line that stays in place, and a line for what matters."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from forecast_autotune.commands.count_line import SILENCE_S
from forecast_harness.records import NodeResult
from forecast_harness.search.report.figures import bars_of_budget, escape_invisible, factor_text
from forecast_harness.search.state import SearchState

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

_REDRAW_INTERVAL_S = 0.25
"""The line is drawn at most so often: a recorded search gives thousands of results a second."""


class LiveDisplay:
    """Watches a search: `with LiveDisplay(console) as live: search(..., watch=live)`.

    A line per better node and per batch, and per answer that is none; without a terminal, one a minute at least. On a
    terminal one more line stays in place, with where the search stands, what was spent of which budget, and what came
    last. `quiet` shows nothing. Nothing that a
    source or model wrote is read as markup or sent to the terminal with control characters.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console, self._quiet = console, quiet
        self._results = self._verified = self._batch = self._problems = 0  # so many of each were shown
        self._best = self._drawn_at = 0.0
        self._last = ""
        self._line: Live | None = None
        self._began = self._said_at = time.monotonic()

    def __enter__(self) -> LiveDisplay:
        if self._console.is_terminal and not self._quiet:
            from rich.live import Live

            self._line = Live(console=self._console, transient=True, auto_refresh=False)
            self._line.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._line is not None:
            self._line.stop()
            self._line = None

    def __call__(self, state: SearchState) -> None:
        """Show where the search stands."""
        if self._quiet or state.started is None:
            return
        for line, important in self._new_lines(state):
            if not important:
                self._last = line
                continue
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            self._said_at = time.monotonic()
        now = time.monotonic()
        if self._line is None and now - self._said_at >= SILENCE_S:
            self._said_at = now
            self._console.print(f"{self._minutes()}, {state.text}", markup=False, soft_wrap=True)
        if self._line is not None and (
            now - self._drawn_at >= _REDRAW_INTERVAL_S or state.stopped is not None
        ):
            from rich.text import Text

            self._drawn_at = now
            spent = [bar.text for bar in bars_of_budget(state.spent, state.settings.budget) if bar.limited]
            shown = "; ".join([state.text, *spent, self._last])
            text = Text(f"{escape_invisible(state.target.name)}: {escape_invisible(shown)}")
            self._line.update(text, refresh=True)

    def _new_lines(self, state: SearchState) -> list[tuple[str, bool]]:
        """Lines about what came since the last look, and whether they matter to whoever reads them later."""
        lines: list[tuple[str, bool]] = []
        points = state.history[self._results :]
        self._results = len(state.history)
        for point in points:
            if point.node == state.seeds[0]:
                continue
            judged = state.judged[point.node]
            node = f"{point.measurements}: {_name(state, point.node)}"
            if point.score is None:
                lines.append((f"{node}: {_refusal(judged)}", False))
            elif judged.is_unverified_gain:
                lines.append(
                    (f"{node}: {factor_text(-point.score)} over the seed, not verified in full yet", False)
                )
            else:
                lines.append(self._score_line(f"{node}: ", point.score))
        for event in state.verifications[self._verified :]:
            node = f"{_name(state, event.node)}: verified in full: "
            score = state.scores.get(event.node)
            if score is None:
                lines.append((node + _refusal(state.judged[event.node]), True))
            else:
                lines.append(self._score_line(node, score))
        self._verified = len(state.verifications)
        batch = max(state.batches, default=0)
        if batch > self._batch:
            self._batch = batch
            lines.append((f"{self._minutes()}, {state.text}", True))
        problems = [a for a in state.answers.values() if a.problem]
        for answer in problems[self._problems :]:
            lines.append((f"{answer.arm}: {escape_invisible(answer.problem[:200])}", True))
        self._problems = len(problems)
        return lines

    def _minutes(self) -> str:
        return f"{(time.monotonic() - self._began) / 60:.1f} min"

    def _score_line(self, before: str, score: float) -> tuple[str, bool]:
        """The line of a node that may lead."""
        better = score < self._best
        self._best = min(self._best, score)
        return f"{before}{factor_text(-score)} over the seed{', the best so far' if better else ''}", better


def _name(state: SearchState, node: str) -> str:
    return escape_invisible(state.nodes[node].provenance.note or node[:8])


def _refusal(judged: NodeResult) -> str:
    """Outcome and the first line of why."""
    lines = judged.feedback.strip().splitlines()
    why = escape_invisible(lines[0][:100]) if lines else ""
    return f"{str(judged.outcome).replace('_', ' ')} {why}".rstrip()
