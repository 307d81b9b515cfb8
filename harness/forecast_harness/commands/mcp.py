"""`mcp`: tools for coding agents, over the Model Context Protocol, on the parts of a recorded program."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Any

from forecast_autotune.commands.output import Output, UsageError, require_packages
from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.printable import printable
from forecast_harness.improve.agent import AgentProblem, AgentSearch
from forecast_harness.improve.session import ImproveSession, ImproveSettings, load_improvement

_SHOWN = 500
"""Characters of a problem that an agent is told."""
_INSTRUCTIONS = """Write faster sources of the kernels of a recorded program. Begin with kernels, take one with much
headroom and a large share, read its statement, then forecast several sources and submit the promising ones, one at a
time. A source is checked and timed beside the original in a sandbox; nothing that you send runs anywhere else. Call
finish once nothing more comes to mind: the best source is then confirmed in a fresh process."""


class AgentTools:
    """The tools, for one thread; any may `close` them."""

    def __init__(self, session: ImproveSession, *, seconds: float) -> None:
        improvement = load_improvement(session.folder)
        if improvement is None:
            raise UsageError(
                f"{session.folder} holds no recorded program: run `forecast-autotune improve` first"
            )
        session.adopt(improvement)
        self._improvement = improvement
        self._searches = {
            p.name: AgentSearch(session, p, seconds=seconds) for p in improvement.parts if p.can_be_searched
        }

    def kernels(self) -> list[dict[str, Any]]:
        """The kernels of the program: share of a step, calls per step, median seconds, headroom; why some are left."""
        return [
            {
                "kernel": p.name,
                "kind": p.kind,
                "share": p.share,
                "calls": p.calls,
                "median_s": p.median_s,
                "headroom": p.headroom if p.can_be_searched else 0.0,
                "left": p.reason,
            }
            for p in self._improvement.parts
        ]

    def statement(self, kernel: str) -> str:
        """A kernel in words: what it computes, calls, rules, source, the best sources so far, failures with causes."""
        return self._search(kernel).statement()

    def forecast(self, kernel: str, sources: list[str]) -> list[dict[str, Any]]:
        """What is expected of sources before they are run: mean and sd of log2(time / the original's), p_fail."""
        return self._search(kernel).forecast(sources)

    def submit(self, kernel: str, source: str) -> dict[str, Any]:
        """Have one source checked and timed: outcome, speedup, what was wrong, and facts of what was compiled."""
        return self._search(kernel).submit(source)

    def best(self, kernel: str) -> dict[str, Any]:
        """The best source of a kernel so far, and what was spent."""
        return self._search(kernel).best()

    def finish(self, kernel: str) -> dict[str, Any]:
        """Confirm the best source of a kernel in a fresh process and end its search."""
        return self._search(kernel).finish()

    def close(self) -> None:
        """End all searches; they can be gone on with."""
        for search in self._searches.values():
            search.close()

    def _search(self, kernel: str) -> AgentSearch:
        if (search := self._searches.get(kernel)) is None:
            raise AgentProblem(
                f"no kernel {kernel!r:.80} can be searched; there are {', '.join(self._searches) or 'none'}"
            )
        return search


def mcp(options: argparse.Namespace, output: Output) -> int:
    """Serve a recorded program over standard input and output until the client leaves."""
    require_packages("mcp", "mcp", "torch")
    from mcp.server import MCPServer

    from forecast_harness.clocks.devices import visible_devices

    device = options.device or ("cuda" if visible_devices() else "cpu")
    settings = ImproveSettings(device, options.seconds)
    words = load_improvement(Path(options.folder))
    session = ImproveSession(
        () if words is None else words.words, settings, Path(options.folder), output.remark
    )
    tools = AgentTools(session, seconds=options.seconds)
    server = MCPServer("forecast-autotune", instructions=_INSTRUCTIONS, log_level="CRITICAL")
    serving = ThreadPoolExecutor(1)  # a write that nobody reads would keep signals from the main thread
    worker = ThreadPoolExecutor(1)  # one device, one judge at a time
    for tool in (tools.kernels, tools.statement, tools.forecast, tools.submit, tools.best, tools.finish):
        server.tool()(_in_turn(tool, worker))
    try:
        serving.submit(server.run, "stdio").result()
    except* BrokenPipeError:
        pass  # the client has left
    except* KeyboardInterrupt as group:
        tools.close()
        # A usual end would wait for the SDK's reader, and that one for the client's next line.
        os._exit(128 + getattr(group.exceptions[0], "number", signal.SIGINT))
    finally:
        tools.close()
        worker.shutdown(cancel_futures=True)
    return 0


def _in_turn(tool: Callable[..., Any], worker: ThreadPoolExecutor) -> Callable[..., Any]:
    """The tool, in turn, with its problems told to the agent."""
    from mcp.server.mcpserver.exceptions import ToolError

    @wraps(tool)
    async def run(**arguments: Any) -> Any:
        try:
            # A client that leaves, or a signal, is noticed while a verdict is awaited.
            return await asyncio.wrap_future(worker.submit(tool, **arguments))
        except (AgentProblem, ForecastAutotuneError, OSError) as error:
            raise ToolError(printable(str(error), _SHOWN)) from error

    return run
