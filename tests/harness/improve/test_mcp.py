"""`mcp` as a coding agent meets it: a real client of the official SDK, and one that means no good."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

from mcp import Client, StdioServerParameters

from forecast_autotune.records import Argument
from forecast_autotune.records.program import FunctionCall, TorchFunction
from forecast_harness.improve import agent
from forecast_harness.improve.parts import Part
from forecast_harness.improve.session import Improvement, ImproveSession, ImproveSettings
from forecast_harness.targets.program_functions import function_pack, write_pack
from tests.waiting import wait_until

KERNEL = "module:norms"
RIGHT = "import torch\n\n\ndef run(x):\n    return torch.linalg.vector_norm(x, dim=-1)\n"
WRONG = "import torch\n\n\ndef run(x):\n    return x.abs().sum(-1)\n"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an `improve` that has recorded a program with one function and one kernel that is left."""
    folder = tmp_path_factory.mktemp("recorded")
    path = folder / "module.py"
    path.write_text("import torch\n\n\ndef norms(x):\n    return torch.stack([row.norm() for row in x])\n")
    x = Argument("x", "tensor", "float32", (64, 32), extra={"least": -4.0, "most": 4.0})
    function = TorchFunction(
        KERNEL, str(path), forms=(FunctionCall((x,), (Argument("y0", "tensor", "float32", (64,)),)),)
    )
    write_pack(function_pack(function), folder / "pack-norms")
    parts = (
        Part(KERNEL, "function", 0.9, 1.0, 1e-3, target=str(folder / "pack-norms"), function=function),
        Part("gemm", "library", 0.1, 1.0, 1e-4, reason="no source can be had for it: it is no Triton kernel"),
    )
    session = ImproveSession(("module.py",), ImproveSettings("cpu", 300.0), folder, lambda line: None)
    session.save(Improvement(("module.py",), parts=parts))
    return folder


def server(folder: Path) -> StdioServerParameters:
    words = ["-m", "forecast_autotune", "mcp", str(folder), "--device", "cpu"]
    return StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ))


def session(folder: Path, talk: Callable[[Callable[..., Awaitable[Any]]], Awaitable[None]]) -> None:
    """Talk to a server of its own; the argument calls a tool and returns its result, or the text of its error."""

    async def run() -> None:
        async with Client(server(folder)) as client:

            async def call(name: str, **arguments: Any) -> Any:
                told = await client.call_tool(name, arguments, read_timeout_seconds=600)
                if told.is_error:
                    return told.content[0].text
                data = told.structured_content
                return data["result"] if isinstance(data, dict) and set(data) == {"result"} else data

            await talk(call)

    asyncio.run(run())


def test_a_client_lists_reads_forecasts_submits_and_finishes(recorded: Path) -> None:
    async def talk(call: Callable[..., Awaitable[Any]]) -> None:
        norms, gemm = await call("kernels")
        assert (norms["kernel"], norms["headroom"] > 0.0) == (KERNEL, True)
        assert (gemm["headroom"], gemm["left"][:9]) == (0.0, "no source")
        text = await call("statement", kernel=KERNEL)
        assert "row.norm()" in text
        assert "It defines run(x)" in text
        wrong = await call("submit", kernel=KERNEL, source=WRONG)
        assert (wrong["outcome"], wrong["speedup"]) == ("incorrect", None)
        assert "wrong" in wrong["feedback"]
        right = await call("submit", kernel=KERNEL, source=RIGHT)
        assert right["outcome"] == "ok"
        assert right["seconds"]
        told = await call("forecast", kernel=KERNEL, sources=[RIGHT.replace("-1", "1"), WRONG])
        assert [set(t) >= {"mean", "sd", "p_fail"} for t in told] == [True, True]
        again = await call("submit", kernel=KERNEL, source=RIGHT)
        assert again["again"]
        end = await call("finish", kernel=KERNEL)
        assert end["measured"] == 3

    session(recorded, talk)


def test_a_hostile_client_loses_nothing_and_hangs_nothing(recorded: Path) -> None:
    async def talk(call: Callable[..., Awaitable[Any]]) -> None:
        for kernel in ("../../etc/passwd", "", "gemm", "\x00", "x" * 100_000):
            assert "can be searched" in await call("statement", kernel=kernel)
        assert "characters" in await call("submit", kernel=KERNEL, source="#" * 5_000_000)
        assert "empty" in await call("submit", kernel=KERNEL, source=" \n")
        assert "sources are forecast at once" in await call("forecast", kernel=KERNEL, sources=["x"] * 1000)
        assert "validation" in str(await call("submit", kernel=KERNEL, source=7)).lower()
        assert "nknown tool" in str(await call("delete_everything"))
        assert [k["kernel"] for k in await call("kernels")] == [KERNEL, "gemm"]

    before = {p.name for p in recorded.parent.iterdir()}
    session(recorded, talk)
    assert {p.name for p in recorded.parent.iterdir()} == before


def started(folder: Path, before: bytes = b"") -> subprocess.Popen[bytes]:
    """A server in a session of its own, that was told `before` and then greeted."""
    parameters = server(folder)
    child = subprocess.Popen(
        [parameters.command, *parameters.args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    write(child, before)
    hello = {"name": "plain", "version": "1"}
    asked(child, 1, "initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo=hello)
    write(child, b'{"jsonrpc": "2.0", "method": "notifications/initialized"}\n')
    return child


def write(child: subprocess.Popen[bytes], line: bytes) -> None:
    assert child.stdin is not None
    child.stdin.write(line)
    child.stdin.flush()


def asked(child: subprocess.Popen[bytes], number: int, method: str, **params: Any) -> None:
    line = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
    write(child, json.dumps(line).encode() + b"\n")


def answer_line(child: subprocess.Popen[bytes], number: int) -> bytes:
    """The line that answers this question; what was said before it is left out."""
    assert child.stdout is not None
    while json.loads(line := child.stdout.readline()).get("id") != number:
        pass
    return line


NO_PROTOCOL = b'no JSON\n\xff\xfe\n{"jsonrpc": "2.0", "method": "nonsense"}\n'


def test_a_client_that_leaves_or_falls_silent_loses_no_search_and_leaves_no_process(recorded: Path) -> None:
    pid_file = recorded / "agent-module.norms" / "pid"

    def is_searching() -> bool:
        return pid_file.exists() and Path(f"/proc/{pid_file.read_text()}").exists()

    child = started(recorded, NO_PROTOCOL)
    asked(child, 2, "tools/call", name="submit", arguments={"kernel": KERNEL, "source": RIGHT + "# again\n"})
    wait_until(is_searching)
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(90) == 0
    wait_until(lambda: not is_searching())
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)

    child = started(recorded)  # the search goes on
    asked(child, 2, "tools/call", name="statement", arguments={"kernel": KERNEL})
    assert b"row.norm()" in answer_line(child, 2)

    async def talk(call: Callable[..., Awaitable[Any]]) -> None:
        assert "another server searches" in await call("statement", kernel=KERNEL)

    session(recorded, talk)
    for number in range(1000):  # more than a pipe holds, and nobody reads
        asked(child, 3 + number, "tools/call", name="kernels", arguments={})
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 128 + signal.SIGTERM
    wait_until(lambda: not is_searching())


def test_a_client_that_leaves_while_the_search_is_started_leaves_no_process(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    improvement = ImproveSession((), ImproveSettings("cpu", 300.0), recorded, lambda line: None)
    search = agent.AgentSearch(improvement, Part("module:none", "function", 0.9, 1.0, 1e-3), seconds=60.0)
    leaving = threading.Thread(target=search.close)
    children: list[subprocess.Popen[str]] = []

    def start(*_: object) -> subprocess.Popen[str]:
        leaving.start()
        wait_until(lambda: search._closed)
        children.append(subprocess.Popen(["sleep", "60"], text=True, start_new_session=True))
        return children[0]

    monkeypatch.setattr(agent, "start_command", start)
    with pytest.raises(agent.AgentProblem, match="the client has left"):
        search.statement()
    leaving.join()
    assert children[0].poll() is not None
