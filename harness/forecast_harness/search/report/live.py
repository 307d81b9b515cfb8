"""What a terminal shows while a search runs: a view that stays in place, or plain lines in a pipe."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING

from forecast_autotune.report.chart import bar
from forecast_harness.records import EVIDENCE_TEXTS, NodeResult
from forecast_harness.search.report import tables
from forecast_harness.search.report.scales import factor_text
from forecast_harness.search.report.sources import escape_invisible
from forecast_harness.search.state import SearchState
from forecast_harness.trials.judge_pool import LocalJudgePool

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live as View

_SHOWN_EVENTS = 8
_REDRAW_INTERVAL_S = 0.25
"""The view is drawn at most so often: a recorded search gives thousands of results a second."""


class LiveDisplay:
    """Watches a search: `with Live(console, lanes=lanes) as live: search(..., watch=live)`.

    On a terminal, a panel with the batch, the best so far, what was spent of which budget, the lanes and the
    last events. Elsewhere a line per better node and per batch. `quiet` shows nothing. Nothing that a source
    or model wrote is read as markup or sent to the terminal with control characters.
    """

    def __init__(
        self,
        console: Console,
        *,
        quiet: bool = False,
        lanes: LocalJudgePool | None = None,
        where: str = "",
    ) -> None:
        self._console, self._quiet, self._lanes, self._where = console, quiet, lanes, where
        self._events: deque[str] = deque(maxlen=_SHOWN_EVENTS)
        self._results = self._verified = self._batch = self._problems = 0  # so many of each were told of
        self._best = self._drawn_at = 0.0
        self._view: View | None = None
        self._began = time.monotonic()

    def __enter__(self) -> LiveDisplay:
        if self._console.is_terminal and not self._quiet:
            from rich.live import Live as InPlace

            self._view = InPlace(console=self._console, transient=True, auto_refresh=False)
            self._view.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._view is not None:
            self._view.stop()
            self._view = None

    def __call__(self, state: SearchState) -> None:
        """Show where the search stands."""
        if self._quiet or state.started is None:
            return
        for line, important in self._new_lines(state):
            self._events.append(line)
            if self._view is None and important:
                self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        now = time.monotonic()
        if self._view is not None and (
            now - self._drawn_at >= _REDRAW_INTERVAL_S or state.stopped is not None
        ):
            self._drawn_at = now
            self._view.update(self.panel(state), refresh=True)

    def panel(self, state: SearchState) -> RenderableType:
        """The view of a state."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        from forecast_autotune.report.table import key_value_table

        plain = not self._console.encoding.lower().startswith("utf")
        pairs: list[tuple[str, str | Text]] = [
            ("best", Text(self._best_text(state), style="bold green" if state.best_score < 0 else "bold")),
            ("batch", _batch_text(state)),
        ]
        for one in tables.bars_of_budget(state.spent, state.settings.budget):
            shown = f"{bar(one.share / 100, 16, plain=plain)} " if one.limited else ""
            pairs.append((one.name, f"{shown}{one.text}"))
        if self._lanes is not None:
            pairs.append(("lanes", f"{self._lanes.capacity} at work"))
        if self._where:
            pairs.append(("page", self._where))
        lines = Text("\n".join(self._events), style="dim", overflow="ellipsis", no_wrap=True)
        title = Text(f" search of {escape_invisible(state.target.name)} ")
        return Panel(Group(key_value_table(pairs), Text(""), lines), title=title, title_align="left")

    def _best_text(self, state: SearchState) -> str:
        if state.best == state.seeds[0]:
            return "nothing faster than the seed yet"
        sure = EVIDENCE_TEXTS[state.evidence(state.best)]
        note = escape_invisible(state.nodes[state.best].provenance.note)
        return f"{factor_text(-state.best_score)} over the seed ({sure}); {note}".removesuffix("; ")

    def _new_lines(self, state: SearchState) -> list[tuple[str, bool]]:
        """Lines about what came since the last look, and whether they matter without a terminal too."""
        found: list[tuple[str, bool]] = []
        points = state.history[self._results :]
        self._results = len(state.history)
        for point in points:
            if point.node == state.seeds[0]:
                continue
            judged = state.judged[point.node]
            node = f"{point.measurements}: {_name(state, point.node)}"
            if point.score is None:
                found.append((f"{node}: {_refusal(judged)}", False))
            elif judged.is_unverified_gain:
                word = f"{factor_text(-point.score)} over the seed, not verified in full yet"
                found.append((f"{node}: {word}", False))
            else:
                found.append(self._told_of_score(f"{node}: ", point.score))
        for event in state.verifications[self._verified :]:
            node = f"{_name(state, event.node)}: verified in full: "
            score = state.scores.get(event.node)
            if score is None:
                found.append((node + _refusal(state.judged[event.node]), True))
            else:
                found.append(self._told_of_score(node, score))
        self._verified = len(state.verifications)
        batch = max(state.batches, default=0)
        if batch > self._batch:
            self._batch = batch
            minutes = (time.monotonic() - self._began) / 60
            found.append((f"{minutes:.1f} min, {state.text}", True))
        problems = [a for a in state.answers.values() if a.problem]
        for answer in problems[self._problems :]:
            found.append((f"{answer.arm}: {escape_invisible(answer.problem[:200])}", True))
        self._problems = len(problems)
        return found

    def _told_of_score(self, before: str, score: float) -> tuple[str, bool]:
        """Of a node that may lead."""
        better = score < self._best
        self._best = min(self._best, score)
        word = f"{factor_text(-score)} over the seed"
        return f"{before}{word}{', the best so far' if better else ''}", better


def _name(state: SearchState, node: str) -> str:
    return escape_invisible(state.nodes[node].provenance.note or node[:8])


def _refusal(judged: NodeResult) -> str:
    """Outcome and the first line of why."""
    lines = judged.feedback.strip().splitlines()
    why = escape_invisible(lines[0][:100]) if lines else ""
    return f"{str(judged.outcome).replace('_', ' ')} {why}".rstrip()


def _batch_text(state: SearchState) -> str:
    batch = max(state.batches, default=0)
    measuring = sum(len(b.open) for b in state.batches.values())
    return (
        f"{batch}; {len(state.nodes):,} nodes, {measuring} being measured, {len(state.pool):,} deferred, "
        f"{len(state.duplicates):,} not new"
    )
