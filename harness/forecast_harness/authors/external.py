"""Proposals of another program: `external:COMMAND`, one JSON object per line on its stdin and stdout.

A request, as it is written to the child (one line; `schema` changes when fields change their meaning):

    {"type": "request", "schema": 1, "id": "<answer with it>", "n": 8, "seed": 1234, "style": "ask",
     "target": {"kind": "pack", "name": "softmax", "id": "...", "language": "torch", "entry": "run",
                "statement": "<what is computed, and the rules for a source>"},
     "work": {"<workload>": {"axes": {...}, "bytes": <moved at least>, "flops": <useful ones>}},
     "parents": [{"id": "...", "source": "...", "language": "torch", "note": "...", "judged": {...} or null}],
     "failures": [<like a parent, with outcome, stage and feedback in judged>],
     "score": <log2(time of the first parent / time of the first seed)>}

The answer, one line:

    {"id": "<the request's>", "tokens": 0, "money": 0.0, "exhausted": false,
     "nodes": [{"source": "...", "note": "what was changed and why", "language": "<default: the target's>",
                "author": "<model and version>", "origin": "llm" | "mechanical" | "hand"}],
     "problem": "<why there are none>"}

Only `id` and `nodes` are needed. Requests come one at a time. What it writes to stderr is kept for
problems. The child runs in a process group of its own, which is ended with the proposer (SIGTERM, then
SIGKILL); one that dies, says nothing in time or answers otherwise is started again, once per request.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from forecast_autotune.errors import RecordError, SettingsError
from forecast_autotune.printable import printable_line
from forecast_autotune.records import codec
from forecast_autotune.records.json_fields import decode_json, read_integer, read_list, read_number
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.authors.author import Draft, new_nodes
from forecast_harness.authors.target_facts import timed_work
from forecast_harness.records import Node, ProposalRequest, Proposed, SearchCost, SearchTarget
from forecast_harness.targets.packs.schema import Language

SCHEMA = 1
TIMEOUT_S = 600.0
"""Seconds that one answer may take."""
MAX_ANSWER_BYTES = 16 * 2**20
"""Bytes of an answer."""
_TERMINATION_GRACE_S = 2.0
_KILL_GRACE_S = 10.0
"""Most seconds that the ends of killed processes are waited for; one that waits for a disk may take longer."""
_MAX_TEXT_CHARS = 400
_MAX_NOTE_CHARS = 300


class _ProtocolError(Exception):
    """The child did not answer as it has to; the text says how."""


class ExternalAuthor:
    """See the module. Raises `SettingsError` for a command line that cannot be split or whose program is not there."""

    styles: Sequence[str] = ("ask",)

    def __init__(self, command: str, target: SearchTarget, *, timeout_s: float = TIMEOUT_S) -> None:
        try:
            self._command = shlex.split(command)
        except ValueError as error:
            raise SettingsError(f"external:{command:.80} is no command line: {error}") from error
        if not self._command:
            raise SettingsError("external: needs a command line, as in external:python agent.py")
        if shutil.which(self._command[0]) is None:
            raise SettingsError(
                f"external: needs a program that can be run, and {self._command[0]!r:.80} is none: give its path, or "
                "make it executable"
            )
        self.name = f"external:{Path(self._command[0]).name}"
        self._timeout_s = timeout_s
        self._mutex = threading.Lock()
        self._start_lock = threading.Lock()
        self._child: _ChildProcess | None = None
        self._closed = False

    def propose(self, request: ProposalRequest) -> Proposed:
        """See `Author`."""
        begin = time.monotonic()
        line = json.dumps(_request_json(request), allow_nan=False).encode() + b"\n"
        spent, problem = SearchCost(), ""
        with self._mutex:
            for _ in range(2):
                try:
                    answer = self._ask_child(line)
                    spent = _answer_cost(answer)
                    found = _read_answer(answer, request)
                except (_ProtocolError, RecordError) as error:
                    problem = f"{self.name}: {error}"
                    self._stop()
                    if spent.tokens or spent.money:
                        break  # an answer that was paid for, and cannot be used, is not bought again
                    continue
                seconds = time.monotonic() - begin
                return replace(found, spent=replace(spent, wall_seconds=seconds))
        return Proposed(
            request.id, (), spent=replace(spent, wall_seconds=time.monotonic() - begin), problem=problem
        )

    def close(self) -> None:
        """End the child and all processes that it started. An answer under way is lost."""
        with self._start_lock:
            self._closed = True
            child = self._child
        if child is not None:
            child.end()
        with self._mutex:  # whoever waited for the child has noticed its end
            self._stop()

    def _ask_child(self, line: bytes) -> Mapping[str, Any]:
        with self._start_lock:
            if self._closed:
                raise _ProtocolError("it was closed")
            child = self._child = self._child or _ChildProcess(self._command)
        return child.ask(line, self._timeout_s)

    def _stop(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child.release()
            self._child = None


class _ChildProcess:
    """The program at work."""

    def __init__(self, command: list[str]) -> None:
        self._errors: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115  closed with the child
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            raise _ProtocolError(f"it cannot be started: {error}") from error
        self._unread = b""
        self._end_lock = threading.Lock()
        self._ended = False

    def ask(self, line: bytes, timeout_s: float) -> Mapping[str, Any]:
        """Write a line, read one. Raises `_ProtocolError`."""
        end = time.monotonic() + timeout_s
        if self._unread.strip():
            raise _ProtocolError(f"it said more than one line to a request: {_printable(self._unread)}")
        said, _, self._unread = self._write_and_read(line, end, timeout_s).partition(b"\n")
        try:
            data = decode_json(said.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise _ProtocolError(f"an answer that is not JSON: {_printable(said)}") from error
        if not isinstance(data, dict):
            raise _ProtocolError(f"an answer that is no object: {_printable(said)}")
        return data

    def _write_and_read(self, line: bytes, end: float, timeout_s: float) -> bytes:
        """What is read until a line is whole."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        os.set_blocking(stdin.fileno(), False)
        os.set_blocking(stdout.fileno(), False)
        left, got = memoryview(line), b""
        with selectors.DefaultSelector() as waiting:
            waiting.register(stdout, selectors.EVENT_READ)
            waiting.register(stdin, selectors.EVENT_WRITE)
            while b"\n" not in got:
                seconds = end - time.monotonic()
                if seconds <= 0:
                    raise _ProtocolError(f"no answer within {timeout_s:g} s{self._stderr_tail()}")
                if self._ended:
                    raise _ProtocolError("it was ended meanwhile")
                for key, _ in waiting.select(min(seconds, 1.0)):
                    if key.fileobj is stdin:
                        left = left[self._write(stdin.fileno(), left) :]
                        if not left:
                            waiting.unregister(stdin)
                        continue
                    part = os.read(stdout.fileno(), 1 << 16)
                    if not part:
                        raise _ProtocolError(f"it ended without an answer{self._stderr_tail()}")
                    got += part
                    if len(got) > MAX_ANSWER_BYTES:
                        raise _ProtocolError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        return got

    def end(self) -> None:
        """Signal its group, in the end with what none can refuse. Safe while another thread waits for it."""
        with self._end_lock:
            if self._ended:
                return
            self._ended = True
            self._signal(signal.SIGTERM)
            # Not reaped before its group is gone: until then no other group can have its number.
            until = time.monotonic() + _TERMINATION_GRACE_S
            state = os.WEXITED | os.WNOHANG | os.WNOWAIT
            while os.waitid(os.P_PID, self._process.pid, state) is None and time.monotonic() < until:
                time.sleep(0.01)
            self._signal(signal.SIGKILL)
            # SIGKILL is sent, not done: what the child started ends when it is next scheduled.
            until = time.monotonic() + _KILL_GRACE_S
            while _group_is_alive(self._process.pid) and time.monotonic() < until:
                time.sleep(0.01)
            self._process.wait()

    def release(self) -> None:
        """Close what leads to it, after its end and by whoever asked it."""
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _signal(self, number: signal.Signals) -> None:
        """To its group: what it started may outlive it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _write(self, fileno: int, left: memoryview) -> int:
        try:
            return os.write(fileno, left)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise _ProtocolError(f"it does not read its requests ({error}){self._stderr_tail()}") from error

    def _stderr_tail(self) -> str:
        """The end of what it wrote to stderr."""
        with contextlib.suppress(OSError, ValueError):
            size = self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(0, size - 4 * _MAX_TEXT_CHARS))
            if text := _printable(self._errors.read()[-_MAX_TEXT_CHARS:]):
                return f"; it said: {text}"
        return ""


def _group_is_alive(group: int) -> bool:
    """Whether a process of the group runs; one that has ended and was not reaped does not. Needs `/proc`."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of_group, *_ = stat.read_text().rpartition(")")[2].split()
            if int(of_group) == group and state not in "ZX":
                return True
    return False


def _request_json(request: ProposalRequest) -> dict[str, Any]:
    target = {k: str(v) for k, v in vars(request.target).items() if k != "payload"}
    return {
        "type": "request",
        "schema": SCHEMA,
        "id": request.id,
        "n": request.n,
        "seed": request.seed,
        "style": request.arm.rpartition("/")[2],
        "target": target,
        "work": timed_work(request.target),
        "parents": [_node_json(p, request) for p in request.parents],
        "failures": [_node_json(f, request) for f in request.failures],
        "score": request.score,
    }


def _node_json(node: Node, request: ProposalRequest) -> dict[str, Any]:
    judged = request.judged.get(node.id)
    return {
        "id": node.id,
        "source": node.source,
        "language": node.language,
        "note": node.provenance.note,
        "judged": None if judged is None else codec.to_json(judged),
    }


def _answer_cost(answer: Mapping[str, Any]) -> SearchCost:
    tokens = read_integer(answer.get("tokens", 0), "tokens")
    money = read_number(answer.get("money"), "money") or 0.0
    if money < 0:
        raise RecordError(f"money must not be negative, it is {money:g}")
    return SearchCost(tokens=tokens, money=money)


def _read_answer(answer: Mapping[str, Any], request: ProposalRequest) -> Proposed:
    """The nodes of an answer. Raises `RecordError` for one of another form."""
    if answer.get("id") != request.id:
        raise RecordError(f"it answers {answer.get('id')!r:.60}, and was asked {request.id!r}")
    if "nodes" not in answer and not answer.get("problem"):
        raise RecordError(f"an answer needs nodes, a list; it has {', '.join(answer) or 'nothing'}")
    drafts = [_draft(one, request) for one in read_list(answer.get("nodes"), "nodes")]
    nodes = new_nodes(request, drafts)
    problem = str(answer.get("problem") or "")[:_MAX_TEXT_CHARS]
    if not nodes and not problem:
        problem = "nothing new among its sources" if drafts else "it gave no source"
    return Proposed(request.id, nodes, problem=problem, exhausted=answer.get("exhausted") is True)


def _draft(data: Any, request: ProposalRequest) -> Draft:
    source = data.get("source") if isinstance(data, Mapping) else None
    if not isinstance(source, str) or not source.strip():
        raise RecordError(f"every node needs a source, as a text that is not empty: {data!r:.80}")
    language = data.get("language") or request.target.language
    if language not in list(Language):
        raise RecordError(f"a node's language must be one of {', '.join(Language)}, not {language!r:.40}")
    if (origin := data.get("origin", "llm")) not in list(Origin):
        raise RecordError(f"a node's origin must be one of {', '.join(Origin)}, not {origin!r:.40}")
    note = " ".join(str(data.get("note") or "").split())[:_MAX_NOTE_CHARS]
    author = str(data.get("author") or request.arm)[:_MAX_NOTE_CHARS]
    return Draft(source, Provenance(Origin(origin), author=author, note=note), str(language))


def _printable(data: bytes) -> str:
    return printable_line(data.decode("utf-8", "replace"), _MAX_TEXT_CHARS)
