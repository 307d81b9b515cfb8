"""The view of a running search: a line for what matters, and where the search stands."""

from __future__ import annotations

import time

from forecast_autotune.commands.output import Output
from forecast_harness.records import NodeResult
from forecast_harness.search.report.figures import bars_of_budget, escape_invisible, factor_text
from forecast_harness.search.state import SearchState


class LiveDisplay:
    """Watches a search: `search(..., watch=LiveDisplay(output))`.

    A remark per better node and per batch, and per answer that is none. The output's stage is where the search stands,
    what was spent of which budget, and what came last. Nothing that a source or model wrote is read as markup or sent
    to the terminal with control characters.
    """

    def __init__(self, output: Output) -> None:
        self._output = output
        self._results = self._verifications = self._batch = self._problems = 0  # so many of each were shown
        self._best = 0.0
        self._last = ""
        self._began = time.monotonic()

    def __call__(self, state: SearchState) -> None:
        """Show where the search stands."""
        if state.started is None:
            return
        for line, important in self._new_lines(state):
            if important:
                self._output.remark(line)
            else:
                self._last = line
        costs = [bar.text for bar in bars_of_budget(state.spent, state.settings.budget) if bar.limited]
        text = "; ".join([state.text, *costs, self._last])
        self._output.stage = escape_invisible(f"{state.target.name}: {text}")

    def _new_lines(self, state: SearchState) -> list[tuple[str, bool]]:
        """Lines about what came since the last look, and whether they matter to whoever reads them later."""
        lines: list[tuple[str, bool]] = []
        points = state.history[self._results :]
        self._results = len(state.history)
        for point in points:
            if point.node == state.seeds[0]:
                continue
            result = state.judged[point.node]
            node = f"{point.measurements}: {_name(state, point.node)}"
            if point.score is None:
                lines.append((f"{node}: {_refusal(result)}", False))
            elif result.is_unverified_gain:
                lines.append(
                    (f"{node}: {factor_text(-point.score)} over the seed, not verified in full yet", False)
                )
            else:
                lines.append(self._score_line(f"{node}: ", point.score))
        for event in state.verifications[self._verifications :]:
            node = f"{_name(state, event.node)}: verified in full: "
            score = state.scores.get(event.node)
            if score is None:
                lines.append((node + _refusal(state.judged[event.node]), True))
            else:
                lines.append(self._score_line(node, score))
        self._verifications = len(state.verifications)
        batch = max(state.batches, default=0)
        if batch > self._batch:
            self._batch = batch
            minutes = (time.monotonic() - self._began) / 60
            lines.append((f"{minutes:.1f} min, {state.text}", True))
        problems = [a for a in state.answers.values() if a.problem]
        for answer in problems[self._problems :]:
            lines.append((f"{answer.arm}: {escape_invisible(answer.problem[:200])}", True))
        self._problems = len(problems)
        return lines

    def _score_line(self, before: str, score: float) -> tuple[str, bool]:
        """The line of a node that may lead."""
        better = score < self._best
        self._best = min(self._best, score)
        return f"{before}{factor_text(-score)} over the seed{', the best so far' if better else ''}", better


def _name(state: SearchState, node: str) -> str:
    return escape_invisible(state.nodes[node].provenance.note or node[:8])


def _refusal(result: NodeResult) -> str:
    """Outcome and the first line of why."""
    lines = result.feedback.strip().splitlines()
    why = escape_invisible(lines[0][:100]) if lines else ""
    return f"{str(result.outcome).replace('_', ' ')} {why}".rstrip()
