"""Compile benchmark kernels without a GPU and record what the compiler made of them.

    python -m benchmarks.corpus.harvest_compiler_output --out FILE.jsonl.gz [--each 40] [--only matmul] [--workers 2]

Registers, spills and shared memory decide many slow configs and nearly all failing ones, and need no GPU
to be known: compiling for sm_90 on any machine yields labels for every kernel. Lines of the type
`compiled` follow the problem line, with TTIR, of the table format, which ignores them. Appends as it
goes, kernel by kernel; a second run leaves out what is there.
"""

from __future__ import annotations

import argparse
import gzip
import os
import random
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import kernels
from benchmarks.lib.case_problems import binary_digests, problem_of_case
from benchmarks.lib.compiled_binaries import compile_config, cubin_resources
from benchmarks.lib.processes.harvest_worker import COMPILE_TIMEOUT_S
from benchmarks.lib.result_files import say
from forecast_autotune.features.ptx import ptx_facts
from forecast_autotune.features.trace import trace_many
from forecast_autotune.records import Candidate, digest
from forecast_autotune.records.table import dump_line, read_lines
from forecast_integrations.triton.compile.forked_children import ForkedChildren
from forecast_integrations.triton.null_device import null_device
from forecast_integrations.triton.problem import describe


def compile_attempt(case: kernels.Case, index: int) -> dict[str, Any]:
    """Compile one config; what came out of it. In a child."""
    data = case.make("meta")
    config = kernels.configs(case)[index]
    compiled, found = compile_config(case, config, data)
    if compiled is None:
        return found
    return {**found, **cubin_resources(compiled.asm["cubin"]), "ptx": ptx_facts(compiled.asm["ptx"])}


def sample_binaries(name: str, each: int) -> list[tuple[kernels.Case, int]]:
    """Up to `each` distinct binaries of a kernel, drawn alike for every run."""
    seen: set[str] = set()
    found = []
    for case in kernels.cases([name]):
        for index, binary in enumerate(binary_digests(case)):
            if binary not in seen:
                seen.add(binary)
                found.append((case, index))
    random.Random(name).shuffle(found)
    return found[:each]


def compile_kernel(name: str, each: int, workers: int) -> list[dict[str, Any]]:
    """The lines of one kernel: its problems with TTIR, and a line per compiled config."""
    lines: list[dict[str, Any]] = []
    by_case: dict[str, list[tuple[kernels.Case, int]]] = {}
    for case, index in sample_binaries(name, each):
        by_case.setdefault(case.name, []).append((case, index))
    for tasks in by_case.values():
        case = tasks[0][0]
        (problem, named), data = problem_of_case(case), case.make("meta")
        listed = kernels.configs(case)
        configs = {i: listed[i] for _, i in tasks}
        records = {i: Candidate(describe.to_config(config)) for i, config in configs.items()}
        values = [dict(config.kwargs) for config in configs.values()]
        traced = trace_many(case.kernel, data["args"], data["kwargs"], values)
        texts = {key: text for key, text in traced if isinstance(text, str)}
        noted = {"label": case.name, "family": case.family, "hand": case.hand}
        lines.append(replace(problem, ttir=texts, extra=noted).to_json())
        by_record = {records[i]: config for i, config in configs.items()}
        grids = describe.launch_grids(by_record, data["grid"], named, case.kernel)
        children, left = ForkedChildren(), list(tasks)
        while left or len(children):
            while left and len(children) < workers:
                _, index = left.pop()
                children.start(index, partial(compile_attempt, case, index))
            ended, _ = children.finished(0.5)
            answers = [(child.tag, _child_result(child)) for child, _ in ended]
            for child in children.overdue(COMPILE_TIMEOUT_S):
                children.kill(child)
                answers.append((child.tag, {"outcome": "timeout", "compile_s": COMPILE_TIMEOUT_S}))
            for index, answer in answers:
                candidate = records[index]
                lines.append(
                    {
                        "type": "compiled",
                        "schema": 1,
                        "problem": problem.id,
                        "config": candidate.config.to_json(),
                        "grid": grids.get(candidate),
                        **answer,
                    }
                )
        children.close()
    return lines


def _child_result(child: Any) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = child.answer()
    except ValueError:
        return {"outcome": "compile_error", "message": "the compiler died"}
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--each", type=int, default=40, help="most binaries of one kernel")
    parser.add_argument("--only", default="", help="comma-separated kernel names")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no kernel after this many seconds")
    arguments = parser.parse_args()
    every = {c.name.partition("/")[0] for c in kernels.every()}
    names = [n for n in arguments.only.split(",") if n] or sorted(every, key=digest)
    there: set[str] = set()
    if arguments.out.is_file():
        lines = (data for _, data in read_lines(arguments.out))
        there = {str(d.get("label", "")).partition("/")[0] for d in lines if d.get("type") == "problem"}
    begin = time.perf_counter()
    with null_device():
        for name in names:
            if name in there or time.perf_counter() - begin > arguments.seconds:
                continue
            found = compile_kernel(name, arguments.each, arguments.workers)
            with arguments.out.open("ab") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed:
                packed.writelines(dump_line(line).encode() for line in found)
            done = [line for line in found if line["type"] == "compiled"]
            ok = sum(line["outcome"] == "ok" for line in done)
            say(f"{name}: {ok} of {len(done)} compiled, {time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
