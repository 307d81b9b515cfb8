"""One process per kernel that does something with each of its sources, and lines that come of it.

A source that hangs or takes the process down is recorded as that and costs the process; another one goes on
with the rest. Lines are JSON objects, on disk as they come.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import kernels
from benchmarks.lib import devices
from benchmarks.lib.processes import child_processes
from benchmarks.lib.result_files import say

RESTARTS = 4
"""Processes that one kernel's sources may cost, beyond the first."""
MOST_SILENT_KERNELS = 2
"""Kernels in a row that give nothing at all, after which something else is wrong than a kernel."""


# --- the child of one kernel ---


@contextlib.contextmanager
def open_case(case: kernels.Case, null: bool) -> Iterator[tuple[str, kernels.Data]]:
    """The device, warm and ready for kernels that ask for memory at every launch, and the case's inputs."""
    with devices.device(null) as where:
        # Tensors of the device `meta` all lie at address zero: they would count as overlapping.
        data = case.make("cpu", small=True) if null else case.make(where)
        devices.warm_up_device(where)
        # Kernels that make tensor descriptors themselves ask for memory at every launch.
        triton.set_allocator(
            lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=where)
        )
        yield where, data


def report_each_source(
    case: str, where: str, marks: Mapping[str, str], of: Callable[[str], Mapping[str, Any]]
) -> None:
    """Print two lines per source: that it begins, and what became of it.

    `marks` are digests of the sources by name; `of` gives the fields of the second line, `outcome` among
    them. Ends early where a source broke the device's context: nothing runs in this process any more.
    """
    for name, mark in marks.items():
        print_line({"case": case, "begin": name})
        begin = time.perf_counter()
        row: Mapping[str, Any]
        try:
            row = of(name)
        except Exception as error:  # one source less
            row = {"outcome": "runtime_error", "detail": f"{type(error).__name__}: {error}"[:400]}
        seconds = round(time.perf_counter() - begin, 3)
        print_line({"case": case, "variant": name, "sha256": mark, **row, "seconds": seconds})
        if row["outcome"] != "ok" and not _device_works(where):
            say(f"{name} broke the device's context: another process goes on")
            break


def print_line(line: Mapping[str, Any]) -> None:
    """Print a line for the parent, who keeps those that begin with `case`."""
    print(json.dumps(line, allow_nan=False), flush=True)


def _device_works(where: str) -> bool:
    """Whether the device still does anything: after an illegal access, nothing runs in this process."""
    try:
        devices.warm_up_device(where)
    except Exception:
        return False
    return True


# --- the parent ---


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Lines of a file; one that was cut short by a kill is passed over."""
    found = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(text))
    return found


def append_line(out: Any, line: Mapping[str, Any]) -> None:
    """Append a line, on disk when this returns."""
    out.write(json.dumps(line, allow_nan=False) + "\n")
    out.flush()


def run_in_children(
    script: str,
    a: Namespace,
    out: Any,
    role: str,
    names: Sequence[str],
    given: Mapping[str, Any],
    folder: Path | None = None,
) -> int:
    """Do a role for every named source of one kernel, in as many processes as it takes.

    `given` is what the children get, `case` and `limit` (seconds without a line) among it, with the sources
    that are left as `variants`. `folder` keeps Triton's cache between processes; None: a fresh one for each.
    Returns how many sources something became of.
    """
    left, made, case = list(names), 0, given["case"]
    for _ in range(RESTARTS + 1):
        before, begun = made, ""
        with tempfile.TemporaryDirectory(prefix="variants-", ignore_cleanup_errors=True) as fresh:
            command = child_processes.child_command(script, a, role, {**given, "variants": left})
            environment = child_processes.child_environment(folder or Path(fresh))
            for line in child_lines(command, environment, given["limit"]):
                if "begin" in line:
                    begun = line["begin"]
                    continue
                append_line(out, line)
                if "outcome" in line:
                    left.remove(line["variant"])
                    made, begun = made + 1, ""
                    shown = line.get("log2_ratio", line.get("detail", ""))
                    say(f"  {line['variant']}: {line['outcome']} {shown}")
        if begun:  # the last thing that the process did
            detail = f"hung for {given['limit']:g} s, or took the process down"
            append_line(out, {"case": case, "variant": begun, "outcome": "crash", "detail": detail})
            left.remove(begun)
            made += 1
            say(f"  {begun}: {detail}")
        if not left:
            break
        if made == before:
            say(f"{case}: the process ended before any variant began")
            break
    return made


def child_lines(
    command: Sequence[str], environment: Mapping[str, str], limit_s: float
) -> Iterator[dict[str, Any]]:
    """JSON objects that a child prints, as they come; the child is ended when none comes for `limit_s`."""
    with subprocess.Popen(command, env=dict(environment), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        arrived: queue.Queue[str | None] = queue.Queue()

        def listen(stream: Any) -> None:
            for text in stream:
                arrived.put(text)
            arrived.put(None)

        threading.Thread(target=listen, args=(process.stdout,), daemon=True).start()
        try:
            while (text := arrived.get(timeout=limit_s)) is not None:
                # Compilers print what they abort on, in braces too.
                if text.startswith('{"case": '):
                    yield json.loads(text)
        except queue.Empty:
            say(f"no line for {limit_s:g} s: the process is ended")
        finally:
            process.kill()
