"""One part of a recorded program as a coding agent works on it: a search that asks in files, answered by tools.

The agent's sources reach the device through that search alone, with every rule of its sandbox. It goes on from its own
log after any end, the agent's, ours or the machine's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from forecast_autotune.records import codec
from forecast_autotune.store.files import acquire_lock, release_lock, write_atomically
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.improve.child import end_child, start_command
from forecast_harness.improve.parts import Part
from forecast_harness.improve.session import ImproveSession, state_of
from forecast_harness.records import Node
from forecast_harness.search.events import NodeForecastRequest
from forecast_harness.search.forecasters import open_forecaster
from forecast_harness.search.output import summary
from forecast_harness.search.state import SearchState
from forecast_harness.targets.novelty import node_identity
from forecast_harness.targets.packs.schema import source_problem

START_S = 180.0
"""Seconds for a search to judge the original, before it asks for the first source."""
VERDICT_S = 600.0
_POLL_S = 0.1
MOST_FORECAST = 64
"""Sources that are forecast at once."""
_FACTS = (
    "registers",
    "spills",
    "spill_bytes",
    "shared_bytes",
    "occupancy",
    "hints",
    "error_over_limit",
    "codes",
    "peak_bytes",
)


class AgentProblem(Exception):
    """A request cannot be carried out; the text is for the agent."""


class AgentSearch:
    """The search of one part. Its child is started by the first question that needs it."""

    def __init__(self, session: ImproveSession, part: Part, *, seconds: float) -> None:
        self.part, self._session, self._seconds = part, session, seconds
        self._queue = session.folder / f"agent-{part.stem}"
        self._folder = session.folder / f"search-agent-{part.stem}"
        self._child: subprocess.Popen[str] | None = None
        self._server_lock: Any = None
        self._closed = False
        self._lifecycle = threading.Lock()  # a client may leave while a child is started: that one ends, too

    def statement(self) -> str:
        """The part in words: its computation and sizes, and the results so far. Raises `AgentProblem`."""
        return (self._open_request() / "request.md").read_text(encoding="utf-8")

    def submit(self, source: str) -> dict[str, Any]:
        """The verdict on a source. Raises `AgentProblem` for a text that is none, and where none comes."""
        if problem := source_problem(source):
            raise AgentProblem(problem)
        if not source.strip():
            raise AgentProblem("the source is empty")
        place = self._open_request()
        state = self._state()
        node = self._node(state, source)
        if node.id in state.judged:
            return {"again": True, **self._verdict(state, node.id)}
        (place / "source.py").write_text(source, encoding="utf-8")
        (place / "done").write_text(json.dumps({"author": "mcp"}), encoding="utf-8")
        until = time.monotonic() + VERDICT_S
        while time.monotonic() < until:
            state = self._state()
            if node.id in state.judged:
                return self._verdict(state, node.id)
            if self._request() not in (None, place) and node.id not in state.nodes:
                return {
                    "outcome": "refused",
                    "feedback": f"it defines no {state.target.entry} that can be called",
                }
            self._check_alive()
            time.sleep(_POLL_S)
        raise AgentProblem(f"no verdict came within {VERDICT_S:.0f} s: ask for best later")

    def forecast(self, sources: Sequence[str]) -> list[dict[str, Any]]:
        """Forecasts of sources before any of them is run: log2 of time over the original's, spread, failure."""
        if not 1 <= len(sources) <= MOST_FORECAST:
            raise AgentProblem(f"1 to {MOST_FORECAST} sources are forecast at once, not {len(sources)}")
        for source in sources:
            if problem := source_problem(source):
                raise AgentProblem(problem)
        self._open_request()
        state = self._state()
        nodes = [self._node(state, s) for s in sources]
        forecaster = open_forecaster("auto", state.target)
        if forecaster is None:
            raise AgentProblem("nothing forecasts this part")
        try:
            answer = forecaster.forecast(
                NodeForecastRequest(
                    batch=0,
                    reference=state.nodes[state.seeds[0]],
                    nodes=tuple(nodes),
                    judged=tuple(
                        (state.nodes[n], j, state.scores.get(n, 0.0)) for n, j in state.judged.items()
                    ),
                    target=state.target,
                )
            )
        finally:
            forecaster.close()
        beliefs = [answer.beliefs.get(n.id) for n in nodes]
        return [{"problem": answer.problem or "none"} if b is None else codec.to_json(b) for b in beliefs]

    def best(self) -> dict[str, Any]:
        """The best source so far, and what was spent."""
        if not (self._folder / "log.jsonl").exists():
            return {"speedup": 1.0, "measured": 0, "source": ""}
        state = self._state()
        totals = summary(state)
        return {
            **{k: totals[k] for k in ("speedup", "confirmed", "evidence", "measured", "failed", "stopped")},
            "source": state.nodes[state.best].source,
        }

    def finish(self) -> dict[str, Any]:
        """Have the best confirmed in a fresh process, and end."""
        if self._child is not None:
            self._queue.mkdir(parents=True, exist_ok=True)
            (self._queue / "stop").touch()
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(VERDICT_S)
        self._end()
        (self._queue / "stop").unlink(missing_ok=True)
        return self.best()

    def close(self) -> None:
        """End the child for good. Its search goes on from its log in another process."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        with self._lifecycle:
            child, self._child = self._child, None
        if child is not None:
            end_child(child)
        release_lock(self._server_lock)
        self._server_lock = None

    def _open_request(self) -> Path:
        """The folder of a question that nobody has answered."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            with self._lifecycle:
                if self._child is None and not self._closed:
                    self._child = self._start()
            self._check_alive()
            place = self._request()
            if place is not None and (self._folder / "log.jsonl").exists():
                return place
            time.sleep(_POLL_S)
        raise AgentProblem(f"the search asked for no source within {START_S:.0f} s")

    def _request(self) -> Path | None:
        folders = sorted(self._queue.glob("[0-9]*"))
        return next((p for p in folders if (p / "request.json").exists() and not (p / "done").exists()), None)

    def _start(self) -> subprocess.Popen[str]:
        """Start the child, after the end of one that a killed server left behind: it holds the log."""
        self._queue.mkdir(parents=True, exist_ok=True)
        if self._server_lock is None:
            try:
                self._server_lock = acquire_lock(self._queue / "server.lock", 0.2, 0.02)
            except TimeoutError:
                raise AgentProblem(
                    f"another server searches {self.part.name}: end it, or take another kernel"
                ) from None
        pid_file = self._queue / "pid"
        with suppress(OSError, ValueError):
            pid = int(pid_file.read_text(encoding="utf-8"))
            if str(self._folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.killpg(pid, signal.SIGKILL)
        words, environment = self._session.search_words(self.part, self._folder, self._seconds)
        words += ["--proposer", f"files:{self._queue}", "--surrogate", "none", "--samples", "1", "--k", "1"]
        child = start_command([*words, "--parents", "1"], environment)
        write_atomically(pid_file, str(child.pid).encode())
        return child

    def _check_alive(self) -> None:
        if self._closed:
            raise AgentProblem("the client has left")
        child = self._child
        if child is not None and child.poll() is not None:
            errors = child.stderr.read() if child.stderr is not None else ""
            self._child = None
            lines = [line for line in errors.splitlines() if line.strip()]
            why = f"exit status {child.returncode}" if child.returncode else self.best().get("stopped")
            raise AgentProblem(f"the search has ended: {lines[-1] if lines else why}")

    def _state(self) -> SearchState:
        if (state := state_of(self._folder)) is None:
            raise AgentProblem("the search has not begun")
        return state

    def _node(self, state: SearchState, source: str) -> Node:
        target = state.target
        identity = node_identity(target.id, target.language, source)
        return Node(identity, source, target.language, (state.seeds[0],), Provenance(Origin.LLM, "mcp"))

    def _verdict(self, state: SearchState, node: str) -> dict[str, Any]:
        result = state.judged[node]
        speedup = 2.0 ** -state.scores[node] if node in state.scores else None
        facts = {k: v for k, v in result.facts.items() if k in _FACTS}
        return {
            "outcome": str(result.outcome),
            "speedup": speedup,
            "standard_error_log2": result.sd,
            "seconds": dict(result.seconds),
            "config": dict(result.config),
            "stage": result.stage,
            "feedback": result.feedback,
            "facts": facts,
        }
